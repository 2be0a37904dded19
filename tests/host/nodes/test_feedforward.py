"""GELU in the matrix product before it: where that stands in for ComfyUI's layers, and where they stay."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .conftest import LAYERS, STEPS, Model

DIM, TOKENS = 32, 24
KEY = "diffusion_model.blocks.0.ffn.forward"

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]


@pytest.fixture
def room(pack: ModuleType, comfy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, serving CPUs in fp32, by what torch does on a GPU; `calls` has each call's tokens."""
    module: Any = importlib.import_module(f"{pack.__name__}.nodes.feedforward")
    traced = importlib.import_module(f"{pack.__name__}.nodes.traced")

    def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    calls: list[int] = []
    monkeypatch.setattr(traced, "linear_gelu", linear_gelu)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "HALF", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(module, "calls", calls, raising=False)
    module._compared.cache_clear()
    yield module
    module._compared.cache_clear()


@pytest.fixture(params=["manual_cast", "disable_weight_init"])
def layers(comfy: ModuleType, request: pytest.FixtureRequest) -> Any:
    """A feed-forward layer as ComfyUI builds Wan's, its weights in fp32; the second kind casts none."""
    import comfy.ops

    torch.manual_seed(0)
    linear = getattr(comfy.ops, request.param).Linear
    made = nn.Sequential(
        linear(DIM, 2 * DIM, dtype=torch.float32),
        nn.GELU(approximate="tanh"),
        linear(2 * DIM, DIM, dtype=torch.float32),
    ).requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_()
    return made


def tokens(dtype: torch.dtype) -> Tensor:
    return torch.randn(2, TOKENS, DIM).to(dtype)


@torch.no_grad()
def test_it_gives_what_the_layer_gives(room: Any, layers: Any) -> None:
    x = tokens(torch.bfloat16 if layers[0].comfy_cast_weights else torch.float32)
    out = room.fuse(layers.forward)(x)
    assert room.calls[-1:] == [TOKENS]
    torch.testing.assert_close(out, layers(x), rtol=2**-6, atol=2**-4)


@torch.no_grad()
def test_a_weight_that_waits_for_a_lora_is_taken_with_it(room: Any, layers: Any) -> None:
    layers[0].weight_function = [lambda weight: weight + 3]  # the list that is there belongs to the class
    x = tokens(torch.float32)
    torch.testing.assert_close(room.fuse(layers.forward)(x), layers(x))


def test_it_stands_in_for_wans_layers_alone(room: Any, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.ops

    assert room.fuse(layers.forward) is not None
    assert room.fuse(lambda x: x) is None
    assert room.fuse(nn.Sequential(layers[0], nn.GELU(), layers[2]).forward) is None
    assert room.fuse(nn.Sequential(nn.Linear(DIM, DIM), layers[1], layers[2]).forward) is None
    no_bias = comfy.ops.manual_cast.Linear(DIM, DIM, bias=False)
    assert room.fuse(nn.Sequential(no_bias, layers[1], layers[2]).forward) is None
    quantised = comfy.ops.fp8_ops.Linear(DIM, DIM)
    assert room.fuse(nn.Sequential(quantised, layers[1], layers[2]).forward) is None
    hook = layers[0].register_forward_hook(lambda *_: None)
    assert room.fuse(layers.forward) is None
    hook.remove()
    layers[1].forward = lambda x: x
    assert room.fuse(layers.forward) is None


def test_gradients_and_other_dtypes_take_the_layers_own_forward(
    room: Any, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = room.fuse(layers.forward)
    with torch.no_grad():
        assert room._proven(None, torch.float32)
    room.calls.clear()
    stand_in(tokens(torch.float32))
    monkeypatch.setattr(room, "HALF", (torch.bfloat16,))
    with torch.no_grad():
        stand_in(tokens(torch.float32))
    assert not room.calls


@torch.no_grad()
def test_a_torch_that_computes_something_else_is_not_asked(
    room: Any, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.traced, "linear_gelu", lambda x, weight, bias: F.relu(F.linear(x, weight, bias)))
    x = tokens(torch.float32)
    torch.testing.assert_close(room.fuse(layers.forward)(x), layers(x), rtol=0, atol=0)


def test_a_patched_model_takes_it_in_every_layer(
    model: Model, patch: Patch, sample: Sample, room: Any
) -> None:
    dense = sample(model)
    assert not room.calls
    out = sample(patch(model, top_k=1.0, top_p=1.0, sparsity=0.0))
    assert len(room.calls) == STEPS * LAYERS + 1  # and the one that compares
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-4)
    room.calls.clear()
    sample(model)
    assert not room.calls
    again = patch(model)  # after a clone ran, whose patches lie on the modules that they share
    assert KEY in again.object_patches


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_another_back_end_asked_for_is_all_that_runs(
    model: Model, patch: Patch, sample: Sample, room: Any, backend: str
) -> None:
    sample(patch(model, backend=backend))
    assert not room.calls


def test_another_nodes_patch_of_the_layer_stays(model: Model, patch: Patch, room: Any) -> None:
    below = model.clone()

    def forward(x: Tensor) -> Tensor:
        return x

    below.add_object_patch(KEY, forward)
    assert patch(below).object_patches[KEY] is forward


def test_a_second_patch_replaces_the_first(model: Model, patch: Patch, room: Any) -> None:
    once = patch(model)
    twice = patch(once)
    assert twice.object_patches[KEY] is not once.object_patches[KEY]
    assert KEY not in patch(twice, backend="reference").object_patches


def test_the_operator_is_gelu_of_the_linear_layer(pack: ModuleType, comfy: ModuleType) -> None:
    """On a CPU torch takes GELU's exact form, which is near."""
    traced = importlib.import_module(f"{pack.__name__}.nodes.traced")
    x, weight, bias = torch.randn(2, 5, 8), torch.randn(6, 8), torch.randn(6)
    out = traced.linear_gelu(x, weight, bias)
    torch.testing.assert_close(out, F.gelu(F.linear(x, weight, bias), approximate="tanh"), rtol=0, atol=1e-3)
    torch.library.opcheck(traced.linear_gelu.default, (x, weight, bias), test_utils="test_faketensor")
