"""What a run's statistics say, and that recording them waits for nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from sparge_core import BlockMask, SparseConfig
from sparge_core.geometry import BLOCK_K, BLOCK_Q
from sparge_core.report import RunStatistics, Timer, describe, plot

CPU = torch.device("cpu")
CONFIG = SparseConfig(0.1, 0.2)


def mask_of(kept: int, of: int = 8, heads: int = 1) -> BlockMask:
    """Every row keeps `kept` of `of` blocks."""
    dense = (torch.arange(of) < kept).expand(1, heads, of // 2, of)
    return BlockMask.from_dense(dense, of // 2 * BLOCK_Q, of * BLOCK_K)


def test_sparsity_is_told_by_layer_and_step_and_as_a_whole() -> None:
    statistics = RunStatistics(["a", "b"], 3)
    statistics.record_sparse("a", 0, mask_of(2), CONFIG)
    statistics.record_sparse("b", 2, mask_of(4), CONFIG)
    statistics.record_sparse("b", 2, mask_of(8), CONFIG)
    summary = statistics.summary()
    assert summary["sparsity_map"] == [[0.75, None, None], [None, None, 0.25]]
    assert summary["sparsity"] == pytest.approx((0.75 + 0.5 + 0.0) / 3)
    assert summary["sparse_calls"] == 3
    assert (summary["layers"], summary["steps"]) == (["a", "b"], 3)


def test_a_call_counts_by_the_work_that_it_is() -> None:
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, mask_of(0), CONFIG)
    statistics.record_sparse("a", 0, mask_of(16, of=16, heads=2), CONFIG)  # 8 times as many token pairs
    assert statistics.summary()["sparsity"] == pytest.approx(1 / 9)


def test_dense_calls_are_counted_by_reason_and_place() -> None:
    statistics = RunStatistics(["a", "b"], 2)
    for step, reason in ((0, "layer set to dense"), (1, "layer set to dense"), (1, "fewer than 4096 tokens")):
        statistics.record_dense("b", step, reason)
    summary = statistics.summary()
    assert summary["dense_calls"] == {"layer set to dense": 2, "fewer than 4096 tokens": 1}
    assert summary["dense_map"] == [[0, 0], [1, 2]]
    assert summary["sparsity"] is None
    assert summary["sparse_calls"] == 0


@pytest.mark.parametrize(
    ("config", "calls"), [(SparseConfig(0.5, 0.0, 0.75), 1), (SparseConfig(0.25, 0.0, 0.75), 0)]
)
def test_calls_whose_floor_is_above_the_target_are_told(config: SparseConfig, calls: int) -> None:
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, mask_of(4), config)
    assert statistics.summary()["floor_calls"] == calls
    assert (
        "top_k alone keeps more than the target sparsity allows: 1." in describe(statistics.summary())
    ) == bool(calls)


def test_times_of_sparse_and_dense_calls_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.25, 2.0, 2.5, 3.0, 3.125])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, mask_of(4), CONFIG, Timer(CPU))
    statistics.record_dense("a", 0, "asked for", Timer(CPU))
    statistics.record_dense("a", 0, "asked for", Timer(CPU))
    summary = statistics.summary()
    assert (summary["sparse_ms"], summary["dense_ms"], summary["attention_ms"]) == (250.0, 625.0, 875.0)


def test_calls_that_the_device_has_not_finished_are_timed_by_the_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Timer, "finished", lambda self: False)
    monkeypatch.setattr(Timer, "milliseconds", lambda self: 2.0)
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, mask_of(4), CONFIG, Timer(CPU))
    statistics.record_dense("a", 0, "asked for", Timer(CPU))
    assert statistics.summary()["attention_ms"] == 4.0
    assert statistics.summary()["attention_ms"] == 4.0


def test_recording_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(*_: Any, **__: Any) -> None:
        raise AssertionError("a value was fetched from the device")

    statistics = RunStatistics(["a"], 1)
    mask = mask_of(2)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
            patch.setattr(torch.Tensor, name, waited)
        statistics.record_sparse("a", 0, mask, CONFIG, Timer(CPU))
        statistics.record_dense("a", 0, "asked for", Timer(CPU))
    assert statistics.summary()["sparsity"] == 0.75


def test_a_summary_is_json_and_can_be_taken_while_the_run_goes_on() -> None:
    statistics = RunStatistics(["a"], 2)
    assert statistics.summary()["sparsity"] is None
    statistics.record_sparse("a", 0, mask_of(2), CONFIG, Timer(CPU))
    assert json.loads(json.dumps(statistics.summary())) == statistics.summary()
    statistics.record_sparse("a", 1, mask_of(4), CONFIG, Timer(CPU))
    assert statistics.summary()["sparsity_map"] == [[0.75, 0.5]]


def test_the_description_names_what_a_user_asks_for() -> None:
    statistics = RunStatistics(["a"], 2)
    assert describe(statistics.summary()).startswith("Sparse calls: none.\nDense calls: none.\n")
    statistics.record_sparse("a", 0, mask_of(2), CONFIG)
    statistics.record_dense("a", 1, "layer set to dense")
    text = describe(statistics.summary())
    assert "Sparse calls: 1, which skipped 75.0% of the work." in text
    assert "Dense calls: 1\n  1: layer set to dense\n" in text


def test_the_picture_shows_sparse_dense_and_idle_cells() -> None:
    pytest.importorskip("PIL", reason="Pillow draws the picture; it comes with ComfyUI")
    from sparge_core import report

    statistics = RunStatistics(["a", "b"], 3)
    statistics.record_sparse("a", 0, mask_of(0), CONFIG)
    statistics.record_sparse("a", 1, mask_of(8), CONFIG)
    statistics.record_dense("b", 0, "layer set to dense")
    picture = plot(statistics.summary())
    assert picture.dtype == np.float32
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert picture.min() >= 0.0
    assert picture.max() <= 1.0

    def cell(layer: int, step: int) -> tuple[int, ...]:
        y = report.MARGIN + 2 * report.LINE_HEIGHT + int((layer + 0.5) * report.MAP_HEIGHT / 2)
        x = report.MARGIN + report.AXIS + int((step + 0.5) * report.MAP_WIDTH / 3)
        return tuple(round(channel * 255) for channel in picture[y, x])

    assert cell(0, 0) == tuple(report.COLOURS[-1])
    assert cell(0, 1) == tuple(report.COLOURS[0])
    assert cell(1, 0) == report.DENSE_GREY
    assert cell(1, 1) == report.BACKGROUND


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (40, 50), (200, 4)])
def test_runs_of_any_size_can_be_drawn(layers: int, steps: int) -> None:
    pytest.importorskip("PIL", reason="Pillow draws the picture; it comes with ComfyUI")
    statistics = RunStatistics([f"a layer with a long name {layer}" for layer in range(layers)], steps)
    statistics.record_sparse("a layer with a long name 0", steps - 1, mask_of(3), CONFIG)
    assert plot(statistics.summary()).shape[2] == 3
