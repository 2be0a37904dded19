"""Host side of `csrc/backward_mma.cu`: the backward kernels of every GPU that has no faster ones."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks
from . import backward_prepare, launch

_MODULE = "backward_mma"
# A view is its pointer and its batch, head and token strides.
# struct RowParams: views of q, d_out, k, v, d_q; records, bits, order; heads, query blocks, query and key
# length, words; scale, scale in powers of two.
_ROWS = struct.Struct("<Q3q Q3q Q3q Q3q Q3q 3Q 5i 2f")
# struct ColumnParams: views of q, d_out, k, v, d_k, d_v; as above, with the key blocks, of columns.
_COLUMNS = struct.Struct("<Q3q Q3q Q3q Q3q Q3q Q3q 3Q 6i 2f")

_LOG2_E = math.log2(math.e)
_ELEMENT_BYTES = 2
_THREADS = 128
_ROW_KEYS = 32  # of a tile of row_gradients
_QUERIES, _WIDE_QUERIES = 32, 64  # of a tile of column_gradients
# Where a multiprocessor has the shared memory of two blocks of the wide one: what it is compiled for.
_WIDE_CAPABILITIES = {(9, 0), (10, 0)}


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bits: Tensor,
    counts: Tensor,
    order: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (B, H, Lq, D), k and v (B, H, Lk, D), laid out as these, from that of the output.

    out and lse: as `forward` returned them; the others as it took them.
    """
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    backward_into(*grads, d_out, q, k, v, out, lse, bits, counts, order, scale)
    return grads


def backward_into(
    d_q: Tensor,
    d_k: Tensor,
    d_v: Tensor,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bits: Tensor,
    counts: Tensor,
    order: Tensor,
    scale: float,
) -> None:
    """As `backward`, into gradients of even strides."""
    batch, heads, q_len, head_dim = q.shape
    k_len, index = k.shape[2], q.device.index
    n_q, n_k = num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K)
    stream = launch.stream(index)
    q, k, v = launch.aligned(q), launch.aligned(k), launch.aligned(v)
    d_out, out = launch.aligned(d_out), launch.aligned(out)
    records = backward_prepare.row_records(d_out, out, lse)
    lists = backward_prepare.columns(bits, k_len, q.dtype, head_dim)
    inputs = *_view(q), *_view(d_out), *_view(k), *_view(v)
    token_bytes = head_dim * _ELEMENT_BYTES

    wide = head_dim == 128 and launch.device(index).capability in _WIDE_CAPABILITIES
    name = "column_gradients_wide" if wide else "column_gradients"
    params = _COLUMNS.pack(
        *inputs, *_view(d_k), *_view(d_v),
        records.data_ptr(), lists.bits.data_ptr(), lists.order.data_ptr(),
        heads, n_k, n_q, q_len, k_len, lists.bits.shape[3], scale, scale * _LOG2_E,
    )  # fmt: skip
    queries = _WIDE_QUERIES if wide else _QUERIES
    shared = (2 * BLOCK_K + 4 * queries) * token_bytes + BLOCK_K * queries * _ELEMENT_BYTES
    kernel = launch.kernel(_MODULE, name, index, q.dtype, head_dim)
    kernel((batch * heads * n_k, 1, 1), _THREADS, shared, stream, params)

    params = _ROWS.pack(
        *inputs, *_view(d_q),
        records.data_ptr(), bits.data_ptr(), order.data_ptr(),
        heads, n_q, q_len, k_len, num_blocks(n_k, WORD_BITS), scale, scale * _LOG2_E,
    )  # fmt: skip
    shared = (2 * BLOCK_Q + 4 * _ROW_KEYS) * token_bytes
    kernel = launch.kernel(_MODULE, "row_gradients", index, q.dtype, head_dim)
    kernel((batch * heads * n_q, 1, 1), _THREADS, shared, stream, params)


def _view(tensor: Tensor) -> tuple[int, ...]:
    """Pointer and strides, in elements, of batches, heads and tokens."""
    return (tensor.data_ptr(), *tensor.stride()[:3])
