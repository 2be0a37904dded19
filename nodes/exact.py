"""Attention that leaves nothing out, by the block-sparse kernel where no other way is faster.

With every block kept, the kernel for compute capability 9.0 takes about half of the time of the kernel that
ComfyUI has torch take (benchmarks/results). So it also serves the calls that stay dense, and the attention to
the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..sparge_core.backends import HALF, cuda_kernels
from ..sparge_core.mask import BlockMask

# The function of ComfyUI that asks torch. Who chose another one (SageAttention, say) gets that.
REPLACED = "attention_pytorch"
MIN_PAIRS = 2**26  # of a query and a key, over all heads: fewer take less time than it costs to launch it
DEVICE = "cuda"  # type of the devices that have the kernel


def serves(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, heads: int) -> bool:
    """Whether `attend` stands in for function(q, k, v, heads), which is ComfyUI's; tensors (B, L, H * D)."""
    return (
        getattr(function, "__name__", "") == REPLACED
        and q.device.type == k.device.type == v.device.type == DEVICE
        and q.dtype in HALF
        and q.dtype == k.dtype == v.dtype
        and q.dim() == 3
        and k.shape == v.shape == (q.shape[0], k.shape[1], q.shape[2])
        and q.shape[0] * heads * q.shape[1] * k.shape[1] >= MIN_PAIRS
        and not torch.is_grad_enabled()
        and cuda_kernels().fastest_when_dense(q.device.index, q.dtype, q.shape[2] // heads)
    )


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Softmax(q k^T / sqrt(D)) v of q (B, Lq, H * D), k and v (B, Lk, H * D), for each head."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = BlockMask.keep_all(q.shape[0], heads, q.shape[2], k.shape[2], q.device)
    out: Tensor = cuda_kernels().attention(q, k, v, mask, q.shape[3] ** -0.5)
    return out.transpose(1, 2).flatten(2)
