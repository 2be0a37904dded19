"""The operators as torch sees them: registered once, traceable as a whole, closed to what does not fit."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import sparge_core
from sparge_core import SparseConfig, cuda, sparse_attention
from sparge_core.cuda import launch, mask_kernels, operators

CONFIG = SparseConfig(top_k=0.1, top_p=0.3)


def test_a_second_copy_of_the_package_registers_nothing_and_shares_the_operators() -> None:
    """ComfyUI imports the pack under the name of its folder, perhaps beside an installed sparge_core."""
    folder = Path(sparge_core.__file__).parent
    spec = importlib.util.spec_from_file_location(
        "another_pack", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    copy = sys.modules["another_pack"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(copy)
        again = importlib.import_module("another_pack.cuda.operators")
        assert again is not operators
        assert again._LIBRARY is None
        assert operators._LIBRARY is not None
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "another_pack"]:
            del sys.modules[name]


def half(*shape: int, device: str = "cuda:0") -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=device)


@pytest.mark.parametrize("q_len", [1, 128, 129, 32_760])
@pytest.mark.parametrize("k_len", [1, 64, 65, 2048, 2049])
def test_fake_results_have_the_shapes_of_a_mask(q_len: int, k_len: int) -> None:
    with FakeTensorMode():
        q, k = half(2, 3, q_len, 64), half(2, 3, k_len, 64)
        bits, counts, order = torch.ops.sparge_attention2.block_mask(q, k, 0.1, 0.1, 0.0, 0.1)
        out, lse = torch.ops.sparge_attention2.forward(q, k, k, bits, counts, order, 0.1)
    rows, blocks = -(-q_len // 128), -(-k_len // 64)
    assert bits.shape == (2, 3, rows, -(-blocks // 32))
    assert counts.shape == (2, 3, rows)
    assert order.shape == (2 * 3 * rows,)
    assert {bits.dtype, counts.dtype, order.dtype} == {torch.int32}
    assert out.shape == q.shape
    assert (lse.shape, lse.dtype) == ((2, 3, q_len), torch.float32)


def test_gradients_have_the_layouts_of_what_they_belong_to() -> None:
    """Of the operator itself and of autograd through the forward pass, whose LSE requires no gradient."""
    with FakeTensorMode():  # on the CPU, as without a GPU autograd has no thread for one
        q = half(2, 300, 3, 64, device="cpu").permute(0, 2, 1, 3).requires_grad_()
        k = half(2, 3, 500, 64, device="cpu").requires_grad_()
        v = half(500, 2, 3, 64, device="cpu").permute(1, 2, 0, 3).requires_grad_()
        masks = torch.ops.sparge_attention2.block_mask(q, k, 0.1, 0.1, 0.0, 0.1)
        assert not any(x.requires_grad for x in masks)
        out, lse = torch.ops.sparge_attention2.forward(q, k, v, *masks, 0.1)
        assert out.requires_grad
        assert not lse.requires_grad
        d_out = torch.empty_like(out)
        by_operator = torch.ops.sparge_attention2.backward(d_out, q, k, v, out, lse, *masks, 0.1)
        for gradients in (by_operator, torch.autograd.grad(out, (q, k, v), d_out)):
            for gradient, x in zip(gradients, (q, k, v), strict=True):
                assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
                assert gradient.stride() == x.stride()


def test_a_second_derivative_is_refused_with_what_to_do() -> None:
    with FakeTensorMode():
        q, k, v = (half(1, 2, 300, 64, device="cpu").requires_grad_() for _ in range(3))
        masks = torch.ops.sparge_attention2.block_mask(q, k, 0.1, 0.1, 0.0, 0.1)
        out, _ = torch.ops.sparge_attention2.forward(q, k, v, *masks, 0.1)
        (d_q,) = torch.autograd.grad(out, q, torch.empty_like(out).requires_grad_(), create_graph=True)
        with pytest.raises(RuntimeError, match='once; use the back end "dense"'):
            torch.autograd.grad(d_q, k, torch.empty_like(d_q))


def test_the_output_keeps_the_layout_of_q() -> None:
    with FakeTensorMode():
        q = half(2, 300, 3, 64).permute(0, 2, 1, 3)
        masks = torch.ops.sparge_attention2.block_mask(q, q, 0.1, 0.1, 0.0, 0.1)
        out, _ = torch.ops.sparge_attention2.forward(q, q, q, *masks, 0.1)
    assert out.stride() == q.stride() == (300 * 3 * 64, 64, 3 * 64, 1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that `compiled` made; that the kernels are ready is found in a way that cannot be traced."""

    def ready(device: int, dtype: torch.dtype, head_dim: int) -> None:
        assert Path(__file__).read_bytes()

    monkeypatch.setattr(cuda, "_remembered", ready)
    monkeypatch.setattr(cuda, "_remembered_gradients", ready)
    torch._dynamo.reset()
    return []


def compiled(run: Callable[..., Any], graphs: list[Any]) -> Callable[..., Any]:
    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(run, backend=keep, fullgraph=True)


def test_attention_compiles_without_a_break_and_no_more_for_new_lengths(graphs: list[Any]) -> None:
    run = compiled(lambda q, k, v: sparse_attention(q, k, v, CONFIG) * 2, graphs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for length in (300, 500, 777, 64, 4096):
            assert run(*(half(1, 4, length, 128) for _ in range(3))).shape == (1, 4, length, 128)
    assert len(graphs) == 2, "one for the first length, one for any length"
    called = [str(node.target) for node in graphs[-1].graph.nodes if "sparge_attention2" in str(node.target)]
    assert called == ["sparge_attention2.block_mask", "sparge_attention2.forward"]


def test_a_mask_made_beforehand_compiles_too(graphs: list[Any]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = sparge_core.block_mask(q, k, CONFIG)
        return sparse_attention(q, k, v, CONFIG, mask=mask)

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert compiled(run, graphs)(*(half(1, 4, 300, 128) for _ in range(3))).shape == (1, 4, 300, 128)
    assert len(graphs) == 1


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launchers that were reached; none of them may launch."""
    reached: list[str] = []
    monkeypatch.setattr(mask_kernels, "block_mask", lambda *arguments: reached.append("mask"))
    for name, launcher in operators._FORWARD.items():
        monkeypatch.setattr(launcher, "forward", lambda *arguments, name=name: reached.append(name))
    for name, launcher in operators._BACKWARD.items():
        backward = f"{name} backward"
        monkeypatch.setattr(launcher, "backward", lambda *arguments, name=backward: reached.append(name))
    return reached


def mask_of(q: Tensor, k: Tensor) -> list[Tensor]:
    return [torch.zeros_like(x) for x in operators._block_mask_shapes(q, k, 0.1, 0.1, 0.0, 1.0)]


GOOD = (
    half(2, 4, 300, 64, device="cpu"),
    half(2, 4, 500, 64, device="cpu"),
    half(2, 4, 500, 64, device="cpu"),
)


@pytest.mark.parametrize(
    ("index", "wrong"),
    [
        (0, half(2, 4, 300, 96, device="cpu")),
        (0, half(2, 4, 300, 64, device="cpu").float()),
        (0, half(2, 4, 0, 64, device="cpu")),
        (0, half(8, 300, 64, device="cpu")),
        (0, half(2, 8, 300, 64, device="cpu")),
        (1, half(2, 4, 0, 64, device="cpu")),
        (1, half(2, 4, 500, 128, device="cpu")),
        (1, half(1, 4, 500, 64, device="cpu")),
        (1, half(2, 4, 500, 64, device="cpu").bfloat16()),
        (2, half(2, 4, 499, 64, device="cpu")),
    ],
    ids=[
        "head dim", "dtype", "no queries", "dimensions", "heads", "no keys", "mixed head dims", "batch",
        "mixed dtypes", "key and value tokens",
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_before_any_launch(
    index: int, wrong: Tensor, launched: list[str]
) -> None:
    tensors = list(GOOD)
    masks = mask_of(*GOOD[:2])
    tensors[index] = wrong
    with pytest.raises(ValueError, match="The CUDA kernels take") as caught:
        operators._forward(*tensors, *masks, 1.0)
    assert str(tuple(wrong.shape)) in str(caught.value), "it says what was given"
    assert launched == []
    if index < 2:
        with pytest.raises(ValueError, match="The CUDA kernels take"):
            operators._block_mask(*tensors[:2], 0.1, 0.1, 0.0, 1.0)
        assert launched == []


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    "spoil",
    [lambda x: x.long(), lambda x: x[..., :-1], lambda x: torch.cat((x, x), -1)[..., ::2]],
    ids=["dtype", "shape", "stride"],
)
def test_a_mask_that_does_not_fit_is_refused_before_any_launch(
    index: int, spoil: Callable[[Tensor], Tensor], launched: list[str]
) -> None:
    masks = mask_of(*GOOD[:2])
    masks[index] = spoil(masks[index])
    with pytest.raises(ValueError, match="contiguous int32"):
        operators._forward(*GOOD, *masks, 1.0)
    assert launched == []


@pytest.mark.parametrize("scale", [0.0, -0.1, float("inf"), float("nan")])
def test_a_scale_that_is_not_above_zero_is_refused_before_any_launch(
    scale: float, launched: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"scale above 0; got {scale}"):
        operators._forward(*GOOD, *mask_of(*GOOD[:2]), scale)
    assert launched == []


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_tensors_of_several_devices_are_refused_before_any_launch(
    index: int, device: str, launched: list[str]
) -> None:
    fitting = (*GOOD, *mask_of(*GOOD[:2]))
    with FakeTensorMode():
        tensors = [torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in fitting]
        tensors[index] = torch.empty(tensors[index].shape, dtype=tensors[index].dtype, device=device)
        with pytest.raises(ValueError, match=f"on {device}"):
            operators._forward(*tensors, 1.0)
    assert launched == []


def results_of(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the output, output and LSE of a forward pass."""
    return torch.zeros_like(q), torch.zeros_like(q), torch.zeros(q.shape[:3])


def call_backward(
    tensors: tuple[Tensor, ...], results: tuple[Tensor, ...], masks: list[Tensor], scale: float = 1.0
) -> None:
    d_out, out, lse = results
    operators._backward(d_out, *tensors, out, lse, *masks, scale)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    "spoil",
    [lambda x: x.double(), lambda x: x[:, :, 1:], lambda x: x.transpose(0, 1)],
    ids=["dtype", "tokens", "shape"],
)
def test_results_that_do_not_fit_are_refused_before_any_launch(
    index: int, spoil: Callable[[Tensor], Tensor], launched: list[str]
) -> None:
    results = list(results_of(GOOD[0]))
    results[index] = spoil(results[index])
    with pytest.raises(ValueError, match="are like q, the LSE is contiguous float32") as caught:
        call_backward(GOOD, tuple(results), mask_of(*GOOD[:2]))
    assert str(tuple(results[index].shape)) in str(caught.value)
    assert launched == []


def test_what_the_forward_pass_refuses_the_backward_pass_refuses_too(launched: list[str]) -> None:
    results, masks = results_of(GOOD[0]), mask_of(*GOOD[:2])
    with pytest.raises(ValueError, match="The CUDA kernels take"):
        call_backward((GOOD[0], GOOD[1].bfloat16(), GOOD[2]), results, masks)
    with pytest.raises(ValueError, match="contiguous int32"):
        call_backward(GOOD, results, [masks[0].long(), *masks[1:]])
    with pytest.raises(ValueError, match="scale above 0"):
        call_backward(GOOD, results, masks, -1.0)
    assert launched == []


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_the_kernels_are_those_of_the_gpu_unless_forced(
    capability: tuple[int, int], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "device", lambda index: launch.Device(0, "", capability, 1, 1, 1))
    call = lambda: operators._forward(*GOOD, *mask_of(*GOOD[:2]), 1.0)  # noqa: E731
    call()
    with cuda.force("mma"):
        call()
        with cuda.force("sm90"):
            call()
    call()
    own = "sm90" if capability == (9, 0) else "mma"
    assert launched == [own, "mma", "sm90", own]
    launched.clear()
    call = lambda: call_backward(GOOD, results_of(GOOD[0]), mask_of(*GOOD[:2]))  # noqa: E731
    call()
    with cuda.force("mma"):
        call()
    assert launched == [f"{own} backward", "mma backward"]


def test_forcing_kernels_that_do_not_exist_says_which_do() -> None:
    with pytest.raises(ValueError, match="'sm80'; choose 'sm90' or 'mma'"), cuda.force("sm80"):
        pass


def test_a_mask_without_an_order_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of the reference or of the caller has none."""
    seen = []
    monkeypatch.setattr(
        cuda, "_operators", type("Ops", (), {"forward": lambda *a: (seen.append(a[5]), None)})
    )
    q = torch.zeros(2, 3, 300, 64)
    mask = sparge_core.BlockMask.from_dense(torch.ones(2, 3, 3, 5, dtype=torch.bool), 300, 300)
    cuda.attention(q, q, q, mask, 1.0)
    assert seen[0].dtype == torch.int32
    assert seen[0].tolist() == list(range(2 * 3 * 3))


@pytest.mark.parametrize("family", ["mma", "sm90"])
def test_launchers_take_what_the_operators_hand_over(family: str) -> None:
    names = inspect.signature(operators._FORWARD[family].forward).parameters
    assert tuple(names) == ("q", "k", "v", "bits", "counts", "order", "scale")
    names = inspect.signature(operators._BACKWARD[family].backward).parameters
    assert tuple(names) == ("d_out", "q", "k", "v", "out", "lse", "bits", "counts", "order", "scale")
