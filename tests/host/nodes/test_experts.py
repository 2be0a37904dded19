"""Wan2.2 14B: two models, one for the first steps and one for the last, each with a student of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models as makers

from .conftest import HEADS, LAYERS, SIZE, Model
from .test_composition import shift

STEPS, SWITCH = 4, 2

Patch = Callable[..., Model]
Account = Callable[[Model], dict[str, Any]]


def weights(seed: int) -> dict[str, Tensor]:
    return makers.random_dit("t2v", heads=HEADS, layers=LAYERS, seed=seed)


@pytest.fixture
def configs(core: ModuleType) -> tuple[Any, Any]:
    """What the two students were distilled for."""
    return core.SparseConfig(top_k=0.3, top_p=0.4), core.SparseConfig(top_k=0.1, top_p=0.2, sparsity=0.6)


@pytest.fixture
def students(
    file: Callable[..., str],
    load_student: Callable[..., Model],
    load: Callable[..., Model],
    configs: tuple[Any, Any],
) -> tuple[Model, Model]:
    """A full model for the first steps, and a diff on another base for the last."""
    first, last = configs
    high = load_student(file(weights(21), "high.safetensors", first.to_metadata()))
    base, target = weights(0), weights(22)
    diff = {f"{key}.diff": target[key].float() - base[key].float() for key in base}
    return high, load_student(file(diff, "low.safetensors", last.to_metadata(), "loras"), load("t2v"))


@pytest.fixture(scope="session")
def sample_both(comfy: ModuleType) -> Callable[[Model, Model], tuple[Tensor, Tensor]]:
    """As two samplers do it in a graph: what the first leaves, with its noise, and what the second makes."""
    import comfy.sample

    positive, negative = ([[makers.text_embedding(seed), {}]] for seed in (0, 1))
    empty = torch.zeros(1, makers.LATENT_CHANNELS, *SIZE)

    def run(model: Model, latent: Tensor, noise: Tensor, **steps: Any) -> Tensor:
        return comfy.sample.sample(
            model,
            noise,
            STEPS,
            3.0,
            "euler",
            "simple",
            positive,
            negative,
            latent,
            disable_pbar=True,
            **steps,
        )

    def sample_both(high: Model, low: Model) -> tuple[Tensor, Tensor]:
        noise = comfy.sample.prepare_noise(empty, 7)
        between = run(high, empty, noise, start_step=0, last_step=SWITCH)
        return between, run(low, between, torch.zeros_like(noise), disable_noise=True, start_step=SWITCH)

    return sample_both


def test_each_expert_runs_with_its_own_student_and_settings(
    students: tuple[Model, Model],
    configs: tuple[Any, Any],
    patch: Patch,
    account: Account,
    rooms: SimpleNamespace,
    sample_both: Callable[[Model, Model], tuple[Tensor, Tensor]],
    load: Callable[..., Model],
    caplog: pytest.LogCaptureFixture,
) -> None:
    high, low = (shift(patch(student, settings="auto")) for student in students)
    between, video = sample_both(high, low)
    assert video.isfinite().all()
    for model, latent, config, file in (
        (high, between, configs[0], "high.safetensors"),
        (low, video, configs[1], "low.safetensors"),
    ):
        did = account(model)
        assert did["settings"]["source"] == "auto: the student's own"
        assert rooms.host.patch_of(model).settings.config == config
        assert rooms.host.student_file(model) == file
        assert did["sparse_calls"] == LAYERS * SWITCH
        assert (did["dense_calls"], did["notes"]) == ({}, [])
        assert rooms.host.find_run(rooms.host.patch_of(model), latent)[1]
    assert account(low)["sparsity"] == pytest.approx(0.6, abs=0.05)
    assert account(high)["sparsity"] < 0.5
    assert "SpargeAttention2" not in " ".join(
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    )

    # The same weights loaded whole, with the same settings by hand.
    by_hand = [
        shift(
            patch(
                load("t2v", weights(seed)), top_k=config.top_k, top_p=config.top_p, sparsity=config.sparsity
            )
        )
        for seed, config in zip((21, 22), configs, strict=True)
    ]
    torch.testing.assert_close(sample_both(*by_hand)[1], video, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(sample_both(*reversed(by_hand))[1], video, atol=0.1)


def test_one_model_may_be_both_experts_each_with_a_patch(
    model: Model,
    patch: Patch,
    account: Account,
    sample_both: Callable[[Model, Model], tuple[Tensor, Tensor]],
) -> None:
    """Without experts, too: other settings for the last steps."""
    high, low = patch(model, sparsity=0.3), patch(model, sparsity=0.7)
    first = sample_both(high, low)
    assert account(high)["sparsity"] < 0.5 < account(low)["sparsity"]
    again = sample_both(high, low)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
