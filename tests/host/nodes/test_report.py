"""The report node after a real sampling run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import LAYERS, STEPS, Model

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Report = Callable[[Model, Tensor], tuple[Tensor, str, dict[str, Any]]]


@pytest.fixture
def report(rooms: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Report:
    """Runs the report node: image, text and the decoded JSON. Its preview goes to a temporary folder."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path))

    def report(model: Model, samples: Tensor) -> tuple[Tensor, str, dict[str, Any]]:
        output = rooms.report.SpargeSparsityReport.execute(model, {"samples": samples})
        image, text, numbers = output.args
        assert output.ui["text"] == (text,)
        (shown,) = output.ui["images"]
        assert (tmp_path / shown["filename"]).is_file()
        return image, text, json.loads(numbers)

    return report


def test_it_says_what_the_run_did(model: Model, patch: Patch, sample: Sample, report: Report) -> None:
    patched = patch(model, sparsity=0.6, dense_layers="1")
    image, text, numbers = report(patched, sample(patched))
    assert image.ndim == 4
    assert image.shape[-1] == 3
    assert image.dtype == torch.float32
    assert 0.0 <= image.min() < image.max() <= 1.0
    assert numbers["sparse_calls"] == STEPS
    assert numbers["dense_calls"] == {"layer set to dense": STEPS}
    assert numbers["attention_ms"] > 0.0
    assert numbers["layers"] == [f"blocks.{block}" for block in range(LAYERS)]
    assert numbers["settings"]["config"]["sparsity"] == 0.6
    assert "layer set to dense" in text
    assert (
        "Settings (manual): top_k 0.03, sparsity 0.6, from 0% to 100% of the sampling, dense layers: 1"
        in text
    )
    assert "Note" not in text


def test_it_is_about_the_run_that_made_the_latent(
    model: Model, patch: Patch, sample: Sample, report: Report
) -> None:
    patched = patch(model)
    first, second = sample(patched, steps=1), sample(patched, steps=3)
    assert report(patched, first)[2]["steps"] == 1
    assert report(patched, first.half())[2]["steps"] == 1  # as --fp16-intermediates hands it on
    assert report(patched, second)[2]["steps"] == 3
    _, text, numbers = report(patched, torch.zeros_like(first))
    assert numbers["steps"] == 3
    assert "no run of this model made this latent, so these are the numbers of its latest run" in text


def test_a_model_without_a_students_weights_is_warned_about_high_sparsity(
    model: Model, patch: Patch, sample: Sample, report: Report, rooms: SimpleNamespace
) -> None:
    settings = {"sparsity": 0.9, "top_k": 0.0}
    warning = "but the model carries no settings of a distilled student"
    large = (3, 32, 32)  # 72 blocks a head, or the one block that each row keeps would be more than a tenth
    patched = patch(model, **settings)
    assert warning in report(patched, sample(patched, size=large, steps=1))[1]

    student = model.clone()
    student.set_attachments(rooms.host.STUDENT, rooms.host.patch_of(patched).settings.config)
    trained = patch(student, **settings)
    assert warning not in report(trained, sample(trained, size=large, steps=1))[1]


def test_a_model_without_the_patch_or_a_run_is_refused(model: Model, patch: Patch, report: Report) -> None:
    with pytest.raises(ValueError, match="has not been through SpargeAttention2; connect the MODEL"):
        report(model, torch.zeros(1))
    with pytest.raises(ValueError, match="No sampler has run with this model yet; connect the LATENT"):
        report(patch(model), torch.zeros(1))
