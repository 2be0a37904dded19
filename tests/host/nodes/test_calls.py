"""Attention calls that cannot be sparse go to the host as they came, and layouts are those of the host."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import LAYERS, STEPS, Model

BATCH, TOKENS, HEADS, DIM = 2, 300, 2, 128  # of these tests' own calls: ragged in both block sizes

Given = dict[str, Any]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def call(model: Model, patch: Callable[..., Model], rooms: SimpleNamespace) -> Callable[..., Any]:
    """Lets a patched layer make one attention call: the result, what the host got and what was counted."""
    from comfy.ldm.modules.attention import optimized_attention

    def call(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = []

        def layer(*, transformer_options: Given) -> None:
            result.append(
                optimized_attention(q, k, v, *args, transformer_options=transformer_options, **kwargs)
            )

        host_got: list[Given] = []

        def spy(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            host_got.append({"args": args, **kwargs})
            return func(*args, **kwargs)

        key = "diffusion_model.blocks.0.self_attn.forward"
        below = model.clone()
        below.add_object_patch(key, layer)
        patched = patch(below)
        attention = rooms.host.patch_of(patched)
        given = {"optimized_attention_override": spy, "anything": object()}
        with attention.run([1.0, 0.0], (1.0, 0.0), (), torch.device("cpu")) as run:
            patched.object_patches[key](transformer_options=given)
        assert all(got.pop("transformer_options") is given for got in host_got)
        return result[0], host_got, run.summary

    return call


def test_the_result_has_the_hosts_layout_and_values(call: Callable[..., Any]) -> None:
    flat = [random(BATCH, TOKENS, HEADS * DIM) + i for i in range(3)]
    by_head = [x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in flat]
    out, host_got, did = call(*flat, HEADS)
    assert (did["sparse_calls"], host_got) == (1, [])
    assert out.shape == flat[0].shape
    assert out.is_contiguous()

    for kwargs, layout in (
        ({"skip_reshape": True}, out),
        (
            {"skip_reshape": True, "skip_output_reshape": True},
            out.unflatten(-1, (HEADS, DIM)).transpose(1, 2),
        ),
    ):
        again, _, did = call(*by_head, HEADS, **kwargs)
        assert did["sparse_calls"] == 1
        assert torch.equal(again, layout)


def test_the_result_is_not_copied_into_the_hosts_layout(rooms: SimpleNamespace) -> None:
    out = torch.empty_like(random(BATCH, TOKENS, HEADS * DIM).unflatten(-1, (HEADS, DIM)).transpose(1, 2))
    assert rooms.host._pack(out).data_ptr() == out.data_ptr()


def test_another_scale_is_honoured(call: Callable[..., Any]) -> None:
    q, k, v = (random(BATCH, TOKENS, HEADS * DIM) + i for i in range(3))
    doubled, _, did = call(q, k, v, HEADS, scale=2 * DIM**-0.5)
    assert did["sparse_calls"] == 1
    same, _, _ = call(2 * q, k, v, HEADS)
    torch.testing.assert_close(doubled, same, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "args", "kwargs", "reason"),
    [
        ((TOKENS, HEADS), (), {"mask": torch.zeros(TOKENS, TOKENS)}, "attention mask"),
        ((TOKENS, HEADS), (torch.zeros(TOKENS, TOKENS),), {}, "attention mask"),
        ((TOKENS + 1, HEADS), (), {}, "queries, keys and values of different shapes"),
        ((TOKENS, 1), (), {"enable_gqa": True}, "queries, keys and values of different shapes"),
        ((TOKENS, HEADS), (), {"future": 3, "causal": True}, "unknown attention option causal, future"),
    ],
    ids=["mask", "positional-mask", "longer-keys", "grouped-heads", "unknown-keywords"],
)
def test_what_cannot_be_sparse_reaches_the_host_untouched(
    keys: tuple[int, int], args: tuple[Any, ...], kwargs: Given, reason: str, call: Callable[..., Any]
) -> None:
    length, key_heads = keys
    q = random(BATCH, TOKENS, HEADS * DIM)
    k, v = (random(BATCH, length, key_heads * DIM) + i for i in range(2))
    out, host_got, did = call(q, k, v, HEADS, *args, **kwargs)
    assert did["dense_calls"] == {reason: 1}

    (got,) = host_got
    assert got.pop("_inside_attn_wrapper") is True
    assert all(a is b for a, b in zip(got.pop("args"), (q, k, v, HEADS, *args), strict=True))
    assert got == kwargs
    assert out.shape == q.shape


def test_keywords_that_ask_for_nothing_do_not_matter(call: Callable[..., Any]) -> None:
    q, k, v = (random(BATCH, TOKENS, HEADS * DIM) + i for i in range(3))
    _, _, did = call(
        q, k, v, HEADS, mask=None, attn_precision=torch.float32, future=None, low_precision=False
    )
    assert did["sparse_calls"] == 1


def test_what_a_patch_adds_to_the_layer_is_the_hosts(
    model: Model, patch: Callable[..., Model], sample: Callable[..., Tensor], account: Callable[..., Given]
) -> None:
    """A patch behind self-attention may attend to a reference of any length, even the video's own."""
    from comfy.ldm.modules.attention import optimized_attention

    def add_reference(given: Given) -> Tensor:
        q = given["q"].flatten(2)
        return given["x"] + optimized_attention(
            q, q, q, HEADS, transformer_options=given["transformer_options"]
        )

    other = model.clone()
    other.set_model_patch(add_reference, "attn1_patch")
    keep_all = patch(other, top_k=1.0, top_p=1.0, sparsity=0.0)
    torch.testing.assert_close(sample(keep_all), sample(other), rtol=1e-4, atol=1e-4)
    assert account(keep_all)["sparse_calls"] == LAYERS * STEPS


def test_the_model_can_be_called_outside_of_a_sampler(
    model: Model, patch: Callable[..., Model], rooms: SimpleNamespace
) -> None:
    patched = patch(model)
    q = random(1, TOKENS, HEADS * DIM)
    freqs = torch.eye(2).expand(1, TOKENS, 1, DIM // 2, 2, 2)
    forward = patched.object_patches["diffusion_model.blocks.0.self_attn.forward"]
    out = forward(q, freqs, transformer_options={})
    assert out.shape == q.shape
    assert not torch.allclose(
        out, model.model.diffusion_model.blocks[0].self_attn.forward(q, freqs), atol=1e-3
    )
    assert not rooms.host.patch_of(patched).runs
