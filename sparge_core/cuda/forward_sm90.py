"""Host side of csrc/forward_sm90.cu: block-sparse attention on GPUs of compute capability 9.0."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks
from . import launch

# struct Params: tensor maps of q, k, v, out; lse, bits, counts, order, ticket; rows, heads, query blocks,
# query and key length, mask words of a row; scale in powers of two.
_PARAMS = struct.Struct("<128s128s128s128s5Q6if")

_LOG2_E = math.log2(math.e)
_ELEMENT_BYTES = 2
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
    """As `forward_into`, of aligned tensors; the others are addresses."""
    batch, heads, q_len, head_dim = q.shape
    k_len, index = k.shape[2], q.device.index
    q_blocks = num_blocks(q_len, BLOCK_Q)
    rows = batch * heads * q_blocks
    stream = launch.stream(index)
    kernel = launch.kernel("forward_sm90", "forward_sm90", index, q.dtype, head_dim)
    ticket = launch.counter(q.device, stream)
    params = _PARAMS.pack(
        launch.tensor_map(q, _LOAD_ROWS),
        launch.tensor_map(k, _LOAD_ROWS),
        launch.tensor_map(v, _LOAD_ROWS),
        launch.tensor_map(out, _STORE_ROWS),
        lse,
        bits,
        counts,
        order,
        ticket.data_ptr(),
        rows,
        heads,
        q_blocks,
        q_len,
        k_len,
        num_blocks(num_blocks(k_len, BLOCK_K), WORD_BITS),
        scale * _LOG2_E,
    )
    shared_bytes = _TILES * _TILE_TOKENS * head_dim * _ELEMENT_BYTES + _CONTROL_BYTES
    kernel((min(rows, kernel.device.multiprocessors), 1, 1), _THREADS, shared_bytes, stream, params)
