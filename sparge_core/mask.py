"""The hybrid rule (Top-k united with Top-p) and `BlockMask`, which holds what it chose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import SparseConfig
from .geometry import (
    BLOCK_K,
    BLOCK_Q,
    WORD_BITS,
    last_block_tokens,
    num_blocks,
    target_blocks,
    top_k_blocks,
)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which key blocks each query block attends to.

    bits: int32 (B, H, n_q, ceil(n_k / 32)); key block j is bit j % 32 of word j // 32; unused bits are 0.
    counts: int32 (B, H, n_q), kept key blocks of each row: as many as it has bits set. The kernels rely on
        it, so take masks from `block_mask` or `from_dense` rather than setting bits by hand.
    q_len, k_len: tokens of the queries and keys, from which the block counts and the ragged ends follow.
    order: int32 (B * H * n_q,) or None; row ids (b * H + h) * n_q + i in the order a kernel takes them.
    """

    bits: Tensor
    counts: Tensor
    q_len: int
    k_len: int
    order: Tensor | None = None

    @classmethod
    def from_dense(cls, dense: Tensor, q_len: int, k_len: int) -> BlockMask:
        """Mask from bool (B, H, n_q, n_k), on its device. A row without blocks attends to nothing."""
        blocks = (num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K))
        if dense.dim() != 4 or dense.dtype != torch.bool or tuple(dense.shape[2:]) != blocks:
            raise ValueError(
                f"A mask of {q_len} query and {k_len} key tokens is bool (B, H, {blocks[0]}, {blocks[1]}); "
                f"got {dense.dtype} {tuple(dense.shape)}."
            )
        words = F.pad(dense, (0, -dense.shape[-1] % WORD_BITS)).unflatten(-1, (-1, WORD_BITS))
        bits = (words * _bit_values(dense.device)).sum(-1, dtype=torch.int32)
        return cls(bits, dense.sum(-1, dtype=torch.int32), q_len, k_len)

    @classmethod
    def keep_all(cls, batch: int, heads: int, q_len: int, k_len: int, device: torch.device) -> BlockMask:
        """Mask that keeps every block: attention over it is dense attention."""
        n_q, n_k = num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K)
        words = (batch, heads, n_q, num_blocks(n_k, WORD_BITS))
        bits = torch.full(words, -1, dtype=torch.int32, device=device)
        if n_k % WORD_BITS:
            bits[..., -1] = (1 << n_k % WORD_BITS) - 1
        counts = torch.full((batch, heads, n_q), n_k, dtype=torch.int32, device=device)
        return cls(bits, counts, q_len, k_len)

    @property
    def n_q(self) -> int:
        return num_blocks(self.q_len, BLOCK_Q)

    @property
    def n_k(self) -> int:
        return num_blocks(self.k_len, BLOCK_K)

    def dense(self) -> Tensor:
        """bool (B, H, n_q, n_k): True where the block is kept."""
        return unpack_bits(self.bits, self.n_k)

    @property
    def indices(self) -> Tensor:
        """int32 (B, H, n_q, n_k): ids of the kept blocks in ascending order, padded with n_k."""
        ids = torch.arange(self.n_k, dtype=torch.int32, device=self.bits.device)
        return torch.where(self.dense(), ids, self.n_k).sort(dim=-1).values

    def sparsity_per_head(self) -> Tensor:
        """float32 (B, H): 1 - kept token pairs / all token pairs, counting real tokens only."""
        return 1.0 - self._kept_pairs().sum(-1).float() / float(self.q_len * self.k_len)

    @property
    def sparsity(self) -> Tensor:
        """float32 (): 1 - kept token pairs / all token pairs of the whole batch, on the mask's device."""
        pairs = self.counts.shape[0] * self.counts.shape[1] * self.q_len * self.k_len
        return 1.0 - self._kept_pairs().sum().float() / float(pairs)

    def tally(self, out: Tensor | None = None) -> Tensor:
        """int32 (2, 2, H), over the batch: kept blocks and kept last blocks, of all rows and of the last row.

        `kept_pairs` makes token pairs of it. Four small kernels, because recording a run does this at each
        of its calls.
        """
        last_word, last_bit = self.bits[..., -1], (self.n_k - 1) % WORD_BITS
        # Unused bits are 0, so a word that has its highest used bit is at least that bit; bit 31 is the sign.
        keeps_last = last_word < 0 if last_bit == WORD_BITS - 1 else last_word >= 1 << last_bit
        kept = torch.stack((self.counts, keeps_last))
        if out is None:
            out = kept.new_empty(2, 2, kept.shape[2])
        torch.sum(kept, (1, 3), dtype=torch.int32, out=out[0])
        torch.sum(kept[..., -1], 1, dtype=torch.int32, out=out[1])
        return out

    def _kept_pairs(self) -> Tensor:
        """int64 (B, H, n_q): token pairs of the kept blocks of each row."""
        last_bit = (self.n_k - 1) % WORD_BITS
        keeps_last = (self.bits[..., -1] >> last_bit) & 1
        missing_keys = BLOCK_K - last_block_tokens(self.k_len, BLOCK_K)
        keys = self.counts.long() * BLOCK_K - keeps_last * missing_keys
        queries = torch.full((self.n_q,), BLOCK_Q, dtype=torch.int64, device=keys.device)
        queries[-1] = last_block_tokens(self.q_len, BLOCK_Q)
        return keys * queries


def kept_pairs(tally: np.ndarray, q_len: int, k_len: int) -> np.ndarray:
    """int64 (H,): token pairs of the kept blocks, of int64 `BlockMask.tally` and the lengths of its mask."""
    all_rows, last_row = BLOCK_K * tally[:, 0] - (BLOCK_K - last_block_tokens(k_len, BLOCK_K)) * tally[:, 1]
    return BLOCK_Q * all_rows - (BLOCK_Q - last_block_tokens(q_len, BLOCK_Q)) * last_row


def unpack_bits(bits: Tensor, n_k: int) -> Tensor:
    """bool (…, n_k) of int32 (…, ceil(n_k / 32)): True where the block's bit is set."""
    return (bits.unsqueeze(-1) & _bit_values(bits.device)).ne(0).flatten(-2)[..., :n_k]


def _bit_values(device: torch.device) -> Tensor:
    """int32 (32,): 1, 2, 4, …; the last one is the sign bit."""
    return torch.ones(WORD_BITS, dtype=torch.int32, device=device) << torch.arange(
        WORD_BITS, dtype=torch.int32, device=device
    )


def select_blocks(scores: Tensor, config: SparseConfig) -> Tensor:
    """The hybrid rule (arXiv 2602.13515, Eq. 9, Alg. 1): bool (B, H, n_q, n_k), True where a block is kept.

    scores: float (B, H, n_q, n_k), pooled and scaled. Both rules cut one descending order, ties by the lower
    index, so a row keeps a prefix of it. The order is that of the scores, because probabilities that round to
    one number, zero included, would tie and favour early blocks. Nothing waits for the device.
    """
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    kept = kept_counts(ranked.softmax(-1), config)
    kept_ranks = torch.arange(scores.shape[-1], device=scores.device) < kept.unsqueeze(-1)
    return torch.zeros_like(kept_ranks).scatter_(-1, order, kept_ranks)


def kept_counts(ranked: Tensor, config: SparseConfig) -> Tensor:
    """int64 (B, H, n_q): blocks that each row keeps; ranked: its probabilities (B, H, n_q, n_k), descending.

    That is max(Top-k count, Top-p count, 1). Top-p is the smallest prefix whose mass reaches p: rank r is
    kept iff the mass before it is below p. A target sparsity replaces p by the order statistic of those
    masses that keeps the wanted number of blocks of each sample.
    """
    floor = top_k_blocks(config.top_k, ranked.shape[-1])
    mass_before = F.pad(ranked.cumsum(-1)[..., :-1], (1, 0))
    if config.sparsity > 0.0:
        in_mass = _within_target(mass_before, floor, config.sparsity)
    elif config.top_p >= 1.0:
        in_mass = torch.ones_like(mass_before, dtype=torch.bool)
    else:
        in_mass = mass_before < config.top_p
    return in_mass.sum(-1).clamp(min=floor)  # NaN masses compare false: the floor still stands


def _within_target(mass_before: Tensor, floor: int, sparsity: float) -> Tensor:
    """Ranks whose mass before them lies within their sample's own p*, which keeps the share 1 - sparsity."""
    samples, heads, n_q, n_k = mass_before.shape
    beyond_floor = target_blocks(sparsity, heads * n_q * n_k) - heads * n_q * floor
    if beyond_floor <= 0:
        return torch.zeros_like(mass_before, dtype=torch.bool)
    largest_kept = mass_before[..., floor:].flatten(1).kthvalue(beyond_floor, dim=1).values
    return mass_before <= largest_kept.view(samples, 1, 1, 1)
