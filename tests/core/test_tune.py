"""What a calibration chooses, that it holds for other data, and which files of it are taken."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparge_core import SparseConfig, block_mask, sparse_attention
from sparge_core.geometry import BLOCK_K
from sparge_core.tune import (
    HEADROOM,
    LADDER,
    Calibration,
    Identity,
    LayerTuning,
    TuneError,
    Tuning,
    load_tuning,
    name_layers,
    percent,
)

TOKENS, HEADS, DIM, STEPS = 1024, 2, 64, 2
MODEL = Identity("T2V", 128, 2, 3)
# How strongly the queries of a layer look at their own place: the more, the more can be skipped.
FOCUS = {"blocks.0": 0.3, "blocks.1": 0.7, "blocks.2": 1.0}
BUDGET = 0.1


def qkv(seed: int, focus: float, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """One layer's tokens: each place has a direction of its own, the same for all seeds, under noise."""
    fixed, noise = torch.Generator().manual_seed(99), torch.Generator().manual_seed(1000 * seed + step)
    places = torch.randn(HEADS, TOKENS // BLOCK_K, DIM, generator=fixed).repeat_interleave(BLOCK_K, 1)
    q, k, v = (torch.randn(1, HEADS, TOKENS, DIM, generator=noise) for _ in range(3))
    return q + focus * places, 0.5 * k + places, v + places


def error_of(config: SparseConfig, seed: int, focus: float, step: int) -> float:
    q, k, v = qkv(seed, focus, step)
    dense = F.scaled_dot_product_attention(q, k, v)
    return float((sparse_attention(q, k, v, config) - dense).abs().sum() / dense.abs().sum())


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """Of seed 0, with a layer that no call came to."""
    calibration = Calibration([*FOCUS, "blocks.3"], STEPS)
    for step in range(STEPS):
        for layer, focus in FOCUS.items():
            q, k, v = qkv(0, focus, step)
            calibration.record(layer, step, q, k, v, F.scaled_dot_product_attention(q, k, v))
    calibration.finish()
    return calibration


def test_every_layer_stays_within_the_budget_on_data_that_was_not_seen(calibration: Calibration) -> None:
    tuning = calibration.tune(BUDGET, MODEL)
    sparse = {name: layer.config for name, layer in tuning.layers.items() if layer.config is not None}
    assert list(sparse) == ["blocks.1", "blocks.2"]
    assert sparse["blocks.1"].sparsity < sparse["blocks.2"].sparsity
    for name, config in sparse.items():
        for seed in (1, 2):
            assert max(error_of(config, seed, FOCUS[name], step) for step in range(STEPS)) <= BUDGET


def test_a_layer_gets_the_sparsest_setting_that_fits_at_the_worst_step(calibration: Calibration) -> None:
    tuning = calibration.tune(BUDGET, MODEL)
    for name in ("blocks.1", "blocks.2"):
        worst = [max(error_of(config, 0, FOCUS[name], step) for step in range(STEPS)) for config in LADDER]
        chosen = next(place for place, error in enumerate(worst) if error <= HEADROOM * BUDGET)
        layer = tuning.layers[name]
        assert layer.config == LADDER[chosen]
        assert layer.error == pytest.approx(worst[chosen], rel=1e-3)
        masks = [block_mask(*qkv(0, FOCUS[name], step)[:2], LADDER[chosen]) for step in range(STEPS)]
        assert layer.skipped == pytest.approx(np.mean([float(mask.sparsity) for mask in masks]), abs=1e-5)


def test_layers_that_no_setting_fits_or_that_were_not_measured_stay_dense_and_are_named(
    calibration: Calibration,
) -> None:
    tuning = calibration.tune(BUDGET, MODEL)
    least = max(error_of(LADDER[-1], 0, FOCUS["blocks.0"], step) for step in range(STEPS))
    failed, unmeasured = tuning.layers["blocks.0"], tuning.layers["blocks.3"]
    assert failed == LayerTuning(None, pytest.approx(least, rel=1e-3), 0.0)
    assert unmeasured == LayerTuning(None, None, 0.0)
    text = tuning.describe()
    assert f"no setting keeps them within the budget: blocks 0 (the least error was {percent(least)}" in text
    assert "dense, because they were not measured: blocks 3" in text
    skipped = sum(tuning.layers[name].skipped for name in ("blocks.1", "blocks.2")) / 4
    assert text.startswith(f"Skips {skipped:.1%} of the attention")
    assert (tuning.steps, tuning.tokens) == (STEPS, TOKENS)


def test_a_budget_that_no_layer_meets_is_said_and_what_would_do(calibration: Calibration) -> None:
    tuning = calibration.tune(1e-4, MODEL)
    assert all(layer.config is None for layer in tuning.layers.values())
    text = tuning.describe()
    assert text.startswith("No setting keeps any layer within the budget of 0.010%, so all layers stay dense")
    least = min(layer.error for layer in tuning.layers.values() if layer.error is not None)
    assert f"a budget above {percent(least / HEADROOM)} would do" in text
    enough = calibration.tune(1.001 * least / HEADROOM, MODEL)
    assert any(layer.config is not None for layer in enough.layers.values())


def test_a_run_without_a_measured_call_says_so() -> None:
    calibration = Calibration(["blocks.0"], 1)
    calibration.finish()
    tuning = calibration.tune(BUDGET, MODEL)
    assert tuning.skipped == 0.0
    assert tuning.describe().startswith("No layer was measured, so all layers stay dense")


def test_a_layer_with_errors_that_are_no_numbers_stays_dense() -> None:
    q, k, v = qkv(0, 1.0, 0)
    v = v.index_fill(2, torch.tensor(5), math.nan)
    calibration = Calibration(["a"], 1)
    calibration.record("a", 0, q, k, v, F.scaled_dot_product_attention(q, k, v))
    calibration.finish()
    assert calibration.tune(BUDGET, MODEL).layers == {"a": LayerTuning(None, None, 0.0)}


def test_two_calls_of_a_step_are_as_one_of_both() -> None:
    calls = [[x[:, :, :256] for x in qkv(seed, 1.0, 0)] for seed in (0, 1)]
    found = []
    for batches in (calls, [[torch.cat(x) for x in zip(*calls, strict=True)]]):
        calibration = Calibration(["a"], 1)
        for q, k, v in batches:
            calibration.record("a", 0, q, k, v, F.scaled_dot_product_attention(q, k, v))
        calibration.finish()
        found.append(calibration.errors())
    assert np.allclose(found[0], found[1], rtol=1e-4)


def test_recording_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(*_: Any, **__: Any) -> None:
        raise AssertionError("a value was fetched from the device")

    q, k, v = (x[:, :, :256] for x in qkv(0, 1.0, 0))
    dense = F.scaled_dot_product_attention(q, k, v)
    calibration = Calibration(["a"], 1)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
            patch.setattr(torch.Tensor, name, waited)
        calibration.record("a", 0, q, k, v, dense)
    calibration.finish()
    assert np.isfinite(calibration.errors()).all()


@pytest.mark.parametrize("budget", [0, 0.0, -0.1, math.nan, math.inf, "0.1", None, True])
def test_a_budget_that_is_none_is_refused_in_a_sentence(budget: Any, calibration: Calibration) -> None:
    with pytest.raises(TuneError, match=r"The budget is .*; it must be a number above 0, such as 0.05"):
        calibration.tune(budget, MODEL)


@pytest.mark.parametrize(
    ("model", "layers", "sentence"),
    [
        (Identity("I2V", 128, 2, 3), FOCUS, "the tuning is for Wan T2V of width 128.*this model is Wan I2V"),
        (Identity("T2V", 128, 2, 3), [*FOCUS, "vace_blocks.0"], "differ in the layers vace_blocks 0"),
    ],
)
def test_a_tuning_for_another_model_says_so(model: Identity, layers: Any, sentence: str) -> None:
    tuning = Tuning(MODEL, BUDGET, (0.0, 1.0), 1, 1, {name: LayerTuning(None, None, 0.0) for name in FOCUS})
    assert tuning.why_not(MODEL, FOCUS) is None
    assert re.search(sentence, tuning.why_not(model, layers) or "")


# ------------------------------------------------------------------------------------------------------------
# The file


@pytest.fixture
def file(calibration: Calibration, tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "tuning.json"
    calibration.tune(BUDGET, MODEL, (0.2, 1.0)).save(path)
    return path


def test_a_file_gives_back_the_tuning_that_was_saved(file: Path, calibration: Calibration) -> None:
    assert load_tuning(file) == calibration.tune(BUDGET, MODEL, (0.2, 1.0))
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_save_that_fails_leaves_the_earlier_file_and_nothing_else(
    file: Path, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        calibration.tune(0.5, MODEL).save(file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


Change = Callable[[dict[str, Any]], object]


def of_layer(name: str, **values: Any) -> Change:
    return lambda content: content["layers"][name].update(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda x: x.update(sparge_attention2_tuning=2),
            "sparge_attention2_tuning is 2, and .* works with 1",
        ),
        (
            lambda x: x.update(method_version="0"),
            "its method_version is '0', and this version works with '1'",
        ),
        (lambda x: x.update(block_k=128), "its block_k is 128"),
        (lambda x: x.pop("sparge_attention2_tuning"), "it lacks the key sparge_attention2_tuning"),
        (lambda x: x.pop("budget"), "the file lacks budget"),
        (lambda x: x.update(more=1), "the file has an unknown key more"),
        (lambda x: x.update(budget=-1), "The budget is -1"),
        (lambda x: x.update(budget=10**400), "too large"),
        (lambda x: x.update(start_percent=2), "start_percent is 2, and it must be a number from 0 to 1"),
        (lambda x: x.update(end_percent=0.1), "start_percent 0.2 is greater than its end_percent 0.1"),
        (lambda x: x.update(steps=1.5), "steps is 1.5, and it must be a whole number"),
        (lambda x: x.update(layers={}), "it has no layers"),
        (lambda x: x.update(model="Wan"), "model is 'Wan', and it must hold type, dim"),
        (lambda x: x["model"].update(heads=0), "model.heads is 0"),
        (lambda x: x["model"].update(type=3), "model.type is 3"),
        (of_layer("blocks.1", setting="spare"), "layers.blocks.1.setting is 'spare'"),
        (of_layer("blocks.1", setting={"top_k": 1.5, "sparsity": 0.5}), r"setting.top_k is 1.5"),
        (of_layer("blocks.1", setting={"top_k": 0.1, "sparsity": 1.0}), r"setting.sparsity is 1.0"),
        (of_layer("blocks.1", setting={"top_k": 0.1, "sparsity": "0.5"}), r"setting.sparsity is '0.5'"),
        (of_layer("blocks.1", skipped=-0.1), "layers.blocks.1.skipped is -0.1"),
        (of_layer("blocks.1", skipped=True), "layers.blocks.1.skipped is True"),
        (of_layer("blocks.1", error=0.2), "sparse with an error of 0.2, beyond the budget of 0.1"),
        (of_layer("blocks.1", error=None), "sparse with an error of None"),
        (of_layer("blocks.0", error=-1.0), "layers.blocks.0.error is -1.0"),
        (of_layer("blocks.1", error=math.nan), "it holds NaN, which is no number"),
        (of_layer("blocks.0", error=math.inf), "it holds Infinity"),
    ],
)
def test_a_file_that_is_not_whole_and_sound_is_refused_by_name(
    change: Change, sentence: str, file: Path
) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TuneError, match=f"tuning.json is no tuning that can be used: .*{sentence}"):
        load_tuning(file)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe{}", b'{"a": ' * 100_000, b'{"budget": 1e999}', b"null"]
)
def test_a_file_that_is_no_json_of_ours_is_refused(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(TuneError, match=r"tuning\.json is no tuning that can be used: it .*Make it anew"):
        load_tuning(file)


# ------------------------------------------------------------------------------------------------------------
# Words


def test_layers_are_named_by_ranges() -> None:
    names = ["blocks.10", "blocks.2", "blocks.0", "blocks.1", "vace_blocks.0", "head"]
    assert name_layers(names) == "blocks 0-2, 10; vace_blocks 0; head"


@pytest.mark.parametrize(
    ("share", "text"), [(0.05, "5.0%"), (0.1234, "12%"), (0.00012, "0.012%"), (2.5, "250%"), (0.0, "0%")]
)
def test_shares_have_two_digits_that_count(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_settings_are_told_in_a_line() -> None:
    layers = {
        "blocks.0": LayerTuning(SparseConfig(sparsity=0.9), 0.01, 0.9),
        "blocks.1": LayerTuning(None, 0.2, 0.0),
        "blocks.2": LayerTuning(SparseConfig(sparsity=0.9), 0.01, 0.9),
    }
    tuning = Tuning(MODEL, 0.05, (0.0, 1.0), 1, 1, layers)
    assert tuning.summary() == "top_k 0.03, sparsity 0.9 in blocks 0, 2; dense in blocks 1"
