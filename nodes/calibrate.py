"""The node that has settings measured in a sampling run, for Tune Sparse Attention."""

from __future__ import annotations

from comfy_api.latest import io

from . import host


class SpargeCalibrate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeCalibrate",
            display_name="Calibrate Sparse Attention",
            category="model/patch",
            description=(
                "Has SpargeAttention2 run dense and measure, in every layer, how far each of ten sparsities "
                "would be from that. Tune Sparse Attention, behind the sampler, makes settings of it. Bypass "
                "both when you have them."
            ),
            search_aliases=[
                "auto tune sparse attention",
                "sparsity per layer",
                "SpargeAttention2 calibration",
            ],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model with SpargeAttention2, on its way to the sampler."
                ),
                io.Int.Input(
                    "steps",
                    default=8,
                    min=1,
                    max=1000,
                    tooltip="At how many steps to measure, spread evenly over those that run sparse. Each "
                    "takes several times as long as a dense one.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model, for the sampler and for Tune Sparse Attention.")],
        )

    @classmethod
    def execute(cls, model: host.ModelPatcher, steps: int) -> io.NodeOutput:
        return io.NodeOutput(host.calibrate(model, steps))
