"""Block geometry: the one definition of block sizes and ragged ends (arXiv 2602.13515, section 3).

Queries are taken in blocks of 128 consecutive tokens, keys and values in blocks of 64. The last block of
either may be ragged: it holds only the tokens that exist, and nothing ever reads past them.
"""

from __future__ import annotations

import math

BLOCK_Q = 128  # query tokens of a block
BLOCK_K = 64  # key/value tokens of a block
WORD_BITS = 32  # key blocks of one word of BlockMask.bits

# A share such as 0.07 of 100 blocks is 7.000000000000001 in floating point and must still mean 7 blocks.
FLOAT_FUZZ = 1e-9


def num_blocks(length: int, block: int) -> int:
    """Number of blocks that hold `length` tokens, the ragged last one included."""
    return (length + block - 1) // block


def last_block_tokens(length: int, block: int) -> int:
    """Real tokens of the last block of `length` tokens."""
    return length - (num_blocks(length, block) - 1) * block


def top_k_blocks(top_k: float, n_k: int) -> int:
    """Key blocks that every row of `n_k` keeps: ceil(top_k * n_k), and never fewer than one."""
    return max(1, math.ceil(top_k * n_k - FLOAT_FUZZ))


def target_blocks(sparsity: float, entries: int) -> int:
    """Block pairs of one sample to keep for a target `sparsity`, of `entries` = heads * n_q * n_k."""
    return round((1.0 - sparsity) * entries)
