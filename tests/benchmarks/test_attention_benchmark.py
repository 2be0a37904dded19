"""The benchmark itself: its masks, its check against float32, and what it says of methods that fail."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import attention, cases
from benchmarks.cases import HEAD_DIM, TINY, Blocks, gradient_error, random_blocks, relative_error
from benchmarks.methods import Call, Method, Problem

CPU = torch.device("cpu")


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q.float() @ k.float().mT * HEAD_DIM**-0.5, -1) @ v.float()


def test_uniform_rows_keep_the_asked_share_and_pairs_count_real_tokens() -> None:
    blocks = random_blocks(2, 1000, 128, 64, 0.25, ragged=False, device=CPU)
    assert blocks.kept.shape == (1, 2, 8, 16)
    assert bool((blocks.counts == 4).all())
    tokens = blocks.kept.repeat_interleave(128, 2)[:, :, :1000].repeat_interleave(64, 3)[..., :1000]
    assert blocks.pairs() == int(tokens.sum())


def test_ragged_heads_begin_with_a_full_row_beside_a_row_of_one_block() -> None:
    counts = random_blocks(3, 4000, 128, 64, 0.1, ragged=True, device=CPU).counts
    assert bool((counts[0, :, 0] == 63).all())
    assert bool((counts[0, :, 1] == 1).all())
    assert counts[0, :, 2:].unique().numel() > 5


def test_indices_list_the_kept_blocks_first_in_ascending_order() -> None:
    kept = torch.tensor([[[[False, True, False, True], [True, True, True, False]]]])
    blocks = Blocks(kept, 128, 64, 200)
    assert blocks.indices[0, 0, 0, :2].tolist() == [1, 3]
    assert blocks.indices[0, 0, 1, :3].tolist() == [0, 1, 2]


def test_a_coarser_block_is_kept_when_any_part_of_it_is() -> None:
    kept = torch.zeros(1, 1, 3, 5, dtype=torch.bool)
    kept[0, 0, 1, 2] = kept[0, 0, 2, 4] = True
    coarse = Blocks(kept, 128, 64, 300).coarsened(128, 128)
    assert coarse.kept[0, 0].tolist() == [[False, False, False], [False, True, False], [False, False, True]]


@pytest.mark.parametrize("structured", [False, True])
def test_inputs_are_views_of_the_host_layout(structured: bool) -> None:
    inputs = cases.make_inputs(TINY, structured, CPU, torch.bfloat16)
    assert inputs.q.shape == (1, TINY.heads, TINY.tokens, HEAD_DIM)
    assert inputs.q.stride()[1:] == (HEAD_DIM, TINY.heads * HEAD_DIM, 1)
    assert inputs.padded[0].shape[2] % cases.LARGEST_BLOCK == 0
    assert inputs.padded[0].data_ptr() == inputs.q.data_ptr()


def test_the_check_sees_a_missing_block_an_unmasked_key_and_an_unwritten_element() -> None:
    inputs = cases.make_inputs(TINY, False, CPU, torch.float32)
    q, k, v = inputs.q, inputs.k, inputs.v
    right = dense_attention(q, k, v)
    assert relative_error(right, q, k, v, None) < 1e-5
    without_last_key = dense_attention(q, k[:, :, :-64], v[:, :, :-64])
    assert relative_error(without_last_key, q, k, v, None) > attention.METHODS["ours"].error
    first = Blocks(torch.zeros(1, TINY.heads, 4, 7, dtype=torch.bool), 128, 64, TINY.tokens)
    first.kept[..., 0] = True
    assert relative_error(dense_attention(q, k[:, :, :64], v[:, :, :64]), q, k, v, first) < 1e-5
    assert relative_error(dense_attention(q, k[:, :, :65], v[:, :, :65]), q, k, v, first) > 1e-2
    unwritten = right.clone()
    unwritten[0, 1, 200, 3] = float("nan")
    assert not relative_error(unwritten, q, k, v, None) <= 1e9


@pytest.mark.parametrize("sparse", [False, True])
def test_the_check_of_gradients_sees_what_is_missing_in_any_of_them(sparse: bool) -> None:
    inputs = cases.make_inputs(TINY, False, CPU, torch.float32)
    blocks = random_blocks(TINY.heads, TINY.tokens, 128, 64, 0.5, ragged=True, device=CPU) if sparse else None
    hidden = torch.zeros(1, TINY.heads, TINY.tokens, TINY.tokens, dtype=torch.bool)
    if blocks:
        kept = blocks.kept.repeat_interleave(128, 2)[:, :, : TINY.tokens].repeat_interleave(64, 3)
        hidden = ~kept[..., : TINY.tokens]
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    d_out = torch.randn_like(out)
    right = torch.autograd.grad(out, (q, k, v), d_out)
    check = lambda gradients: gradient_error(gradients, d_out, q.detach(), k.detach(), v.detach(), blocks)  # noqa: E731
    assert check(right) < 1e-5
    for i in range(3):
        for token in (0, TINY.tokens - 1):
            wrong = [x.clone() for x in right]
            wrong[i][0, -1, token] *= 1.2
            assert check(tuple(wrong)) > 1e-3, (i, token)
        unwritten = [x.clone() for x in right]
        unwritten[i][0, 0, 200, 3] = float("nan")
        assert not check(tuple(unwritten)) <= 1e9


class Fake(Method):
    name = "fake"
    needs_gpu = False
    patterns = ("uniform",)

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._run = run

    def calls(self, problem: Problem) -> Iterator[Call]:
        q, k, v = problem.inputs.q, problem.inputs.k, problem.inputs.v
        yield Call("total", lambda: self._run(q, k, v), None, (q, k, v))


def only_row(run: Callable[[Tensor, Tensor, Tensor], Tensor], seconds: float = 60.0) -> attention.Row:
    benchmark = attention.Benchmark(CPU, "bf16", 1.0, time.monotonic() + seconds)
    benchmark.run([TINY], [Fake(run)], [0.0], ["uniform"])
    (row,) = benchmark.rows
    return row


def test_a_run_that_is_cut_short_has_the_most_wanted_sparsity_of_every_shape() -> None:
    class Sparse(Fake):
        dense = False

    benchmark = attention.Benchmark(CPU, "bf16", 1.0, time.monotonic() + 60)
    shapes = [TINY, replace(TINY, name="other")]
    right = Sparse(lambda q, k, v: dense_attention(q, k, v).to(q.dtype))
    benchmark.run(shapes, [right], [0.75, 0.0], ["uniform"])
    measured = [(row.sparsity, row.shape) for row in benchmark.rows]
    assert measured == [(0.75, "tiny"), (0.75, "other"), (0.0, "tiny"), (0.0, "other")]


def test_a_right_method_is_timed() -> None:
    row = only_row(lambda q, k, v: dense_attention(q, k, v).to(q.dtype))
    assert (row.status, row.sparsity, row.achieved) == ("ok", 0.0, 0.0)
    assert row.ms
    assert row.rel_err is not None
    assert row.rel_err < 1e-2


def test_a_wrong_method_is_not_timed() -> None:
    row = only_row(lambda q, k, v: v)
    assert (row.status, row.ms) == ("wrong", None)


def test_a_method_that_raises_says_why_and_the_run_goes_on() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError("no kernel\nfor this")

    row = only_row(broken)
    assert (row.status, row.note) == ("failed", "NotImplementedError: no kernel")


def test_what_there_was_no_time_for_is_said() -> None:
    assert only_row(lambda q, k, v: v, seconds=-1.0).status == "out of time"


def test_a_run_without_a_gpu_measures_the_reference_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "results.json"
    options = [
        "--tiny",
        "--cell-ms",
        "1",
        "--sparsities",
        "0.5",
        "--methods",
        "ours",
        "fa4",
        "--out",
        str(path),
    ]
    assert attention.main(options) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    ours = [row for row in rows if row["method"] == "ours" and row["status"] == "ok"]
    assert {(row["part"], row["pattern"], row["config"].partition(", ")[2]) for row in ours} >= {
        ("kernel", "uniform", ""),
        ("mask", "uniform", "top_p=0"),
        ("total", "uniform", "top_p=0"),
        ("fwd+bwd", "uniform", "top_p=0"),
        ("backward", "uniform", "top_p=0"),
        ("kernel", "ragged", ""),
        ("kernel", "structured", ""),
        ("mask", "structured", "sparsity=0.5"),
        ("total", "structured", "sparsity=0.5"),
    }
    assert len(ours) == 11  # structured masks and totals also with a top_p
    assert [row["status"] for row in rows if row["method"] == "fa4"] == ["unsupported"]
    assert "at 50%" in capsys.readouterr().out
