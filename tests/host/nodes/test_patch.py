"""The patch node on the real model code: what becomes sparse, what stays as it was, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models as makers

from .conftest import HEADS, LAYERS, SIZE, STEPS, TOKENS, Model

ALL_CALLS = LAYERS * STEPS

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Account = Callable[[Model], dict[str, Any]]


def close(result: Tensor, truth: Tensor) -> None:
    """Equal within what fp32 sums in another order allow."""
    torch.testing.assert_close(result, truth, rtol=1e-4, atol=1e-4)


def test_keeping_every_block_equals_dense(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    patched = patch(model, top_k=1.0, top_p=1.0, sparsity=0.0)
    close(sample(patched), sample(model))
    assert account(patched)["sparse_calls"] == ALL_CALLS


def test_a_sparse_run_skips_what_the_slider_says(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    patched = patch(model, sparsity=0.6)
    sparse = sample(patched, size=(3, 32, 32))
    assert account(patched)["sparsity"] == pytest.approx(0.6, abs=0.01)
    assert account(patched)["dense_calls"] == {}
    assert not torch.allclose(sparse, sample(model, size=(3, 32, 32)), atol=1e-3)


def test_without_the_node_the_model_is_bit_for_bit_what_it_was(
    load: Callable[[str], Model], patch: Patch, sample: Sample
) -> None:
    model = load("t2v")
    before = sample(model)
    patched = patch(model)
    first = sample(patched)
    assert torch.equal(sample(model), before)
    assert torch.equal(sample(patched), first)


def test_the_given_model_is_not_changed_by_patching(
    model: Model, patch: Patch, rooms: SimpleNamespace
) -> None:
    patch(model)
    assert not model.object_patches
    assert rooms.host.patch_of(model) is None
    assert not any(
        rooms.host.KEY in keyed for kind in (model.wrappers, model.callbacks) for keyed in kind.values()
    )


def test_text_attention_stays_dense_where_video_and_text_are_equally_long(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    to_host = []

    def spy(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        to_host.append(args[1].shape[1])
        return func(*args, **kwargs)

    patched = patch(model)
    patched.model_options["transformer_options"]["optimized_attention_override"] = spy
    sample(patched, size=(2, 32, 32))  # 2 * 16 * 16 = 512 tokens, as many as the text has
    assert to_host == [makers.TEXT_TOKENS] * ALL_CALLS
    assert account(patched)["sparse_calls"] == ALL_CALLS


@pytest.mark.parametrize("kind", makers.KINDS)
def test_every_kind_of_wan_runs_patched(
    kind: str, models: Callable[[str], Model], patch: Patch, sample: Sample, account: Account
) -> None:
    frames = torch.randn(1, makers.LATENT_CHANNELS, *SIZE, generator=torch.Generator().manual_seed(3))
    cond: dict[str, Any] = {}
    if kind in ("i2v", "flf2v"):
        pictures = 2 if kind == "flf2v" else 1
        tokens = torch.randn(
            1, pictures * makers.CLIP_TOKENS, 1280, generator=torch.Generator().manual_seed(4)
        )
        cond["clip_vision_output"] = SimpleNamespace(penultimate_hidden_states=tokens)
        cond["concat_latent_image"] = frames
        cond["concat_mask"] = torch.ones(1, 1, *SIZE)
    if kind == "vace":
        cond["vace_frames"] = [torch.cat([frames, frames], dim=1)]
        cond["vace_mask"] = [torch.ones(1, 64, *SIZE)]
        cond["vace_strength"] = [1.0]
    model = models(kind)
    layers = LAYERS + (kind == "vace")

    truth = sample(model, cond=cond)
    keep_all = patch(model, top_k=1.0, top_p=1.0, sparsity=0.0)
    close(sample(keep_all, cond=cond), truth)
    assert account(keep_all)["sparse_calls"] == layers * STEPS

    sparse = patch(model)
    assert not torch.allclose(sample(sparse, cond=cond), truth, atol=1e-3)
    assert account(sparse)["sparse_calls"] == layers * STEPS


def test_tokens_beside_the_videos_own_take_part(
    load: Callable[[str], Model], patch: Patch, sample: Sample, account: Account
) -> None:
    """Reference pictures put tokens before (ref_conv) or behind (context latents) those of the grid."""
    model = with_reference_pictures(load)
    picture = torch.randn(1, makers.LATENT_CHANNELS, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    cond = {"reference_latents": [picture], "context_latents": [picture[..., :10, :14]]}
    tokens = TOKENS + 8 * 8 + 5 * 7
    keep_all = patch(model, top_k=1.0, top_p=1.0, sparsity=0.0, min_tokens=tokens)
    close(sample(keep_all, cond=cond), sample(model, cond=cond))
    assert account(keep_all)["sparse_calls"] == ALL_CALLS
    longer = patch(model, min_tokens=tokens + 1)
    sample(longer, cond=cond)
    assert account(longer)["sparse_calls"] == 0


def with_reference_pictures(load: Callable[..., Model]) -> Model:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(HEADS * makers.HEAD_DIM, makers.LATENT_CHANNELS, 2, 2, generator=generator) / 8
    return load("t2v", {"ref_conv.weight": weight, "ref_conv.bias": torch.zeros(len(weight))})


def test_dense_layers_stay_dense_and_vace_blocks_follow_the_block_they_feed(
    models: Callable[[str], Model], patch: Patch, sample: Sample, account: Account
) -> None:
    patched = patch(models("vace"), dense_layers="0")
    sample(patched)
    did = account(patched)
    assert did["dense_calls"] == {"layer set to dense": 2 * STEPS}
    dense_of = dict(zip(did["layers"], did["dense_map"], strict=True))
    assert dense_of == {"blocks.0": [1, 1], "vace_blocks.0": [1, 1], "blocks.1": [0, 0]}


def test_steps_outside_of_the_window_are_dense(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    # Of four steps the first starts at 0 % of the sampling, the second at 25 %, and so on.
    patched = patch(model, start_percent=0.25, end_percent=0.5)
    sample(patched, steps=4)
    did = account(patched)
    assert did["dense_map"] == [[1, 0, 0, 1]] * LAYERS
    assert did["dense_calls"] == {"step outside of start_percent to end_percent": 2 * LAYERS}


def test_short_videos_stay_dense(model: Model, patch: Patch, sample: Sample, account: Account) -> None:
    patched = patch(model, min_tokens=TOKENS + 1)
    assert torch.equal(sample(patched), sample(model))
    assert account(patched)["dense_calls"] == {f"fewer than {TOKENS + 1} tokens": ALL_CALLS}


def test_the_dense_back_end_is_the_hosts_own_attention(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    patched = patch(model, backend="dense")
    assert torch.equal(sample(patched), sample(model))
    assert account(patched)["dense_calls"] == {"back end set to dense": ALL_CALLS}


def test_a_back_end_that_cannot_serve_says_why_and_runs_dense(
    model: Model, patch: Patch, sample: Sample, account: Account
) -> None:
    patched = patch(model, backend="cuda")
    assert torch.equal(sample(patched), sample(model))
    ((reason, calls),) = account(patched)["dense_calls"].items()
    assert "got cpu" in reason
    assert calls == ALL_CALLS


def test_auto_is_training_free_unless_the_model_is_a_student(
    model: Model, patch: Patch, rooms: SimpleNamespace
) -> None:
    plain = rooms.host.patch_of(patch(model, settings="auto", top_k=1.0)).settings
    assert plain.config == rooms.attention.TRAINING_FREE
    assert plain.policy.start_percent == rooms.attention.TRAINING_FREE_START

    student = model.clone()
    config = type(plain.config)(top_k=0.05, top_p=0.16)
    student.set_attachments(rooms.host.STUDENT, config)
    own = rooms.host.patch_of(patch(student, settings="auto")).settings
    assert own.config == config
    assert own.policy.start_percent == 0.0


@pytest.mark.parametrize("batch", [1, 2])
def test_guidance_gives_the_same_in_one_batch_and_in_two_calls(
    batch: int, model: Model, patch: Patch, sample: Sample, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = patch(model)
    together = sample(patched, batch=batch)
    assert account(patched)["sparse_calls"] == ALL_CALLS
    monkeypatch.setattr(patched.model, "memory_required", lambda *_, **__: float("inf"))
    apart = sample(patched, batch=batch)
    assert account(patched)["sparse_calls"] == 2 * ALL_CALLS
    close(apart, together)


def test_each_item_of_a_batch_gets_what_it_gets_alone(model: Model, patch: Patch, sample: Sample) -> None:
    patched = patch(model)
    noise = torch.randn(2, makers.LATENT_CHANNELS, *SIZE, generator=torch.Generator().manual_seed(5))
    both = sample(patched, batch=2, noise=noise)
    for item in range(2):
        close(both[item : item + 1], sample(patched, noise=noise[item : item + 1]))


class NotWan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.diffusion_model = torch.nn.Linear(2, 2)


def without_blocks(model: Model) -> Model:
    clone = model.clone()
    empty = type(model.model.diffusion_model).__new__(type(model.model.diffusion_model))
    torch.nn.Module.__init__(empty)
    empty.blocks = torch.nn.ModuleList()
    clone.add_object_patch("diffusion_model", empty)
    return clone


def with_foreign_blocks(model: Model) -> Model:
    clone = without_blocks(model)
    clone.object_patches["diffusion_model"].blocks = torch.nn.ModuleList([torch.nn.Identity()])
    return clone


def not_wan(model: Model) -> Model:
    return type(model)(NotWan(), model.load_device, model.offload_device)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (not_wan, "works on Wan video models, and this model is a Linear; connect the MODEL output"),
        (
            without_blocks,
            "this WanModel has no blocks; put the node directly behind the one that loads the model",
        ),
        (with_foreign_blocks, "this WanModel has none in blocks.0; put the node directly behind"),
    ],
)
def test_a_model_that_cannot_be_patched_is_refused(
    change: Callable[[Model], Model], sentence: str, model: Model, patch: Patch
) -> None:
    other = change(model)
    patches = dict(other.object_patches)
    with pytest.raises(ValueError, match=sentence):
        patch(other)
    assert other.object_patches == patches


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sparsity": float("nan")}, "sparsity.* nan"),
        ({"top_k": 1.5}, r"top_k.* 1\.5"),
        ({"top_p": -0.1}, r"top_p.* -0\.1"),
        ({"start_percent": 0.7, "end_percent": 0.3}, "start_percent must not be greater than end_percent"),
        ({"dense_layers": "0-99"}, '"0-99" names layer 99, but this model has 2 layers'),
        ({"dense_layers": "first"}, '"first" is neither a layer nor a rising range'),
        ({"min_tokens": -1}, "min_tokens.* -1"),
    ],
)
@pytest.mark.parametrize("mode", ["manual", "auto"])
def test_settings_outside_of_their_range_are_refused(
    settings: dict[str, Any], sentence: str, mode: str, model: Model, patch: Patch
) -> None:
    with pytest.raises(ValueError, match=sentence):
        patch(model, **{"settings": mode, **settings})
    assert not model.object_patches
