"""The node that makes a tuning of what a calibrated run measured."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from comfy_api.latest import io, ui

from ..sparge_core.picture import plot_tuning
from ..sparge_core.tune import TuneError, Tuning
from . import host
from .attention import CALIBRATED
from .report import NoRun, run_of
from .tuning import FOLDER, SUFFIX, TUNING, tuning_file

log = logging.getLogger(__name__)

NAME = re.compile(r"[\w.-]+")


class SpargeTune(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeTune",
            display_name="Tune Sparse Attention",
            category="model/patch",
            description=(
                "Gives every layer the sparsest setting that keeps its error within a budget, as Calibrate "
                "Sparse Attention measured it, and saves the settings for SpargeAttention2. Another budget "
                "needs no new run."
            ),
            search_aliases=["auto tune sparse attention", "error budget", "SpargeAttention2 tuning"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model from Calibrate Sparse Attention."),
                io.Latent.Input("latent", tooltip="What the sampler returned for it."),
                io.Float.Input(  # without a minimum: what is no budget gets a sentence of ours
                    "budget",
                    default=0.05,
                    max=1.0,
                    step=0.005,
                    tooltip="Largest error of a layer: relative L1 of its attention output against dense "
                    "attention. 0.05 is 5 %.",
                ),
                io.String.Input(
                    "name",
                    default="tuning",
                    tooltip="Of the file, in the folder tunings of ComfyUI's output folder. A file of this "
                    "name is replaced.",
                ),
            ],
            outputs=[
                TUNING.Output("tuning", tooltip="The settings. Connect them to SpargeAttention2."),
                io.Image.Output("image", tooltip="What is skipped by layer, and the errors."),
                io.String.Output("text", tooltip="The settings and what they save, to read."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model: host.ModelPatcher, latent: dict[str, Any], budget: float, name: str
    ) -> io.NodeOutput:
        try:
            tuning, lines = cls._tune(model, latent, budget, name)
        except (NoRun, TuneError, OSError) as problem:
            # The rest of the graph has its work to do all the same.
            log.warning("SpargeAttention2: %s", problem)
            tuning, lines = None, [f"{problem} Nothing was saved, and SpargeAttention2 gets no tuning."]
        text = "\n".join(lines)
        host.show_text(getattr(cls.hidden, "unique_id", None), text)
        image = torch.from_numpy(plot_tuning(tuning, text))[None]
        shown = {**ui.PreviewImage(image, cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}
        return io.NodeOutput(tuning, image, text, ui=shown)

    @staticmethod
    def _tune(
        model: host.ModelPatcher, latent: dict[str, Any], budget: float, name: str
    ) -> tuple[Tuning, list[str]]:
        """The tuning, saved, and what there is to say of it; raises NoRun or TuneError."""
        if not NAME.fullmatch(name):
            raise TuneError(f'The name "{name}" may hold letters, digits, "_", "-" and "." only.')
        attention, run, found = run_of(model, latent)
        if run.calibration is None:
            raise TuneError(
                "That run was not calibrated; put Calibrate Sparse Attention between SpargeAttention2 and "
                "the sampler, and connect its model here too."
            )
        missed = [
            f"Not measured, {reason}: {calls} calls."
            for reason, calls in run.summary["dense_calls"].items()
            if reason != CALIBRATED
        ]
        policy = attention.settings.policy
        window = (policy.start_percent, policy.end_percent)
        try:
            tuning = run.calibration.tune(budget, host.identity(model), window)
        except TuneError as error:
            raise TuneError(" ".join([str(error), *missed])) from error
        tuning.save(tuning_file(name))
        lines = [tuning.describe(), f"File: {FOLDER}/{name}{SUFFIX}", *missed]
        if not found:
            lines.append("Note: no run of this model made this latent, so this is of its latest run.")
        return tuning, lines
