"""Host side of `csrc/backward_prepare.cu`: what the backward kernels of every GPU need beforehand."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks
from . import launch, mask_kernels

_MODULE = "backward_prepare"
# A view is its pointer and its batch, head and token strides.
_RECORDS = struct.Struct("<Q3q Q3q QQ ii")
_TRANSPOSE = struct.Struct("<QQQ iiii")
_RECORD_THREADS, _TRANSPOSE_THREADS = 256, 128


@dataclass(frozen=True)
class Columns:
    """The mask by key blocks: who keeps each, int32, as `BlockMask` says it by query blocks."""

    bits: Tensor  # (B, H, n_k, ceil(n_q / 32))
    counts: Tensor  # (B, H, n_k)
    order: Tensor  # (B * H * n_k,)


def row_records(d_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """LSE and rowsum(d_out * out) of the queries of each mask row, fp32 (B * H * n_q, 2, 128).

    d_out and out (B, H, Lq, D), aligned; lse (B, H, Lq), contiguous.
    """
    batch, heads, q_len, head_dim = out.shape
    rows = batch * heads * num_blocks(q_len, BLOCK_Q)
    index = out.device.index
    records = torch.empty((rows, 2, BLOCK_Q), dtype=torch.float32, device=out.device)
    kernel = launch.kernel(_MODULE, "row_records", index, out.dtype, head_dim)
    params = _RECORDS.pack(
        out.data_ptr(), *out.stride()[:3],
        d_out.data_ptr(), *d_out.stride()[:3],
        lse.data_ptr(), records.data_ptr(), heads, q_len,
    )  # fmt: skip
    kernel((rows, 1, 1), _RECORD_THREADS, 0, launch.stream(index), params)
    return records


def columns(bits: Tensor, k_len: int, dtype: torch.dtype, head_dim: int) -> Columns:
    """Transposes bits int32 (B, H, n_q, words). dtype, head_dim: of q, whose kernels are loaded."""
    batch, heads, n_q, words = bits.shape
    n_k, column_words = num_blocks(k_len, BLOCK_K), num_blocks(n_q, WORD_BITS)
    index = bits.device.index
    column_bits = bits.new_empty((batch, heads, n_k, column_words))
    counts = bits.new_empty((batch, heads, n_k))
    kernel = launch.kernel(_MODULE, "transpose_mask", index, dtype, head_dim)
    params = _TRANSPOSE.pack(
        bits.data_ptr(), column_bits.data_ptr(), counts.data_ptr(), n_q, n_k, words, column_words
    )
    kernel((words, batch * heads, 1), _TRANSPOSE_THREADS, 0, launch.stream(index), params)
    return Columns(column_bits, counts, mask_kernels.row_order(counts, dtype, head_dim))
