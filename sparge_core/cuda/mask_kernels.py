"""Launches the mask kernels of `csrc/mask.cu`: from q and k to what the forward kernels read of a mask.

Everything that depends on the tensors' values is decided on the GPU; nothing waits for it.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks, target_blocks, top_k_blocks
from . import launch

# Rows longer than this do not fit a thread block; their scores would take as much memory as the output.
MAX_KEY_BLOCKS = 8192

_WARP = 32

# The parameter structs of csrc/mask.cu, field by field.
_MEANS = struct.Struct("<Q3q Q3q QQ QQ iii")
_SCORES = struct.Struct("<QQ QQ QQ iii f i")
_SELECT = struct.Struct("<QQQ iiii II")
_TARGET = struct.Struct("<QQQQQ iiii II")
_ORDER = struct.Struct("<QQ ii")

_TILE_Q, _TILE_K, _SCORE_THREADS = 128, 64, 256
_MEANS_THREADS = 128
_ROW_VALUES = 16  # scores that a thread of the kernels for long rows holds
_SELECT_ROWS = 4  # of a thread block of `select_blocks_1280`, which gives a row one warp
_MASS_UNITS = 2**31  # of a row's softmax
_ALL_MASS = 2**32 - 1

_TARGET_ROWS = 8  # of a thread block of the kernels for a target
_LEVELS, _GROUPS, _CELLS = 2048, 256, 65536
_SEARCH_WORDS = 2 * _LEVELS + 8 + 2 * (_GROUPS + _CELLS)  # of a sample
_ROW_STATE_BYTES = 1040  # of a row
_KEY_BYTES = 8  # of an entry that is sorted
_MAX_TARGET_ENTRIES = 2**32 - 1  # of a sample: 32 bits count them

_ORDER_THREADS = 1024


@dataclass(frozen=True)
class Layout:
    """Sizes of one problem, and where in a scratch buffer its intermediate arrays begin, in bytes."""

    n_q: int
    n_k: int
    rows: int  # of all samples and heads
    words: int  # of bits of a row
    pitch: int  # of a row of scores
    floor: int  # key blocks that Top-k keeps of a row
    beyond_floor: (
        int  # key blocks that a target sparsity keeps of a sample besides them; 0: no target decides
    )
    q_means: int
    q_units: int
    k_means: int
    k_units: int
    scores: int
    searches: int
    row_states: int  # in place of the means, which have been read by then
    scratch_bytes: int


@functools.lru_cache(maxsize=64)
def layout(
    batch: int, heads: int, q_len: int, k_len: int, head_dim: int, top_k: float, sparsity: float
) -> Layout:
    """Raises ValueError for more than 8192 key blocks, and for a target for 2^32 pairs of blocks or more."""
    n_q, n_k = num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K)
    if n_k > MAX_KEY_BLOCKS:
        raise ValueError(
            f"The CUDA mask takes up to {MAX_KEY_BLOCKS * BLOCK_K} key tokens and got {k_len}; "
            'choose the back end "reference" for longer sequences.'
        )
    rows, words = batch * heads * n_q, num_blocks(n_k, WORD_BITS)
    floor, beyond_floor = top_k_blocks(top_k, n_k), 0
    if sparsity > 0.0:
        entries = heads * n_q * n_k
        if entries > _MAX_TARGET_ENTRIES:
            raise ValueError(
                f"The CUDA mask takes a target sparsity for up to {_MAX_TARGET_ENTRIES} pairs of blocks of a "
                f"sample and got {entries}; set sparsity to 0, so that Top-p decides."
            )
        beyond_floor = max(target_blocks(sparsity, entries) - heads * n_q * floor, 0)
    parts = launch.Parts()
    q_means, q_units = parts.add(rows * head_dim * 4), parts.add(rows * 4)
    k_means, k_units = parts.add(batch * heads * n_k * head_dim * 4), parts.add(batch * heads * n_k * 4)
    if beyond_floor:
        parts.add(max(rows * _ROW_STATE_BYTES - parts.size, 0))
    return Layout(
        n_q=n_q,
        n_k=n_k,
        rows=rows,
        words=words,
        pitch=words * WORD_BITS,
        floor=floor,
        beyond_floor=beyond_floor,
        q_means=q_means,
        q_units=q_units,
        k_means=k_means,
        k_units=k_units,
        scores=parts.add(rows * words * WORD_BITS * 4),
        searches=parts.add(4 * batch * _SEARCH_WORDS if beyond_floor else 0),
        row_states=q_means,
        scratch_bytes=parts.size,
    )


def block_mask(
    q: Tensor, k: Tensor, top_k: float, top_p: float, sparsity: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The hybrid mask (arXiv 2602.13515, Eq. 9 and Alg. 1) of q (B, H, Lq, D) and k (B, H, Lk, D).

    q, k: bfloat16 or float16 on one GPU, D 64 or 128, any strides with unit last stride.
    top_k, top_p, sparsity: as in `SparseConfig`; scale: factor of the pooled scores.
    Returns bits (B, H, n_q, ceil(n_k / 32)), counts (B, H, n_q) and order (B * H * n_q,), all int32, as in
    `BlockMask`. Raises ValueError for more than 8192 key blocks.
    """
    batch, heads, q_len, head_dim = q.shape
    sizes = layout(batch, heads, q_len, k.shape[2], head_dim, top_k, sparsity)
    bits = q.new_empty((batch, heads, sizes.n_q, sizes.words), dtype=torch.int32)
    counts = q.new_empty((batch, heads, sizes.n_q), dtype=torch.int32)
    order = q.new_empty((sizes.rows,), dtype=torch.int32)
    scratch = q.new_empty((sizes.scratch_bytes,), dtype=torch.uint8)
    enqueue(
        launch.aligned(q),
        launch.aligned(k),
        sizes,
        top_p,
        sparsity,
        scale,
        bits=bits.data_ptr(),
        counts=counts.data_ptr(),
        order=order.data_ptr(),
        scratch=scratch.data_ptr(),
    )
    return bits, counts, order


def enqueue(
    q: Tensor,
    k: Tensor,
    sizes: Layout,
    top_p: float,
    sparsity: float,
    scale: float,
    *,
    bits: int,
    counts: int,
    order: int,
    scratch: int,
) -> None:
    """As `block_mask`, of aligned q and k, to these addresses; `sizes` is their `layout`."""
    batch, heads, q_len, head_dim = q.shape
    k_len, index, dtype = k.shape[2], q.device.index, q.dtype
    stream = launch.stream(index)
    n_q, n_k, pitch, rows = sizes.n_q, sizes.n_k, sizes.pitch, sizes.rows
    scores, searches = scratch + sizes.scores, scratch + sizes.searches
    q_means, q_units = scratch + sizes.q_means, scratch + sizes.q_units
    k_means, k_units = scratch + sizes.k_means, scratch + sizes.k_units

    def run(name: str, grid: tuple[int, int, int], threads: int, shared: int, params: bytes) -> None:
        launch.kernel("mask", name, index, dtype, head_dim)(grid, threads, shared, stream, params)

    run(
        "block_means",
        (heads * (n_q + num_blocks(k_len, 2 * BLOCK_K)), batch, 1),
        _MEANS_THREADS,
        0,
        _MEANS.pack(
            q.data_ptr(), *q.stride()[:3], k.data_ptr(), *k.stride()[:3],
            q_means, q_units, k_means, k_units, q_len, k_len, heads,
        ),
    )  # fmt: skip
    run(
        "pooled_scores",
        (num_blocks(n_k, _TILE_K), num_blocks(n_q, _TILE_Q), batch * heads),
        _SCORE_THREADS,
        (_TILE_Q + _TILE_K) * head_dim * 4,
        _SCORES.pack(
            q_means, q_units, k_means, k_units, scores, searches, n_q, n_k, pitch, scale,
            batch * _SEARCH_WORDS if sizes.beyond_floor else 0,
        ),
    )  # fmt: skip
    if sizes.beyond_floor:
        sample_rows, multiprocessors = heads * n_q, launch.device(index).multiprocessors
        target = _TARGET.pack(
            scores, scratch + sizes.row_states, searches, bits, counts,
            sample_rows, n_k, pitch, sizes.words, sizes.floor, sizes.beyond_floor,
        )  # fmt: skip

        def run_target(name: str, blocks: int, resident: int, threads: int, shared: int = 0) -> None:
            """No more thread blocks than run at once, `resident` a multiprocessor; each takes many rows."""
            run(name, (min(blocks, resident * multiprocessors), batch, 1), threads, shared, target)

        blocks, threads = num_blocks(sample_rows, _TARGET_ROWS), _TARGET_ROWS * _WARP
        if n_k <= 512:
            run_target("bin_rows_512", blocks, 3, threads)
        elif n_k <= 1280:
            run_target("bin_rows_1280", blocks, 2, threads)
        else:
            row_threads = _long_row_threads(n_k)
            run_target("bin_rows_8192", sample_rows, 1024 // row_threads, row_threads)
        # Shared memory for a row to sort: a power of two of entries, each thread at least one.
        run_target("rank_open", blocks, 4, threads, _KEY_BYTES * max(1 << (n_k - 1).bit_length(), threads))
        run_target("count_exact", blocks, 8, threads)
        run_target("keep_target", blocks, 8, threads)
    else:
        if sparsity > 0.0:
            top_p = 0.0  # Top-k alone keeps as much as the target, or more
        mass_limit = math.ceil(top_p * _MASS_UNITS) if top_p < 1.0 else _ALL_MASS
        if n_k <= 512:
            name, blocks, threads = "select_blocks_512", rows, _WARP
        elif n_k <= 1280:
            name, blocks, threads = "select_blocks_1280", num_blocks(rows, _SELECT_ROWS), _SELECT_ROWS * _WARP
        else:
            name, blocks, threads = "select_blocks_8192", rows, _long_row_threads(n_k)
        run(
            name,
            (blocks, 1, 1),
            threads,
            0,
            _SELECT.pack(scores, bits, counts, rows, n_k, pitch, sizes.words, sizes.floor, mass_limit),
        )
    run(
        "order_rows", (batch * heads, 1, 1), _ORDER_THREADS, 0, _ORDER.pack(counts, order, batch * heads, n_q)
    )


def row_order(counts: Tensor, dtype: torch.dtype, head_dim: int) -> Tensor:
    """The order, int32 (B * H * n_q,), in which forward kernels should take rows of these counts (B, H, n_q).

    dtype, head_dim: of q, whose kernels are loaded. For masks made elsewhere; any order is right.
    """
    heads, n_q = counts.shape[0] * counts.shape[1], counts.shape[2]
    index = counts.device.index
    order = torch.empty(heads * n_q, dtype=torch.int32, device=counts.device)
    kernel = launch.kernel("mask", "order_rows", index, dtype, head_dim)
    params = _ORDER.pack(counts.data_ptr(), order.data_ptr(), heads, n_q)
    kernel((heads, 1, 1), _ORDER_THREADS, 0, launch.stream(index), params)
    return order


def _long_row_threads(n_k: int) -> int:
    """Threads of a thread block that has a long row for itself."""
    return num_blocks(n_k, _ROW_VALUES * _WARP) * _WARP
