"""Blocks that torch compiles: the same numbers, and one set of graphs for all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from sparge_core import SparseConfig, sparse_attention
from sparge_core.distill import pair as pair_module
from sparge_core.distill.pair import WanPair

from .conftest import make_model
from .test_pair import TIME, make_pair, velocities

BLOCKS = 9  # more than the graphs that torch makes of one piece of code before it gives up


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of torch's compiler but the last stage, which makes machine code."""
    monkeypatch.setattr(pair_module, "BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def learn(pair: WanPair, x: Tensor, batch: Any) -> list[Tensor]:
    """Velocities and gradients of one step, with the weights a little off the teacher's."""
    with torch.no_grad():
        for weight in pair.trained.values():
            weight.add_(0.01)
    t = torch.tensor([TIME])
    target = pair.teacher(x, t, batch)
    student = pair.student(x, t, batch)
    (student - target).square().mean().backward()
    gradients = [weight.grad for weight in pair.trained.values() if weight.grad is not None]
    assert gradients
    return [target, student.detach(), *gradients]


@pytest.mark.parametrize(("student", "checkpointing"), [("low_rank", False), ("full", True)])
def test_compiled_blocks_give_the_same_velocities_and_gradients(
    student: str, checkpointing: bool, values: dict[str, Any]
) -> None:
    options = {"student": student, "checkpointing": checkpointing}
    plain = learn(*make_pair(values, **options))
    assert graphs() == 0
    compiled = learn(*make_pair(values, **options, compile=True))
    assert graphs() > 0
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_all_blocks_share_their_graphs(values: dict[str, Any], tmp_path: Path) -> None:
    made = []
    for blocks in (2, BLOCKS):
        torch.compiler.reset()
        counters.clear()
        base = make_model(tmp_path / f"of-{blocks}", num_layers=blocks)
        learn(*make_pair(values, base=base, compile=True))
        made.append(graphs())
    assert made[0] == made[1] > 0


def test_other_settings_need_no_other_graphs(values: dict[str, Any]) -> None:
    pair, x, batch = make_pair(values, compile=True)
    sparse, teacher = velocities(pair, x, batch)
    made = graphs()
    with pair.attention.dense():
        torch.testing.assert_close(velocities(pair, x, batch)[0], teacher)
    calls = []

    def attend(q: Tensor, k: Tensor, v: Tensor, config: SparseConfig) -> Tensor:
        calls.append(config.top_k)
        return sparse_attention(q, k, v, config)

    pair.attention.attend = attend
    pair.attention.config = SparseConfig(top_k=0.25, top_p=0.0)
    assert not torch.allclose(velocities(pair, x, batch)[0], sparse, atol=1e-4)
    assert calls == [0.25] * 2
    assert graphs() == made


def test_without_a_compiler_the_blocks_run_as_they_are_and_a_warning_says_so(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler found: g++")

    monkeypatch.setattr(pair_module, "BACKEND", no_compiler)
    with caplog.at_level(logging.WARNING):
        pair, x, batch = make_pair(values, compile=True)
    assert not pair.compiled
    assert "install a C compiler" in caplog.text
    assert "no compiler found: g++" in caplog.text
    expected = velocities(*make_pair(values))
    torch.testing.assert_close(velocities(pair, x, batch), expected)
