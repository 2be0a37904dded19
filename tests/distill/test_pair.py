"""Student and teacher: which attention is sparse, which weights are trained, and that no more differs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge_core import BlockMask, exact, reference
from sparge_core.distill import data
from sparge_core.distill.options import options_from
from sparge_core.distill.pair import Batch, WanPair
from sparge_core.wan.transformer import load_transformer

from .conftest import IMAGE, make_data, make_model

CPU = torch.device("cpu")
TIME = 0.4


@pytest.fixture(params=["t2v", "i2v"])
def kind(request: pytest.FixtureRequest, values: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Options of a run with either kind of model."""
    if request.param == "t2v":
        return values
    return {
        **values,
        "base": make_model(tmp_path / "image", **IMAGE),
        "data": make_data(tmp_path / "images", 3, image=True),
    }


def make_pair(values: dict[str, Any], **changes: Any) -> tuple[WanPair, Tensor, Batch]:
    """The pair, and one input to it."""
    options = options_from({**values, **changes})
    batch = Batch([data.open_dataset(options.data).read(0)], CPU)
    return (
        WanPair(options, CPU),
        torch.randn(batch.latent.shape, generator=torch.Generator().manual_seed(1)),
        batch,
    )


def velocities(pair: WanPair, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return pair.student(x, torch.tensor([TIME]), batch), pair.teacher(x, torch.tensor([TIME]), batch)


@pytest.mark.parametrize("student", ["low_rank", "full"])
def test_the_teacher_is_the_model_as_diffusers_runs_it(student: str, kind: dict[str, Any]) -> None:
    pair, x, batch = make_pair(kind, student=student)
    with torch.no_grad():
        for weight in pair.trained.values():
            weight.add_(0.1)
    model = load_transformer(kind["base"], torch.float32)
    given = x if batch.image_latent is None else torch.cat((x, batch.image_latent), dim=1)
    with torch.no_grad():
        (expected,) = model(
            given, torch.tensor([TIME * 1000]), batch.text, batch.image_embedding, return_dict=False
        )
    taught, teacher = velocities(pair, x, batch)
    torch.testing.assert_close(teacher, expected)
    assert not torch.allclose(taught, expected, atol=1e-3)


@pytest.mark.parametrize("student", ["low_rank", "full"])
def test_a_teacher_by_our_kernel_teaches_the_same(
    student: str, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, x, batch = make_pair(kind, student=student)
    _, expected = velocities(pair, x, batch)
    calls = []

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
        calls.append(mask.sparsity.item())
        return reference.attention(q, k, v, mask, scale=scale)

    kernels = SimpleNamespace(attention=attention, fastest_when_dense=lambda *_: True)
    monkeypatch.setattr(exact, "cuda_kernels", lambda: kernels)
    monkeypatch.setattr(exact, "DEVICE", "cpu")
    monkeypatch.setattr(exact, "HALF", (torch.float32,))
    monkeypatch.setattr(exact, "MIN_PAIRS", 1)
    _, teacher = velocities(pair, x, batch)
    assert calls == [0.0] * 2  # once a layer, and not in the student, which is sparse
    torch.testing.assert_close(teacher, expected, rtol=1e-4, atol=1e-5)


def test_an_untrained_student_that_keeps_every_block_equals_its_teacher(kind: dict[str, Any]) -> None:
    student, teacher = velocities(*make_pair(kind, top_k=1.0, top_p=1.0, sparsity=0.0))
    torch.testing.assert_close(student, teacher, rtol=1e-4, atol=1e-5)


def test_cross_attention_stays_dense(kind: dict[str, Any]) -> None:
    """Without the self-attentions' outputs nothing of a very sparse student differs from its teacher."""
    pair, x, batch = make_pair(kind, sparsity=0.75)
    student, teacher = velocities(pair, x, batch)
    assert not torch.allclose(student, teacher, atol=1e-4)
    with torch.no_grad():
        for name, weight in pair._model.named_parameters():
            if ".attn1.to_out" in name:
                weight.zero_()
    student, teacher = velocities(pair, x, batch)
    torch.testing.assert_close(student, teacher, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("student", ["low_rank", "full"])
@pytest.mark.parametrize("parameters", ["self_attention", "all"])
def test_only_what_was_asked_for_is_trained(student: str, parameters: str, values: dict[str, Any]) -> None:
    pair, x, batch = make_pair(values, student=student, parameters=parameters)
    pair.student(x, torch.tensor([TIME]), batch).square().mean().backward()
    trained = {name for name, weight in pair._model.named_parameters() if weight.grad is not None}
    assert trained == set(pair.trained)
    assert all(".attn1." in name for name in trained) == (parameters == "self_attention")
    assert all(".lora_" in name for name in trained) == (student == "low_rank")
    assert all(weight.dtype == torch.float32 for weight in pair.trained.values())


@pytest.mark.parametrize("student", ["low_rank", "full"])
def test_checkpointing_changes_no_gradient(student: str, kind: dict[str, Any]) -> None:
    """Recomputing happens in the backward pass, after the teacher has run dense and without the factors."""

    def gradients(checkpointing: bool) -> dict[str, Tensor | None]:
        pair, x, batch = make_pair(kind, student=student, checkpointing=checkpointing)
        with torch.no_grad():
            for weight in pair.trained.values():
                weight.add_(0.01)
        t = torch.tensor([TIME])
        target = pair.teacher(x, t, batch)
        (pair.student(x, t, batch) - target).square().mean().backward()
        return {name: weight.grad for name, weight in pair.trained.items()}

    plain, recomputed = gradients(False), gradients(True)
    assert plain.keys() == recomputed.keys()
    assert any(grad is not None and grad.any() for grad in plain.values())
    for name in plain:
        torch.testing.assert_close(recomputed[name], plain[name])


def test_an_adapter_is_where_training_starts(values: dict[str, Any], tmp_path: Path) -> None:
    """Under another alpha too: the factors are scaled to have the same product."""
    from sparge_core.distill.export import LowRankPair, write_low_rank
    from sparge_core.wan.keys import SCHEMES

    pair, x, batch = make_pair(values)
    with torch.no_grad():
        for weight in pair.trained.values():
            weight.add_(
                0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
            )
    expected, teacher = velocities(pair, x, batch)
    factors = {}
    for name, weight in pair.trained.items():
        if ".lora_A." in name:
            target = SCHEMES[1].parse(name)
            assert target is not None
            up = pair.trained[name.replace(".lora_A.", ".lora_B.")]
            factors[target.target] = LowRankPair(up.detach(), weight.detach(), values["alpha"])
    file = write_low_rank(tmp_path / "a.safetensors", factors, options_from(values).config, {}, "fp32")
    given, _ = velocities(*make_pair(values, adapter=file, alpha=2.0))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(given, teacher, atol=1e-4)


def test_bf16_computes_close_to_fp32(kind: dict[str, Any]) -> None:
    for student in ("low_rank", "full"):
        exact, _ = velocities(*make_pair(kind, student=student))
        rounded, teacher = velocities(*make_pair(kind, student=student, dtype="bf16"))
        assert rounded.dtype == teacher.dtype == torch.bfloat16
        assert (rounded.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("student", ["low_rank", "full"])
def test_norms_compute_in_the_dtype_of_what_they_are_given(student: str, values: dict[str, Any]) -> None:
    """With an fp32 weight torch has no fused kernel for them and answers in fp32."""
    pair, _, _ = make_pair(values, student=student, dtype="bf16")
    for name, module in pair._model.named_modules():
        if isinstance(module, torch.nn.RMSNorm):
            x = torch.randn(2, *module.normalized_shape).bfloat16()
            assert module(x).dtype == torch.bfloat16, name
            torch.testing.assert_close(
                module(x).float(), type(module).forward(module, x).float(), rtol=0.02, atol=0.02
            )
