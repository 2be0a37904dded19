"""What a run's statistics say, and that recording them waits for nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from sparge_core import BlockMask, SparseConfig, block_mask, record
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks
from sparge_core.record import RunStatistics, Timer
from sparge_core.reference import kept_mass
from sparge_core.report import describe, status

CPU = torch.device("cpu")
CONFIG = SparseConfig(0.1, 0.2)
PICTURE = "sparge_core.picture"


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
    mask, mass, output = mask_of(2), torch.tensor(0.5), torch.ones(1, 8, 4)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
            patch.setattr(torch.Tensor, name, waited)
        statistics.record_sparse("a", 0, mask, CONFIG, Timer(CPU), grid=(2, 16, 16))
        statistics.record_mass("a", 0, mass)
        statistics.record_error("a", 0, output, output)
        statistics.record_dense("a", 0, "asked for", Timer(CPU))
        statistics.send()
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


def random_mask(seed: int, q_len: int, k_len: int, batch: int = 2, heads: int = 3) -> BlockMask:
    shape = (batch, heads, num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K))
    generator = torch.Generator().manual_seed(seed)
    return BlockMask.from_dense(torch.rand(shape, generator=generator) < 0.4, q_len, k_len)


def token_pairs(mask: BlockMask) -> torch.Tensor:
    """bool (B, H, Lq, Lk): every pair of tokens, to be counted one by one."""
    tokens = mask.dense().repeat_interleave(BLOCK_Q, 2).repeat_interleave(BLOCK_K, 3)
    return tokens[:, :, : mask.q_len, : mask.k_len]


# Whole and ragged last blocks, with the last key block at each end of a word of bits.
LENGTHS = [
    (256, 256),
    (300, 300),
    (1, 1),
    (140, 32 * BLOCK_K),
    (140, 32 * BLOCK_K - 3),
    (140, 33 * BLOCK_K - 63),
    (128, 31 * BLOCK_K - 1),
]


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
def test_the_sparsity_is_that_of_the_tokens_counted_one_by_one(q_len: int, k_len: int) -> None:
    statistics = RunStatistics(["a", "b"], 2)
    first, second, other = (random_mask(seed, q_len, k_len) for seed in range(3))
    for layer, step, mask in (("a", 0, first), ("a", 1, second), ("b", 1, other)):
        statistics.record_sparse(layer, step, mask, CONFIG)
    summary = statistics.summary()
    skipped = [1.0 - token_pairs(mask).double().mean().item() for mask in (first, second, other)]
    assert summary["sparsity_map"] == [
        [pytest.approx(skipped[0], abs=1e-12), pytest.approx(skipped[1], abs=1e-12)],
        [None, pytest.approx(skipped[2], abs=1e-12)],
    ]
    assert summary["sparsity"] == pytest.approx(sum(skipped) / 3, abs=1e-12)
    of_a = torch.cat([token_pairs(first), token_pairs(second)]).double().mean((0, 2, 3))
    assert summary["sparsity_by_head"][0] == pytest.approx((1.0 - of_a).tolist(), abs=1e-12)


def test_a_journal_that_is_full_is_sent_and_used_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "JOURNAL_VALUES", 40)
    statistics = RunStatistics(["a"], 1)
    masks = [random_mask(seed, 300, 300) for seed in range(9)]
    for mask in masks:
        statistics.record_sparse("a", 0, mask, CONFIG)
    kept = torch.stack([token_pairs(mask).double().mean() for mask in masks]).mean().item()
    assert statistics.summary()["sparsity"] == pytest.approx(1.0 - kept, abs=1e-12)

    wide = random_mask(0, 300, 300, heads=50)  # leaves more than the whole journal holds
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, wide, CONFIG)
    assert statistics.summary()["sparsity"] == pytest.approx(1.0 - token_pairs(wide).double().mean().item())


def test_an_example_shows_what_the_centre_of_the_middle_frame_looks_at() -> None:
    grid, tokens = (5, 8, 14), 5 * 8 * 14
    mask = random_mask(0, tokens, tokens)
    statistics = RunStatistics(["a"], 3)
    statistics.record_sparse("a", 1, mask, CONFIG, grid=grid)
    statistics.record_sparse("a", 1, random_mask(1, tokens, tokens), CONFIG, grid=grid)  # the first is kept
    statistics.summary()
    assert statistics.example("a", 0) is None
    example = statistics.example("a", 1)
    assert example is not None
    centre = (2 * 8 + 4) * 14 + 7
    first, last = example.queries
    assert first <= centre < last
    looked_at = token_pairs(mask)[0, :, centre]
    assert np.array_equal(example.token_shares(2), looked_at[2].numpy())
    assert example.token_shares() == pytest.approx(looked_at.double().mean(0).numpy())
    assert example.grid == grid


@pytest.mark.parametrize(
    ("grid", "tokens", "shown"),
    [
        ((5, 8, 14), 5 * 8 * 14, (5, 8, 14)),
        ((5, 8, 14), 6 * 8 * 14, (6, 8, 14)),  # a reference frame before the video
        ((5, 8, 14), 5 * 8 * 14 + 3, None),
        (None, 560, None),
    ],
)
def test_a_grid_is_only_shown_where_it_holds_the_tokens(grid: Any, tokens: int, shown: Any) -> None:
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, random_mask(0, tokens, tokens), CONFIG, grid=grid)
    statistics.summary()
    (example,) = statistics.examples()
    assert example.grid == shown
    assert example.queries[0] < tokens


def test_the_kept_mass_is_that_of_the_pooled_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 700, 64, generator=generator) for _ in range(2))
    config = SparseConfig(0.1, 0.5)
    mask = block_mask(q, k, config)
    q_means = torch.stack([x.mean(2) for x in q.split(BLOCK_Q, 2)], 2)
    k_means = torch.stack([x.mean(2) for x in k.split(BLOCK_K, 2)], 2)
    shares = (torch.einsum("bhid,bhjd->bhij", q_means, k_means) / 8.0).softmax(-1)
    rows = (shares * mask.dense()).sum(-1)[0]
    assert kept_mass(q, k, mask).item() == pytest.approx(rows.mean().item(), rel=1e-6)
    assert kept_mass(q, k, mask, rows=3).item() == pytest.approx(rows[:, ::2].mean().item(), rel=1e-6)
    assert kept_mass(q, k, mask).item() >= 0.5

    statistics = RunStatistics(["a", "b"], 20)
    asked = []
    for step in range(3, 20):
        if statistics.wants_mass("a", step):
            asked.append(step)
            statistics.record_mass("a", step, kept_mass(q, k, mask))
        assert not statistics.wants_mass("a", step)
    assert asked == [3, 8, 16]  # the first that is sparse, and then some
    summary = statistics.summary()
    assert summary["kept_mass"] == pytest.approx(rows.mean().item(), rel=1e-6)
    assert [step for step, mass in enumerate(summary["kept_mass_map"][0]) if mass is not None] == asked
    assert summary["kept_mass_map"][1] == [None] * 20


def test_a_mass_that_is_no_number_is_left_out() -> None:
    statistics = RunStatistics(["a"], 1)
    statistics.record_mass("a", 0, torch.tensor(float("nan")))
    assert statistics.summary()["kept_mass"] is None


def test_layers_are_ranked_by_the_error_of_their_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "COMPARED_VALUES", 100)  # so that an output is compared in parts
    generator = torch.Generator().manual_seed(0)
    names = ["a", "b", "c", "never compared"]
    statistics = RunStatistics(names, 4)
    assert statistics.summary()["probe"] is None
    errors: dict[str, float] = {}
    for name, noise in zip(names, (0.2, 0.7, 0.1), strict=False):
        difference = norm = 0.0
        for step in (1, 3):
            dense = torch.randn(2, 37, 8, generator=generator)
            sparse = dense + noise * torch.randn(2, 37, 8, generator=generator)
            statistics.record_error(name, step, sparse, dense)
            difference += (sparse - dense).abs().sum().item()
            norm += dense.abs().sum().item()
        errors[name] = difference / norm
    probe = statistics.summary()["probe"]
    assert probe["error"] == [*(pytest.approx(error, rel=1e-5) for error in errors.values()), None]
    assert probe["ranking"] == sorted(errors, key=lambda name: -errors[name]) == ["b", "a", "c"]
    assert probe["steps"] == [1, 3]
    assert [error is None for error in probe["error_map"][0]] == [True, False, True, False]
    text = describe(statistics.summary())
    assert "Probe at step 2, 4" in text
    assert f"largest first: b {errors['b']:.1%}, a {errors['a']:.1%}, c {errors['c']:.1%}." in text


def test_a_run_that_goes_on_is_told_in_a_line() -> None:
    statistics = RunStatistics(["a"], 4)
    assert status(1, 4, statistics.progress()) == "Step 1/4: 0 sparse, 0 dense"
    statistics.record_sparse("a", 0, mask_of(2), CONFIG)
    assert status(1, 4, statistics.progress()) == "Step 1/4: 1 sparse, 0 dense"
    statistics.send()
    statistics.record_dense("a", 1, "layer set to dense")
    line = "Step 2/4: 75.0% skipped; 1 sparse, 1 dense"
    assert status(2, 4, statistics.progress()) == line


def test_the_factor_compares_calls_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 0.0, 3.0, 0.0, 5.0, 0.0, 100.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, mask_of(4), CONFIG, Timer(CPU))
    size = (1, 1, 4 * BLOCK_Q, 8 * BLOCK_K)
    factors = []
    for of in (size, size, (1, 1, 64, 64)):
        factors.append(statistics.summary()["speedup"])
        statistics.record_dense("a", 0, "asked for", Timer(CPU), of)
    summary = statistics.summary()
    assert [*factors, summary["speedup"]] == [None, 3.0, 4.0, 4.0]
    assert "A dense call takes 4.00 times as long as a sparse one of its size." in describe(summary)


def test_the_memory_is_that_of_the_largest_mask() -> None:
    statistics = RunStatistics(["a"], 1)
    statistics.record_sparse("a", 0, mask_of(8, of=16, heads=2), CONFIG)
    statistics.record_sparse("a", 0, mask_of(4), CONFIG)
    memory = statistics.summary()["memory"]
    assert memory == {"mask_bytes": 2 * 8 * (1 + 1) * 4, "peak_bytes": None}
    assert "Memory: 0.1 KiB for the largest mask." in describe(statistics.summary())


def test_the_picture_shows_sparse_dense_and_idle_cells() -> None:
    picture = pytest.importorskip(PICTURE, reason="Pillow draws the picture; it comes with ComfyUI")
    statistics = RunStatistics(["a", "b"], 3)
    statistics.record_sparse("a", 0, mask_of(0), CONFIG)
    statistics.record_sparse("a", 1, mask_of(8), CONFIG)
    statistics.record_dense("b", 0, "layer set to dense")
    drawn = picture.plot(statistics.summary())
    assert drawn.dtype == np.float32
    assert drawn.ndim == 3
    assert drawn.shape[2] == 3
    assert drawn.min() >= 0.0
    assert drawn.max() <= 1.0
    left, top, right, bottom = picture.map_boxes(picture.MARGIN + picture.HEADLINE + picture.GAP)[0]

    def cell(layer: int, step: int) -> tuple[int, ...]:
        y, x = top + int((layer + 0.5) * (bottom - top) / 2), left + int((step + 0.5) * (right - left) / 3)
        return tuple(round(channel * 255) for channel in drawn[y, x])

    assert cell(0, 0) == tuple(picture.COLOURS[-1])
    assert cell(0, 1) == tuple(picture.COLOURS[0])
    assert cell(1, 0) == picture.DENSE_GREY
    assert cell(1, 1) == picture.BACKGROUND


@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize("grid", [(2, 8, 16), None])
def test_the_picture_shows_where_a_query_block_looks(grid: Any, head: int | None) -> None:
    picture = pytest.importorskip(PICTURE, reason="Pillow draws the picture; it comes with ComfyUI")
    statistics = RunStatistics(["a"], 1)
    kept = torch.tensor([[True, False, True, False], [False, True, True, False]])  # of each head
    dense = kept[None, :, None].expand(1, 2, 2, 4)
    statistics.record_sparse("a", 0, BlockMask.from_dense(dense, 256, 256), CONFIG, grid=grid)
    statistics.summary()
    (example,) = statistics.examples()
    tiles = picture._Tiles(example, head)
    pixels = tiles._pixels.reshape(-1, 3)[:256]
    first, last = example.queries
    assert (first, last) == (128, 256)
    assert (pixels[first:last] == picture.QUERY).all()
    shares = [0.5, 0.5] if head is None else [0.0, 1.0]
    expected = picture._colours(np.array(shares)).repeat(BLOCK_K, 0)
    assert np.array_equal(pixels[:first], expected)
    shown = picture.plot(statistics.summary(), example=example, head=head)
    assert len(shown) > len(picture.plot(statistics.summary()))


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (40, 50), (200, 4)])
def test_runs_of_any_size_can_be_drawn(layers: int, steps: int) -> None:
    picture = pytest.importorskip(PICTURE, reason="Pillow draws the picture; it comes with ComfyUI")
    statistics = RunStatistics([f"a layer with a long name {layer}" for layer in range(layers)], steps)
    assert picture.plot(statistics.summary()).shape[2] == 3
    statistics.record_sparse("a layer with a long name 0", steps - 1, mask_of(3), CONFIG)
    assert picture.plot(statistics.summary(), "a line\n\n" + 400 * "word ").shape[2] == 3
