"""The node that distils a student of the loaded model."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io, ui

from ..sparge_core.distill import DistillError
from ..sparge_core.wan import read_student
from . import host, weights
from .samples import DEFAULT_FOLDER, output_folder

if TYPE_CHECKING:
    from ..sparge_core.distill.data import Dataset
    from ..sparge_core.distill.loop import Distillation
    from ..sparge_core.distill.options import TrainOptions
    from .training import ComfyPair

log = logging.getLogger(__name__)

RUNS = "distillation/runs"  # in the output folder: checkpoints, log and curve of each run
STUDENTS = "loras"  # in the output folder, where ComfyUI looks for them too
NAME = re.compile(r"[\w.-]+")


class SpargeDistillStudent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeDistillStudent",
            display_name="Distill Student",
            category="model/training",
            description=(
                "Fine-tunes the model for sparse attention, so that most of it can be skipped: a low-rank "
                "student learns to move as the model does with full attention. Takes hours on a large GPU; "
                "stopped or not, it saves, and goes on where it was."
            ),
            search_aliases=["train sparse attention", "velocity distillation", "SpargeAttention2 training"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="A Wan text-to-video or image-to-video model: the teacher."),
                io.String.Input(
                    "samples",
                    default=DEFAULT_FOLDER,
                    tooltip="Folder in ComfyUI's output folder, filled by Save Distillation Sample.",
                ),
                io.String.Input(
                    "name",
                    default="student",
                    tooltip="Of the run and of the student's file. A run of this name is gone on with.",
                ),
                io.Int.Input("steps", default=500, min=1, max=100_000, tooltip="Optimiser steps in all."),
                io.Int.Input(
                    "batch", default=16, min=1, max=1024, tooltip="Samples a step, one after another."
                ),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=1e-7,
                    max=1e-1,
                    step=1e-6,
                    round=False,
                    tooltip="AdamW's.",
                ),
                io.Int.Input("rank", default=64, min=1, max=1024, tooltip="Of the low-rank factors."),
                io.Float.Input(
                    "top_k",
                    default=0.03,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    tooltip="Share of all blocks that each block attends to at least.",
                ),
                io.Float.Input(
                    "top_p",
                    default=0.2,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    tooltip="With sparsity at 0: share of its attention that each block keeps at least. The "
                    "paper's: 0.2 for 1.3B, 0.16 for 14B.",
                ),
                io.Float.Input(
                    "sparsity",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    tooltip="Share of the attention to skip, in place of top_p; 0: off.",
                ),
                io.Int.Input(
                    "held_out",
                    default=4,
                    min=0,
                    max=1024,
                    advanced=True,
                    tooltip="Samples that are not trained on but compared with the model.",
                ),
                io.Int.Input(
                    "save_every",
                    default=25,
                    min=1,
                    max=10_000,
                    advanced=True,
                    tooltip="Steps between checkpoints.",
                ),
                io.Boolean.Input(
                    "checkpointing",
                    default=True,
                    advanced=True,
                    tooltip="Compute activations twice rather than keep them: slower, in far less memory.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**63 - 1,
                    control_after_generate=False,
                    advanced=True,
                    tooltip="The same seed and samples give the same student.",
                ),
            ],
            outputs=[
                io.Model.Output(
                    tooltip="The model with the student's weights. Connect it to SpargeAttention2."
                ),
                io.String.Output("file", tooltip="The student as Load Distilled Student names it."),
                io.Image.Output("image", tooltip="Loss and velocity error by step."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: host.ModelPatcher, samples: str, name: str, **settings: Any) -> io.NodeOutput:
        from ..sparge_core.distill.data import open_dataset
        from ..sparge_core.distill.log import plot, read_records
        from ..sparge_core.distill.pair import check_data
        from . import training

        if not NAME.fullmatch(name):
            raise DistillError(f'The name "{name}" may hold letters, digits, "_", "-" and "." only.')
        options = _options(
            training.model_name(model), output_folder(samples), output_folder(RUNS) / name, settings
        )
        file = output_folder(f"{STUDENTS}/{name}.safetensors")
        data = open_dataset(options.data)
        check_data(options, data, training.describe(model))
        with training.open_pair(model, options) as pair:
            _run(pair, options, data, file)
        student = weights.load(read_student(file), model)
        image = torch.from_numpy(plot(read_records(options.out), name))[None]
        return io.NodeOutput(student, f"{STUDENTS}/{file.name}", image, ui=ui.PreviewImage(image, cls=cls))


def _options(base: str, data: Path, out: Path, settings: dict[str, Any]) -> TrainOptions:
    from ..sparge_core.distill.options import options_from

    return options_from(
        {
            **settings,
            "base": base,
            "data": data,
            "out": out,
            "alpha": float(settings["rank"]),
            "validate_every": settings["save_every"],
        }
    )


def _run(pair: ComfyPair, options: TrainOptions, data: Dataset, file: Path) -> None:
    """Train, and leave a checkpoint and the student at `file`, after an interrupt or an error too."""
    from ..sparge_core.distill import checkpoint
    from ..sparge_core.distill.loop import Distillation

    run = Distillation(options, pair, data)
    if checkpoint.checkpoints(options.out):
        run.resume(checkpoint.find(options.out))
        if run.step > options.steps:
            raise DistillError(
                f"The run {options.out.name} is at step {run.step}, beyond {options.steps}; raise steps or "
                "name another run."
            )
    try:
        _make_steps(run)
    except comfy.model_management.InterruptProcessingException:
        if run.step:
            run.save()
            _export(run, pair, file)
            log.info("SpargeAttention2: stopped and saved at step %d of %s.", run.step, options.out)
        raise
    _export(run, pair, file)


def _make_steps(run: Distillation) -> None:
    """All remaining steps, with the curve as the preview of the progress bar."""
    from PIL import Image

    from ..sparge_core.distill.log import JsonLines, plot, read_records

    options = run.options
    options.out.mkdir(parents=True, exist_ok=True)
    lines = JsonLines(options.out, run.step)
    bar = comfy.utils.ProgressBar(options.steps)
    for record in run.records():
        lines.write(record)
        pixels = (plot(read_records(options.out), options.out.name) * 255).round().astype("uint8")
        picture = Image.fromarray(pixels)
        bar.update_absolute(run.step, options.steps, ("JPEG", picture, max(picture.size)))


def _export(run: Distillation, pair: ComfyPair, file: Path) -> None:
    from ..sparge_core.distill.export import describe_run, write_low_rank

    write_low_rank(file, pair.pairs(), run.options.config, describe_run(run.options, run.step), "bf16")
