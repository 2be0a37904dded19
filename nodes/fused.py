"""The forward of ComfyUI's Wan self-attention, with RMSNorm and rotation of q and k in one kernel.

It repeats one function of ComfyUI's. So it stands in only for layers whose forward is that very function, and
only once it has given the same as that function for a small layer, on the device at hand.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfy.ops
import torch
from comfy.ldm.wan import model as wan_model
from comfy.ldm.wan.model import WanSelfAttention
from torch import Tensor, nn

from ..sparge_core.backends import HALF, cuda_kernels, decided_once

log = logging.getLogger(__name__)

OVERRIDE = "optimized_attention_override"  # ComfyUI's slot in transformer_options
DEVICE = "cuda"  # type of the devices that have the kernel
ROUNDING = 2.0**-6  # relative difference of two results in bfloat16 that may round differently


@dataclass(frozen=True)
class Fused:
    """A layer whose forward is ComfyUI's own."""

    layer: WanSelfAttention

    def serves(self, x: Tensor, freqs: Tensor) -> bool:
        """Whether `forward` gives for x (B, L, C) what the layer's own forward does."""
        samples, tokens, _ = x.shape
        head_dim = self.layer.head_dim
        return (
            x.device.type == freqs.device.type == DEVICE
            and not torch.is_grad_enabled()
            and x.dtype in HALF
            and freqs.dtype == torch.float32
            and freqs.shape[0] in (1, samples)
            and freqs.shape[1:] == (tokens, 1, head_dim // 2, 2, 2)
            and self.layer.dim <= cuda_kernels().MAX_NORM_CHANNELS
            and _proven(x.device.index, x.dtype, head_dim)
        )

    def forward(self, x: Tensor, freqs: Tensor, transformer_options: dict[str, Any]) -> Tensor:
        """Attention of tokens x (B, L, C), rotated by freqs (1 or B, L, 1, D / 2, 2, 2)."""
        layer = self.layer
        q = _rotated(layer.q(x), layer.norm_q, freqs)
        k = _rotated(layer.k(x), layer.norm_k, freqs)
        out = wan_model.optimized_attention(
            q, k, layer.v(x), heads=layer.num_heads, transformer_options=transformer_options
        )
        projected: Tensor = layer.o(out)
        return projected


def fuse(forward: Callable[..., Tensor]) -> Fused | None:
    """The fused form of a layer's bound forward; None if it is not the one that ComfyUI has for Wan."""
    layer: Any = getattr(forward, "__self__", None)
    function: Any = getattr(forward, "__func__", None)
    if (
        type(layer) is WanSelfAttention
        and function is WanSelfAttention.forward
        and function.__module__ == wan_model.__name__
        and _is_plain(layer.norm_q)
        and _is_plain(layer.norm_k)
    ):
        return Fused(layer)
    return None


def _is_plain(norm: nn.Module) -> bool:
    # An instance with a forward of its own carries another node's patch.
    return isinstance(norm, nn.RMSNorm) and isinstance(norm.eps, float) and "forward" not in vars(norm)


def _rotated(x: Tensor, norm: nn.Module, freqs: Tensor) -> Tensor:
    # ComfyUI may keep the weight elsewhere, in another dtype or with a LoRA still to be added. Of a token of
    # ones, whose mean square is 1, the norm gives just that weight as it takes it.
    weight = norm(x.new_ones(1, 1, x.shape[-1])).flatten()
    rotated: Tensor = cuda_kernels().norm_rope(x, weight, freqs, norm.eps)
    return rotated


@decided_once
def _proven(device_index: int, dtype: torch.dtype, head_dim: int) -> bool:
    return _compared(device_index, dtype, head_dim)


@functools.cache
def _compared(device_index: int, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a small layer gives the same either way. Asked once a process; waits for the device."""
    if cuda_kernels().why_not_norm_rope(device_index, dtype, head_dim) is not None:
        return False
    heads, tokens = 2, 16
    device = torch.device(DEVICE, device_index)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    settings = {"operations": comfy.ops.disable_weight_init, "device": device, "dtype": dtype}
    layer = WanSelfAttention(heads * head_dim, heads, operation_settings=settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(random(*parameter.shape))
        x = random(1, tokens, heads * head_dim).to(dtype)
        freqs = random(1, tokens, 1, head_dim // 2, 2, 2)

        def results(forward: Callable[..., Tensor]) -> list[Tensor]:
            """What comes to the attention, and what the layer makes of what comes back."""
            seen: list[Tensor] = []

            def override(_: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                seen.extend((q, k, v))
                return v

            out = forward(x, freqs, transformer_options={OVERRIDE: override})
            return [*seen, out]

        own, fused = results(layer.forward), results(Fused(layer).forward)
        same = len(own) == len(fused) and all(
            one.shape == other.shape and torch.allclose(one, other, ROUNDING, ROUNDING)
            for one, other in zip(own, fused, strict=False)
        )
    if not same:
        log.info(
            "SpargeAttention2: this ComfyUI computes queries and keys in another way than the fused kernel, "
            "which is therefore not used."
        )
    return same
