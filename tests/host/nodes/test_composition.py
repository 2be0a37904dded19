"""The patch beside other nodes, in every order; several runs of one model; an interrupt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from family import COMPANIONS

from .conftest import LAYERS, STEPS, Model

ALL_CALLS = LAYERS * STEPS
KEYS = [f"diffusion_model.blocks.{block}.self_attn.forward" for block in range(LAYERS)]

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Account = Callable[[Model], dict[str, Any]]
Node = Callable[[Model], Model]


def lora_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    weights = {}
    for block in range(LAYERS):
        for part in ("q", "k", "v", "o"):
            key = f"diffusion_model.blocks.{block}.self_attn.{part}"
            weights[f"{key}.lora_A.weight"] = torch.randn(4, 256, generator=generator) / 16
            weights[f"{key}.lora_B.weight"] = torch.randn(256, 4, generator=generator) / 2
    return weights


def lora(model: Model) -> Model:
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, lora_weights(), 1.0, 0.0)[0]


def bypass_lora(model: Model) -> Model:
    import comfy.sd

    return comfy.sd.load_bypass_lora_for_models(model, None, lora_weights(), 1.0, 0.0)[0]


def shift(model: Model) -> Model:
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    return ModelSamplingSD3().patch(model, 2.0)[0]


def merge(model: Model) -> Model:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    return ModelMergeSimple().merge(model, lora(model), 0.5)[0]


def easy_cache(model: Model) -> Model:
    from comfy_extras.nodes_easycache import EasyCacheNode

    return EasyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0]


def lazy_cache(model: Model) -> Model:
    from comfy_extras.nodes_easycache import LazyCacheNode

    return LazyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0]


def skip_layer(model: Model) -> Model:
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    return SkipLayerGuidanceDiT.execute(model, 2.0, 0.0, 1.0, double_layers="0").args[0]


def skip_layer_simple(model: Model) -> Model:
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiTSimple

    return SkipLayerGuidanceDiTSimple.execute(model, 0.0, 1.0, double_layers="0").args[0]


def cfg_zero(model: Model) -> Model:
    from comfy_extras.nodes_cfg import CFGZeroStar

    return CFGZeroStar.execute(model).args[0]


def nag(model: Model) -> Model:
    """As NAG nodes do it: attention to the text moves away from attention to another text."""

    def away(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward_away(x: Tensor, context: Tensor, **kwargs: Any) -> Tensor:
            return 3 * forward(x, context, **kwargs) - 2 * forward(x, -context, **kwargs)

        return forward_away

    clone = model.clone()
    for block in range(LAYERS):
        key = f"diffusion_model.blocks.{block}.cross_attn.forward"
        clone.add_object_patch(key, away(clone.get_model_object(key)))
    return clone


def context_windows(model: Model) -> Model:
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    return WanContextWindowsManualNode.execute(
        model, 5, 0, "standard_static", 1, False, "pyramid", freenoise=False
    ).args[0]


def rope(model: Model) -> Model:
    from comfy_extras.nodes_rope import ScaleROPE

    return ScaleROPE.execute(model, 2.0, 1.0, 1.5, 0.0, 3.0, 0.0).args[0]


def attention_switch(model: Model) -> Model:
    """As nodes that choose an attention do it: an override in transformer_options."""

    def flipped(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return -func(*args, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = flipped
    return clone


def attention_patch(model: Model) -> Model:
    clone = model.clone()
    clone.set_model_patch(lambda given: given["x"] + 0.5 * given["q"].flatten(2), "attn1_patch")
    return clone


def block_patch(model: Model) -> Model:
    clone = model.clone()
    clone.set_model_double_block_patch(lambda given: {"img": 1.5 * given["img"]})
    return clone


def wrapped_forward(model: Model) -> Model:
    """As nodes that patch the layer itself do it: on top of what is there, which they call."""

    def on(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: 2 * forward(*args, **kwargs)

    clone = model.clone()
    for key in KEYS:
        clone.add_object_patch(key, on(clone.get_model_object(key)))
    return clone


NODES: dict[str, Node] = {
    node.__name__: node
    for node in (
        lora, bypass_lora, shift, merge, easy_cache, lazy_cache, skip_layer, skip_layer_simple,
        cfg_zero, nag, context_windows, rope, attention_switch, attention_patch, block_patch, wrapped_forward,
    )
}  # fmt: skip


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_docs_list_the_nodes_that_are_tried() -> None:
    assert [companion.name for companion in COMPANIONS] == list(NODES)


@pytest.mark.parametrize("name", NODES)
def test_the_order_of_nodes_does_not_matter(
    name: str, model: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    node = NODES[name]
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
    assert not warnings(caplog)


@pytest.mark.parametrize(
    "name", [name for name in NODES if name != "attention_switch"]
)  # is what it replaces
def test_with_every_block_kept_a_node_does_what_it_does_alone(
    name: str, model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    alone = NODES[name](model)
    keep_all = patch(alone, top_k=1.0, top_p=1.0, sparsity=0.0)
    torch.testing.assert_close(sample(keep_all), sample(alone), rtol=1e-3, atol=1e-3)
    assert account(keep_all)["sparse_calls"] > 0


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


@pytest.mark.parametrize("module", ["blocks.1", "blocks.1.self_attn"])
def test_what_another_workflow_put_into_the_same_model_is_not_patched(
    module: str, model: Model, patch: Patch, sample: Sample
) -> None:
    """ComfyUI leaves the patches of the clone that ran last in the model until another clone is loaded."""

    class Nothing(torch.nn.Module):
        def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.zeros_like(x)

    truth = sample(patch(model))
    other = model.clone()
    other.add_object_patch(f"diffusion_model.{module}", Nothing())
    sample(other)
    assert torch.equal(sample(patch(model)), truth)


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


@pytest.mark.parametrize(
    "sampler", ["heun", "dpm_2", "dpmpp_2s_ancestral", "uni_pc", "seeds_2", "dpm_adaptive"]
)
def test_samplers_with_several_calls_a_step_are_counted_by_step(
    sampler: str, model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    calls = 0

    def count(apply_model: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        nonlocal calls
        calls += 1
        return apply_model(given["input"], given["timestep"], **given["c"])

    patched = patch(model)
    patched.set_model_unet_function_wrapper(count)
    assert sample(patched, sampler=sampler, cfg=1.0).isfinite().all()
    did = account(patched)
    assert did["steps"] == STEPS
    assert did["sparse_calls"] == LAYERS * calls > LAYERS * STEPS - 1
    assert all(share is not None for row in did["sparsity_map"] for share in row)


def test_weights_that_are_offloaded_change_nothing(
    model: Model, patch: Patch, sample: Sample, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with little memory: weights, and the LoRA on them, come to the device when they are used."""
    import comfy.model_management as management

    def of(order: Callable[[Model], Model]) -> tuple[Tensor, Model]:
        patched = order(model)
        return sample(patched), patched

    def one_order(model: Model) -> Model:
        return patch(lora(model))

    def other_order(model: Model) -> Model:
        return lora(patch(model))

    truth, _ = of(one_order)
    management.unload_all_models()
    load = management.LoadedModel.model_use_more_vram
    monkeypatch.setattr(
        management.LoadedModel,
        "model_use_more_vram",
        lambda self, memory, force_patch_weights=False: load(self, 1, force_patch_weights),
    )
    for order in (one_order, other_order):
        offloaded, patched = of(order)
        assert patched.model.model_lowvram
        assert patched.lowvram_patch_counter() > 0
        torch.testing.assert_close(offloaded, truth, rtol=1e-4, atol=1e-4)
        assert account(patched)["sparse_calls"] == ALL_CALLS
        management.unload_all_models()


def test_what_a_patch_of_attention_leaves_arrives_behind_the_layer(
    model: Model, patch: Patch, sample: Sample
) -> None:
    """InfiniteTalk's, for two speakers: where each stands is seen in self-attention, and used further on."""
    from comfy.ldm.wan.model_multitalk import MultiTalkGetAttnMapPatch

    maps: list[Tensor] = []

    def use(given: dict[str, Any]) -> Tensor:
        maps.append(given["transformer_options"].pop("x_ref_attn_map"))
        return given["x"]

    speakers = torch.zeros(2, 8 * 8)
    speakers[0, :32] = speakers[1, 32:] = 1.0
    other = model.clone()
    other.set_model_patch(MultiTalkGetAttnMapPatch(speakers), "attn1_patch")
    other.set_model_patch(use, "attn2_patch")
    sample(other, cfg=1.0)
    truth, maps = maps, []
    assert len(truth) == ALL_CALLS
    sample(patch(other, top_k=1.0, top_p=1.0, sparsity=0.0), cfg=1.0)
    torch.testing.assert_close(maps, truth, rtol=1e-3, atol=1e-3)


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
