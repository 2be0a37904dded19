"""Dense attention by the block-sparse kernel, where keeping every block is still the fastest way.

The kernel for compute capability 9.0 takes about half of the time of the FlashAttention-2 that torch brings
(benchmarks/results). It serves what stays dense in a patched model, and the teacher of a distillation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import HALF, cuda_kernels
from .mask import BlockMask

MIN_PAIRS = 2**26  # of a query and a key, over all heads: fewer take less time than it costs to launch it
DEVICE = "cuda"  # type of the devices that have the kernel


def is_fastest(q: Tensor, heads: int, k_len: int) -> bool:
    """Whether `attend` is, and without gradients, for q (B, L, H * D) and k_len keys of its kind."""
    batch, q_len, channels = q.shape
    return (
        q.device.type == DEVICE
        and q.dtype in HALF
        and batch * heads * q_len * k_len >= MIN_PAIRS
        and not torch.is_grad_enabled()
        and cuda_kernels().fastest_when_dense(q.device.index, q.dtype, channels // heads)
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax(q k^T / sqrt(D)) v of q (B, H, Lq, D), k and v (B, H, Lk, D), where the CUDA kernels serve."""
    batch, heads, q_len, head_dim = q.shape
    mask = BlockMask.keep_all(batch, heads, q_len, k.shape[2], q.device)
    out: Tensor = cuda_kernels().attention(q, k, v, mask, head_dim**-0.5)
    return out
