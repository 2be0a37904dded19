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
_SCORES = struct.Struct("<QQ QQ Q iii f")
_SELECT = struct.Struct("<QQQ iii II")
_RANK = struct.Struct("<QQ iii I")
_DIGITS = struct.Struct("<QQ q Q i")
_KEEP = struct.Struct("<QQQQ Q iii")
_ORDER = struct.Struct("<QQ ii")

_TILE_Q, _TILE_K, _SCORE_THREADS = 128, 64, 256
_MEANS_THREADS = 128
_SELECT_8192_VALUES = 16  # scores that a thread of `select_blocks_8192` holds; the others take one warp a row
_MASS_UNITS = 2**31  # of a row's softmax
_ALL_MASS = 2**32 - 1

_RANK_BIN_BYTES, _RANK_VALUES, _RANK_MIN_THREADS = 2 * 16 * 321, 10, 128
_DIGIT_ROUNDS, _DIGITS_OF_ROUND, _DIGIT_THREADS = 3, 2048, 512
_SEARCH_BYTES = 8 * _DIGIT_ROUNDS * _DIGITS_OF_ROUND + 16 * _DIGIT_ROUNDS  # of a sample
_KEEP_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 4  # of the kernels that loop over their input

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
    scratch_bytes: int


@functools.lru_cache(maxsize=64)
def layout(
    batch: int, heads: int, q_len: int, k_len: int, head_dim: int, top_k: float, sparsity: float
) -> Layout:
    """Raises ValueError for more than 8192 key blocks."""
    n_q, n_k = num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K)
    if n_k > MAX_KEY_BLOCKS:
        raise ValueError(
            f"The CUDA mask takes up to {MAX_KEY_BLOCKS * BLOCK_K} key tokens and got {k_len}; "
            'choose the back end "reference" for longer sequences.'
        )
    rows, words = batch * heads * n_q, num_blocks(n_k, WORD_BITS)
    floor, beyond_floor = top_k_blocks(top_k, n_k), 0
    if sparsity > 0.0:
        beyond_floor = max(target_blocks(sparsity, heads * n_q * n_k) - heads * n_q * floor, 0)
    parts = launch.Parts()
    return Layout(
        n_q=n_q,
        n_k=n_k,
        rows=rows,
        words=words,
        pitch=words * WORD_BITS,
        floor=floor,
        beyond_floor=beyond_floor,
        q_means=parts.add(rows * head_dim * 4),
        q_units=parts.add(rows * 4),
        k_means=parts.add(batch * heads * n_k * head_dim * 4),
        k_units=parts.add(batch * heads * n_k * 4),
        scores=parts.add(rows * words * WORD_BITS * 4),
        searches=parts.add(batch * _SEARCH_BYTES if beyond_floor else 0),
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
        _SCORES.pack(q_means, q_units, k_means, k_units, scores, n_q, n_k, pitch, scale),
    )
    if sizes.beyond_floor:
        run(
            "rank_blocks",
            (rows, 1, 1),
            _rank_threads(n_k),
            _RANK_BIN_BYTES + 12 * n_k,
            _RANK.pack(scores, searches, n_k, pitch, batch, sizes.floor),
        )
        busy = launch.device(index).multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        cells = heads * n_q * pitch
        for digit_round in range(_DIGIT_ROUNDS):
            run(
                "count_digits",
                (min(num_blocks(cells, 4 * _DIGIT_THREADS), busy), batch, 1),
                _DIGIT_THREADS,
                0,
                _DIGITS.pack(scores, searches, cells, sizes.beyond_floor, digit_round),
            )
        run(
            "keep_target",
            (min(num_blocks(heads * n_q, _KEEP_THREADS // _WARP), busy), batch, 1),
            _KEEP_THREADS,
            0,
            _KEEP.pack(
                scores, searches, bits, counts, sizes.beyond_floor, heads * n_q, pitch, sizes.words
            ),
        )  # fmt: skip
    else:
        if sparsity > 0.0:
            top_p = 0.0  # Top-k alone keeps as much as the target, or more
        mass_limit = math.ceil(top_p * _MASS_UNITS) if top_p < 1.0 else _ALL_MASS
        if n_k <= 1280:
            name, threads = "select_blocks_512" if n_k <= 512 else "select_blocks_1280", _WARP
        else:
            name, threads = "select_blocks_8192", num_blocks(n_k, _SELECT_8192_VALUES * _WARP) * _WARP
        run(
            name,
            (rows, 1, 1),
            threads,
            0,
            _SELECT.pack(scores, bits, counts, n_k, pitch, sizes.words, sizes.floor, mass_limit),
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


def _rank_threads(n_k: int) -> int:
    """Threads of a row: a power of two, as few as hold it."""
    threads = _RANK_MIN_THREADS
    while threads * _RANK_VALUES < n_k:
        threads *= 2
    return threads
