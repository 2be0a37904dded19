"""What a patched model decides and remembers, without ComfyUI."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

LENGTH, HEADS, DIM = 300, 2, 64
SIGMAS = [1.0, 0.75, 0.5, 0.0]
CPU = torch.device("cpu")


@pytest.fixture
def make(attention: ModuleType) -> Callable[..., Any]:
    """A SparseAttention of two layers, half sparse at any length unless told otherwise."""

    def make(
        sparsity: float = 0.5, backend: str = "auto", student: bool = False, layers: int = 2, **policy: Any
    ) -> Any:
        settings = attention.Settings(
            attention.SparseConfig(sparsity=sparsity),
            attention.DensePolicy(**{"min_tokens": 0, **policy}),
            backend,
            "manual",
            student,
        )
        return attention.SparseAttention(
            settings, [attention.Layer(f"blocks.{block}", block) for block in range(layers)]
        )

    return make


@pytest.fixture
def call(attention: ModuleType) -> Callable[..., Any]:
    """A call of the host, whose own attention returns -1 everywhere."""

    def call(
        reason: str | None = None,
        length: int = LENGTH,
        dtypes: tuple[torch.dtype, ...] = 3 * (torch.float32,),
    ) -> Any:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, HEADS, length, DIM, generator=generator).to(dtype) for dtype in dtypes)
        return attention.Call(
            q, k, v, None, reason, dense=lambda: torch.full_like(q, -1.0), pack=lambda out: out
        )

    return call


def was_dense(out: Tensor) -> bool:
    return bool((out == -1.0).all())


def test_a_call_is_sparse_unless_something_speaks_against_it(
    make: Callable[..., Any], call: Callable[..., Any]
) -> None:
    sparse = make()
    with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as run:
        out = sparse.attend(sparse.layers[0], call())
    assert not was_dense(out)
    assert out.shape == (1, HEADS, LENGTH, DIM)
    assert run.summary["sparse_calls"] == 1
    assert run.summary["dense_calls"] == {}


@pytest.mark.parametrize(
    ("settings", "given", "reason"),
    [
        ({}, {"reason": "attention mask"}, "attention mask"),
        ({"dense_layers": (1,)}, {}, "layer set to dense"),
        ({"min_tokens": LENGTH + 1}, {}, f"fewer than {LENGTH + 1} tokens"),
        ({"backend": "dense"}, {}, "back end set to dense"),
        ({"backend": "cuda"}, {}, "got cpu"),
        ({}, {"dtypes": (torch.float32, torch.float16, torch.float32)}, "q, k and v of one dtype"),
    ],
)
def test_a_dense_call_is_the_hosts_and_has_a_reason(
    settings: dict[str, Any],
    given: dict[str, Any],
    reason: str,
    make: Callable[..., Any],
    call: Callable[..., Any],
) -> None:
    sparse = make(**settings)
    with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as run:
        assert was_dense(sparse.attend(sparse.layers[1], call(**given)))
    ((counted, calls),) = run.summary["dense_calls"].items()
    assert reason in counted
    assert calls == 1


def test_calls_are_counted_by_layer_and_step(make: Callable[..., Any], call: Callable[..., Any]) -> None:
    sparse = make(dense_layers=(1,))
    with sparse.run(SIGMAS, (0.8, 0.0), (), CPU) as run:
        for sigma in SIGMAS[:-1]:
            run.begin_step(sigma, {})
            for layer in sparse.layers:
                sparse.attend(layer, call())
    assert run.summary["dense_map"] == [[1, 0, 0], [1, 1, 1]]
    assert [share is not None for share in run.summary["sparsity_map"][0]] == [False, True, True]


@pytest.mark.parametrize(
    ("count", "probed"), [(0, []), (1, [6]), (2, [4, 8]), (8, range(2, 10)), (99, range(2, 10))]
)
def test_probed_steps_are_spread_over_the_sparse_ones(
    count: int, probed: Sequence[int], make: Callable[..., Any]
) -> None:
    sigmas = [1.0 - step / 10 for step in range(11)]
    with make().run(sigmas, (0.8, 0.0), (), CPU) as run:
        run.probe(count)
    assert run.probed == set(probed)


def test_a_probed_step_is_as_without_and_its_error_is_known(
    make: Callable[..., Any], call: Callable[..., Any]
) -> None:
    sparse = make()
    outputs = []
    for count in (0, 1):
        with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as run:
            run.probe(count)
            for sigma in SIGMAS[:-1]:
                run.begin_step(sigma, {})
                outputs.append(sparse.attend(sparse.layers[0], call()))
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    plain, probed = (run.summary for run in sparse.runs)
    assert plain["probe"] is None
    assert probed["probe"]["steps"] == [1]
    dense = torch.full_like(outputs[0], -1.0)
    error = (outputs[0] - dense).abs().sum().item() / dense.abs().sum().item()
    assert probed["probe"]["error"] == [pytest.approx(error, rel=1e-5), None]
    assert (probed["sparse_calls"], probed["dense_calls"]) == (3, {})


def test_the_window_is_compared_in_the_schedules_precision(make: Callable[..., Any]) -> None:
    """A step on the edge of the window is inside, although its float32 sigma is not the edge's double."""
    sparse = make()
    for edge in (0.9, 0.3):
        rounded = float(np.float32(edge))
        assert rounded != edge
        for window in ((edge, 0.0), (1.0, edge)):
            with sparse.run([1.0, rounded, 0.0], window, (), CPU) as run:
                run.reached.add(sparse.layers[0])
                run.begin_step(rounded, {})
                assert run.in_window


def test_the_step_of_a_sigma_between_two_is_the_nearer(make: Callable[..., Any]) -> None:
    sparse = make()
    with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as run:
        run.reached.add(sparse.layers[0])
        steps = []
        for sigma in (1.0, 0.9, 0.8, 0.75, 0.45, 0.1, 0.0):
            run.begin_step(sigma, {})
            steps.append(run.step)
    assert steps == [0, 0, 1, 1, 2, 2, 2]


def test_a_failed_run_leaves_nothing(make: Callable[..., Any]) -> None:
    sparse = make()
    with pytest.raises(KeyboardInterrupt), sparse.run(SIGMAS, (1.0, 0.0), (), CPU):
        raise KeyboardInterrupt
    assert sparse.current is None
    assert not sparse.runs


def test_a_run_within_a_run_gives_the_outer_one_back(
    make: Callable[..., Any], call: Callable[..., Any]
) -> None:
    sparse = make()
    with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as outer:
        sparse.attend(sparse.layers[0], call())
        with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as inner:
            sparse.attend(sparse.layers[0], call())
            sparse.attend(sparse.layers[1], call())
        assert sparse.current is outer
    assert [run.summary["sparse_calls"] for run in (outer, inner)] == [1, 2]
    assert list(sparse.runs) == [inner, outer]


def test_what_the_first_call_compiles_is_not_time_in_attention(
    attention: ModuleType, make: Callable[..., Any], call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, seconds = attention.choose, 10.0

    def slow(*asked: Any) -> Any:
        nonlocal now
        now += seconds
        return choose(*asked)

    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(attention, "choose", slow)
    sparse = make()
    with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as run:
        sparse.attend(sparse.layers[0], call())
    assert run.summary["sparse_calls"] == 1
    assert run.summary["attention_ms"] == 0.0


def test_a_run_without_steps_misses_no_layer(make: Callable[..., Any]) -> None:
    sparse = make()
    with sparse.run([0.0], (1.0, 0.0), (), CPU) as run:
        pass
    assert run.notes == []
    with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as run:
        pass
    assert len(run.notes) == 1


def test_old_runs_are_forgotten(attention: ModuleType, make: Callable[..., Any]) -> None:
    sparse = make()
    runs = []
    for _ in range(attention.RUNS_KEPT + 2):
        with sparse.run(SIGMAS, (1.0, 0.0), (), CPU) as run:
            runs.append(run)
    assert list(sparse.runs) == runs[2:]


def test_outside_of_a_run_attention_is_sparse_and_nothing_is_kept(
    make: Callable[..., Any], call: Callable[..., Any]
) -> None:
    sparse = make()
    assert not was_dense(sparse.attend(sparse.layers[0], call()))
    assert not sparse.runs


def test_each_run_prints_what_it_did(
    make: Callable[..., Any], call: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    sparse = make(dense_layers=(1,))
    with caplog.at_level(logging.INFO), sparse.run(SIGMAS, (1.0, 0.0), (), CPU):
        for layer in sparse.layers:
            sparse.attend(layer, call())
    (line,) = caplog.messages
    assert "\n" not in line
    assert "layer set to dense" in line
    assert "Time in attention" in line


def test_manual_settings_that_differ_from_a_students_are_warned_about(
    attention: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    student = attention.SparseConfig(top_k=0.03, top_p=0.16)
    policy = attention.DensePolicy()
    attention.choose_settings("manual", student, policy, "auto", student)
    assert not caplog.messages
    chosen = attention.choose_settings("manual", attention.SparseConfig(top_p=0.9), policy, "auto", student)
    assert chosen.config.top_p == 0.9
    (line,) = caplog.messages
    assert "fine-tuned with top_k 0.03, top_p 0.16, sparsity 0" in line
    assert "set them to auto" in line


@pytest.mark.parametrize(("asked", "start"), [((0.0, 1.0), 0.2), ((0.4, 1.0), 0.4), ((0.0, 0.1), 0.1)])
def test_auto_without_a_student_keeps_the_first_steps_dense(
    asked: tuple[float, float], start: float, attention: ModuleType
) -> None:
    policy = attention.DensePolicy(*asked, dense_layers=(3,))
    chosen = attention.choose_settings("auto", attention.SparseConfig(1.0, 1.0), policy, "auto", None)
    assert chosen.config == attention.TRAINING_FREE
    assert (chosen.policy.start_percent, chosen.policy.end_percent) == (start, asked[1])
    assert chosen.policy.dense_layers == (3,)


def test_auto_uses_a_students_settings_at_every_step(attention: ModuleType) -> None:
    student = attention.SparseConfig(top_k=0.05, top_p=0.16)
    chosen = attention.choose_settings(
        "auto", attention.SparseConfig(1.0, 1.0), attention.DensePolicy(), "auto", student
    )
    assert (chosen.config, chosen.policy.start_percent) == (student, 0.0)
