"""What stays dense, and the attention to the text, by our kernel where that is the fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..sparge_core import exact

# The function of ComfyUI that asks torch. Who chose another one (SageAttention, say) gets that.
REPLACED = "attention_pytorch"


def serves(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, heads: int) -> bool:
    """Whether `attend` stands in for function(q, k, v, heads), which is ComfyUI's; tensors (B, L, H * D)."""
    return (
        getattr(function, "__name__", "") == REPLACED
        and q.dim() == 3
        and k.shape == v.shape == (q.shape[0], k.shape[1], q.shape[2])
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and exact.is_fastest(q, heads, k.shape[1])
    )


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Softmax(q k^T / sqrt(D)) v of q (B, Lq, H * D), k and v (B, Lk, H * D), for each head."""
    out = exact.attend(*(x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2).flatten(2)
