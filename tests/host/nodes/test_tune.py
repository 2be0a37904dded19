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


def test_a_model_that_has_nothing_to_tune_is_a_sentence_and_the_graph_goes_on(
    tune: Any, nodes: SimpleNamespace, model: Model, patch: Patch, sample: Sample, output: Path
) -> None:
    patched = patch(model)
    latent = sample(patched, size=LARGE, steps=1)
    for given, name, sentence in (
        (model, "mine", "has not been through SpargeAttention2"),
        (patch(model), "mine", "No sampler has run with this model yet"),
        (patched, "mine", "That run was not calibrated"),
        (patched, "../mine", 'The name "../mine" may hold letters'),
    ):
        tuning, image, text = nodes.tune.SpargeTune.execute(given, {"samples": latent}, 0.1, name).args
        assert tuning is None
        assert sentence in text
        assert text.endswith("Nothing was saved, and SpargeAttention2 gets no tuning.")
        assert image.min() < 0.5
    assert not list(output.rglob("*.json"))


def test_a_folder_that_cannot_be_written_is_a_sentence(tune: Any, output: Path) -> None:
    output.mkdir()
    (output / "tunings").write_text("a file")
    tuning, _, text = tune(0.2)
    assert tuning is None
    assert "Nothing was saved" in text


def test_a_file_that_is_gone_is_named(nodes: SimpleNamespace) -> None:
    assert nodes.tuning.SpargeLoadTuning.fingerprint_inputs("gone") == 0.0
    with pytest.raises(ValueError, match=r"gone\.json cannot be read"):
        nodes.tuning.SpargeLoadTuning.execute("gone")


def test_what_stays_dense_by_the_node_stays_dense_with_a_tuning(
    tune: Any, model: Model, patch: Patch, sample: Sample, account: Any
) -> None:
    tuning = tune(0.5)[0]
    tuned = {"settings": "auto", "tuning": tuning}
    dense_layer = patch(model, dense_layers="0", **tuned)
    sample(dense_layer, size=LARGE, steps=STEPS)
    assert account(dense_layer)["sparsity_map"][0] == [None] * STEPS
    assert account(dense_layer)["sparse_calls"] == (LAYERS - 1) * STEPS
    short = patch(model, min_tokens=1000, **tuned)
    assert torch.equal(sample(short, size=LARGE, steps=STEPS), sample(model, size=LARGE, steps=STEPS))
    assert account(short)["sparse_calls"] == 0


def test_on_manual_a_tuning_is_not_used_and_a_note_says_so(
    tune: Any, model: Model, patch: Patch, sample: Sample, account: Any
) -> None:
    with_tuning, plain = patch(model, tuning=tune(0.2)[0]), patch(model)
    assert torch.equal(sample(with_tuning, size=LARGE), sample(plain, size=LARGE))
    assert account(with_tuning)["notes"] == [
        "a tuning is connected, but on manual the sliders count; set settings to auto to use it"
    ]


def test_a_students_own_settings_give_way_to_a_tuning_with_a_note(
    tune: Any, rooms: SimpleNamespace, model: Model, patch: Patch, sample: Sample, account: Any
) -> None:
    student = model.clone()
    student.set_attachments(rooms.host.STUDENT, rooms.attention.SparseConfig(sparsity=0.9))
    tuned = patch(student, settings="auto", tuning=tune(0.2)[0])
    sample(tuned, size=LARGE)
    (note,) = account(tuned)["notes"]
    assert note == "the tuning is used, and not the settings that the student was fine-tuned with"


def test_an_interrupted_calibration_leaves_nothing(
    nodes: SimpleNamespace, rooms: SimpleNamespace, model: Model, patch: Patch, sample: Sample, output: Path
) -> None:
    plain = sample(model, size=LARGE, steps=STEPS)
    calibrated = nodes.calibrate.SpargeCalibrate.execute(patch(model), 8).args[0]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(calibrated, size=LARGE, steps=STEPS, callback=interrupt)
    assert not rooms.host.patch_of(calibrated).runs
    assert not output.exists()
    assert torch.equal(sample(model, size=LARGE, steps=STEPS), plain)


@pytest.mark.slow
def test_a_compiled_model_follows_its_tuning(
    tune: Any, model: Model, patch: Patch, sample: Sample, account: Any
) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    tuned = patch(model, settings="auto", tuning=tune(0.2)[0])
    expected, did = sample(tuned, size=LARGE, steps=STEPS), account(tuned)
    compiled = tuned.clone()
    set_torch_compile_wrapper(compiled, backend="eager")
    torch.testing.assert_close(sample(compiled, size=LARGE, steps=STEPS), expected, rtol=1e-4, atol=1e-4)
    assert account(compiled)["sparsity_map"] == did["sparsity_map"]
