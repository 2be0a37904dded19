"""What stays dense by our kernel: self-attention that may not be sparse, and the attention to the text."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import LAYERS, STEPS, TOKENS, Model

PASSES = STEPS * LAYERS
TEXT_KEY = "diffusion_model.blocks.0.cross_attn.forward"

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]


@pytest.fixture
def kernels(pack: ModuleType, comfy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Our kernel on the CPU in place of ComfyUI's function, whichever that is; key tokens of each call."""
    from comfy.ldm.wan import model as wan_model

    room = importlib.import_module(f"{pack.__name__}.nodes.exact")
    exact, core = (
        importlib.import_module(f"{pack.__name__}.sparge_core.{name}") for name in ("exact", "reference")
    )

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
        found.calls.append(k.shape[2])
        out: Tensor = core.attention(q, k, v, mask, scale=scale)
        return out

    found = SimpleNamespace(calls=[], attention=attention, fastest_when_dense=lambda *_: True, room=room)
    monkeypatch.setattr(exact, "cuda_kernels", lambda: found)
    monkeypatch.setattr(exact, "DEVICE", "cpu")
    monkeypatch.setattr(exact, "HALF", (torch.float32,))
    monkeypatch.setattr(exact, "MIN_PAIRS", 1)
    monkeypatch.setattr(room, "REPLACED", wan_model.optimized_attention.__name__)
    return found


def test_dense_calls_and_the_text_take_the_kernel_and_give_what_comfyui_gives(
    model: Model, patch: Patch, sample: Sample, kernels: SimpleNamespace, account: Callable[..., Any]
) -> None:
    patched = patch(model, min_tokens=TOKENS + 1)
    out = sample(patched)
    text = [tokens for tokens in kernels.calls if tokens != TOKENS]
    assert kernels.calls.count(TOKENS) == len(text) == PASSES
    assert account(patched)["dense_calls"]
    torch.testing.assert_close(out, sample(model), rtol=1e-4, atol=1e-4)
    assert len(kernels.calls) == 2 * PASSES  # the model itself is as it was


def test_image_and_text_of_an_i2v_model_take_the_kernel(
    models: Callable[[str], Model], patch: Patch, sample: Sample, kernels: SimpleNamespace
) -> None:
    model = models("i2v")
    torch.testing.assert_close(
        sample(patch(model, min_tokens=TOKENS + 1)), sample(model), rtol=1e-4, atol=1e-4
    )
    assert kernels.calls.count(TOKENS) == PASSES


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_another_back_end_asked_for_is_all_that_runs(
    model: Model, patch: Patch, sample: Sample, kernels: SimpleNamespace, backend: str
) -> None:
    sample(patch(model, backend=backend, min_tokens=TOKENS + 1))
    assert not kernels.calls


def test_another_nodes_override_gets_the_calls_that_stay_dense(
    model: Model, patch: Patch, sample: Sample, kernels: SimpleNamespace
) -> None:
    seen = []

    def override(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        seen.append(args[1].shape[1])
        return func(*args, **kwargs)

    below = model.clone()
    below.model_options["transformer_options"] = {"optimized_attention_override": override}
    sample(patch(below, min_tokens=TOKENS + 1))
    assert not kernels.calls
    assert len(seen) == 2 * PASSES


def test_an_attention_that_the_user_chose_for_comfyui_stays(
    model: Model, patch: Patch, sample: Sample, kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.room, "REPLACED", "attention_other")
    sample(patch(model, min_tokens=TOKENS + 1))
    assert not kernels.calls


def test_another_nodes_patch_of_the_text_attention_stays(
    model: Model, patch: Patch, sample: Sample, kernels: SimpleNamespace
) -> None:
    below = model.clone()
    own = model.get_model_object(TEXT_KEY)
    calls = []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        out: Tensor = own(*args, **kwargs)
        return out

    theirs = MethodType(forward, own.__self__)
    below.add_object_patch(TEXT_KEY, theirs)
    patched = patch(below)
    assert patched.object_patches[TEXT_KEY] is theirs
    sample(patched)
    assert len(calls) == STEPS
    assert len(kernels.calls) == PASSES - STEPS  # of the other layers


def test_patching_again_leaves_one_patch(model: Model, patch: Patch) -> None:
    once = patch(model)
    again = patch(once)
    assert again.object_patches.keys() == once.object_patches.keys()
    assert again.object_patches[TEXT_KEY] is not once.object_patches[TEXT_KEY]
    assert TEXT_KEY not in patch(again, backend="dense").object_patches


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "dtype"),
    [
        ((1, 8, 256), (1, 0, 256), torch.float32),
        ((1, 8, 256), (2, 8, 256), torch.float32),
        ((1, 8, 256), (1, 8, 128), torch.float32),
        ((1, 2, 8, 128), (1, 2, 8, 128), torch.float32),
        ((1, 8, 256), (1, 8, 256), torch.float64),
    ],
)
def test_other_tensors_stay_with_comfyui(
    kernels: SimpleNamespace, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def function() -> None: ...

    function.__name__ = kernels.room.REPLACED
    q, k = torch.empty(q_shape, dtype=dtype), torch.empty(k_shape, dtype=dtype)
    with torch.no_grad():
        assert not kernels.room.serves(function, q, k, k, 2)
        right = torch.empty(1, 8, 256)
        assert kernels.room.serves(function, right, right, right, 2)
    assert not kernels.room.serves(function, right, right, right, 2)  # gradients are recorded
