"""The node that shows what a sampling run did."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..sparge_core.picture import plot, plot_text
from ..sparge_core.record import Example, RunStatistics
from ..sparge_core.report import describe
from . import host
from .attention import Run, SparseAttention

log = logging.getLogger(__name__)


class SpargeSparsityReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeSparsityReport",
            display_name="Sparsity Report",
            category="model/patch",
            description=(
                "Shows what SpargeAttention2 did in a sampling run: the sparsity of every layer by step and "
                "by head, where a part of the video looks, the calls that stayed dense and why, and the time "
                "spent in attention."
            ),
            search_aliases=["sparse attention report", "SpargeAttention2 report"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model that the sampler used."),
                io.Latent.Input(
                    "latent", tooltip="What the sampler returned, so that the report is about that run."
                ),
                io.Int.Input(
                    "layer",
                    default=-1,
                    min=-1,
                    max=999,
                    optional=True,
                    tooltip="Transformer block whose mask is shown, counted from 0. -1: one in the middle.",
                ),
                io.Int.Input(
                    "step",
                    default=0,
                    min=0,
                    max=10000,
                    optional=True,
                    tooltip="Step whose mask is shown, counted from 1. 0: one in the middle.",
                ),
                io.Int.Input(
                    "head",
                    default=-1,
                    min=-1,
                    max=999,
                    optional=True,
                    tooltip="Head whose mask is shown, counted from 0. -1: the share of all heads.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    "image", tooltip="Sparsity by layer, step and head, and where a part of the video looks."
                ),
                io.String.Output("text", tooltip="The numbers, to read."),
                io.String.Output("json", tooltip="The numbers, for scripts."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: host.ModelPatcher,
        latent: dict[str, Any],
        layer: int = -1,
        step: int = 0,
        head: int = -1,
    ) -> io.NodeOutput:
        try:
            attention, run, found = run_of(model, latent)
        except NoRun as problem:  # the rest of the graph has its work to do all the same
            log.warning("SpargeAttention2: %s", problem)
            return cls._output(str(problem), plot_text(str(problem)), {"problem": str(problem)})
        lines = [
            describe(run.summary),
            attention.settings.describe(),
            *(f"Note: {note}." for note in run.notes),
        ]
        if not found:
            lines.append(
                "Note: no run of this model made this latent, so these are the numbers of its latest run."
            )
        example, missing = find_example(run.statistics, layer, step, head)
        if missing is not None:
            lines.append(f"Note: {missing}.")
        chosen = None if head < 0 else head
        mask = None if example is None else about(example, chosen)
        text = "\n".join(lines)
        picture = plot(run.summary, text, example, chosen)
        return cls._output(text, picture, {**attention.account(run), "mask": mask})

    @classmethod
    def _output(cls, text: str, picture: np.ndarray, numbers: dict[str, Any]) -> io.NodeOutput:
        host.show_text(getattr(cls.hidden, "unique_id", None), text)
        image = torch.from_numpy(picture)[None]
        shown = {**ui.PreviewImage(image, cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}
        return io.NodeOutput(image, text, json.dumps(numbers), ui=shown)


class NoRun(ValueError):
    """There is no run to speak of; the message says why, and what to do."""


def run_of(model: host.ModelPatcher, latent: dict[str, Any]) -> tuple[SparseAttention, Run, bool]:
    """The model's patch, the run that made this latent or else its latest one, and whether it made it.

    Raises NoRun.
    """
    attention = host.patch_of(model)
    if attention is None:
        raise NoRun(
            "This model has not been through SpargeAttention2; connect the MODEL that goes into the "
            "sampler, with a SpargeAttention2 node before it."
        )
    run, found = host.find_run(attention, latent["samples"])
    if run is None:
        raise NoRun(
            "No sampler has run with this model yet; connect the LATENT that comes out of the sampler "
            "that uses it."
        )
    return attention, run, found


def find_example(
    statistics: RunStatistics, layer: int, step: int, head: int
) -> tuple[Example | None, str | None]:
    """The mask to show, or None and, if there are others, why there is none of this one.

    layer: a transformer block, below 0 for one in the middle. step: counted from 1, 0 for one in the middle.
    head: of the layer, below 0 for all.
    """
    examples = statistics.examples()
    found = [x for x in examples if layer < 0 or x.layer == f"blocks.{layer}"]
    if examples and not found:
        names = sorted({x.layer for x in examples}, key=statistics.layers.index)
        return (
            None,
            f"layer {layer} was not sparse, so it has no mask to show; sparse were {', '.join(names)}",
        )
    steps = sorted({x.step + 1 for x in found})
    if found and step > 0 and step not in steps:
        what = "no layer" if layer < 0 else f"layer {layer}"
        named = ", ".join(map(str, steps))
        return None, f"{what} was sparse at step {step}, so there is no mask to show; sparse were {named}"
    if not found:
        return None, None
    step = step or steps[len(steps) // 2]
    found = [x for x in found if x.step + 1 == step]
    example = found[len(found) // 2]
    if head >= len(example.bits):
        return (
            None,
            f"{example.layer} has heads 0 to {len(example.bits) - 1}, so there is no head {head} to show",
        )
    return example, None


def about(example: Example, head: int | None) -> dict[str, Any]:
    """JSON-able. share: of the heads (of one head, 0 or 1) that look at each key block of 64 tokens."""
    kept = example.kept()
    return {
        "layer": example.layer,
        "step": example.step,
        "head": head,
        "grid": example.grid,
        "tokens": example.tokens,
        "query_tokens": example.queries,
        "share": (kept.mean(0) if head is None else kept[head].astype(float)).tolist(),
    }
