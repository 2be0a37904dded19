"""The node that has sparse attention compared with dense in a sampling run."""

from __future__ import annotations

from comfy_api.latest import io

from . import host


class SpargeSparsityProbe(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeSparsityProbe",
            display_name="Sparsity Probe",
            category="model/patch",
            description=(
                "Has SpargeAttention2 compute dense attention beside sparse at a few steps, so that "
                "Sparsity Report ranks the layers by error and you know which to keep dense. The video stays "
                "the same, but these steps take longer. Bypass it when you know."
            ),
            search_aliases=["sparse attention error", "which layers dense", "SpargeAttention2 probe"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model with SpargeAttention2, on its way to the sampler."
                ),
                io.Int.Input(
                    "steps",
                    default=2,
                    min=1,
                    max=1000,
                    tooltip="At how many steps to compare, spread evenly over those that run sparse.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, for the sampler and for Sparsity Report.")],
        )

    @classmethod
    def execute(cls, model: host.ModelPatcher, steps: int) -> io.NodeOutput:
        return io.NodeOutput(host.probe(model, steps))
