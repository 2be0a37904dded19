"""The mask kernels against the rule in float64: each choice is right but for what fp32 rounding may swap."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparge_core import BlockMask, SparseConfig, reference
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks, target_blocks, top_k_blocks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [64, 128]
CONFIGS = [
    SparseConfig(0.03, 0.2),
    SparseConfig(0.0, 0.0),
    SparseConfig(1e-6, 1e-6),
    SparseConfig(0.0, 0.5),
    SparseConfig(0.3, 0.1),
    SparseConfig(0.05, 0.95),
    SparseConfig(1.0, 0.0),
    SparseConfig(0.0, 1.0),
    SparseConfig(1.0, 1.0),
    SparseConfig(0.0, 0.2, 0.5),
    SparseConfig(0.03, 0.2, 0.95),
    SparseConfig(0.2, 0.2, 0.75),
    SparseConfig(0.0, 0.2, 0.01),
    SparseConfig(0.5, 0.2, 0.9),  # Top-k alone keeps more
]

FP32_ROUNDING = 2.0**-24
MASS_UNIT = 2.0**-31  # the kernels count mass in whole units


def cuda_mask(q: Tensor, k: Tensor, config: SparseConfig, scale: float | None = None) -> BlockMask:
    from sparge_core.cuda import mask_kernels

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    made = mask_kernels.block_mask(q, k, config.top_k, config.top_p, config.sparsity, scale)
    return BlockMask(made[0], made[1], q.shape[2], k.shape[2], made[2])


def random_tokens(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(B, H, L, D) tokens, noise on a mean of each block, so that pooled scores spread."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    batch, heads, length, dim = shape
    means = torch.randn(batch, heads, num_blocks(length, BLOCK_K), dim, generator=generator, device=DEVICE)
    noise = torch.randn(batch, heads, length, dim, generator=generator, device=DEVICE)
    return (means.repeat_interleave(BLOCK_K, 2)[:, :, :length] + 0.5 * noise).to(dtype)


def assert_follows_the_rule(
    q: Tensor, k: Tensor, config: SparseConfig, mask: BlockMask, scale: float | None = None
) -> None:
    """Every choice is that of exact arithmetic, unless what decided it lies within fp32 rounding.

    Scores are dot products of head_dim terms, so fp32 may shift one by head_dim * 2^-24 of the sum of its
    terms' magnitudes; a row's tolerance is that of its largest score, twice for a difference. Kept blocks
    must be a prefix of the order within it, and the prefix must end where the rule says, within the error
    of the masses that follows from that of the scores.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q_means = reference.block_means(q.double(), BLOCK_Q) * scale
    k_means = reference.block_means(k.double(), BLOCK_K)
    scores = q_means @ k_means.transpose(-1, -2)
    magnitudes = q_means.abs() @ k_means.abs().transpose(-1, -2)
    tolerance = 2 * q.shape[-1] * FP32_ROUNDING * magnitudes.amax(-1, keepdim=True)  # of a difference
    tolerance = tolerance + q.shape[-1] * torch.finfo(torch.float32).tiny  # below it products vanish, and tie
    samples, heads, n_q, n_k = scores.shape
    floor = top_k_blocks(config.top_k, n_k)

    kept = mask.dense()
    assert kept.shape == scores.shape
    assert torch.equal(mask.counts, kept.sum(-1, dtype=torch.int32))
    assert (mask.counts >= floor).all(), "a row keeps fewer blocks than Top-k alone"
    used = torch.zeros_like(mask.bits, dtype=torch.int64)
    used[..., -1] = mask.bits[..., -1].long() & 0xFFFFFFFF
    assert (used >> ((n_k - 1) % 32 + 1) == 0).all(), "bits past the last key block are set"

    lowest_kept = scores.where(kept, math.inf).amin(-1, keepdim=True)
    highest_dropped = scores.where(~kept, -math.inf).amax(-1, keepdim=True)
    assert (lowest_kept >= highest_dropped - tolerance).all(), "a block was kept in place of a better one"

    # The mass before the last kept entry and before the first dropped one: what the rule compares with p.
    ranked = scores.sort(dim=-1, descending=True).values.softmax(-1)
    before = torch.cat([torch.zeros_like(ranked[..., :1]), ranked.cumsum(-1)], -1)  # also past the end
    count = mask.counts.long().unsqueeze(-1)
    mass_last = before.gather(-1, count - 1)
    mass_next = before.gather(-1, count)
    relative = torch.expm1(2 * tolerance) + 2.0**-18  # 2^-18: exponentials, and their sum, in fp32
    slack = relative * mass_next + n_k * MASS_UNIT
    above_floor, below_all = count > floor, count < n_k
    if config.sparsity == 0.0:
        if config.top_p >= 1.0:
            assert (mask.counts == n_k).all()
        assert (mass_last < config.top_p + slack)[above_floor].all(), "a row keeps more than p needs"
        assert (mass_next >= config.top_p - slack)[below_all].all(), "a row keeps less than p"
        return
    target = target_blocks(config.sparsity, heads * n_q * n_k)
    for sample in range(samples):
        total = int(mask.counts[sample].sum())
        if target <= heads * n_q * floor:
            assert (mask.counts[sample] == floor).all(), "Top-k alone reaches the target"
            continue
        assert total >= target, "less is kept than the target asks for"
        if not above_floor[sample].any():
            continue
        at = mass_last[sample].where(above_floor[sample], -1.0).flatten().argmax()
        cut, cut_slack = mass_last[sample].flatten()[at], slack[sample].flatten()[at]
        assert (mass_next[sample] >= cut - slack[sample] - cut_slack)[below_all[sample]].all(), (
            "a row drops an entry with less mass before it than one that another row keeps"
        )
        tied = ((before[sample, ..., floor:n_k] - cut).abs() <= slack[sample] + cut_slack).sum()
        assert total - target <= int(tied), "more is kept than the target asks for"


def assert_is_a_schedule(mask: BlockMask) -> None:
    """Every row once: long ones, middle ones head by head, short ones; each part longest first."""
    assert mask.order is not None
    order, counts = mask.order.long(), mask.counts.flatten()
    assert torch.equal(order.sort().values, torch.arange(counts.numel(), device=order.device))
    means = counts[order].double() / counts.double().mean()
    on_edge = ((means - 4).abs() < 1e-5) | ((means - 0.5).abs() < 1e-5)  # fp32 may see it on either side
    part = torch.where(means > 4, 0, torch.where(means >= 0.5, 1, 2))
    assert (part.diff() >= 0)[~(on_edge[1:] | on_edge[:-1])].all()
    head = order // mask.n_q
    together = (part.diff() == 0) & ~(on_edge[1:] | on_edge[:-1])
    middle = together & (part[1:] == 1)
    assert (head.diff() >= 0)[middle].all()
    # Rows of a class keep their order, so a row may be longer than the one before it by a class at most.
    width = torch.tensor([4, 3.5 / 16, 0.5 / 8], device=means.device, dtype=means.dtype)[part][1:]
    one_list = together & ((head.diff() == 0) | ~middle) & (means[:-1] < 64)  # beyond: one class
    assert (means.diff() <= width * (1 + 1e-4))[one_list].all()


def same_bits(a: BlockMask, b: BlockMask) -> bool:
    return (
        torch.equal(a.bits, b.bits)
        and torch.equal(a.counts, b.counts)
        and a.order is not None
        and b.order is not None
        and torch.equal(a.order, b.order)
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_up_to_a_few_blocks_follows_the_rule(dtype: torch.dtype, head_dim: int) -> None:
    tokens = random_tokens(1, 2, 257, head_dim, dtype=dtype)
    others = random_tokens(1, 2, 257, head_dim, dtype=dtype, seed=1)
    for length in range(1, 258):
        config = CONFIGS[length % len(CONFIGS)]
        q, k = tokens[:, :, :length], others[:, :, : 1 + length * 37 % 257]  # k takes every length too
        mask = cuda_mask(q, k, config)
        assert_follows_the_rule(q, k, config, mask)
        assert_is_a_schedule(mask)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_setting_follows_the_rule(dtype: torch.dtype, head_dim: int, config: SparseConfig) -> None:
    q = random_tokens(2, 3, 129 * 17, head_dim, dtype=dtype)
    k = random_tokens(2, 3, 64 * 71 + 5, head_dim, dtype=dtype, seed=1)
    mask = cuda_mask(q, k, config)
    assert_follows_the_rule(q, k, config, mask)
    assert_is_a_schedule(mask)


@pytest.mark.parametrize("k_len", [32_760, 75_600, 151_200, 300_001])
@pytest.mark.parametrize("config", [SparseConfig(0.03, 0.16), SparseConfig(0.03, 0.2, 0.5)], ids=str)
def test_video_lengths_follow_the_rule(config: SparseConfig, k_len: int) -> None:
    q = random_tokens(1, 2, min(k_len, 75_600), 128, dtype=torch.bfloat16)
    k = random_tokens(1, 2, k_len, 128, dtype=torch.bfloat16, seed=1)
    mask = cuda_mask(q, k, config)
    assert_follows_the_rule(q, k, config, mask)
    assert_is_a_schedule(mask)


@pytest.mark.parametrize("config", [SparseConfig(0.03, 0.2), SparseConfig(0.03, 0.2, 0.9)], ids=str)
def test_nearly_every_choice_is_the_same_as_the_reference_makes(config: SparseConfig) -> None:
    q = random_tokens(1, 4, 32_760, 128, dtype=torch.bfloat16)
    k = random_tokens(1, 4, 32_760, 128, dtype=torch.bfloat16, seed=1)
    mine, theirs = cuda_mask(q, k, config).dense(), reference.block_mask(q, k, config).dense()
    assert (mine != theirs).double().mean() < 1e-5


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1e-3, 30.0, 1e3, 1e5])
@pytest.mark.parametrize("config", [SparseConfig(0.1, 0.3), SparseConfig(0.1, 0.2, 0.6)], ids=str)
def test_tiny_and_huge_values_follow_the_rule(config: SparseConfig, magnitude: float) -> None:
    q = (random_tokens(1, 3, 1000, 128, dtype=torch.float32) * magnitude).bfloat16()
    k = random_tokens(1, 3, 5000, 128, dtype=torch.bfloat16, seed=1)
    for queries, keys in ((q, k), (q, q)):
        mask = cuda_mask(queries, keys, config)
        assert_follows_the_rule(queries, keys, config, mask)
        assert_is_a_schedule(mask)


def test_scores_whose_probabilities_vanish_are_still_ranked() -> None:
    q = torch.full((1, 1, 128, 64), 100.0, dtype=torch.bfloat16, device=DEVICE)
    levels = torch.tensor([1.0, -8.0, -3.0, -7.0, -2.0, -5.0], device=DEVICE)
    k = levels.repeat_interleave(BLOCK_K).view(1, 1, -1, 1).expand(-1, -1, -1, 64).to(torch.bfloat16)
    config = SparseConfig(0.5, 0.0)
    assert cuda_mask(q, k, config).dense().flatten().nonzero().flatten().tolist() == [0, 2, 4]
    assert reference.block_mask(q, k, config).dense().flatten().nonzero().flatten().tolist() == [0, 2, 4]


@pytest.mark.parametrize("n_k", [1, 31, 33, 100, 512, 513, 1182, 2500])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_equal_scores_go_to_the_lower_index(config: SparseConfig, n_k: int) -> None:
    q = torch.ones(1, 2, 300, 64, dtype=torch.bfloat16, device=DEVICE)
    k = torch.ones(1, 2, n_k * BLOCK_K, 64, dtype=torch.bfloat16, device=DEVICE)
    mask = cuda_mask(q, k, config)
    assert_follows_the_rule(q, k, config, mask)
    ids = torch.arange(n_k, device=DEVICE)
    assert torch.equal(mask.dense(), ids < mask.counts.unsqueeze(-1)), "not the first blocks"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("distinct", [2, 3, 50])
def test_repeated_blocks_are_chosen_in_order(config: SparseConfig, distinct: int) -> None:
    blocks = random_tokens(1, 2, distinct * BLOCK_K, 128, dtype=torch.bfloat16).unflatten(2, (-1, BLOCK_K))
    which = torch.randint(distinct, (700,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    k = blocks[:, :, which].flatten(2, 3)
    q = random_tokens(1, 2, 1000, 128, dtype=torch.bfloat16, seed=1)
    mask = cuda_mask(q, k, config)
    assert_follows_the_rule(q, k, config, mask)
    dense = mask.dense()
    for block in range(distinct):
        same = dense[..., which == block].int()
        assert (same.diff(dim=-1) <= 0).all(), "a repeated block was kept and an earlier copy of it dropped"


def one_outlier(k: Tensor) -> None:
    k[:, :, :64] *= 300


def skewed_heads(k: Tensor) -> None:
    k[:, 0] *= 8
    k[:, 1] *= 0.01


def exponential_spread(k: Tensor) -> None:
    falling = torch.linspace(0, -60, k.shape[2], device=k.device).exp2()
    k *= falling.view(1, 1, -1, 1).to(k.dtype)


def identical_but_one(k: Tensor) -> None:
    k[:, :, 64:] = k[:, :, 64:128].repeat(1, 1, k.shape[2] // 64 - 1, 1)


@pytest.mark.parametrize("change", [one_outlier, skewed_heads, exponential_spread, identical_but_one])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_uneven_scores_follow_the_rule(config: SparseConfig, change: Callable[[Tensor], None]) -> None:
    q = random_tokens(1, 3, 1100, 128, dtype=torch.bfloat16)
    k = random_tokens(1, 3, 64 * 300, 128, dtype=torch.bfloat16, seed=1)
    change(k)
    mask = cuda_mask(q, k, config)
    assert_follows_the_rule(q, k, config, mask)
    assert_is_a_schedule(mask)


@pytest.mark.parametrize("n_k", [300, 700, 1500, 8192])
@pytest.mark.parametrize("sparsity", [0.3, 0.9])
def test_a_target_is_met_where_one_outlier_puts_all_other_scores_in_one_bin(
    sparsity: float, n_k: int
) -> None:
    """So that a whole row is open to the search for the cut, and has to be sorted."""
    q = random_tokens(1, 2, 1100, 64, dtype=torch.bfloat16)
    k = random_tokens(1, 2, n_k * BLOCK_K, 64, dtype=torch.bfloat16, seed=1)
    q[..., 0] = 8.0
    k[..., 0] = 0.0
    k[:, :, 5 * BLOCK_K : 6 * BLOCK_K, 0] = -300.0
    config = SparseConfig(0.03, 0.2, sparsity)
    mask = cuda_mask(q, k, config)
    assert not mask.dense()[..., 5].any()
    assert_follows_the_rule(q, k, config, mask)


@pytest.mark.parametrize("n_k", [90, 700, 1500])
@pytest.mark.parametrize("spread", [5.0, 10.0, 40.0])
def test_a_target_is_met_where_most_entries_have_no_mass(spread: float, n_k: int) -> None:
    """The mass before them is then the whole row, and they are kept or dropped together."""
    q = random_tokens(1, 2, 5000, 128, dtype=torch.bfloat16)
    k = (random_tokens(1, 2, n_k * BLOCK_K, 128, dtype=torch.float32, seed=1) * spread).bfloat16()
    for config in (SparseConfig(0.03, 0.2, 0.4), SparseConfig(0.5, 0.2, 0.4), SparseConfig(0.0, 0.2, 0.8)):
        mask = cuda_mask(q, k, config)
        assert_follows_the_rule(q, k, config, mask)


def fused(tokens: Tensor) -> Tensor:
    """A view into a (B, L, 3 * H * D) tensor, whose other parts are NaN."""
    batch, heads, length, dim = tokens.shape
    whole = torch.full((batch, length, 3, heads, dim), math.nan, dtype=tokens.dtype, device=tokens.device)
    whole[:, :, 1] = tokens.transpose(1, 2)
    return whole[:, :, 1].transpose(1, 2)


def host_layout(tokens: Tensor) -> Tensor:
    """(B, L, H * D), as ComfyUI hands it over."""
    return tokens.transpose(1, 2).contiguous().transpose(1, 2)


def among_nan(tokens: Tensor) -> Tensor:
    """A view with NaN tokens right before and after each head, at an offset of whole 16 bytes."""
    batch, heads, length, dim = tokens.shape
    whole = torch.full((batch, heads, length + 3, dim), math.nan, dtype=tokens.dtype, device=tokens.device)
    whole[:, :, 1:-2] = tokens
    return whole[:, :, 1:-2]


def misaligned(tokens: Tensor) -> Tensor:
    """A view that 16-byte loads cannot read."""
    batch, heads, length, dim = tokens.shape
    whole = torch.full((batch, heads, length, dim + 2), math.nan, dtype=tokens.dtype, device=tokens.device)
    whole[..., 1:-1] = tokens
    return whole[..., 1:-1]


def every_other_batch(tokens: Tensor) -> Tensor:
    return tokens.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("layout", [fused, host_layout, among_nan, misaligned, every_other_batch])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_strides_and_what_lies_around_a_view_change_nothing(
    head_dim: int, layout: Callable[[Tensor], Tensor]
) -> None:
    q = random_tokens(2, 3, 1003, head_dim, dtype=torch.bfloat16)
    k = random_tokens(2, 3, 777, head_dim, dtype=torch.bfloat16, seed=1)
    for config in (SparseConfig(0.1, 0.3), SparseConfig(0.1, 0.3, 0.6)):
        plain = cuda_mask(q, k, config)
        assert same_bits(cuda_mask(layout(q), layout(k), config), plain)
        assert_follows_the_rule(q, k, config, plain)


def test_one_head_seen_by_all_is_read_right() -> None:
    q = random_tokens(1, 4, 500, 128, dtype=torch.bfloat16)
    k = random_tokens(1, 1, 700, 128, dtype=torch.bfloat16, seed=1).expand(-1, 4, -1, -1)
    config = SparseConfig(0.2, 0.3)
    assert same_bits(cuda_mask(q, k, config), cuda_mask(q, k.contiguous(), config))


@pytest.mark.parametrize("config", [SparseConfig(0.03, 0.2), SparseConfig(0.03, 0.2, 0.8)], ids=str)
def test_a_batch_chooses_what_its_samples_choose_alone(config: SparseConfig) -> None:
    q = random_tokens(3, 2, 5000, 128, dtype=torch.bfloat16)
    k = random_tokens(3, 2, 5000, 128, dtype=torch.bfloat16, seed=1)
    q[1] *= 3
    together = cuda_mask(q, k, config)
    for sample in range(3):
        alone = cuda_mask(q[sample : sample + 1], k[sample : sample + 1], config)
        assert torch.equal(together.bits[sample], alone.bits[0])


@pytest.mark.parametrize("scale", [0.5, 1e-3, -0.2])
def test_the_scale_is_that_of_the_caller(scale: float) -> None:
    q = random_tokens(1, 2, 2000, 64, dtype=torch.float16)
    k = random_tokens(1, 2, 3000, 64, dtype=torch.float16, seed=1)
    for config in (SparseConfig(0.05, 0.4), SparseConfig(0.05, 0.4, 0.7)):
        mask = cuda_mask(q, k, config, scale)
        assert_follows_the_rule(q, k, config, mask, scale)


@pytest.mark.parametrize("config", [SparseConfig(0.03, 0.2), SparseConfig(0.03, 0.2, 0.8)], ids=str)
def test_the_same_inputs_give_the_same_bits(config: SparseConfig) -> None:
    q = random_tokens(1, 12, 32_760, 128, dtype=torch.bfloat16)
    k = random_tokens(1, 12, 32_760, 128, dtype=torch.bfloat16, seed=1)
    first = cuda_mask(q, k, config)
    for _ in range(100):
        assert same_bits(cuda_mask(q, k, config), first)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_of_no_numbers_keep_blocks_and_leave_other_samples_alone(
    config: SparseConfig, value: float
) -> None:
    q = random_tokens(2, 2, 700, 128, dtype=torch.bfloat16)
    k = random_tokens(2, 2, 3000, 128, dtype=torch.bfloat16, seed=1)
    clean = cuda_mask(q, k, config)
    k[0, 0, 100, 5] = value
    q[0, 1] = value
    mask = cuda_mask(q, k, config)
    floor = top_k_blocks(config.top_k, mask.n_k)
    assert torch.equal(mask.counts, mask.dense().sum(-1, dtype=torch.int32))
    assert (mask.counts >= floor).all()
    assert torch.equal(mask.bits[1], clean.bits[1])
    assert_is_a_schedule(mask)
    assert same_bits(cuda_mask(q, k, config), mask)


def test_long_rows_come_first_and_heads_stay_together() -> None:
    q = random_tokens(2, 4, 128 * 300, 64, dtype=torch.bfloat16)
    k = random_tokens(2, 4, 64 * 400, 64, dtype=torch.bfloat16, seed=1)
    q[:, 1, : 128 * 20] *= 0.01  # flat rows keep many blocks
    q *= 4
    mask = cuda_mask(q, k, SparseConfig(0.0, 0.5))
    counts = mask.counts.double()
    assert (counts > 4 * counts.mean()).sum() >= 20, "the case has heavy rows"
    assert_is_a_schedule(mask)


def test_more_key_blocks_than_a_row_can_hold_are_refused_before_any_launch() -> None:
    from sparge_core.cuda import mask_kernels

    tokens = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    k = tokens.expand(1, 1, mask_kernels.MAX_KEY_BLOCKS * BLOCK_K + 1, 64)
    with pytest.raises(ValueError, match="takes up to 524288 key tokens and got 524289"):
        cuda_mask(tokens, k, SparseConfig())
