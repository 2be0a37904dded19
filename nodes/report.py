"""The node that shows what a sampling run did."""

from __future__ import annotations

import json
from typing import Any

import torch
from comfy_api.latest import io, ui

from ..sparge_core.picture import plot
from ..sparge_core.report import describe
from . import host


class SpargeSparsityReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeSparsityReport",
            display_name="Sparsity Report",
            category="model/patch",
            description=(
                "Shows what SpargeAttention2 did in a sampling run: the sparsity of every layer at every "
                "step, the calls that stayed dense and why, and the time spent in attention."
            ),
            search_aliases=["sparse attention report", "SpargeAttention2 report"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model that the sampler used."),
                io.Latent.Input(
                    "latent", tooltip="What the sampler returned, so that the report is about that run."
                ),
            ],
            outputs=[
                io.Image.Output("image", tooltip="Sparsity by layer and step."),
                io.String.Output("text", tooltip="The numbers, to read."),
                io.String.Output("json", tooltip="The numbers, for scripts."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: host.ModelPatcher, latent: dict[str, Any]) -> io.NodeOutput:
        attention = host.patch_of(model)
        if attention is None:
            raise ValueError(
                "This model has not been through SpargeAttention2; connect the MODEL that goes into the "
                "sampler, with a SpargeAttention2 node before it."
            )
        run, found = host.find_run(attention, latent["samples"])
        if run is None:
            raise ValueError(
                "No sampler has run with this model yet; connect the LATENT that comes out of the sampler "
                "that uses it."
            )
        lines = [
            describe(run.summary),
            attention.settings.describe(),
            *(f"Note: {note}." for note in run.notes),
        ]
        if not found:
            lines.append(
                "Note: no run of this model made this latent, so these are the numbers of its latest run."
            )
        text = "\n".join(lines)
        host.show_text(getattr(cls.hidden, "unique_id", None), text)
        image = torch.from_numpy(plot(run.summary, text))[None]
        shown = {**ui.PreviewImage(image, cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}
        return io.NodeOutput(image, text, json.dumps(attention.account(run)), ui=shown)
