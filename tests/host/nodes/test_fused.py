"""Norm and rotation as one kernel: where it stands in for ComfyUI's own code, and where that stays."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HEADS, HEAD_DIM, TOKENS = 2, 64, 24
DIM = HEADS * HEAD_DIM


def in_two_steps(x: Tensor, weight: Tensor, rotation: Tensor, epsilon: float) -> Tensor:
    """What the kernel does, on any device."""
    normalised = nn.functional.rms_norm(x, weight.shape, weight, epsilon).float()
    pairs = normalised.unflatten(-1, (-1, rotation.shape[3], 2))
    return torch.einsum("blhpij,blhpj->blhpi", rotation, pairs).flatten(2).to(x.dtype)


@pytest.fixture
def kernels() -> SimpleNamespace:
    """The kernel on the CPU, and how often it ran."""

    def norm_rope(*arguments: Any) -> Tensor:
        found.calls += 1
        return found.run(*arguments)

    found = SimpleNamespace(
        calls=0,
        run=in_two_steps,
        norm_rope=norm_rope,
        why_not_norm_rope=lambda *_: None,
        MAX_NORM_CHANNELS=8192,
    )
    return found


@pytest.fixture
def fused(
    pack: ModuleType, comfy: ModuleType, kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    module = importlib.import_module(f"{pack.__name__}.nodes.fused")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "cuda_kernels", lambda: kernels)
    module._compared.cache_clear()
    yield module
    module._compared.cache_clear()


@pytest.fixture
def layer(comfy: ModuleType) -> Any:
    import comfy.ops
    from comfy.ldm.wan.model import WanSelfAttention

    torch.manual_seed(0)
    settings = {"operations": comfy.ops.manual_cast, "device": "cpu", "dtype": torch.float32}
    made = WanSelfAttention(DIM, HEADS, operation_settings=settings).requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_()
    return made


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(2, TOKENS, DIM).to(dtype), torch.randn(1, TOKENS, 1, HEAD_DIM // 2, 2, 2)


def seen(forward: Callable[..., Tensor], x: Tensor, freqs: Tensor, name: str) -> list[Tensor]:
    """q, k and v that come to the attention, and the layer's result for v as the attention's."""
    found: list[Tensor] = []

    def override(_: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.extend((q, k, v))
        return v

    with torch.no_grad():
        out = forward(x, freqs, transformer_options={name: override})
    return [*found, out]


def test_it_gives_what_the_layer_gives(fused: Any, layer: Any, kernels: SimpleNamespace) -> None:
    x, freqs = inputs()
    stand_in = fused.fuse(layer.forward)
    with torch.no_grad():
        assert stand_in.serves(x, freqs)
    kernels.calls = 0
    for ours, own in zip(
        seen(stand_in.forward, x, freqs, fused.OVERRIDE),
        seen(layer.forward, x, freqs, fused.OVERRIDE),
        strict=True,
    ):
        torch.testing.assert_close(ours, own, rtol=2**-6, atol=2**-6)
    assert kernels.calls == 2


def test_a_weight_that_waits_for_a_lora_is_taken_with_it(fused: Any, layer: Any) -> None:
    layer.norm_q.weight_function = [lambda weight: weight + 3]  # the list that is there belongs to the class
    x, freqs = inputs()
    stand_in = fused.fuse(layer.forward)
    for ours, own in zip(
        seen(stand_in.forward, x, freqs, fused.OVERRIDE),
        seen(layer.forward, x, freqs, fused.OVERRIDE),
        strict=True,
    ):
        torch.testing.assert_close(ours, own, rtol=2**-6, atol=2**-6)


def test_it_stands_in_for_comfyuis_own_forward_alone(
    fused: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fused.fuse(layer.forward) is not None
    assert fused.fuse(lambda x, freqs, transformer_options: x) is None
    own = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    assert fused.fuse(layer.forward) is None  # another pack replaced it for all models
    monkeypatch.undo()
    layer.norm_k.forward = lambda x: x
    assert fused.fuse(layer.forward) is None
    layer.norm_k = nn.Identity()
    assert fused.fuse(layer.forward) is None


def test_it_serves_no_other_rotation_dtype_or_gradient(fused: Any, layer: Any) -> None:
    x, freqs = inputs()
    stand_in = fused.fuse(layer.forward)
    with torch.no_grad():
        assert stand_in.serves(x, freqs)
        assert stand_in.serves(x, freqs.expand(2, *freqs.shape[1:]))
        for other in (
            (x.float(), freqs),
            (x, freqs.double()),
            (x, freqs[:, :-1]),
            (x, freqs.expand(3, *freqs.shape[1:])),
            (x, freqs.expand(-1, -1, HEADS, -1, -1, -1)),
            (x, freqs[..., 0]),
            (x.to("meta"), freqs),
        ):
            assert not stand_in.serves(*other)
    assert not stand_in.serves(x, freqs)


def test_a_host_that_computes_otherwise_keeps_its_own_code(
    fused: Any, layer: Any, kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, freqs = inputs()

    def other(x: Tensor, freqs: Tensor) -> Tensor:
        return x

    monkeypatch.setattr(fused.wan_model, "apply_rope1", other)
    with torch.no_grad():
        assert not fused.fuse(layer.forward).serves(x, freqs)


def test_without_the_kernel_the_hosts_code_stays(fused: Any, layer: Any, kernels: SimpleNamespace) -> None:
    kernels.why_not_norm_rope = lambda *_: "needs a GPU"
    with torch.no_grad():
        assert not fused.fuse(layer.forward).serves(*inputs())
