"""The forward kernels against attention in float64 on the same rounded inputs.

Every output is NaN before the launch and every token beyond a tensor's end is NaN in its parent buffer: what
a kernel leaves out or reads too far shows. Masks are made by torch, so these tests need no mask kernel.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparge_core import BlockMask
from sparge_core.cuda import forward_mma
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [64, 128]
LOG2_E = math.log2(math.e)

# Relative error of an output, norm over norm: P and the output are rounded to the element type (half a unit
# in the last place is 2^-9 in bfloat16 and 2^-12 in float16). A single query's may be larger by chance.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
TOLERANCE_OF_A_QUERY = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
LSE_TOLERANCE = 1e-4  # times the largest of 1 and the LSE: fp32 sums of products

Forward = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(params=["sm90", "mma", "mma-narrow"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which launcher runs. "mma-narrow": with the kernel of GPUs that have little shared memory."""
    name: str = request.param
    if name == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its instructions exist on compute capability 9.0 alone")
    if name == "mma-narrow":
        monkeypatch.setattr(forward_mma, "_WIDE_CAPABILITIES", frozenset())
    return name.removesuffix("-narrow")


@dataclasses.dataclass
class Case:
    """q (B, H, Lq, D), k and v (B, H, Lk, D), and the kept blocks, bool (B, H, n_q, n_k)."""

    q: Tensor
    k: Tensor
    v: Tensor
    kept: Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def run(
    family: str, case: Case, out: Tensor | None = None, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output, laid out as (B, L, H, D) unless `out` is given, and LSE of one launch into NaN."""
    launcher = importlib.import_module(f"sparge_core.cuda.forward_{family}")
    batch, heads, length, dim = case.q.shape
    mask = BlockMask.from_dense(case.kept, length, case.k.shape[2])
    if out is None:
        out = torch.empty(batch, length, heads, dim, dtype=case.q.dtype, device=DEVICE).transpose(1, 2)
    out.fill_(math.nan)
    lse = torch.full((batch, heads, length), math.nan, device=DEVICE)
    if order is None:
        order = torch.arange(mask.counts.numel(), dtype=torch.int32, device=DEVICE)
    launcher.forward_into(out, lse, case.q, case.k, case.v, mask.bits, mask.counts, order, case.scale)
    return out, lse


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """Attention and base-2 LSE in float64 over the kept blocks."""
    length, keys = case.q.shape[2], case.k.shape[2]
    kept = case.kept.repeat_interleave(BLOCK_Q, 2)[:, :, :length].repeat_interleave(BLOCK_K, 3)[..., :keys]
    scores = case.q.double() @ case.k.double().transpose(-1, -2) * case.scale
    scores = scores.masked_fill(~kept, -math.inf)
    return scores.softmax(-1) @ case.v.double(), scores.logsumexp(-1) * LOG2_E


def errors(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> Tensor:
    """Relative errors of the output, of its worst query and of the LSE; NaN counts as infinite."""
    (out, lse), (out_wanted, lse_wanted) = got, wanted
    difference = out.double() - out_wanted
    tiny = torch.finfo(torch.float64).tiny
    whole = difference.norm() / out_wanted.norm().clamp(min=tiny)
    query = (difference.norm(dim=-1) / out_wanted.norm(dim=-1).clamp(min=tiny)).amax()
    sums = ((lse.double() - lse_wanted).abs() / lse_wanted.abs().clamp(min=1.0)).amax()
    return torch.stack([whole, query, sums]).nan_to_num(nan=math.inf)


def assert_within(measured: Tensor, dtype: torch.dtype) -> None:
    """measured: what `errors` returned, or several of them stacked, one problem a row."""
    limits = torch.tensor([TOLERANCE[dtype], TOLERANCE_OF_A_QUERY[dtype], LSE_TOLERANCE], dtype=torch.float64)
    measured = measured.cpu().reshape(-1, 3)
    wrong = (measured > limits).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"problems {wrong[:10]}: output, worst query, LSE {measured[wrong[:10]].tolist()}"


def assert_exact(family: str, case: Case) -> None:
    assert_within(errors(run(family, case), exact(case)), case.q.dtype)


def in_nan(values: Tensor) -> Tensor:
    """The same (B, H, L, D) values as a (B, L, H * D) view with NaN before and behind each sequence."""
    batch, heads, length, dim = values.shape
    around = BLOCK_Q
    shape = (batch, length + 2 * around, heads, dim)
    parent = torch.full(shape, math.nan, dtype=values.dtype, device=DEVICE)
    return parent[:, around : around + length].transpose(1, 2).copy_(values)


def random_tokens(*shape: int, dtype: torch.dtype, amplitude: float = 1.0) -> Tensor:
    values = torch.randn(*shape, device=DEVICE) * amplitude
    limit = torch.finfo(dtype).max
    return in_nan(values.clamp(-limit, limit).to(dtype))


def random_case(
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    dim: int,
    dtype: torch.dtype,
    kept: Tensor | None = None,
    amplitudes: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Case:
    """Normal tokens; unless `kept` is given, a mask whose rows keep between one and all blocks."""
    q = random_tokens(batch, heads, q_len, dim, dtype=dtype, amplitude=amplitudes[0])
    k, v = (random_tokens(batch, heads, k_len, dim, dtype=dtype, amplitude=x) for x in amplitudes[1:])
    if kept is None:
        kept = random_kept(batch, heads, num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K))
    return Case(q, k, v, kept)


def random_kept(batch: int, heads: int, n_q: int, n_k: int) -> Tensor:
    """bool (B, H, n_q, n_k), of 1 to n_k random blocks in each row."""
    counts = torch.randint(1, n_k + 1, (batch, heads, n_q, 1), device=DEVICE)
    return kept_by_counts(counts, n_k)


def kept_by_counts(counts: Tensor, n_k: int) -> Tensor:
    """bool (..., n_k) with counts (..., 1) random entries."""
    ranks = torch.rand(*counts.shape[:-1], n_k, device=DEVICE).argsort(-1).argsort(-1)
    return ranks < counts


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_from_1_to_257(family: str, dtype: torch.dtype, dim: int) -> None:
    measured = []
    for length in range(1, 258):
        case = random_case(1, 2, length, length, dim, dtype)
        measured.append(errors(run(family, case), exact(case)))
    assert_within(torch.stack(measured), dtype)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_of_different_lengths(family: str, dtype: torch.dtype, dim: int) -> None:
    measured = []
    for q_len, k_len in ((1, 1), (1, 200), (200, 1), (127, 4097), (129, 63), (640, 65), (1000, 769)):
        case = random_case(2, 3, q_len, k_len, dim, dtype)
        measured.append(errors(run(family, case), exact(case)))
    assert_within(torch.stack(measured), dtype)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_batches(family: str, batch: int, dtype: torch.dtype, dim: int) -> None:
    assert_exact(family, random_case(batch, 3, 500, 700, dim, dtype))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_batch_equals_its_samples_bit_for_bit(family: str, dim: int) -> None:
    case = random_case(3, 2, 500, 500, dim, torch.bfloat16)
    out, lse = run(family, case)
    for b in range(3):
        sample = Case(case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1], case.kept[b : b + 1])
        sample_out, sample_lse = run(family, sample)
        assert torch.equal(sample_out[0], out[b])
        assert torch.equal(sample_lse[0], lse[b])


def unequal_rows(heads: int, n_q: int, n_k: int) -> Tensor:
    """Rows that keep all blocks, the first, the last, one in between, all but the last, and random ones."""
    kept = random_kept(1, heads, n_q, n_k)
    kept[:, :, :5] = False
    kept[:, :, 0] = True
    kept[:, :, 1, 0] = True
    kept[:, :, 2, -1] = True
    kept[:, :, 3, n_k // 2] = True
    kept[:, :, 4, :-1] = True
    return kept


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_len", [1024, 1025, 1000], ids=["whole", "one-key-over", "ragged"])
def test_rows_that_keep_one_block_stand_beside_rows_that_keep_all(
    family: str, k_len: int, dtype: torch.dtype, dim: int
) -> None:
    kept = unequal_rows(4, 12, num_blocks(k_len, BLOCK_K))
    assert_exact(family, random_case(1, 4, 12 * BLOCK_Q - 50, k_len, dim, dtype, kept))


def test_every_count_up_to_all(family: str) -> None:
    n_k = 40
    counts = torch.arange(1, n_k + 1, device=DEVICE).view(1, 1, n_k, 1)
    kept = kept_by_counts(counts.expand(1, 2, n_k, 1), n_k)
    assert_exact(family, random_case(1, 2, n_k * BLOCK_Q, n_k * BLOCK_K - 9, 128, torch.bfloat16, kept))


def test_blocks_far_apart_in_rows_of_many_mask_words(family: str) -> None:
    """More than 32 mask words, in which whole groups of 32 are empty."""
    k_len = 2100 * BLOCK_K + 17
    n_k = num_blocks(k_len, BLOCK_K)
    kept = torch.zeros(1, 1, 6, n_k, dtype=torch.bool, device=DEVICE)
    for row, blocks in enumerate(([0, n_k - 1], [n_k - 1], [1023, 1024], [31, 32, 2047, 2048], [5], [1056])):
        kept[0, 0, row, blocks] = True
    kept[0, 0, 4, ::37] = True
    case = random_case(1, 1, 6 * BLOCK_Q, k_len, 64, torch.bfloat16, kept)
    assert_exact(family, case)


def test_a_row_without_blocks_gives_zeros() -> None:
    kept = random_kept(1, 2, 3, 4)
    kept[0, 0, 1] = kept[0, 1, 2] = False
    case = random_case(1, 2, 3 * BLOCK_Q, 4 * BLOCK_K, 128, torch.bfloat16, kept)
    out, lse = run("mma", case)
    empty = ~kept.any(-1).repeat_interleave(BLOCK_Q, 2)
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert out.isfinite().all()


def fused_qkv(case: Case) -> Case:
    batch, heads, length, dim = case.q.shape
    parent = torch.empty(batch, length, 3, heads, dim, dtype=case.q.dtype, device=DEVICE)
    q, k, v = (parent[:, :, i].transpose(1, 2) for i in range(3))
    return Case(q.copy_(case.q), k.copy_(case.k), v.copy_(case.v), case.kept)


def each(layout: Callable[[Tensor], Tensor]) -> Callable[[Case], Case]:
    return lambda case: Case(layout(case.q), layout(case.k), layout(case.v), case.kept)


def offset_view(x: Tensor) -> Tensor:
    """A piece of a larger tensor: other heads, tokens and batches around it."""
    batch, heads, length, dim = x.shape
    parent = torch.full((batch + 2, heads + 3, length + 9, dim), math.nan, dtype=x.dtype, device=DEVICE)
    return parent[1 : batch + 1, 2 : heads + 2, 5 : length + 5].copy_(x)


def tokens_apart(x: Tensor) -> Tensor:
    """Every third token of a longer sequence."""
    batch, heads, length, dim = x.shape
    parent = torch.full((batch, heads, 3 * length, dim), math.nan, dtype=x.dtype, device=DEVICE)
    return parent[:, :, ::3].copy_(x)


def heads_innermost(x: Tensor) -> Tensor:
    """(L, B, H, D) in memory."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def misaligned_pointer(x: Tensor) -> Tensor:
    parent = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)
    return parent[1:].view(x.shape).copy_(x)


def misaligned_stride(x: Tensor) -> Tensor:
    batch, heads, length, dim = x.shape
    parent = torch.full((batch, heads, length, dim + 1), math.nan, dtype=x.dtype, device=DEVICE)
    return parent[..., :dim].copy_(x)


LAYOUTS = {
    "contiguous": each(torch.Tensor.contiguous),
    "fused-qkv": fused_qkv,
    "offset": each(offset_view),
    "tokens-apart": each(tokens_apart),
    "heads-innermost": each(heads_innermost),
    "misaligned-pointer": each(misaligned_pointer),
    "misaligned-stride": each(misaligned_stride),
}


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_inputs_give_the_same_bits(family: str, layout: str, dim: int) -> None:
    case = random_case(2, 3, 333, 333, dim, torch.bfloat16)
    other = LAYOUTS[layout](case)
    assert other.q.stride() != case.q.stride()
    out, lse = run(family, case)
    other_out, other_lse = run(family, other)
    assert_within(errors((out, lse), exact(case)), torch.bfloat16)
    assert torch.equal(other_out, out)
    assert torch.equal(other_lse, lse)


def test_one_key_and_value_for_the_whole_batch(family: str) -> None:
    case = random_case(3, 2, 300, 200, 128, torch.bfloat16)
    assert_exact(family, Case(case.q, case.k[:1].expand_as(case.k), case.v[:1].expand_as(case.v), case.kept))


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, offset_view, tokens_apart, heads_innermost])
def test_layouts_of_the_output(family: str, layout: Callable[[Tensor], Tensor]) -> None:
    case = random_case(2, 3, 333, 400, 128, torch.bfloat16)
    out, _ = run(family, case)
    other, _ = run(family, case, layout(torch.zeros_like(out)))
    assert torch.equal(other, out)


def test_nothing_is_written_beside_the_output(family: str) -> None:
    case = random_case(2, 3, 200, 200, 128, torch.bfloat16)
    parent = torch.full((4, 5, 330, 136), math.nan, dtype=torch.bfloat16, device=DEVICE)
    out, _ = run(family, case, parent[1:3, 1:4, 65:265, :128])
    assert out.isfinite().all()
    assert int(parent.isfinite().sum()) == out.numel()


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_output_is_laid_out_as_the_queries(family: str, dim: int) -> None:
    launcher = importlib.import_module(f"sparge_core.cuda.forward_{family}")
    case = random_case(2, 3, 200, 200, dim, torch.bfloat16)
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    mask = BlockMask.from_dense(case.kept, 200, 200)
    order = torch.arange(mask.counts.numel(), dtype=torch.int32, device=DEVICE)
    out, lse = launcher.forward(q, case.k, case.v, mask.bits, mask.counts, order, case.scale)
    assert out.stride() == q.stride()
    assert lse.is_contiguous()
    assert_within(errors((out, lse), exact(case)), torch.bfloat16)


def test_blocks_that_no_row_keeps_have_no_influence(family: str) -> None:
    case = random_case(1, 2, 500, 1000, 128, torch.bfloat16)
    case.kept[..., 3] = case.kept[..., 10] = False
    case.kept[..., 5] = True
    wanted = exact(case)
    for x in (case.k, case.v):
        x[:, :, 3 * BLOCK_K : 4 * BLOCK_K] = math.nan
        x[:, :, 10 * BLOCK_K : 11 * BLOCK_K] = math.nan
    assert_within(errors(run(family, case), wanted), torch.bfloat16)


AMPLITUDES = [
    (torch.bfloat16, (1e-30, 1e-30, 1e-30)),
    (torch.bfloat16, (1e5, 1e5, 1e5)),
    (torch.bfloat16, (1e5, 1e-30, 1.0)),
    (torch.bfloat16, (1e-30, 1e5, 1e5)),
    (torch.bfloat16, (1.0, 1e-5, 1e-30)),
    (torch.bfloat16, (30.0, 30.0, 1e5)),
    (torch.bfloat16, (1e3, 10.0, 1e-10)),
    (torch.float16, (1e-4, 1e-4, 1e-1)),
    (torch.float16, (3e4, 3e4, 1.0)),
    (torch.float16, (30.0, 30.0, 1e4)),
    (torch.float16, (1e-4, 1e3, 1e4)),
]


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "amplitudes"), AMPLITUDES, ids=str)
def test_values_from_tiny_to_huge(
    family: str, dtype: torch.dtype, amplitudes: tuple[float, float, float], dim: int
) -> None:
    assert_exact(family, random_case(1, 2, 300, 1000, dim, dtype, amplitudes=amplitudes))


def test_channels_of_unlike_magnitude_do_not_disturb_each_other(family: str) -> None:
    case = random_case(1, 2, 300, 1000, 128, torch.bfloat16)
    case.v.mul_(torch.logspace(-30, 5, 128, device=DEVICE).bfloat16())
    out, _ = run(family, case)
    wanted, _ = exact(case)
    error = (out.double() - wanted).flatten(0, 2).norm(dim=0) / wanted.flatten(0, 2).norm(dim=0)
    assert error.nan_to_num(nan=math.inf).amax() < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("step", [0.5, 3.0, 9.0, 20.0, 150.0, 500.0, -3.0, -20.0, -500.0])
def test_rows_whose_scores_rise_or_fall_from_block_to_block(
    family: str, step: float, dim: int, dtype: torch.dtype
) -> None:
    """`step`: by how much the scores of one block exceed those of the block before, in powers of two."""
    n_k = 20
    case = random_case(1, 2, 2 * BLOCK_Q, n_k * BLOCK_K - 5, dim, dtype)
    level = torch.arange(n_k, device=DEVICE).repeat_interleave(BLOCK_K)[: case.k.shape[2]] * step
    # The last channel carries the level, so that fp32 sums round its size once and not at every channel.
    case.q[..., -1] = 1.0 / (case.scale * LOG2_E)
    case.k[..., -1] = level.to(dtype)
    case.kept[:, :, 0] = True
    assert_exact(family, case)


def test_one_key_far_above_all_others(family: str) -> None:
    """Wherever in the row it stands, a lone large score takes all of the weight."""
    case = random_case(1, 1, 20 * BLOCK_Q, 20 * BLOCK_K, 128, torch.bfloat16)
    case.kept.fill_(True)
    case.k[..., :20] = 0.0
    for block in range(20):  # a channel for each query block, in which only one key is not zero
        case.q[:, :, block * BLOCK_Q : (block + 1) * BLOCK_Q, block] = 3000.0
        case.k[:, :, block * BLOCK_K + 3 * block, block] = 3000.0
    assert_exact(family, case)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_any_order_of_the_rows_gives_the_same_bits(family: str, dim: int) -> None:
    case = random_case(2, 4, 3000, 3000, dim, torch.bfloat16)
    out, lse = run(family, case)
    rows = case.kept[..., 0].numel()
    for order in (torch.arange(rows - 1, -1, -1, device=DEVICE), torch.randperm(rows, device=DEVICE)):
        other_out, other_lse = run(family, case, order=order.int())
        assert torch.equal(other_out, out)
        assert torch.equal(other_lse, lse)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_inputs_give_the_same_bits_100_times(family: str, dtype: torch.dtype, dim: int) -> None:
    case = random_case(1, 8, 5000, 5000, dim, dtype)
    out, lse = run(family, case)
    assert out.isfinite().all()
    same = torch.ones((), dtype=torch.bool, device=DEVICE)
    for _ in range(100):
        again_out, again_lse = run(family, case)
        same &= (again_out == out).all() & (again_lse == lse).all()
    assert bool(same)


def assert_rows_exact(family: str, case: Case, rows: list[tuple[int, int]]) -> None:
    """Compares the named (head, query block) rows of batch 0 with float64, and all of the output with NaN."""
    out, lse = run(family, case)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    measured = []
    for head, block in rows:
        queries = slice(block * BLOCK_Q, (block + 1) * BLOCK_Q)
        kept = case.kept[0, head, block].repeat_interleave(BLOCK_K)[: case.k.shape[2]]
        scores = case.q[0, head, queries].double() @ case.k[0, head, kept].double().T * case.scale
        wanted = scores.softmax(-1) @ case.v[0, head, kept].double(), scores.logsumexp(-1) * LOG2_E
        measured.append(errors((out[0, head, queries], lse[0, head, queries]), wanted))
    assert_within(torch.stack(measured), case.q.dtype)


@pytest.mark.parametrize(
    ("heads", "length", "dim", "dtype"),
    [
        (12, 32760, 128, torch.bfloat16),
        (12, 32760, 64, torch.float16),
        (40, 75600, 128, torch.bfloat16),
    ],
    ids=["1.3B-480p", "1.3B-480p-fp16-d64", "14B-720p"],
)
def test_the_sizes_of_wan(family: str, heads: int, length: int, dim: int, dtype: torch.dtype) -> None:
    """Exponentially distributed counts around 5 %, with a full row and a row of one block in every head."""
    n_q, n_k = num_blocks(length, BLOCK_Q), num_blocks(length, BLOCK_K)
    counts = (0.05 * n_k * torch.empty(1, heads, n_q, 1, device=DEVICE).exponential_()).clamp(1, n_k).long()
    counts[:, :, 0], counts[:, :, 1] = n_k, 1
    kept = torch.cat([kept_by_counts(counts[:, head : head + 1], n_k) for head in range(heads)], dim=1)
    case = random_case(1, heads, length, length, dim, dtype, kept)
    rows = [(head, block) for head in (0, heads // 2, heads - 1) for block in (0, 1, n_q // 2, n_q - 1)]
    assert_rows_exact(family, case, rows)


@pytest.mark.slow
@pytest.mark.parametrize("far", ["batch", "head", "token"])
def test_offsets_beyond_32_bits(family: str, far: str) -> None:
    """Views whose last element lies more than 2^31 elements behind the first, as long fused QKV tensors."""
    batch, heads, length, dim = 2, 2, 4 * BLOCK_Q + 8, 128  # the last blocks start far off
    distance = 2**31 + 2**20
    strides = {
        "batch": (distance, dim, heads * dim, 1),
        "head": (length * dim, distance, dim, 1),
        "token": (heads * dim, dim, distance // (4 * BLOCK_Q) // 8 * 8, 1),
    }[far]
    sizes = (batch, heads, length, dim)
    span = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    assert span > 2**31
    small = random_case(batch, heads, length, length, dim, torch.bfloat16)
    far_view = torch.empty(span, dtype=torch.bfloat16, device=DEVICE).as_strided(small.q.shape, strides)
    for name in ("q", "k", "v"):
        assert_exact(family, dataclasses.replace(small, **{name: far_view.copy_(getattr(small, name))}))
    assert_within(errors(run(family, small, far_view), exact(small)), torch.bfloat16)
