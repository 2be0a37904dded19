"""Which back end runs, what each needs, and what is said and done when none serves."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparge_core import (
    BlockMask,
    SparseConfig,
    backends,
    block_mask,
    choose,
    flex,
    reference,
    sparse_attention,
)

CONFIG = SparseConfig(0.2, 0.4)
Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(
    *, dim: int = 64, dtype: torch.dtype = torch.float32, length: int = 300, key_heads: int = 2
) -> Inputs:
    torch.manual_seed(0)
    q = torch.randn(1, 2, length, dim, dtype=dtype)
    k, v = (torch.randn(1, key_heads, length, dim, dtype=dtype) for _ in range(2))
    return q, k, v


class Kernels:
    """Stands in for the CUDA package: serves by the reference, and remembers what it was given."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.dtypes: list[torch.dtype] = []
        self.masks = 0

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        assert q.dtype != torch.float32, "the kernels are asked about what they would get"
        return self.reason

    def block_mask(self, q: Tensor, k: Tensor, config: SparseConfig, scale: float) -> BlockMask:
        self.masks += 1
        return reference.block_mask(q, k, config, scale=scale)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Any:
        self.dtypes.append(q.dtype)
        return reference.attention(q, k, v, mask, scale=scale)

    def sparse_attention(self, q: Tensor, k: Tensor, v: Tensor, config: SparseConfig, scale: float) -> Any:
        return self.attention(q, k, v, self.block_mask(q, k, config, scale), scale)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """A machine whose every tensor is on a CUDA device, served by the kernels but not by FlexAttention."""
    kernels = Kernels()
    monkeypatch.setattr(backends, "cuda_kernels", lambda: kernels)
    monkeypatch.setattr(flex, "why_not", lambda *_: "cannot be compiled here")

    def on_cuda(constraint: backends.DeviceIs, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return None if constraint.type == "cuda" else f"{constraint}, got cuda"

    monkeypatch.setattr(backends.DeviceIs, "why_not", on_cuda)
    return kernels


# --- on a machine without a GPU


def test_a_cpu_runs_the_reference_and_says_why_nothing_else() -> None:
    choice = choose(*inputs())
    assert choice.name == "reference"
    assert (
        choice.why
        == "cuda needs tensors on a cuda device, got cpu; flex needs tensors on a cuda device, got cpu"
    )


def test_sparse_attention_is_the_reference_over_the_chosen_blocks() -> None:
    q, k, v = inputs()
    expected = reference.attention(q, k, v, reference.block_mask(q, k, CONFIG, scale=0.2), scale=0.2)
    assert torch.equal(sparse_attention(q, k, v, CONFIG, scale=0.2), expected)
    mask = block_mask(q, k, CONFIG, scale=0.2)
    assert 0 < mask.sparsity < 1
    assert torch.equal(sparse_attention(q, k, v, SparseConfig(1, 1), scale=0.2, mask=mask), expected)


def test_keep_all_equals_dense() -> None:
    q, k, v = inputs()
    torch.testing.assert_close(
        sparse_attention(q, k, v, SparseConfig(1, 1)), F.scaled_dot_product_attention(q, k, v)
    )


def test_a_batch_of_two_equals_two_calls() -> None:
    pairs = [torch.cat((x, x.flip(2) * 2)) for x in inputs()]
    for config in (CONFIG, SparseConfig(0.0, 0.0, 0.6)):
        alone = [sparse_attention(*(x[i : i + 1] for x in pairs), config) for i in range(2)]
        assert torch.equal(sparse_attention(*pairs, config), torch.cat(alone))


def test_gradients_flow_and_the_mask_is_not_part_of_them() -> None:
    q, k, v = (x.double().requires_grad_() for x in inputs(length=130, dim=4))
    mask = block_mask(q, k, CONFIG)
    through_choice = torch.autograd.grad(sparse_attention(q, k, v, CONFIG).sum(), (q, k, v))
    with_mask = torch.autograd.grad(sparse_attention(q, k, v, CONFIG, mask=mask).sum(), (q, k, v))
    torch.testing.assert_close(through_choice, with_mask)


def test_a_back_end_that_cannot_serve_runs_dense_with_its_reason() -> None:
    q, k, v = inputs()
    choice = choose(q, k, v, "cuda")
    assert choice == backends.Choice("dense", {"cuda": "needs tensors on a cuda device, got cpu"})
    assert torch.equal(
        sparse_attention(q, k, v, CONFIG, backend="cuda"), F.scaled_dot_product_attention(q, k, v)
    )


def test_dense_by_name_needs_no_reason() -> None:
    q, k, v = inputs()
    assert choose(q, k, v, "dense") == backends.Choice("dense")
    assert torch.equal(
        sparse_attention(q, k, v, CONFIG, scale=0.5, backend="dense"),
        F.scaled_dot_product_attention(q, k, v, scale=0.5),
    )


def test_grouped_heads_run_dense_with_a_reason() -> None:
    q, k, v = inputs(key_heads=1)
    assert "got 2 query and 1 key heads" in choose(q, k, v).reasons["reference"]
    expected = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
    torch.testing.assert_close(sparse_attention(q, k, v, CONFIG), expected)


def test_mixed_dtypes_run_dense_with_a_reason() -> None:
    q, k, v = inputs()
    assert choose(q, k, v.bfloat16()).reasons["reference"] == (
        "needs q, k and v of one dtype, got float32, float32 and bfloat16"
    )
    out = sparse_attention(q, k.half(), v.bfloat16(), CONFIG)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k.half().float(), v.bfloat16().float()))


def test_values_of_another_width_run_dense_with_a_reason() -> None:
    q, k, v = inputs()
    assert "head dims 64 and 32" in choose(q, k, v[..., :32]).reasons["reference"]
    assert sparse_attention(q, k, v[..., :32], CONFIG).shape == (1, 2, 300, 32)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (
            ((1, 2, 8), (1, 2, 8, 4), (1, 2, 8, 4)),
            "must be (batch, heads, tokens, head dim); got q (1, 2, 8), k",
        ),
        (((1, 2, 0, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "must not be empty; got q (1, 2, 0, 4)"),
        (((1, 2, 8, 4), (1, 2, 0, 4), (1, 2, 0, 4)), "must not be empty"),
        (((0, 2, 8, 4), (0, 2, 8, 4), (0, 2, 8, 4)), "must not be empty"),
        (((2, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "same batch size and head dim"),
        (((1, 2, 8, 4), (1, 2, 8, 5), (1, 2, 8, 4)), "same batch size and head dim"),
        (
            ((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 9, 4)),
            "k and v must have the same batch size, heads and tokens",
        ),
        (
            ((1, 2, 8, 4), (1, 2, 8, 4), (1, 1, 8, 4)),
            "k and v must have the same batch size, heads and tokens",
        ),
        (((1, 3, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4)), "heads of q must be a multiple of those of k"),
    ],
)
def test_shapes_that_no_attention_takes_are_refused(
    shapes: tuple[tuple[int, ...], ...], sentence: str
) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    for backend in ("auto", "cuda", "reference", "dense"):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            sparse_attention(*tensors, CONFIG, backend=backend)


def test_tensors_that_no_attention_takes_are_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="on one device; got cpu, meta and cpu"):
        sparse_attention(q, k.to("meta"), v, CONFIG)
    with pytest.raises(ValueError, match=r"floating point; got torch\.int64"):
        sparse_attention(q.long(), k.long(), v.long(), CONFIG)


def test_a_mask_needs_heads_and_dtypes_that_belong_together() -> None:
    q, k, _ = inputs(key_heads=1)
    with pytest.raises(ValueError, match="A block mask needs as many key as query heads"):
        block_mask(q, k, CONFIG)
    with pytest.raises(ValueError, match="A block mask needs q, k and v of one dtype"):
        block_mask(q, q.double(), CONFIG)


def test_an_unknown_back_end_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="'triton' is unknown; choose one of auto, cuda, flex, reference, dense"
    ):
        sparse_attention(*inputs(), CONFIG, backend="triton")


def test_a_mask_of_other_tensors_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(
        ValueError, match=re.escape("(1, 2, 200, 300) on cpu, but the tensors have (1, 2, 300, 300)")
    ):
        sparse_attention(q, k, v, CONFIG, mask=block_mask(q[:, :, :200], k, CONFIG))


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_compiled_code_gives_the_same(backend: str) -> None:
    q, k, v = inputs()
    compiled = torch.compile(
        lambda q, k, v: sparse_attention(q * 1, k, v, CONFIG, backend=backend) + 1,
        backend="eager",
        dynamic=True,
    )
    for length in (300, 170):
        tensors = [x[:, :, :length] for x in (q, k, v)]
        torch.testing.assert_close(
            compiled(*tensors), sparse_attention(*tensors, CONFIG, backend=backend) + 1
        )


def test_the_choice_can_be_traced_without_a_graph_break() -> None:
    q, k, v = inputs()

    def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * (2 if choose(q, k, v).name == "reference" else 3)

    compiled = torch.compile(scaled, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(q, k, v), q * 2)


# --- on a GPU, as far as a machine without one can tell


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_gpu_runs_the_kernels(kernels: Kernels, dtype: torch.dtype, dim: int) -> None:
    q, k, v = inputs(dtype=dtype, dim=dim)
    assert choose(q, k, v) == backends.Choice("cuda")
    sparse_attention(q, k, v, CONFIG)
    assert (kernels.masks, kernels.dtypes) == (1, [dtype])


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (inputs(dim=96, dtype=torch.float16), "needs a head dim of 64 or 128, got 96"),
        (inputs(dtype=torch.float16, key_heads=1), "needs as many key as query heads"),
        (inputs(dtype=torch.float64), "needs float16 or bfloat16 tensors, got float64"),
        (
            tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs(dtype=torch.float16)),
            "needs a head dim that is contiguous in memory, got strides of 300, 300 and 300 elements",
        ),
    ],
)
def test_what_the_kernels_cannot_take_runs_dense_with_a_reason(
    kernels: Kernels, tensors: Inputs, sentence: str
) -> None:
    choice = choose(*tensors)
    assert choice.name == "dense"
    assert choice.reasons["cuda"].startswith(sentence)
    assert set(choice.reasons) == {"cuda", "flex", "reference"}
    sparse_attention(*tensors, CONFIG)
    assert kernels.dtypes == []


def test_the_runtime_s_own_reason_is_passed_on(kernels: Kernels) -> None:
    kernels.reason = "needs a GPU of compute capability 8.0 or newer, got 7.5"
    q, k, v = inputs(dtype=torch.float16)
    assert choose(q, k, v).reasons == {
        "cuda": kernels.reason,
        "flex": "cannot be compiled here",
        "reference": "needs tensors on a cpu device, got cuda",
    }
    block_mask(q, k, CONFIG)
    assert kernels.masks == 0


def test_float32_runs_dense_unless_the_kernels_are_asked_for_by_name(kernels: Kernels) -> None:
    q, k, v = inputs()
    assert choose(q, k, v).name == "dense"
    assert choose(q, k, v).reasons["cuda"] == "needs float16 or bfloat16 tensors, got float32"
    assert choose(q, k, v, "cuda") == backends.Choice("cuda", cast=torch.bfloat16)
    out = sparse_attention(q, k, v, CONFIG, backend="cuda")
    assert kernels.dtypes == [torch.bfloat16]
    assert out.dtype == torch.float32
    halves = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(
        out, reference.attention(*halves, reference.block_mask(halves[0], halves[1], CONFIG)).float()
    )


def test_flex_serves_where_the_kernels_do_not(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.reason = "needs another GPU"
    monkeypatch.setattr(flex, "why_not", lambda *_: None)
    q, k, v = inputs(dtype=torch.float16)
    assert choose(q, k, v) == backends.Choice("flex", {"cuda": "needs another GPU"})
    with_gradient = q.clone().requires_grad_()
    assert choose(with_gradient, k, v).reasons["flex"] == "needs q, k and v that require no gradient"
    with torch.no_grad():
        assert choose(with_gradient, k, v).name == "flex"


def test_every_need_says_itself_in_a_sentence() -> None:
    sentences = [
        str(need) for backend in backends.BACKENDS.values() for need in backend.auto_needs + backend.needs
    ]
    assert all(sentence.startswith("needs ") for sentence in sentences)
    assert "needs float16, bfloat16 or float32 tensors" in sentences
