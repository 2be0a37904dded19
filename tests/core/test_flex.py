"""FlexAttention: equal to the reference where it compiles, refused with a sentence where it fails or errs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge_core import BlockMask, SparseConfig, flex, reference, sparse_attention
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Answers are remembered for the life of a process; here each test asks anew."""
    flex.prove.cache_clear()
    yield
    flex.prove.cache_clear()


def test_an_answer_that_differs_from_the_reference_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Any:
        everything = BlockMask.from_dense(torch.ones_like(mask.dense()), mask.q_len, mask.k_len)
        return reference.attention(q, k, v, everything, scale=scale)

    monkeypatch.setattr(flex, "attention", dense)
    assert (
        flex.why_not(CPU, torch.bfloat16, 64)
        == "gives wrong results on this device with this version of torch"
    )


def test_one_wrong_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_block(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Any:
        kept = mask.dense()
        kept[0, 1, -1, -1] ^= True
        return reference.attention(q, k, v, BlockMask.from_dense(kept, mask.q_len, mask.k_len), scale=scale)

    monkeypatch.setattr(flex, "attention", off_by_a_block)
    assert flex.why_not(CPU, torch.bfloat16, 64) is not None


def test_nan_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "attention", lambda q, *_: torch.full_like(q, torch.nan))
    assert flex.why_not(CPU, torch.float16, 64) is not None


def test_the_right_answer_is_trusted_and_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def right(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Any:
        calls.append(q.dtype)
        return reference.attention(q, k, v, mask, scale=scale)

    monkeypatch.setattr(flex, "attention", right)
    for _ in range(2):
        assert flex.why_not(CPU, torch.bfloat16, 64) is None
        assert flex.why_not(CPU, torch.float16, 64) is None
    assert calls == [torch.bfloat16, torch.float16]


def test_a_failure_to_compile_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Tensor:
        raise RuntimeError("Cannot find a working triton installation")

    monkeypatch.setattr(flex, "attention", failing)
    reason = flex.why_not(CPU, torch.float16, 64)
    assert reason == "cannot run here: RuntimeError: Cannot find a working triton installation"


def uneven(length: int) -> tuple[Tensor, Tensor, Tensor, BlockMask]:
    q, k, v = (torch.randn(2, 3, length, 64, dtype=torch.bfloat16) for _ in range(3))
    kept = torch.rand(2, 3, num_blocks(length, BLOCK_Q), num_blocks(length, BLOCK_K)) < 0.4
    kept[..., -1] |= ~kept.any(-1)
    return q, k, v, BlockMask.from_dense(kept, length, length)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # C++ is compiled, once for the probe and once for any length
def test_rows_of_any_mix_of_counts_equal_the_reference_at_ragged_lengths() -> None:
    """Compiled for the CPU, where a C++ compiler is at hand."""
    reason = flex.why_not(CPU, torch.bfloat16, 64)
    if reason is not None and "ompiler" in reason:
        pytest.skip(reason)
    assert reason is None
    for length in (700, 401, 640, 129):
        q, k, v, mask = uneven(length)
        out = sparse_attention(q, k, v, SparseConfig(), backend="flex", mask=mask)
        torch.testing.assert_close(out, reference.attention(q, k, v, mask), atol=2e-2, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_still_compiles_where_a_caller_has_switched_compilation_off() -> None:
    """As the ComfyUI node does around its attention: eagerly it would run dense, in memory of L x L."""
    if "ompiler" in (reason := flex.why_not(CPU, torch.bfloat16, 64) or ""):
        pytest.skip(reason)
    q, k, v, mask = uneven(500)
    run = torch.compiler.disable(lambda: flex.attention(q, k, v, mask, 0.125))
    torch.testing.assert_close(run(), reference.attention(q, k, v, mask, scale=0.125), atol=2e-2, rtol=2e-2)
