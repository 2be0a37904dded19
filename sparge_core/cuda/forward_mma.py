"""Host side of `csrc/forward_mma.cu`: the forward kernel of every GPU that has no faster one."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..geometry import BLOCK_Q, num_blocks
from . import launch

_MODULE = "forward_mma"
_LOG2_E = math.log2(math.e)
_THREADS = 128
# The queries and the ring of key and value tiles. Two blocks of threads fit into the 100 KB that
# a multiprocessor has in compute capability 8.6, 8.9 and 12.0.
_SHARED_BYTES = 48 * 1024
# Wider tiles, where a multiprocessor has 160 KB and more: the architectures that the kernel is compiled for.
_WIDE_SHARED_BYTES = 64 * 1024
_WIDE_CAPABILITIES = {(8, 0), (9, 0), (10, 0)}
# A view is its pointer and its batch, head and token strides.
_PARAMS = struct.Struct("<Q3q Q3q Q3q Q3q 4Q 3i f")


def forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, counts: Tensor, order: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, Lq, D) to the kept blocks of k, v (B, H, Lk, D), all float16 or all bfloat16.

    bits int32 (B, H, n_q, words), counts int32 (B, H, n_q) and order int32 (B * H * n_q,) as in `BlockMask`.
    scale: above 0. Returns the output, with q's strides, and the LSE in base 2, float32 (B, H, Lq).
    """
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    forward_into(out, lse, q, k, v, bits, counts, order, scale)
    return out, lse


def forward_into(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bits: Tensor,
    counts: Tensor,
    order: Tensor,
    scale: float,
) -> None:
    """As `forward`, into an `out` of q's shape and even strides, and a contiguous `lse`."""
    enqueue(
        out,
        launch.aligned(q),
        launch.aligned(k),
        launch.aligned(v),
        scale,
        lse=lse.data_ptr(),
        bits=bits.data_ptr(),
        counts=counts.data_ptr(),
        order=order.data_ptr(),
    )


def enqueue(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    lse: int,
    bits: int,
    counts: int,
    order: int,
) -> None:
    """As `forward_into`, of aligned q, k and v; the others are addresses."""
    batch, heads, q_len, head_dim = q.shape
    device = q.device.index
    wide = head_dim == 128 and launch.device(device).capability in _WIDE_CAPABILITIES
    name = "forward_mma_wide" if wide else "forward_mma"
    kernel = launch.kernel(_MODULE, name, device, q.dtype, head_dim)
    params = _PARAMS.pack(
        q.data_ptr(), *q.stride()[:3],
        k.data_ptr(), *k.stride()[:3],
        v.data_ptr(), *v.stride()[:3],
        out.data_ptr(), *out.stride()[:3],
        lse, bits, counts, order,
        heads, q_len, k.shape[2], scale * _LOG2_E,
    )  # fmt: skip
    shared_bytes = _WIDE_SHARED_BYTES if wide else _SHARED_BYTES
    rows = batch * heads * num_blocks(q_len, BLOCK_Q)
    kernel((rows, 1, 1), _THREADS, shared_bytes, launch.stream(device), params)
