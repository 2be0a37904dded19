"""The node that loads a tuning, and where tunings lie."""

from __future__ import annotations

import logging
from pathlib import Path

from comfy_api.latest import io

from ..sparge_core.tune import load_tuning
from . import host
from .samples import output_folder

log = logging.getLogger(__name__)

TUNING = io.Custom("SPARGE_TUNING")
FOLDER = "tunings"  # in the output folder
SUFFIX = ".json"


class SpargeLoadTuning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeLoadTuning",
            display_name="Load Sparse Tuning",
            category="model/patch",
            description="Loads the settings of each layer that Tune Sparse Attention found for a model.",
            search_aliases=["auto tune sparse attention", "sparsity per layer", "SpargeAttention2 tuning"],
            inputs=[
                io.Combo.Input(
                    "file",
                    options=sorted(path.stem for path in output_folder(FOLDER).glob(f"*{SUFFIX}")),
                    tooltip="A .json file in the folder tunings of ComfyUI's output folder.",
                )
            ],
            outputs=[TUNING.Output("tuning", tooltip="The settings. Connect them to SpargeAttention2.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> float:
        """A file made anew under its old name is another tuning; one that is gone fails when it loads."""
        path = tuning_file(file)
        return path.stat().st_mtime if path.is_file() else 0.0

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        tuning = load_tuning(tuning_file(file))
        log.info("SpargeAttention2: %s: %s", file, tuning.describe())
        host.show_text(getattr(cls.hidden, "unique_id", None), tuning.describe())
        return io.NodeOutput(tuning)


def tuning_file(name: str) -> Path:
    """The file of the tuning of this name, there or not; an error for a name that leads out of the folder."""
    return output_folder(f"{FOLDER}/{name}{SUFFIX}")
