"""Host side of csrc/backward_sm90.cu: gradients of attention on GPUs of compute capability 9.0."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks
from . import backward_prepare, launch

_MODULE = "backward_sm90"
# struct RowParams: tensor maps of q, d_out, k, v; view of d_q; records, bits, counts, order, ticket; rows,
# heads, query blocks, query and key length, words; scale, scale in powers of two.
_ROWS = struct.Struct("<128s128s128s128s Q3q 5Q 6i 2f")
# struct ColumnParams: tensor maps of q, d_out; views of k, v, d_k, d_v; as above, of columns.
_COLUMNS = struct.Struct("<128s128s Q3q Q3q Q3q Q3q 5Q 6i 2f")

_LOG2_E = math.log2(math.e)
_ELEMENT_BYTES = 2
_THREADS = 384  # one producer warpgroup and two consumers
_RECORD_BYTES = 2 * 4 * BLOCK_Q
_LINE_BYTES = 2 * (16 + 12)  # two lines, each with a full and an empty barrier
_KEY_STAGES = 5
_QUERY_STAGES = 3
_EXCHANGE_STAGES = 1
_EXCHANGE_BYTES = BLOCK_Q * BLOCK_K * _ELEMENT_BYTES


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
    rows, columns = batch * heads * n_q, batch * heads * n_k
    stream = launch.stream(index)
    q, k, v = launch.aligned(q), launch.aligned(k), launch.aligned(v)
    d_out, out = launch.aligned(d_out), launch.aligned(out)
    records = backward_prepare.row_records(d_out, out, lse)
    lists = backward_prepare.columns(bits, k_len, q.dtype, head_dim)
    ticket = launch.counter(q.device, stream)
    scales = scale, scale * _LOG2_E
    queries = launch.tensor_map(q, BLOCK_Q), launch.tensor_map(d_out, BLOCK_Q)

    kernel = launch.kernel(_MODULE, "column_gradients", index, q.dtype, head_dim)
    params = _COLUMNS.pack(
        *queries,
        *_view(k), *_view(v), *_view(d_k), *_view(d_v),
        records.data_ptr(), lists.bits.data_ptr(), lists.counts.data_ptr(), lists.order.data_ptr(),
        ticket.data_ptr(),
        columns, heads, n_k, n_q, k_len, lists.bits.shape[3], *scales,
    )  # fmt: skip
    stage = 2 * BLOCK_Q * head_dim * _ELEMENT_BYTES + _RECORD_BYTES + 2 * 16
    exchange = _EXCHANGE_STAGES * (_EXCHANGE_BYTES + 4 * 16)
    shared = _QUERY_STAGES * stage + exchange + _LINE_BYTES
    multiprocessors = kernel.device.multiprocessors
    kernel((min(columns, multiprocessors), 1, 1), _THREADS, shared, stream, params)

    kernel = launch.kernel(_MODULE, "row_gradients", index, q.dtype, head_dim)
    params = _ROWS.pack(
        *queries, launch.tensor_map(k, BLOCK_K), launch.tensor_map(v, BLOCK_K),
        *_view(d_q),
        records.data_ptr(), bits.data_ptr(), counts.data_ptr(), order.data_ptr(), ticket.data_ptr(),
        rows, heads, n_q, q_len, k_len, num_blocks(n_k, WORD_BITS), *scales,
    )  # fmt: skip
    stage = 2 * BLOCK_K * head_dim * _ELEMENT_BYTES + 16
    own = 2 * BLOCK_Q * head_dim * _ELEMENT_BYTES + _RECORD_BYTES + 16
    shared = own + _KEY_STAGES * stage + _LINE_BYTES
    kernel((min(rows, multiprocessors), 1, 1), _THREADS, shared, stream, params)


def _view(tensor: Tensor) -> tuple[int, ...]:
    """Pointer and strides, in elements, of batches, heads and tokens."""
    return (tensor.data_ptr(), *tensor.stride()[:3])
