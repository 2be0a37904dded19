"""What torch.compile makes of a patched model: one graph, in which each self-attention is one operator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from .conftest import LAYERS, Model

Patch = Callable[..., Model]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Graphs that the compiler captures; they run as they are. Attention is torch's, as on a GPU."""
    from comfy.ldm.modules import attention
    from comfy.ldm.wan import model as wan_model

    monkeypatch.setattr(wan_model, "optimized_attention", attention.attention_pytorch)
    torch.compiler.reset()
    captured: list[torch.fx.GraphModule] = []
    yield captured
    torch.compiler.reset()


def compiled(model: Model, graphs: list[torch.fx.GraphModule]) -> Model:
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    clone = model.clone(disable_dynamic=True)
    set_torch_compile_wrapper(clone, backend=backend, options={"guard_filter_fn": skip_torch_compile_dict})
    return clone


@pytest.mark.slow
def test_the_fused_feed_forward_layers_are_operators_in_it(
    pack: ModuleType,
    model: Model,
    patch: Patch,
    sample: Callable[..., Any],
    graphs: list[torch.fx.GraphModule],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room: Any = importlib.import_module(f"{pack.__name__}.nodes.feedforward")
    monkeypatch.setattr(room, "DEVICE", "cpu")
    monkeypatch.setattr(room, "HALF", (torch.float32,))
    room._compared.cache_clear()
    sample(compiled(patch(model, sparsity=0.5), graphs))
    room._compared.cache_clear()
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum(".linear_gelu" in name for name in names) == LAYERS


@pytest.mark.slow
def test_a_patched_model_is_one_graph(
    model: Model, patch: Patch, sample: Callable[..., Any], graphs: list[torch.fx.GraphModule]
) -> None:
    sample(compiled(patch(model, sparsity=0.5), graphs))
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes]
    attention = [name for name in names if name.startswith("sparge_attention2_host.attention")]
    assert len(attention) == 2 * LAYERS  # to the video itself and to the text
    assert sum(name.startswith("sparge_attention2_host.rotation") for name in names) == 1


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch has no such tag")
def test_no_cuda_graph_records_what_is_decided_at_each_step(pack: ModuleType) -> None:
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    traced = importlib.import_module(f"{pack.__name__}.nodes.traced")
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(name) for name in ("q", "k", "v", "target")]
    call = graph.call_function(traced.attend.default, (*inputs[:3], 2, inputs[3]))
    assert is_cudagraph_unsafe_fx_node(call)


@pytest.mark.parametrize("trained", range(3), ids="qkv")
def test_a_layer_that_is_trained_is_no_operator_since_that_has_no_gradients(
    trained: int, model: Model, patch: Patch, rooms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the operator was called")

    monkeypatch.setattr(rooms.host.traced, "attend", forbidden)
    attention = rooms.host.patch_of(patch(model))
    override = rooms.host._make_override(attention, attention.layers[0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    qkv = [torch.randn(1, 300, 128) for _ in range(3)]
    qkv[trained].requires_grad_()
    out = override(None, *qkv, 2, transformer_options={rooms.host.HOST_OPTIONS: {}})
    out.sum().backward()
    assert qkv[trained].grad.abs().sum() > 0


def test_a_target_lives_as_long_as_who_asked_for_it(pack: ModuleType) -> None:
    traced = importlib.import_module(f"{pack.__name__}.nodes.traced")
    x = torch.ones(1, 2, 4)
    target = traced.Target(lambda q, k, v, heads: (q + heads).transpose(1, 2).contiguous().transpose(1, 2))
    number = target.number
    out = traced.attend(x, x, x, 2, number)
    assert out.is_contiguous()
    assert torch.equal(out, x + 2)
    del target
    with pytest.raises(KeyError):
        traced.attend(x, x, x, 2, number)
