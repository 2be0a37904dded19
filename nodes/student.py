"""The node that loads a distilled student."""

from __future__ import annotations

import logging
from pathlib import Path

import folder_paths
from comfy_api.latest import io

from ..sparge_core.wan import FULL, read_student
from . import host, weights

log = logging.getLogger(__name__)

FOLDERS = ("diffusion_models", "loras")  # by custom full models are in the first; any kind may be in either


class SpargeLoadStudent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeLoadStudent",
            display_name="Load Distilled Student",
            category="model/loaders",
            description=(
                "Loads weights that were distilled for sparse attention: a full model, or a diff or low-rank "
                "file for the model at base. Settings in the file go to the SpargeAttention2 node with it."
            ),
            search_aliases=["sparse student", "SpargeAttention2 loader", "distilled weights"],
            inputs=[
                io.Combo.Input(
                    "file",
                    options=_files(),
                    tooltip="A .safetensors file in models/diffusion_models or models/loras, named as in "
                    "ComfyUI, the original Wan, diffusers, peft or kohya.",
                ),
                io.Model.Input(
                    "base",
                    optional=True,
                    tooltip="The model that a diff or low-rank file was distilled from.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The student. Connect it to SpargeAttention2.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str, base: host.ModelPatcher | None = None) -> float:
        """A file distilled anew under its old name is another student."""
        return _path(file).stat().st_mtime

    @classmethod
    def execute(cls, file: str, base: host.ModelPatcher | None = None) -> io.NodeOutput:
        student = read_student(_path(file))
        model = weights.load(student, base)
        lines = [f"{student.path.name}: {student.title}.", student.advice]
        if student.kind == FULL and base is not None:
            lines.append("The base is not used: the file is a full model.")
        log.info("SpargeAttention2: %s", " ".join(lines))
        host.show_text(getattr(cls.hidden, "unique_id", None), "\n".join(lines))
        return io.NodeOutput(model)


def _files() -> list[str]:
    return [f"{folder}/{name}" for folder in FOLDERS for name in folder_paths.get_filename_list(folder)]


def _path(file: str) -> Path:
    folder, name = file.split("/", 1)
    return Path(folder_paths.get_full_path_or_raise(folder, name))
