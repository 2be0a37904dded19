"""Host side of csrc/forward_sm90.cu: block-sparse attention on GPUs of compute capability 9.0."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..geometry import BLOCK_Q, num_blocks
from . import launch

# struct Params: tensor maps of q, k, v, out; lse, bits, counts, order, ticket; rows, heads, query blocks,
# query and key length, mask words of a row; scale in powers of two.
_PARAMS = struct.Struct("<128s128s128s128s5Q6if")

_THREADS = 384  # one producer warpgroup and two consumers
_LOAD_ROWS = 64  # tokens of a q, k or v box
_STORE_ROWS = 16  # tokens of an output box
_TILE_TOKENS = 128
_TILES = 2 + 3 + 2  # stages of q, k and v
_CONTROL_BYTES = 16 * _TILES + 2 * 12  # a full and an empty barrier per stage, two RowInfo


def forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, counts: Tensor, order: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, Lq, D) over the kept blocks of k, v (B, H, Lk, D), all float16 or all bfloat16.

    D is 64 or 128. bits, counts, order: as `BlockMask` holds them. A row without blocks gives
    zeros and an LSE of -inf.
    Returns the output, laid out as `torch.empty_like(q)`, and the LSE in base 2, fp32 (B, H, Lq).
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
    """As `forward`, into an aligned `out` of q's shape and a contiguous `lse`."""
    batch, heads, q_len, head_dim = q.shape
    q_blocks = num_blocks(q_len, BLOCK_Q)
    rows = batch * heads * q_blocks
    index = q.device.index
    stream = launch.stream(index)
    kernel = launch.kernel("forward_sm90", "forward_sm90", index, q.dtype, head_dim)

    q, k, v = launch.aligned(q), launch.aligned(k), launch.aligned(v)
    ticket = torch.empty(1, dtype=torch.int32, device=q.device)
    launch.zero(ticket, stream)
    params = _PARAMS.pack(
        launch.tensor_map(q, _LOAD_ROWS),
        launch.tensor_map(k, _LOAD_ROWS),
        launch.tensor_map(v, _LOAD_ROWS),
        launch.tensor_map(out, _STORE_ROWS),
        lse.data_ptr(),
        bits.data_ptr(),
        counts.data_ptr(),
        order.data_ptr(),
        ticket.data_ptr(),
        rows,
        heads,
        q_blocks,
        q_len,
        k.shape[2],
        bits.shape[3],
        scale * math.log2(math.e),
    )
    shared_bytes = _TILES * _TILE_TOKENS * head_dim * q.element_size() + _CONTROL_BYTES
    kernel((min(rows, kernel.device.multiprocessors), 1, 1), _THREADS, shared_bytes, stream, params)
