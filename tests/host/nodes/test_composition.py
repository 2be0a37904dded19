"""The patch beside other nodes, in every order; several runs of one model; an interrupt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import LAYERS, STEPS, Model

ALL_CALLS = LAYERS * STEPS
KEYS = [f"diffusion_model.blocks.{block}.self_attn.forward" for block in range(LAYERS)]

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Account = Callable[[Model], dict[str, Any]]
Node = Callable[[Model], Model]


def lora(model: Model) -> Model:
    import comfy.sd

    generator = torch.Generator().manual_seed(11)
    weights = {}
    for block in range(LAYERS):
        for part in ("q", "k", "v", "o"):
            key = f"diffusion_model.blocks.{block}.self_attn.{part}"
            weights[f"{key}.lora_A.weight"] = torch.randn(4, 256, generator=generator) / 16
            weights[f"{key}.lora_B.weight"] = torch.randn(256, 4, generator=generator) / 2
    return comfy.sd.load_lora_for_models(model, None, weights, 1.0, 0.0)[0]


def shift(model: Model) -> Model:
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    return ModelSamplingSD3().patch(model, 2.0)[0]


def step_cache(model: Model) -> Model:
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0]


def context_windows(model: Model) -> Model:
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    return WanContextWindowsManualNode.execute(
        model, 5, 0, "standard_static", 1, False, "pyramid", freenoise=False
    ).args[0]


def other_attention(model: Model) -> Model:
    """As nodes that choose an attention do it: an override in transformer_options."""

    def flipped(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return -func(*args, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = flipped
    return clone


def other_forward(model: Model) -> Model:
    """As nodes that patch the layer itself do it: on top of what is there, which they call."""

    def on(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: 2 * forward(*args, **kwargs)

    clone = model.clone()
    for key in KEYS:
        clone.add_object_patch(key, on(clone.get_model_object(key)))
    return clone


@pytest.mark.parametrize(
    "node",
    [lora, shift, step_cache, context_windows, other_attention, other_forward],
    ids=lambda node: node.__name__,
)
def test_the_order_of_nodes_does_not_matter(
    node: Node, model: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    # One layer and the last steps stay dense, so that both ways through the patch are composed.
    settings = {"end_percent": 0.5, "dense_layers": "0"}
    before, behind = patch(node(model), **settings), node(patch(model, **settings))
    one, other = sample(before, steps=3), sample(behind, steps=3)
    assert torch.equal(one, other)
    did, also_did = account(before), account(behind)
    assert did["sparse_calls"] > 0
    for fact in ("sparse_calls", "dense_calls", "sparsity_map", "dense_map"):
        assert did[fact] == also_did[fact]
    assert not torch.allclose(one, sample(patch(model, **settings), steps=3), atol=1e-3)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_of_two_patches_the_last_counts(
    model: Model, patch: Patch, sample: Sample, account: Account, rooms: SimpleNamespace
) -> None:
    first = patch(model, sparsity=0.3)
    both = patch(first, sparsity=0.6)
    assert torch.equal(sample(both), sample(patch(model, sparsity=0.6)))
    assert account(both)["sparse_calls"] == ALL_CALLS
    assert not rooms.host.patch_of(first).runs
    sample(first)
    assert account(first)["settings"]["config"]["sparsity"] == 0.3


def test_a_displaced_patch_is_one_clear_line(
    model: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    patched = patch(model)
    own = model.get_model_object(KEYS[1])
    patched.add_object_patch(KEYS[1], lambda *args, **kwargs: own(*args, **kwargs))
    sample(patched)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
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


def test_a_clone_with_weights_of_its_own_uses_those(
    load: Callable[..., Model], patch: Patch, sample: Sample
) -> None:
    """ComfyUI's compile node and its nodes for several GPUs clone a model so that it is loaded anew."""
    model = load("t2v")
    patched = patch(model)
    truth = sample(patched)
    anew = patched.clone(force_deepcopy=True)
    assert anew.model is not model.model
    with torch.no_grad():
        for weight in model.model.parameters():
            weight.zero_()
    assert torch.equal(sample(anew), truth)


def test_two_samplers_of_different_sizes_share_one_patched_model(
    model: Model, patch: Patch, sample: Sample, rooms: SimpleNamespace
) -> None:
    sizes = ((3, 16, 16), (2, 18, 22))
    alone = [sample(patch(model), size=size) for size in sizes]
    patched = patch(model)
    together = [sample(patched, size=size) for size in sizes]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    attention = rooms.host.patch_of(patched)
    found = [rooms.host.find_run(attention, latent) for latent in together]
    assert [(run, known) for run, known in found] == [(run, True) for run in attention.runs]
    assert rooms.host.find_run(attention, torch.zeros(1)) == (attention.runs[-1], False)


def test_a_sampler_that_evaluates_a_step_twice_is_counted_by_step(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    patched = patch(model)
    sample(patched, sampler="heun")
    did = account(patched)
    assert did["steps"] == STEPS
    assert did["sparse_calls"] == LAYERS * (2 * STEPS - 1)
    assert all(share is not None for row in did["sparsity_map"] for share in row)


def test_an_interrupt_leaves_no_state(
    comfy: ModuleType, model: Model, patch: Patch, sample: Sample, account: Account, rooms: SimpleNamespace
) -> None:
    import comfy.model_management as management

    def interrupt(*_: Any) -> None:
        raise management.InterruptProcessingException()

    truth = sample(patch(model))
    patched = patch(model)
    with pytest.raises(management.InterruptProcessingException):
        sample(patched, callback=interrupt)
    attention = rooms.host.patch_of(patched)
    assert attention.current is None
    assert not attention.runs
    assert torch.equal(sample(patched), truth)
    assert account(patched)["sparse_calls"] == ALL_CALLS
