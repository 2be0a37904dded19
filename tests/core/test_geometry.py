"""Block counts, ragged ends and rounding."""

from __future__ import annotations

import re

import pytest

from sparge_core.cuda.modules import source_folder
from sparge_core.geometry import BLOCK_K, BLOCK_Q, last_block_tokens, num_blocks, target_blocks, top_k_blocks


def test_block_sizes_are_those_of_the_method() -> None:
    assert (BLOCK_Q, BLOCK_K) == (128, 64)


def test_the_kernels_have_the_same_blocks() -> None:
    source = (source_folder() / "common.cuh").read_text(encoding="utf-8")
    found = dict(re.findall(r"constexpr int kBlock([QK]) = (\d+);", source))
    assert found == {"Q": str(BLOCK_Q), "K": str(BLOCK_K)}


@pytest.mark.parametrize(
    ("length", "block", "blocks", "last"),
    [
        (1, 64, 1, 1),
        (64, 64, 1, 64),
        (65, 64, 2, 1),
        (32_760, BLOCK_Q, 256, 120),  # Wan2.1 480p
        (32_760, BLOCK_K, 512, 56),
        (75_600, BLOCK_Q, 591, 80),  # Wan2.1 720p
        (75_600, BLOCK_K, 1182, 16),
    ],
)
def test_a_ragged_end_is_a_block_of_the_tokens_that_are_left(
    length: int, block: int, blocks: int, last: int
) -> None:
    assert num_blocks(length, block) == blocks
    assert last_block_tokens(length, block) == last


@pytest.mark.parametrize(
    ("top_k", "n_k", "kept"),
    [(0.03, 512, 16), (0.07, 100, 7), (0.5, 3, 2), (1.0, 7, 7), (0.01, 1, 1), (0.0, 9, 1), (1e-12, 9, 1)],
)
def test_top_k_rounds_up_to_whole_blocks_and_keeps_one_at_least(top_k: float, n_k: int, kept: int) -> None:
    assert top_k_blocks(top_k, n_k) == kept


def test_target_counts_the_blocks_to_keep() -> None:
    assert target_blocks(0.95, 12 * 256 * 512) == round(0.05 * 12 * 256 * 512)
    assert target_blocks(0.0, 10) == 10
