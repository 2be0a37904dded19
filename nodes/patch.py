"""The node that makes a model's self-attention sparse."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io

from ..sparge_core import DensePolicy, SparseConfig, parse_layers
from ..sparge_core.tune import Tuning
from . import host
from .attention import TRAINING_FREE, SparseAttention, choose_settings
from .tuning import TUNING

SETTINGS = ("auto", "manual")
BACKENDS = ("auto", "cuda", "flex", "reference", "dense")


class SpargeAttention2Patch(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SpargeAttention2Patch",
            display_name="SpargeAttention2",
            category="model/patch",
            description=(
                "Makes the self-attention of a Wan video model sparse: every block of the video attends only "
                "to the blocks that matter to it. The longer and larger the video, the more time this saves."
            ),
            search_aliases=["sparse attention", "SpargeAttn", "SpargeAttention", "block sparse"],
            inputs=[
                io.Model.Input("model", tooltip="A Wan2.1 or Wan2.2 video model."),
                io.Combo.Input(
                    "settings",
                    options=list(SETTINGS),
                    default="auto",
                    tooltip="auto: a distilled student brings its own settings; any other model skips half "
                    "of its attention and keeps the first 20 % of the steps dense, which preserves the "
                    "picture. manual: the sliders below.",
                ),
                io.Float.Input(
                    "top_k",
                    default=TRAINING_FREE.top_k,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    tooltip="manual: share of all blocks that each block attends to at least, "
                    "strongest first.",
                ),
                io.Float.Input(
                    "top_p",
                    default=TRAINING_FREE.top_p,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    tooltip="manual, with sparsity at 0: share of its attention that each block keeps at "
                    "least. Distilled students use about 0.2; any other model needs 0.6 or more.",
                ),
                io.Float.Input(
                    "sparsity",
                    default=TRAINING_FREE.sparsity,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    display_mode=io.NumberDisplay.slider,
                    tooltip="manual: share of the attention to skip. It is met exactly, in place of top_p. "
                    "0 lets top_k and top_p decide.",
                ),
                io.Float.Input(
                    "start_percent",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Part of the sampling after which attention becomes sparse. auto without a "
                    "student starts at 0.2 or later.",
                ),
                io.Float.Input(
                    "end_percent",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Part of the sampling after which attention is dense again.",
                ),
                io.String.Input(
                    "dense_layers",
                    default="",
                    advanced=True,
                    tooltip="Transformer blocks that always stay dense, for example 0, 1, 38-39.",
                ),
                io.Int.Input(
                    "min_tokens",
                    default=DensePolicy().min_tokens,
                    min=0,
                    max=1 << 20,
                    step=512,
                    advanced=True,
                    tooltip="Shorter videos stay dense, because sparse attention would not be faster. "
                    "81 frames of 832 × 480 are 32760 tokens.",
                ),
                io.Combo.Input(
                    "backend",
                    options=list(BACKENDS),
                    default="auto",
                    advanced=True,
                    tooltip="What computes sparse attention. auto takes the fastest that serves your GPU; "
                    "dense skips nothing, to compare.",
                ),
                TUNING.Input(
                    "tuning",
                    optional=True,
                    tooltip="Settings of each layer, from Tune Sparse Attention or Load Sparse Tuning. auto "
                    "uses them, at the steps that they were measured for.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The model with sparse self-attention.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: host.ModelPatcher,
        settings: str,
        top_k: float,
        top_p: float,
        sparsity: float,
        start_percent: float,
        end_percent: float,
        dense_layers: str,
        min_tokens: int,
        backend: str,
        tuning: Tuning | None = None,
    ) -> io.NodeOutput:
        layers = host.self_attention_layers(model)
        blocks = 1 + max(layer.block for layer in layers)
        policy = DensePolicy(start_percent, end_percent, parse_layers(dense_layers, blocks), min_tokens)
        manual = SparseConfig(top_k, top_p, sparsity)
        student, file = host.student_config(model), host.student_file(model)
        notes: tuple[str, ...] = ()
        if tuning is not None:
            why = tuning.why_not(host.identity(model), [layer.name for layer in layers])
            if why is not None:
                tuning, notes = None, (f"{why}, so it is not used",)
        chosen = choose_settings(settings, manual, policy, backend, student, file, tuning)
        chosen = replace(chosen, notes=(*notes, *chosen.notes))
        node_id = getattr(cls.hidden, "unique_id", None)
        return io.NodeOutput(host.patch_self_attention(model, SparseAttention(chosen, layers), node_id))
