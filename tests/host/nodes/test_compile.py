"""torch.compile as ComfyUI's node sets it up, before and behind the patch, and changes after a compile.

The node drops every guard on transformer_options. The compiler's front end, which guards concern, is the real
one; its back end runs the captured graph as it is, since what becomes of a graph is no matter of the patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import TEXT_TOKENS

from .conftest import LAYERS, STEPS, TOKENS, Model

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Account = Callable[[Model], dict[str, Any]]

FACTS = ("sparse_calls", "dense_calls", "sparsity_map", "dense_map")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_model(model: Model, keys: Sequence[str] = ("diffusion_model",)) -> Model:
    """What ComfyUI's TorchCompileModel does, which compiles all of the model; others name parts of it."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    clone = model.clone(disable_dynamic=True)
    options = {"guard_filter_fn": skip_torch_compile_dict}
    set_torch_compile_wrapper(clone, backend="eager", options=options, keys=list(keys))
    return clone


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [["diffusion_model"], [f"diffusion_model.blocks.{block}" for block in range(LAYERS)]],
    ids=["model", "blocks"],
)
def test_compiled_and_patched_in_any_order_and_again_without(
    keys: list[str], model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    settings = {"end_percent": 0.5, "dense_layers": "0"}
    plain, patched = sample(model), patch(model, **settings)
    truth = sample(patched)
    facts = {fact: account(patched)[fact] for fact in FACTS}

    def check(result: Model) -> None:
        torch.testing.assert_close(sample(result), truth, rtol=1e-4, atol=1e-4)
        assert {fact: account(result)[fact] for fact in FACTS} == facts

    base = compile_model(model, keys)
    torch.testing.assert_close(sample(base), plain, rtol=1e-4, atol=1e-4)
    behind = patch(base, **settings)
    check(behind)
    check(compile_model(patch(model, **settings), keys))
    torch.testing.assert_close(sample(base), plain, rtol=1e-4, atol=1e-4)

    other = patch(base, sparsity=0.8)
    torch.testing.assert_close(sample(other), sample(patch(model, sparsity=0.8)), rtol=1e-4, atol=1e-4)
    assert account(other)["sparse_calls"] == LAYERS * STEPS
    check(behind)


@pytest.mark.slow
def test_an_override_comes_and_goes_after_a_compile(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    calls = []

    @torch.compiler.disable
    def spy(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[1].shape[1])
        return func(*args, **kwargs)

    patched = patch(compile_model(model), dense_layers="0")
    with_spy = patched.clone()
    with_spy.model_options["transformer_options"]["optimized_attention_override"] = spy
    truth = sample(patched)
    for expected in ([], [TOKENS, TEXT_TOKENS, TEXT_TOKENS] * STEPS, []):
        calls.clear()
        torch.testing.assert_close(sample(with_spy if expected else patched), truth, rtol=1e-4, atol=1e-4)
        assert calls == expected
        assert account(patched)["sparse_calls"] == (LAYERS - 1) * STEPS


@pytest.mark.slow
def test_what_a_patch_of_attention_leaves_arrives_behind_a_compiled_layer(
    model: Model, patch: Patch, sample: Sample
) -> None:
    left: list[Tensor] = []

    def leave(given: dict[str, Any]) -> Tensor:
        given["transformer_options"]["left"] = given["q"].mean((2, 3))
        return given["x"]

    @torch.compiler.disable
    def take(given: dict[str, Any]) -> Tensor:
        left.append(given["transformer_options"].pop("left"))
        return given["x"]

    other = model.clone()
    other.set_model_patch(leave, "attn1_patch")
    other.set_model_patch(take, "attn2_patch")
    sample(patch(other), cfg=1.0)
    truth = list(left)
    assert len(truth) == LAYERS * STEPS
    for compiled in (compile_model(patch(other)), patch(compile_model(other))):
        left.clear()
        sample(compiled, cfg=1.0)
        torch.testing.assert_close(left, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_blocks_that_a_node_compiled_and_put_in_their_places_are_patched_in_any_order(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    """As some nodes do it: each block is an object patch, whose name ours begin with."""

    def compile_blocks(model: Model) -> Model:
        clone = model.clone()
        for block in range(LAYERS):
            key = f"diffusion_model.blocks.{block}"
            clone.add_object_patch(key, torch.compile(clone.get_model_object(key), backend="eager"))
        return clone

    settings = {"end_percent": 0.5, "dense_layers": "0"}
    plain, patched = sample(model), patch(model, **settings)
    truth = sample(patched)
    facts = {fact: account(patched)[fact] for fact in FACTS}
    for result in (patch(compile_blocks(model), **settings), compile_blocks(patch(model, **settings))):
        torch.testing.assert_close(sample(result), truth, rtol=1e-4, atol=1e-4)
        assert {fact: account(result)[fact] for fact in FACTS} == facts
        assert torch.equal(sample(model), plain)
