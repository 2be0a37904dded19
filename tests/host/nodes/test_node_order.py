"""Random chains of nodes around the patch: each gives what its nodes give in one canonical order."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import HEADS, Model
from .test_composition import KEYS, NODES, Node

CHAINS = 16
LONGEST = 5  # nodes beside the patch

Patch = Callable[..., Model]
Sample = Callable[..., Tensor]
Account = Callable[[Model], dict[str, Any]]

# These commute among each other, where they work together at all.
POOL = [name for name in NODES if name not in ("lazy_cache", "skip_layer_simple")]
APART = {"easy_cache", "context_windows"}  # the cache takes the windows for one video, and fails


def own_attention(model: Model) -> Model:
    """A node that gives one layer an attention of its own, and calls nothing of what was there."""
    from comfy.ldm.modules.attention import optimized_attention

    def own(x: Tensor, *_: Any, transformer_options: dict[str, Any]) -> Tensor:
        return optimized_attention(x, x, x, HEADS, transformer_options=transformer_options)

    clone = model.clone()
    clone.add_object_patch(KEYS[0], own)
    return clone


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def chain(nodes: list[Node], model: Model) -> Model:
    for node in nodes:
        model = node(model)
    return model


@pytest.mark.parametrize("seed", range(CHAINS))
def test_any_order_gives_what_the_canonical_one_gives(
    seed: int, model: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    choice = random.Random(seed)
    others = choice.sample(POOL, choice.randint(1, LONGEST))
    if set(others) >= APART:
        others.remove("easy_cache")
    others.sort(key=list(NODES).index)
    settings = {"end_percent": 0.6, "dense_layers": choice.choice(["", "0", "1"])}

    def ours(model: Model) -> Model:
        return patch(model, **settings)

    canonical = chain([*(NODES[name] for name in others), ours], model)
    shuffled = choice.sample(others, len(others))
    nodes = [NODES[name] for name in shuffled]
    nodes.insert(choice.randint(0, len(nodes)), ours)
    if choice.random() < 0.3:  # another setting of ours somewhere before counts for nothing
        nodes.insert(choice.randint(0, nodes.index(ours)), lambda model: patch(model, sparsity=0.9))
    one, other = chain(nodes, model), canonical
    # Weights are patched in the order of the nodes, so that their sums are rounded in another one.
    torch.testing.assert_close(sample(one), sample(other), rtol=1e-3, atol=1e-3, msg=f"{shuffled}")
    assert account(one)["sparse_calls"] == account(other)["sparse_calls"] > 0
    assert not warnings(caplog)


@pytest.mark.parametrize("seed", range(4))
def test_an_order_that_does_not_gives_a_warning_that_says_why(
    seed: int, model: Model, patch: Patch, sample: Sample, account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    choice = random.Random(seed)
    names = [name for name in POOL if name not in ("wrapped_forward", "attention_switch", "skip_layer")]
    nodes: list[Node] = [NODES[name] for name in choice.sample(names, 1)]
    place = choice.randint(0, len(nodes))
    nodes.insert(place, patch)
    nodes.insert(choice.randint(place + 1, len(nodes)), own_attention)
    behind = chain(nodes, model)
    sample(behind)
    (warning,) = warnings(caplog)
    assert "a later node replaced the attention of 1 layers, blocks.0 first" in warning
    assert "put the SpargeAttention2 node behind that one" in warning
    layers = dict(zip(account(behind)["layers"], account(behind)["sparsity_map"], strict=True))
    assert all(share is None for share in layers["blocks.0"])
    assert any(share is not None for share in layers["blocks.1"])

    caplog.clear()
    nodes.remove(patch)
    before = chain([*nodes, patch], model)
    sample(before)
    assert all(any(share is not None for share in row) for row in account(before)["sparsity_map"])
    assert not warnings(caplog)
