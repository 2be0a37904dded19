"""A block's feed-forward layer with its GELU in the first matrix product, instead of a pass of its own.

That pass reads and writes the widest tensor of the model: 7 % of a sparse step of Wan2.1 1.3B. cuBLAS takes
the tanh form of GELU, which Wan has, as an epilogue, and torch asks it to in `_addmm_activation`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import comfy.ops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..sparge_core.backends import HALF, decided_once
from . import traced

log = logging.getLogger(__name__)

DEVICE = "cuda"  # type of the devices for which torch asks cuBLAS
ROUNDING = 2.0**-6  # relative difference of results of which one is rounded once more on its way
SMALL = 64  # tokens and channels of the layer that is compared


def fuse(forward: Callable[..., Tensor]) -> Callable[[Tensor], Tensor] | None:
    """The fused form of a feed-forward layer's bound forward; None if that is not Wan's as ComfyUI has it."""
    layers: Any = getattr(forward, "__self__", None)
    function: Any = getattr(forward, "__func__", None)
    if type(layers) is not nn.Sequential or function is not nn.Sequential.forward or len(layers) != 3:
        return None
    widen, activation, narrow = layers
    if not (_is_plain(widen) and type(activation) is nn.GELU and activation.approximate == "tanh"):
        return None
    if any("forward" in vars(module) or _has_hooks(module) for module in (widen, activation)):
        return None  # another node's patch

    def fused(x: Tensor) -> Tensor:
        if not _serves(x):
            return forward(x)
        # As ComfyUI's own forward of the layer: the weights may lie elsewhere, or wait for a LoRA.
        if widen.comfy_cast_weights or widen.weight_function or widen.bias_function:
            weight, bias, stream = comfy.ops.cast_bias_weight(widen, x, offloadable=True)
            hidden = traced.linear_gelu(x, weight, bias)
            comfy.ops.uncast_bias_weight(widen, weight, bias, stream)
        else:
            hidden = traced.linear_gelu(x, widen.weight, widen.bias)
        out: Tensor = narrow(hidden)
        return out

    return fused


def _is_plain(layer: nn.Module) -> bool:
    plain = comfy.ops.disable_weight_init.Linear
    return (
        isinstance(layer, plain)
        and type(layer).forward is plain.forward
        and type(layer).forward_comfy_cast_weights is plain.forward_comfy_cast_weights
        and layer.bias is not None
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _serves(x: Tensor) -> bool:
    return (
        x.device.type == DEVICE
        and x.dtype in HALF
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and _proven(x.device.index, x.dtype)
    )


@decided_once
def _proven(device_index: int, dtype: torch.dtype) -> bool:
    return _compared(device_index, dtype)


@functools.cache
def _compared(device_index: int, dtype: torch.dtype) -> bool:
    """Whether a small layer gives the same either way. Asked once a process; waits for the device."""
    device = torch.device(DEVICE, device_index)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    x, weight, bias = random(1, SMALL, SMALL), random(2 * SMALL, SMALL) / SMALL**0.5, random(2 * SMALL)
    own = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    try:
        same = torch.allclose(traced.linear_gelu(x, weight, bias), own, ROUNDING, ROUNDING)
    except (RuntimeError, AttributeError) as error:
        log.info("SpargeAttention2: GELU stays a pass of its own: %s", error)
        return False
    if not same:
        log.info("SpargeAttention2: GELU stays a pass of its own: torch's fused one gives something else.")
    return same
