"""Calibrating, tuning and loading, in real sampling runs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import LAYERS, Model

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
STEPS = 3
LARGE = (3, 20, 22)  # 330 tokens: three query blocks and six key blocks


@pytest.fixture(scope="module")
def nodes(pack: ModuleType) -> SimpleNamespace:
    names = ("calibrate", "tune", "tuning")
    return SimpleNamespace(
        **{name: importlib.import_module(f"{pack.__name__}.nodes.{name}") for name in names}
    )


@pytest.fixture(autouse=True)
def output(tmp_path: Path, comfy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    return tmp_path / "output"


@pytest.fixture
def tune(
    nodes: SimpleNamespace, model: Model, patch: Patch, sample: Sample
) -> Callable[..., tuple[Any, Tensor, str]]:
    """Calibrates a run of seed 7 and runs the tune node: tuning, image, text."""

    def tune(budget: float, name: str = "mine", **settings: Any) -> tuple[Any, Tensor, str]:
        calibrated = nodes.calibrate.SpargeCalibrate.execute(patch(model, **settings), 8).args[0]
        latent = sample(calibrated, size=LARGE, steps=STEPS)
        output = nodes.tune.SpargeTune.execute(calibrated, {"samples": latent}, budget, name)
        return output.args

    return tune


def test_a_tuned_model_meets_its_budget_on_a_seed_that_was_not_seen(
    tune: Any,
    nodes: SimpleNamespace,
    rooms: SimpleNamespace,
    model: Model,
    patch: Patch,
    sample: Sample,
    account: Any,
) -> None:
    budget = 0.2
    tuning, image, text = tune(budget)
    assert image.shape[-1] == 3
    assert "File: tunings/mine.json" in text
    loaded = nodes.tuning.SpargeLoadTuning.execute("mine").args[0]
    assert loaded == tuning
    tuned = patch(model, settings="auto", tuning=loaded)
    probed = rooms.probe.SpargeSparsityProbe.execute(tuned, steps=STEPS).args[0]
    sample(probed, size=LARGE, steps=STEPS, seed=8)
    run = account(tuned)
    assert run["sparse_calls"] > 0
    errors = [error for error in run["probe"]["error"] if error is not None]
    assert max(errors) <= budget
    assert run["sparsity"] == pytest.approx(tuning.skipped, abs=0.05)


def test_a_calibrated_run_is_the_dense_one_and_leaves_nothing(
    tune: Any, nodes: SimpleNamespace, model: Model, patch: Patch, sample: Sample
) -> None:
    plain = sample(model, size=LARGE, steps=STEPS)
    calibrated = nodes.calibrate.SpargeCalibrate.execute(patch(model), 8).args[0]
    assert torch.equal(sample(calibrated, size=LARGE, steps=STEPS), plain)
    assert torch.equal(sample(model, size=LARGE, steps=STEPS), plain)


def test_it_says_so_when_no_layer_can_meet_the_budget(tune: Any) -> None:
    tuning, _, text = tune(1e-6)
    assert all(layer.config is None for layer in tuning.layers.values())
    assert text.startswith("No setting keeps any layer within the budget")


@pytest.mark.parametrize("budget", [0.0, -1.0, math.nan])
def test_a_budget_that_is_none_is_a_sentence_and_the_graph_goes_on(
    budget: float, tune: Any, output: Path, model: Model, patch: Patch, sample: Sample
) -> None:
    tuning, _, text = tune(budget)
    assert tuning is None
    assert "it must be a number above 0" in text
    assert not list(output.rglob("*.json"))
    sample(patch(model, tuning=tuning), size=LARGE, steps=1)


def test_a_tuning_for_another_model_is_a_note_and_the_run_uses_the_nodes_own_settings(
    tune: Any, rooms: SimpleNamespace, model: Model, patch: Patch, sample: Sample, account: Any
) -> None:
    tuning = tune(0.2)[0]
    other = replace(tuning, model=replace(tuning.model, dim=5120))
    patched, plain = patch(model, tuning=other), patch(model)
    assert torch.equal(sample(patched, size=LARGE), sample(plain, size=LARGE))
    assert "the tuning is for Wan T2V of width 5120" in account(patched)["notes"][0]
    assert account(patched)["sparse_calls"] == account(plain)["sparse_calls"] == 2 * LAYERS
