"""The hybrid rule against a definition by loops, and what `BlockMask` says of the blocks it holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparge_core import BlockMask, SparseConfig
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks
from sparge_core.mask import kept_counts, select_blocks

# Probabilities are whole 64ths, so that every sum is exact and ties and exact hits of p are frequent.
UNIT = 64
weights = st.integers(0, UNIT // 2)
settings = st.builds(
    SparseConfig,
    top_k=st.integers(0, 16).map(lambda n: n / 16) | st.floats(0.0, 1.0),
    top_p=st.integers(0, UNIT).map(lambda n: n / UNIT) | st.floats(0.0, 1.0),
    sparsity=st.just(0.0) | st.floats(0.0, 1.0, exclude_max=True),
)


@st.composite
def maps(draw: st.DrawFn) -> Tensor:
    """float64 (B, H, n_q, n_k) with a few blocks of a few heads."""
    shape = [draw(st.integers(1, most)) for most in (2, 3, 4, 9)]
    values = draw(st.lists(weights, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=torch.float64).view(shape) / UNIT


def kept_blocks(probabilities: Tensor, config: SparseConfig) -> Tensor:
    """What `select_blocks` makes of scores that have exactly these probabilities."""
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    kept_ranks = torch.arange(ranked.shape[-1]) < kept_counts(ranked, config).unsqueeze(-1)
    return torch.zeros_like(kept_ranks).scatter(-1, order, kept_ranks)


def ranking(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda j: (-row[j], j))


def masses_before(row: list[float]) -> list[float]:
    """Mass before each rank."""
    ranked = [row[j] for j in ranking(row)]
    return [sum(ranked[:rank]) for rank in range(len(row))]


def floor_of(row: list[float], config: SparseConfig) -> int:
    return max(math.ceil(config.top_k * len(row) - 1e-9), 1)


def kept_of(row: list[float], config: SparseConfig, in_mass: int) -> set[int]:
    """Kept blocks of a row of which Top-p takes `in_mass`."""
    return set(ranking(row)[: max(floor_of(row, config), in_mass)])


def smallest_prefix(row: list[float], p: float) -> int:
    """Entries of the smallest prefix of the ranking whose mass is at least p, all if none is or p is 1."""
    ranked = [row[j] for j in ranking(row)]
    if p >= 1:
        return len(row)
    return next((n for n in range(len(row) + 1) if sum(ranked[:n]) >= p), len(row))


def by_loops(sample: Tensor, config: SparseConfig) -> list[set[int]]:
    """Kept blocks of every row of one sample (H, n_q, n_k), by the words of the rule."""
    rows = sample.flatten(0, 1).tolist()
    if config.sparsity == 0:
        return [kept_of(row, config, smallest_prefix(row, config.top_p)) for row in rows]
    target = round((1 - config.sparsity) * sample.numel())
    for p in [-1.0, *sorted({mass for row in rows for mass in masses_before(row)})]:
        kept = [kept_of(row, config, sum(mass <= p for mass in masses_before(row))) for row in rows]
        if sum(map(len, kept)) >= target:
            return kept
    raise AssertionError("keeping everything reaches any target")


@given(maps(), settings)
def test_the_kept_blocks_are_those_of_the_definition(probabilities: Tensor, config: SparseConfig) -> None:
    kept = kept_blocks(probabilities, config)
    for sample, chosen in zip(probabilities, kept, strict=True):
        found = [set(row.nonzero().flatten().tolist()) for row in chosen.flatten(0, 1)]
        assert found == by_loops(sample, config)


@given(maps(), settings)
def test_a_batch_keeps_what_its_samples_keep_alone(probabilities: Tensor, config: SparseConfig) -> None:
    alone = [kept_blocks(sample[None], config) for sample in probabilities]
    assert torch.equal(kept_blocks(probabilities, config), torch.cat(alone))


@given(maps(), settings)
def test_every_row_keeps_a_block(probabilities: Tensor, config: SparseConfig) -> None:
    assert kept_blocks(probabilities, config).any(-1).all()


def row_of(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities).view(1, 1, 1, -1)


def kept_ids(probabilities: Tensor, config: SparseConfig) -> list[int]:
    return kept_blocks(probabilities, config).flatten().nonzero().flatten().tolist()


def test_the_block_that_crosses_p_is_kept() -> None:
    assert kept_ids(row_of(0.125, 0.5, 0.375), SparseConfig(0.0, 0.6)) == [1, 2]


def test_a_prefix_that_meets_p_exactly_is_enough() -> None:
    assert kept_ids(row_of(0.125, 0.5, 0.375), SparseConfig(0.0, 0.5)) == [1]


def test_ties_go_to_the_lower_index() -> None:
    assert kept_ids(torch.full((1, 1, 1, 8), 0.125), SparseConfig(0.375, 0.0)) == [0, 1, 2]


@given(maps(), settings)
def test_scores_are_ranked_and_cut_as_their_probabilities_are(weights: Tensor, config: SparseConfig) -> None:
    scores = weights * 20
    assert torch.equal(select_blocks(scores, config), kept_blocks(scores.softmax(-1), config))


def test_probabilities_that_vanish_are_still_told_apart() -> None:
    scores = torch.tensor([-900.0, -300.0, 0.0, -200.0]).view(1, 1, 1, 4)
    assert scores.softmax(-1).count_nonzero() == 1
    assert select_blocks(scores, SparseConfig(0.5, 0.0)).flatten().tolist() == [False, False, True, True]


def test_ties_among_many_scores_go_to_the_lower_index() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0]).repeat(1, 1, 1, 400)
    expected = [j for j in range(1200) if j % 3 == 2] + [j for j in range(600) if j % 3 == 1]
    kept = select_blocks(scores, SparseConfig(0.5, 0.0))
    assert kept.flatten().nonzero().flatten().tolist() == sorted(expected)


def test_either_rule_may_keep_more() -> None:
    skewed = row_of(0.9, 0.025, 0.025, 0.05)
    assert kept_ids(skewed, SparseConfig(0.5, 0.5)) == [0, 3]
    assert kept_ids(torch.full((1, 1, 1, 4), 0.25), SparseConfig(0.25, 0.7)) == [0, 1, 2]


def test_p_of_one_keeps_blocks_whose_mass_vanishes_in_rounding() -> None:
    assert kept_ids(row_of(1.0, 0.0, 1e-30, 0.0), SparseConfig(0.0, 1.0)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "config", [SparseConfig(0.0, 0.5), SparseConfig(0.2, 0.0), SparseConfig(0.0, 0.2, 0.5)]
)
def test_rows_of_nan_are_not_empty_and_leave_other_samples_alone(config: SparseConfig) -> None:
    torch.manual_seed(0)
    probabilities = torch.rand(2, 2, 3, 10).softmax(-1)
    clean = kept_blocks(probabilities, config)
    probabilities[0, 1] = float("nan")
    kept = kept_blocks(probabilities, config)
    assert kept.any(-1).all()
    assert torch.equal(kept[1], clean[1])


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9, 0.95, 0.97])
def test_the_target_sparsity_is_met_to_the_block(sparsity: float) -> None:
    torch.manual_seed(0)
    probabilities = (torch.randn(2, 3, 16, 40, dtype=torch.float64) * 2).softmax(-1)
    kept = kept_blocks(probabilities, SparseConfig(0.0, 0.2, sparsity))
    assert kept.sum((1, 2, 3)).tolist() == [round((1 - sparsity) * 3 * 16 * 40)] * 2


def test_a_floor_above_the_target_wins() -> None:
    torch.manual_seed(0)
    kept = kept_blocks(torch.rand(1, 2, 4, 10).softmax(-1), SparseConfig(0.3, 1.0, 0.9))
    assert (kept.sum(-1) == 3).all()


def test_choosing_and_counting_never_wait_for_the_device() -> None:
    scores = torch.empty(2, 3, 4, 70, device="meta")  # a meta tensor has no values that one could wait for
    for config in (SparseConfig(), SparseConfig(sparsity=0.8)):
        mask = BlockMask.from_dense(select_blocks(scores, config), 4 * BLOCK_Q, 70 * BLOCK_K)
        assert mask.sparsity.device.type == "meta"
        assert mask.indices.shape == mask.dense().shape == (2, 3, 4, 70)


@st.composite
def masks(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Random kept blocks, bool (B, H, n_q, n_k), with their lengths."""
    q_len, k_len = draw(st.integers(1, 4 * BLOCK_Q)), draw(st.integers(1, 70 * BLOCK_K))
    shape = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        num_blocks(q_len, BLOCK_Q),
        num_blocks(k_len, BLOCK_K),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.rand(shape, generator=generator) < draw(st.sampled_from((0.0, 0.1, 0.5, 1.0))), q_len, k_len


@given(masks())
def test_a_mask_gives_back_the_blocks_that_it_was_made_from(given_mask: tuple[Tensor, int, int]) -> None:
    dense, q_len, k_len = given_mask
    mask = BlockMask.from_dense(dense, q_len, k_len)
    assert torch.equal(mask.dense(), dense)
    assert mask.bits.dtype == mask.counts.dtype == mask.indices.dtype == torch.int32
    assert torch.equal(mask.counts, dense.sum(-1))
    for row, ids in zip(dense.flatten(0, 2), mask.indices.flatten(0, 2), strict=True):
        kept = row.nonzero().flatten().tolist()
        assert ids.tolist() == kept + [mask.n_k] * (mask.n_k - len(kept))


@given(masks())
def test_sparsity_counts_real_token_pairs(given_mask: tuple[Tensor, int, int]) -> None:
    dense, q_len, k_len = given_mask
    mask = BlockMask.from_dense(dense, q_len, k_len)
    tokens = dense.repeat_interleave(BLOCK_Q, 2)[:, :, :q_len].repeat_interleave(BLOCK_K, 3)[..., :k_len]
    torch.testing.assert_close(mask.sparsity, 1 - tokens.float().mean(), atol=1e-5, rtol=0)
    torch.testing.assert_close(mask.sparsity_per_head(), 1 - tokens.float().mean((2, 3)), atol=1e-5, rtol=0)


def test_keeping_everything_is_a_sparsity_of_exactly_zero() -> None:
    dense = torch.ones(1, 2, num_blocks(32_760, BLOCK_Q), num_blocks(32_760, BLOCK_K), dtype=torch.bool)
    mask = BlockMask.from_dense(dense, 32_760, 32_760)
    assert mask.sparsity.item() == 0.0
    assert (mask.sparsity_per_head() == 0.0).all()


def test_key_block_j_is_bit_j_modulo_32_of_word_j_over_32() -> None:
    dense = torch.zeros(1, 1, 1, 35, dtype=torch.bool)
    dense[..., [0, 2, 31, 33]] = True
    mask = BlockMask.from_dense(dense, BLOCK_Q, 35 * BLOCK_K)
    assert mask.bits.flatten().tolist() == [1 + 4 - 2**31, 2]


def test_blocks_that_do_not_fit_the_lengths_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"129 query and 64 key tokens is bool \(B, H, 2, 1\); got .* \(1, 1, 1, 1\)"
    ):
        BlockMask.from_dense(torch.ones(1, 1, 1, 1, dtype=torch.bool), 129, 64)
    with pytest.raises(ValueError, match="is bool"):
        BlockMask.from_dense(torch.ones(1, 1, 1, 1), 128, 64)


@pytest.mark.parametrize("k_len", [1, 64, 65, 2047, 2048, 2049])
def test_a_mask_that_keeps_all_is_the_one_made_of_ones(k_len: int) -> None:
    kept = BlockMask.keep_all(2, 3, 200, k_len, torch.device("cpu"))
    ones = BlockMask.from_dense(torch.ones(2, 3, 2, -(-k_len // 64), dtype=torch.bool), 200, k_len)
    assert torch.equal(kept.bits, ones.bits)
    assert torch.equal(kept.counts, ones.counts)
