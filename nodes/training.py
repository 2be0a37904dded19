"""What this pack knows of training inside ComfyUI: a loaded model as student and teacher. Read on 0.30.0.

The model is loaded a second time for it, as by ComfyUI's own training node: weights that a graph's nodes load
are inference tensors, through which no gradient flows. Low-rank factors hang beside the linear layers by
forward hooks, so nothing of the model changes; they need no other library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
import torch.utils.checkpoint
from comfy.ldm.wan.model import WanModel
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.nn import Linear, Parameter

from ..sparge_core import DensePolicy
from ..sparge_core.distill import DistillError
from ..sparge_core.distill.export import LowRankPair
from ..sparge_core.distill.flow import INITIAL, generator
from ..sparge_core.distill.options import SELF_ATTENTION, TrainOptions
from ..sparge_core.distill.pair import Batch, check_attention
from . import host
from .attention import Settings, SparseAttention

UP, DOWN = ".up", ".down"  # behind the name of a weight: its factors


class ComfyPair:
    """ComfyUI's Wan model: the student with sparse attention and low-rank factors, the teacher without.

    Use `open_pair`, which gives the memory back. Names in `trained`: Wan's of the weights, and UP or DOWN.
    """

    def __init__(self, model: ModelPatcher, options: TrainOptions) -> None:
        self.options = options
        settings = Settings(options.config, DensePolicy(min_tokens=0), "auto", "distillation", True)
        self._attention = SparseAttention(settings, host.self_attention_layers(model))
        self._model = host.patch_self_attention(model, self._attention)
        self._wan = self._model.get_model_object("diffusion_model")
        self._active = True  # whether the factors take part
        self._hooks: list[Any] = []
        self.facts = {"model": describe(self._model)}
        if options.checkpointing:
            for number in range(len(self._wan.blocks)):
                key = f"diffusion_model.blocks.{number}.forward"
                forward = self._model.get_model_object(key)
                again = partial(torch.utils.checkpoint.checkpoint, forward, use_reentrant=False)
                self._model.add_object_patch(key, again)
        comfy.model_management.load_models_gpu([self._model], memory_required=1e20, force_full_load=True)
        self.device = self._model.load_device
        self._model.model.requires_grad_(False)
        check_attention(
            self.device, self._model.model.get_dtype_inference(), self._wan.dim // self._wan.num_heads
        )
        self.trained: Mapping[str, Parameter] = self._add_factors()

    def _add_factors(self) -> dict[str, Parameter]:
        """fp32 factors beside the linear layers of the blocks; the product is 0 at first."""
        factors: dict[str, Parameter] = {}
        for name, module in self._wan.named_modules():
            chosen = self.options.parameters != SELF_ATTENTION or ".self_attn." in name
            if not (isinstance(module, Linear) and name.startswith("blocks.") and chosen):
                continue
            (outputs, inputs), rank = module.weight.shape, self.options.rank
            source = generator(self.options.seed, INITIAL, len(factors))
            down = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=source)
            pair = (torch.zeros(outputs, rank), down)
            up_factor, down_factor = (Parameter(factor.to(self.device)) for factor in pair)
            factors[f"{name}.weight{UP}"], factors[f"{name}.weight{DOWN}"] = up_factor, down_factor
            self._hooks.append(module.register_forward_hook(self._hook(up_factor, down_factor)))
        return factors

    def _hook(self, up: Parameter, down: Parameter) -> Any:
        scale = self.options.alpha / self.options.rank

        def add(_module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
            if not self._active:
                return None
            (x,) = inputs
            low = torch.nn.functional.linear(x, down.to(x.dtype))
            return out + torch.nn.functional.linear(low, up.to(x.dtype)) * scale

        return add

    def student(self, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor:
        # Asked here, for a step can take minutes: what was accumulated for it is lost, and no step is.
        comfy.model_management.throw_exception_if_processing_interrupted()
        return self._velocity(x_t, t, condition)

    @torch.no_grad()
    def teacher(self, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor:
        with self._as_teacher():
            return self._velocity(x_t, t, condition)

    @contextmanager
    def _as_teacher(self) -> Iterator[None]:
        settings = self._attention.settings
        self._active, self._attention.settings = False, replace(settings, backend="dense")
        try:
            yield
        finally:
            self._active, self._attention.settings = True, settings

    def _velocity(self, x_t: Tensor, t: Tensor, condition: Batch) -> Tensor:
        """ComfyUI's model gives the clip that it sees, x_0 = x_t - t u."""
        options = self._model.model_options["transformer_options"]
        more = {} if condition.image_embedding is None else {"clip_fea": condition.image_embedding}
        clip = self._model.model.apply_model(
            x_t,
            t,
            c_concat=condition.image_latent,
            c_crossattn=condition.text,
            transformer_options={**options},
            **more,
        )
        return (x_t - clip) / t.view(-1, 1, 1, 1, 1)

    def pairs(self) -> dict[str, LowRankPair]:
        """The factors by Wan's names of their weights."""
        return {
            name.removesuffix(UP): LowRankPair(
                up.detach(), self.trained[name.removesuffix(UP) + DOWN].detach(), self.options.alpha
            )
            for name, up in self.trained.items()
            if name.endswith(UP)
        }

    def close(self) -> None:
        """Hand the memory back: take the model and the factors off the GPU."""
        for hook in self._hooks:
            hook.remove()
        self.trained = {}
        comfy.model_management.unload_model_and_clones(self._model)
        self._model.detach()
        comfy.model_management.soft_empty_cache()


@contextmanager
def open_pair(model: ModelPatcher, options: TrainOptions) -> Iterator[ComfyPair]:
    """The pair of a second copy of `model`, for as long as this is entered. Gradients work inside."""
    if model.cached_patcher_init is None:
        raise DistillError(
            "This model cannot be loaded a second time, which training needs; load it with ComfyUI's Load "
            "Diffusion Model or with Load Distilled Student."
        )
    training = comfy.model_management.in_training
    with torch.inference_mode(False), torch.enable_grad():
        comfy.model_management.in_training = True
        pair = None
        try:
            pair = ComfyPair(model.clone(force_deepcopy=True), options)
            yield pair
        finally:
            comfy.model_management.in_training = training
            if pair is not None:
                pair.close()


def model_name(model: ModelPatcher) -> str:
    """The file that the model is from, as far as ComfyUI remembers it."""
    loaded = (getattr(model, "cached_patcher_init", None) or (None, ()))[1]
    return next(
        (Path(str(one)).name for one in loaded if str(one).endswith((".safetensors", ".sft"))), "model"
    )


def describe(model: ModelPatcher) -> dict[str, Any]:
    """What decides which samples a Wan model takes, under the names of diffusers' configuration.

    DistillError for a model that is no plain text-to-video or image-to-video Wan.
    """
    wan = model.get_model_object("diffusion_model")
    if type(wan) is not WanModel:
        raise DistillError(
            f"Distill Student works on Wan text-to-video and image-to-video models, and this model is a "
            f"{type(wan).__name__}; connect one of those."
        )
    image = wan.img_emb.proj[0].weight.shape[0] if wan.img_emb is not None else None
    return {
        "patch_size": list(wan.patch_size),
        "num_attention_heads": wan.num_heads,
        "num_layers": len(wan.blocks),
        "in_channels": wan.patch_embedding.weight.shape[1],
        "out_channels": wan.out_dim,
        "text_dim": wan.text_embedding[0].weight.shape[1],
        "image_dim": image,
    }
