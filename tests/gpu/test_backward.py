"""The backward kernels against gradients in float64 on the same rounded inputs, and autograd through them.

As in the forward tests every gradient is NaN before the launch and every token beyond a tensor's end is NaN
in its parent buffer: what a kernel leaves out or reads too far shows. Output and LSE come from float64,
rounded, so a wrong forward pass fails elsewhere.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparge_core import BlockMask, SparseConfig, block_mask, choose, cuda, reference, sparse_attention
from sparge_core.cuda import backward_mma
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks

from .test_forward import (
    DEVICE,
    DTYPES,
    HEAD_DIMS,
    LAYOUTS,
    LOG2_E,
    Case,
    heads_innermost,
    kept_by_counts,
    misaligned_pointer,
    misaligned_stride,
    offset_view,
    random_case,
    random_kept,
    random_tokens,
    tokens_apart,
    unequal_rows,
)

pytestmark = pytest.mark.gpu

# Error of a gradient, norm over norm: the output (and so delta), P, dS and the gradient itself are rounded to
# the element type. Where dP - delta cancels, as in a row with one key, over the norm of what cancels.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}

CONFIG = SparseConfig(top_k=0.1, top_p=0.3)
Gradients = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=["sm90", "mma", "mma-narrow"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which launcher runs. "mma-narrow": with the kernels of GPUs that have little shared memory."""
    name: str = request.param
    if name == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its instructions exist on compute capability 9.0 alone")
    if name == "mma-narrow":
        monkeypatch.setattr(backward_mma, "_WIDE_CAPABILITIES", frozenset())
    return name.removesuffix("-narrow")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@dataclasses.dataclass
class Exact:
    """Output and base-2 LSE (B, H, Lq) of the forward pass, and the gradients, all in float64.

    uncancelled: dQ and dK as they would be with dS = P dP.
    """

    out: Tensor
    lse: Tensor
    gradients: Gradients
    uncancelled: tuple[Tensor, Tensor]


def exact(case: Case, d_out: Tensor) -> Exact:
    """Everything in float64 by the formulas themselves; rows that keep no block give zeros."""
    length, keys = case.q.shape[2], case.k.shape[2]
    kept = case.kept.repeat_interleave(BLOCK_Q, 2)[:, :, :length].repeat_interleave(BLOCK_K, 3)[..., :keys]
    q, k, v, d_out = (x.double().nan_to_num() for x in (case.q, case.k, case.v, d_out))
    scores = (q @ k.transpose(-1, -2) * case.scale).masked_fill(~kept, -math.inf)
    p = scores.softmax(-1).nan_to_num()
    products = p * (d_out @ v.transpose(-1, -2)) * case.scale
    d_scores = products - p * products.sum(-1, keepdim=True)
    gradients = d_scores @ k, d_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ d_out
    uncancelled = products @ k, products.transpose(-1, -2) @ q
    return Exact(p @ v, scores.logsumexp(-1) * LOG2_E, gradients, uncancelled)


def like_the_host(values: Tensor) -> Tensor:
    """The same (B, H, L, D) values as a view of (B, L, H * D)."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def run(
    family: str, case: Case, d_out: Tensor, truth: Exact, gradients: Gradients | None = None
) -> Gradients:
    """Gradients of one launch into NaN, laid out as (B, L, H, D) unless they are given."""
    launcher = importlib.import_module(f"sparge_core.cuda.backward_{family}")
    mask = BlockMask.from_dense(case.kept, case.q.shape[2], case.k.shape[2])
    order = torch.randperm(mask.counts.numel(), device=DEVICE).int()
    if gradients is None:
        d_q, d_k, d_v = (like_the_host(torch.empty_like(x)) for x in (case.q, case.k, case.v))
        gradients = d_q, d_k, d_v
    for gradient in gradients:
        gradient.fill_(math.nan)
    out, lse = like_the_host(truth.out.to(case.q.dtype)), truth.lse.float()
    launcher.backward_into(
        *gradients, d_out, case.q, case.k, case.v, out, lse, mask.bits, mask.counts, order, case.scale
    )
    return gradients


def errors(got: Gradients, truth: Exact) -> Tensor:
    """Relative errors of dQ, dK and dV; NaN counts as infinite."""
    sizes = (*truth.uncancelled, truth.gradients[2])
    differences = [
        (one.double() - wanted).norm() / torch.maximum(wanted.norm(), size.norm())
        for one, wanted, size in zip(got, truth.gradients, sizes, strict=True)
    ]
    return torch.stack(differences).nan_to_num(nan=math.inf)


def assert_within(measured: Tensor, dtype: torch.dtype) -> None:
    """measured: what `errors` returned, or several of them stacked, one problem a row."""
    measured = measured.cpu().reshape(-1, 3)
    wrong = (measured > TOLERANCE[dtype]).any(-1).nonzero().flatten().tolist()
    assert not wrong, f"problems {wrong[:10]}: dQ, dK, dV {measured[wrong[:10]].tolist()}"


def random_problem(*arguments: object, **options: object) -> tuple[Case, Tensor]:
    case = random_case(*arguments, **options)  # type: ignore[arg-type]
    return case, random_tokens(*case.q.shape, dtype=case.q.dtype)


def measure(family: str, case: Case, d_out: Tensor) -> Tensor:
    truth = exact(case, d_out)
    return errors(run(family, case, d_out, truth), truth)


def assert_exact(family: str, case: Case, d_out: Tensor) -> None:
    assert_within(measure(family, case, d_out), case.q.dtype)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_from_1_to_257(family: str, dtype: torch.dtype, dim: int) -> None:
    measured = [
        measure(family, *random_problem(1, 2, length, length, dim, dtype)) for length in range(1, 258)
    ]
    assert_within(torch.stack(measured), dtype)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_of_different_lengths(family: str, dtype: torch.dtype, dim: int) -> None:
    lengths = ((1, 1), (1, 200), (200, 1), (127, 4097), (4097, 127), (129, 63), (640, 65), (1000, 769))
    measured = [measure(family, *random_problem(2, 3, q_len, k_len, dim, dtype)) for q_len, k_len in lengths]
    assert_within(torch.stack(measured), dtype)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_batch_equals_its_samples_bit_for_bit(family: str, dim: int) -> None:
    case, d_out = random_problem(3, 2, 500, 700, dim, torch.bfloat16)
    truth = exact(case, d_out)
    together = run(family, case, d_out, truth)
    assert_within(errors(together, truth), torch.bfloat16)
    for b in range(3):
        part = slice(b, b + 1)
        sample = Case(case.q[part], case.k[part], case.v[part], case.kept[part])
        sample_truth = dataclasses.replace(truth, out=truth.out[part], lse=truth.lse[part])
        alone = run(family, sample, d_out[part], sample_truth)
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[b])


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_len", [1024, 1025, 1000], ids=["whole", "one-key-over", "ragged"])
def test_rows_that_keep_one_block_stand_beside_rows_that_keep_all(
    family: str, k_len: int, dtype: torch.dtype, dim: int
) -> None:
    kept = unequal_rows(4, 12, num_blocks(k_len, BLOCK_K))
    assert_exact(family, *random_problem(1, 4, 12 * BLOCK_Q - 50, k_len, dim, dtype, kept))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_columns_kept_by_one_row_stand_beside_columns_kept_by_all(family: str, dim: int) -> None:
    kept = unequal_rows(4, 12, 40).transpose(2, 3).contiguous()  # (1, 4, 40, 12): by columns
    assert_exact(
        family, *random_problem(1, 4, 40 * BLOCK_Q - 50, 12 * BLOCK_K - 7, dim, torch.bfloat16, kept)
    )


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rows_and_columns_without_blocks_give_zeros(family: str, dim: int) -> None:
    """Whatever stands in them, and whatever the forward pass said of them."""
    kept = random_kept(1, 2, 5, 7)
    kept[0, 0, 1] = kept[0, 1, 4] = False
    kept[0, 0, :, 3] = kept[0, 1, :, 6] = False
    kept[0, 0, 0, 0] = True
    case, d_out = random_problem(1, 2, 5 * BLOCK_Q, 7 * BLOCK_K, dim, torch.bfloat16, kept)
    truth = exact(case, d_out)
    case.k[0, 0, 3 * BLOCK_K : 4 * BLOCK_K] = math.nan
    case.v[0, 1, 6 * BLOCK_K :] = math.nan
    case.q[0, 0, BLOCK_Q : 2 * BLOCK_Q] = math.nan
    d_q, d_k, d_v = run(family, case, d_out, truth)
    assert_within(errors((d_q, d_k, d_v), truth), torch.bfloat16)
    empty_rows = ~case.kept.any(3).repeat_interleave(BLOCK_Q, 2)
    empty_columns = ~case.kept.any(2).repeat_interleave(BLOCK_K, 2)
    assert (d_q[empty_rows] == 0).all()
    assert (d_k[empty_columns] == 0).all()
    assert (d_v[empty_columns] == 0).all()


def test_blocks_far_apart_in_rows_and_columns_of_many_mask_words(family: str) -> None:
    """More than 32 mask words, in which whole groups of 32 are empty."""
    k_len = 2100 * BLOCK_K + 17
    n_k = num_blocks(k_len, BLOCK_K)
    kept = torch.zeros(1, 1, 6, n_k, dtype=torch.bool, device=DEVICE)
    for row, blocks in enumerate(([0, n_k - 1], [n_k - 1], [1023, 1024], [31, 32, 2047, 2048], [5], [1056])):
        kept[0, 0, row, blocks] = True
    kept[0, 0, 4, ::37] = True
    assert_exact(family, *random_problem(1, 1, 6 * BLOCK_Q, k_len, 64, torch.bfloat16, kept))
    n_q = 1100
    kept = torch.zeros(1, 1, n_q, 3, dtype=torch.bool, device=DEVICE)
    for column, blocks in enumerate(([0, n_q - 1], [31, 32, 1023, 1024], [1056])):
        kept[0, 0, blocks, column] = True
    assert_exact(family, *random_problem(1, 1, n_q * BLOCK_Q - 11, 3 * BLOCK_K, 64, torch.bfloat16, kept))


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_inputs_give_the_same_bits(family: str, layout: str, dim: int) -> None:
    case, d_out = random_problem(2, 3, 333, 333, dim, torch.bfloat16)
    truth = exact(case, d_out)
    gradients = run(family, case, d_out, truth)
    assert_within(errors(gradients, truth), torch.bfloat16)
    for one, other in zip(run(family, LAYOUTS[layout](case), d_out, truth), gradients, strict=True):
        assert torch.equal(one, other)


def one_for_all(x: Tensor) -> Tensor:
    """The gradient of a sum, as autograd makes it: one number, seen everywhere."""
    return torch.ones((), dtype=x.dtype, device=DEVICE).expand(x.shape)


@pytest.mark.parametrize(
    "layout",
    [
        torch.Tensor.contiguous, offset_view, tokens_apart, heads_innermost, misaligned_pointer,
        misaligned_stride, one_for_all,
    ],
    ids=lambda layout: layout.__name__,
)  # fmt: skip
def test_layouts_of_the_outputs_gradient_give_the_same_bits(
    family: str, layout: Callable[[Tensor], Tensor]
) -> None:
    case, d_out = random_problem(2, 3, 333, 400, 128, torch.bfloat16)
    if layout is one_for_all:
        d_out = torch.ones_like(d_out)
    truth = exact(case, d_out)
    gradients = run(family, case, d_out, truth)
    for one, other in zip(run(family, case, layout(d_out), truth), gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, offset_view, tokens_apart, heads_innermost])
def test_layouts_of_the_gradients(family: str, layout: Callable[[Tensor], Tensor]) -> None:
    case, d_out = random_problem(2, 3, 333, 400, 128, torch.bfloat16)
    truth = exact(case, d_out)
    gradients = run(family, case, d_out, truth)
    d_q, d_k, d_v = (layout(torch.zeros_like(x)) for x in gradients)
    for one, other in zip(run(family, case, d_out, truth, (d_q, d_k, d_v)), gradients, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_written_beside_the_gradients(family: str) -> None:
    case, d_out = random_problem(2, 3, 200, 200, 128, torch.bfloat16)
    parents = [torch.full((4, 5, 330, 136), math.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    d_q, d_k, d_v = (parent[1:3, 1:4, 65:265, :128] for parent in parents)
    run(family, case, d_out, exact(case, d_out), (d_q, d_k, d_v))
    for parent in parents:
        assert int(parent.isfinite().sum()) == case.q.numel()
        assert parent[1:3, 1:4, 65:265, :128].isfinite().all()


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("dtype", "amplitudes"),
    [
        (torch.bfloat16, (1e-3, 1e-3, 1e-3)),
        (torch.bfloat16, (5.0, 5.0, 1e4)),
        (torch.bfloat16, (20.0, 1.0, 1e-20)),
        (torch.float16, (3.0, 3.0, 10.0)),
        (torch.float16, (1e-2, 1.0, 1.0)),
    ],
    ids=str,
)
def test_values_from_small_to_large(
    family: str, dtype: torch.dtype, amplitudes: tuple[float, float, float], dim: int
) -> None:
    assert_exact(family, *random_problem(1, 2, 300, 1000, dim, dtype, amplitudes=amplitudes))


@pytest.mark.parametrize("level", [-3000.0, -200.0, 200.0, 3000.0])
def test_scores_that_are_all_far_from_zero(family: str, level: float) -> None:
    """Hidden keys score 0, which may lie far above all real scores; `level` is in powers of two."""
    case, d_out = random_problem(1, 2, 300, 3 * BLOCK_K - 9, 128, torch.bfloat16)
    case.q[..., -1] = 1.0 / (case.scale * LOG2_E)
    case.k[..., -1] = level
    truth = exact(case, d_out)
    d_q, d_k, d_v = run(family, case, d_out, truth)
    # In the last channel of dQ the level cancels, but not the rounding of what it is multiplied by.
    d_q[..., -1] = truth.gradients[0][..., -1] = truth.uncancelled[0][..., -1] = 0.0
    assert_within(errors((d_q, d_k, d_v), truth), torch.bfloat16)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_inputs_give_the_same_bits_100_times(family: str, dtype: torch.dtype, dim: int) -> None:
    case, d_out = random_problem(1, 4, 3000, 3000, dim, dtype)
    truth = exact(case, d_out)
    first = [x.clone() for x in run(family, case, d_out, truth)]
    assert all(x.isfinite().all() for x in first)
    same = torch.ones((), dtype=torch.bool, device=DEVICE)
    for _ in range(100):
        for again, once in zip(run(family, case, d_out, truth), first, strict=True):
            same &= (again == once).all()
    assert bool(same)


def forward(case: Case) -> tuple[Tensor, Tensor]:
    """Output and LSE by the forward kernels, for sizes at which float64 is too much."""
    mask = BlockMask.from_dense(case.kept, case.q.shape[2], case.k.shape[2])
    both = cuda.attention(case.q, case.k, case.v, mask, case.scale, return_lse=True)
    assert isinstance(both, tuple)
    return both


def exact_row(case: Case, d_out: Tensor, head: int, block: int) -> tuple[Tensor, ...]:
    """P and scaled dS of a mask row in float64, its kept keys and its queries."""
    queries = torch.arange(case.q.shape[2], device=DEVICE)[block * BLOCK_Q : (block + 1) * BLOCK_Q]
    kept = case.kept[0, head, block].repeat_interleave(BLOCK_K)[: case.k.shape[2]].nonzero().flatten()
    p = (case.q[0, head, queries].double() @ case.k[0, head, kept].double().T * case.scale).softmax(-1)
    d_p = d_out[0, head, queries].double() @ case.v[0, head, kept].double().T
    return p, p * (d_p - (p * d_p).sum(-1, keepdim=True)) * case.scale, kept, queries


def error(got: Tensor, wanted: Tensor) -> float:
    relative = ((got.double() - wanted).norm() / wanted.norm()).item()
    return math.inf if math.isnan(relative) else relative


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
    case, d_out = random_problem(1, heads, length, length, dim, dtype, kept)
    out, lse = forward(case)
    d_q, d_k, d_v = run(family, case, d_out, Exact(out, lse, (out, out, out), (out, out)))
    assert all(x.isfinite().all() for x in (d_q, d_k, d_v))
    for head in (0, heads // 2, heads - 1):
        for block in (0, 1, n_q // 2, n_q - 1):
            _, d_scores, row_keys, queries = exact_row(case, d_out, head, block)
            wanted = d_scores @ case.k[0, head, row_keys].double()
            assert error(d_q[0, head, queries], wanted) < TOLERANCE[dtype], (head, block)
        for block in (0, n_k - 1):
            keys = torch.arange(length, device=DEVICE)[block * BLOCK_K : (block + 1) * BLOCK_K]
            wanted_k = wanted_v = torch.zeros(len(keys), dim, dtype=torch.float64, device=DEVICE)
            for row in case.kept[0, head, :, block].nonzero().flatten().tolist():
                p, d_scores, row_keys, queries = exact_row(case, d_out, head, row)
                ours = torch.isin(row_keys, keys)
                wanted_k = wanted_k + d_scores[:, ours].T @ case.q[0, head, queries].double()
                wanted_v = wanted_v + p[:, ours].T @ d_out[0, head, queries].double()
            assert error(d_k[0, head, keys], wanted_k) < TOLERANCE[dtype], (head, block)
            assert error(d_v[0, head, keys], wanted_v) < TOLERANCE[dtype], (head, block)


@pytest.mark.slow
@pytest.mark.parametrize("far", ["batch", "head", "token"])
def test_offsets_beyond_32_bits(family: str, far: str) -> None:
    """Views whose last element lies more than 2^31 elements behind the first."""
    batch, heads, length, dim = 2, 2, 4 * BLOCK_Q + 8, 128  # the last blocks start far off
    distance = 2**31 + 2**20
    strides = {
        "batch": (distance, dim, heads * dim, 1),
        "head": (length * dim, distance, dim, 1),
        "token": (heads * dim, dim, distance // (4 * BLOCK_Q) // 8 * 8, 1),
    }[far]
    span = 1 + sum((size - 1) * step for size, step in zip((batch, heads, length, dim), strides, strict=True))
    assert span > 2**31
    case, d_out = random_problem(batch, heads, length, length, dim, torch.bfloat16)
    truth = exact(case, d_out)
    far_view = torch.empty(span, dtype=torch.bfloat16, device=DEVICE).as_strided(case.q.shape, strides)
    for name in ("q", "k", "v"):
        other = dataclasses.replace(case, **{name: far_view.copy_(getattr(case, name))})
        assert_within(errors(run(family, other, d_out, truth), truth), torch.bfloat16)
    measured = errors(run(family, case, far_view.copy_(d_out), truth), truth)
    assert_within(measured, torch.bfloat16)
    near = [like_the_host(torch.empty_like(x)) for x in (case.q, case.k, case.v)]
    for i in range(3):
        d_q, d_k, d_v = (*near[:i], far_view, *near[i + 1 :])
        measured = errors(run(family, case, d_out, truth, (d_q, d_k, d_v)), truth)
        assert_within(measured, torch.bfloat16)


# ---- through autograd


def leaves(length: int = 1000, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Gradients:
    """q, k, v (2, 3, length, dim) as ComfyUI hands them over, which require gradients."""
    flat = (torch.randn(2, length, 3 * dim, device=DEVICE, dtype=dtype) for _ in range(3))
    q, k, v = (x.view(2, length, 3, dim).transpose(1, 2).requires_grad_() for x in flat)
    return q, k, v


def differentiate(run: Callable[..., Tensor], tensors: Gradients) -> list[Tensor]:
    """Output and gradients of a weighted sum of it."""
    for x in tensors:
        x.grad = None
    out = run(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    (out.float() * weights).sum().backward()
    gradients = [x.grad for x in tensors]
    assert all(x is not None for x in gradients)
    return [out.detach(), *(x for x in gradients if x is not None)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sparse_attention(q, k, v, CONFIG)


def test_gradients_are_taken_by_the_kernels_and_equal_the_references() -> None:
    tensors = leaves()
    assert choose(*tensors).name == "cuda"
    out, *gradients = differentiate(attend, tensors)
    mask = block_mask(*tensors[:2], CONFIG)
    exact_out, *wanted = differentiate(
        lambda q, k, v: reference.attention(q, k, v, mask),  # type: ignore[return-value]
        tuple(x.detach().double().requires_grad_() for x in tensors),  # type: ignore[arg-type]
    )
    assert error(out, exact_out) < TOLERANCE[torch.bfloat16]
    for got, right, x in zip(gradients, wanted, tensors, strict=True):
        assert error(got, right) < TOLERANCE[torch.bfloat16]
        assert got.stride() == x.stride()


def test_a_float32_tensor_gets_a_float32_gradient_where_the_kernels_are_asked_for() -> None:
    tensors = leaves(dtype=torch.float32)
    _, *gradients = differentiate(lambda q, k, v: sparse_attention(q, k, v, CONFIG, backend="cuda"), tensors)
    halves = tuple(x.detach().bfloat16().requires_grad_() for x in tensors)
    _, *wanted = differentiate(attend, halves)  # type: ignore[arg-type]
    for got, half in zip(gradients, wanted, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, half.float())


def test_only_what_requires_a_gradient_gets_one() -> None:
    q, k, v = leaves()
    expected = differentiate(attend, (q, k, v))[2]
    fixed = [q.detach(), v.detach()]
    k.grad = None
    out = sparse_attention(fixed[0], k, fixed[1], CONFIG)
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    (out.float() * weights).sum().backward()
    assert k.grad is not None
    assert torch.equal(k.grad, expected)
    assert all(x.grad is None for x in fixed)


def test_the_mask_and_the_lse_are_not_differentiated() -> None:
    q, k, v = leaves()
    mask = block_mask(q, k, CONFIG)
    out, lse = cuda.attention(q, k, v, mask, 0.1, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad
    assert not any(x.requires_grad for x in torch.ops.sparge_attention2.block_mask(q, k, 0.1, 0.3, 0.0, 0.1))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = leaves()
    (d_q,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        d_q.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_finds_nothing_wrong_with_the_operators(dtype: torch.dtype) -> None:
    q, k, v = leaves(dtype=dtype)
    mask = block_mask(q, k, CONFIG)
    blocks = mask.bits, mask.counts, mask.order
    operators = torch.ops.sparge_attention2
    torch.library.opcheck(
        operators.forward,
        (q, k, v, *blocks, 0.1),
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )
    out, lse = operators.forward(q, k, v, *blocks, 0.1)
    arguments = (torch.randn_like(out), q, k, v, out, lse, *blocks, 0.1)
    torch.library.opcheck(
        operators.backward,
        tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor needs triton"),
        ],
    ),
]


@pytest.mark.parametrize("backend", COMPILERS)
def test_compiled_whole_gives_the_gradients_of_eager(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for length in (3000, 2777, 2304):
        tensors = leaves(length)
        for got, wanted in zip(differentiate(compiled, tensors), differentiate(attend, tensors), strict=True):
            assert torch.equal(got, wanted), length


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = checkpoint(lambda *x: attend(*x) * 2.0, q, k, v, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return out

    tensors = leaves()
    wanted = differentiate(lambda *x: attend(*x) * 2.0, tensors)
    for got, right in zip(differentiate(recomputed, tensors), wanted, strict=True):
        assert torch.equal(got, right)


def test_the_backward_pass_saves_inputs_output_lse_and_mask_alone() -> None:
    q, k, v = leaves()
    mask = block_mask(q, k, CONFIG)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = cuda.attention(q, k, v, mask, 0.1, return_lse=True)
    assert mask.order is not None
    allowed = {x.data_ptr() for x in (q, k, v, out, lse, mask.bits, mask.counts, mask.order)}
    assert {x.data_ptr() for x in saved} == allowed
    assert len(saved) == len(allowed)


def test_the_backward_pass_waits_for_nothing() -> None:
    q, k, v = leaves()
    differentiate(attend, (q, k, v))  # compiles
    out = attend(q, k, v)
    d_out = torch.ones_like(out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        busy = torch.cuda.Event()
        busy.record()
        torch.autograd.grad(out, (q, k, v), d_out)
        assert not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("index", "spoil"),
    [
        (0, lambda x: x[..., :64]),
        (0, lambda x: x.float()),
        (0, lambda x: x.cpu()),
        (4, lambda x: x[:, :, 1:]),
        (5, lambda x: x.double()),
        (5, lambda x: x.transpose(0, 1)),
    ],
    ids=["head dim", "dtype", "device", "tokens of the output", "dtype of the LSE", "shape of the LSE"],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_and_cuda_goes_on(
    index: int, spoil: Callable[[Tensor], Tensor]
) -> None:
    q, k, v = (x.detach() for x in leaves())
    mask = block_mask(q, k, CONFIG)
    out, lse = torch.ops.sparge_attention2.forward(q, k, v, mask.bits, mask.counts, mask.order, 0.1)
    arguments = [torch.randn_like(out), q, k, v, out, lse, mask.bits, mask.counts, mask.order, 0.1]
    expected = torch.ops.sparge_attention2.backward(*arguments)
    spoiled = [spoil(x) if i == index else x for i, x in enumerate(arguments)]
    with pytest.raises(ValueError, match="got"):
        torch.ops.sparge_attention2.backward(*spoiled)
    torch.cuda.synchronize()
    for got, wanted in zip(torch.ops.sparge_attention2.backward(*arguments), expected, strict=True):
        assert torch.equal(got, wanted)
