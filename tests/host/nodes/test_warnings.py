"""What a user is told when the patch does not do what it should: one clear line, and a note in the report."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models as makers

from .conftest import LAYERS, STEPS, Model

KEYS = [f"diffusion_model.blocks.{block}.self_attn.forward" for block in range(LAYERS)]

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Account = Callable[[Model], dict[str, Any]]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def told(account: Account, caplog: pytest.LogCaptureFixture) -> Callable[[Model], str]:
    """The one line that the latest run of a model warned with, which is its one note too."""

    def told(model: Model) -> str:
        (warning,) = warnings(caplog)
        (note,) = account(model)["notes"]
        assert warning == f"SpargeAttention2: {note}."
        return warning

    return told


# ----------------------------------------------------------------------------------------------------------
# A patch that others displace or never call


def test_a_displaced_patch_is_one_clear_line(
    model: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    patched = patch(model)
    own = model.get_model_object(KEYS[1])
    patched.add_object_patch(KEYS[1], lambda *args, **kwargs: own(*args, **kwargs))
    sample(patched)
    (warning,) = warnings(caplog)
    assert "a later node replaced the attention of 1 layers, blocks.1 first" in warning
    assert "put the SpargeAttention2 node behind that one" in warning
    did = account(patched)
    assert did["sparse_calls"] == STEPS
    assert len(did["notes"]) == 1


def test_a_run_that_never_reaches_the_patch_says_so(
    model: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    def skip(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        return {"img": args["img"]}

    patched = patch(model)
    for block in range(LAYERS):
        patched.set_model_patch_replace(skip, "dit", "double_block", block)
    sample(patched)
    assert "no attention call of this run came to SpargeAttention2" in caplog.text
    assert account(patched)["sparsity"] is None


def test_a_layer_replaced_as_a_whole_is_one_clear_line(
    load: Callable[..., Model],
    patch: Patch,
    sample: Sample,
    account: Account,
    told: Callable[[Model], str],
) -> None:
    """The patch is still where it was, on what is used no more."""

    class Other(torch.nn.Module):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return x

    patched = patch(load("t2v"))
    patched.add_object_patch("diffusion_model.blocks.1.self_attn", Other())
    sample(patched)
    assert "the attention of 1 layers, blocks.1 first, was never called" in told(patched)
    assert account(patched)["sparse_calls"] == STEPS


def test_layers_that_another_node_skips_are_told_of(
    model: Model, patch: Patch, sample: Sample, told: Callable[[Model], str]
) -> None:
    patched = patch(model)
    patched.set_model_patch_replace(lambda args, extra: {"img": args["img"]}, "dit", "double_block", 0)
    sample(patched)
    assert "the attention of 1 layers, blocks.0 first, was never called" in told(patched)


def test_the_second_model_of_a_guider_is_told_of(
    load: Callable[..., Model], model: Model, patch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """ComfyUI's guider with a model for the negative prompt calls no wrapper of that one."""
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import DualModelGuider

    positive, negative = ([[makers.text_embedding(seed), {}]] for seed in (0, 1))
    second = patch(load("t2v"), end_percent=0.0)
    guider = DualModelGuider.execute(patch(model), positive, 3.0, second, negative).args[0]
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS)
    latent = torch.zeros(1, 16, 3, 16, 16)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, disable_pbar=True)
    (warning,) = warnings(caplog)
    assert "this sampler uses the model as its second one" in warning


# ----------------------------------------------------------------------------------------------------------
# Weights and settings that do not fit each other


@pytest.fixture
def student(pack: ModuleType, rooms: SimpleNamespace, model: Model) -> Model:
    """A model as Load Distilled Student leaves it."""
    config = importlib.import_module(f"{pack.__name__}.sparge_core").SparseConfig(top_k=0.1, top_p=0.2)
    return as_student(rooms, model, config)


def as_student(rooms: SimpleNamespace, model: Model, config: Any) -> Model:
    clone = model.clone()
    clone.set_attachments(rooms.host.STUDENT, config)
    clone.set_attachments(rooms.host.STUDENT_FILE, "student.safetensors")
    return clone


def test_a_student_with_its_own_settings_is_not_warned_of(
    student: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    patched = patch(student, settings="auto")
    sample(patched)
    assert account(patched)["settings"]["source"] == "auto: the student's own"
    assert account(patched)["notes"] == []
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"min_tokens": 4096}, "fewer than 4096 tokens"),
        ({"backend": "dense"}, "back end set to dense"),
        ({"dense_layers": f"0-{LAYERS - 1}"}, "layer set to dense"),
    ],
    ids=["short", "dense", "layers"],
)
def test_a_student_whose_calls_are_all_dense_is_warned_of(
    settings: dict[str, Any],
    reason: str,
    student: Model,
    patch: Patch,
    sample: Sample,
    told: Callable[[Model], str],
) -> None:
    patched = patch(student, **{"settings": "auto", **settings})
    sample(patched)
    assert "the weights are a student's, distilled for sparse attention, but every call was dense" in told(
        patched
    )
    assert reason in told(patched)


def test_base_weights_whose_calls_are_all_dense_are_not_warned_of(
    model: Model, patch: Patch, sample: Sample, caplog: pytest.LogCaptureFixture
) -> None:
    sample(patch(model, backend="dense"))
    assert not warnings(caplog)


def test_a_student_loaded_behind_the_patch_is_warned_of(
    student: Model,
    model: Model,
    patch: Patch,
    sample: Sample,
    rooms: SimpleNamespace,
    told: Callable[[Model], str],
) -> None:
    """Its settings come too late: the patch has chosen those for models that are none."""
    late = as_student(rooms, patch(model, settings="auto"), rooms.host.student_config(student))
    sample(late)
    assert "the student student.safetensors was loaded behind the SpargeAttention2 node" in told(late)


def test_base_weights_at_a_students_sparsity_are_warned_of(
    student: Model, model: Model, patch: Patch, sample: Sample, told: Callable[[Model], str]
) -> None:
    large = {"size": (3, 32, 32), "steps": 1, "cfg": 1.0}
    settings = {"sparsity": 0.9, "top_k": 0.0}
    patched = patch(model, **settings)
    sample(patched, **large)
    assert "but the model carries no settings of a distilled student" in told(patched)
