"""`why_not`: a sentence for every GPU, dtype, driver and compiler that cannot serve; never an exception."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sparge_core import cuda
from sparge_core.cuda import cache, driver, modules, nvrtc


@pytest.fixture(autouse=True)
def fake_tensors() -> Iterator[None]:
    """Tensors that say they are on a GPU, without one."""
    with FakeTensorMode():
        yield


def why_not(
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, device: str = "cuda:0", **options: Any
) -> str | None:
    q, k, v = (torch.empty(1, 2, 300, head_dim, dtype=dtype, device=device, **options) for _ in range(3))
    return cuda.why_not(q, k, v)


def test_none_means_that_the_kernels_are_loaded(csrc: Path, compiler: Any, library: Any) -> None:
    assert why_not() is None
    assert len(library.loaded) == 2
    compiler.error = AssertionError("compiled again")
    assert why_not() is None


def test_tensors_on_the_cpu_never_touch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_open", lambda: pytest.fail("the driver was opened"))
    assert why_not(device="cpu") == "needs tensors on a CUDA device, got cpu"


def test_the_backward_kernels_are_loaded_where_gradients_are_needed(
    csrc: Path, compiler: Any, library: Any
) -> None:
    with torch.no_grad():
        assert why_not(requires_grad=True) is None
    assert len(library.loaded) == 2
    assert why_not(requires_grad=True) is None
    assert len(library.loaded) == 4


def test_without_backward_kernels_only_gradients_go_to_another_back_end(
    csrc: Path, compiler: Any, library: Any
) -> None:
    assert why_not() is None
    compiler.error = nvrtc.CompilerError("nvrtc-12.8 cannot compile backward_sm90.cu: why")
    reason = why_not(requires_grad=True)
    assert reason == "needs kernels for this GPU: nvrtc-12.8 cannot compile backward_sm90.cu: why"
    assert why_not() is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"head_dim": 96}, "needs a head dim of 64 or 128, got 96"),
        ({"dtype": torch.float32}, "needs float16 or bfloat16 tensors, got float32"),
    ],
)
def test_what_the_kernels_are_not_made_for_is_said_without_a_driver(
    given: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_open", lambda: pytest.fail("the driver was opened"))
    assert why_not(**given) == sentence


@pytest.mark.parametrize(
    ("tokens", "reason"), [(524_288, None), (524_289, "needs up to 524288 key tokens, got 524289")]
)
def test_more_key_tokens_than_the_mask_takes_are_said(
    tokens: int, reason: str | None, csrc: Path, compiler: Any, library: Any
) -> None:
    q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda:0")
    k = torch.empty(1, 1, tokens, 64, dtype=torch.bfloat16, device="cuda:0")
    assert cuda.why_not(q, k, k) == reason


def test_a_gpu_that_is_too_old_is_named(library: Any) -> None:
    library.devices = [("Old GPU", (7, 5))]
    assert why_not() == "needs a GPU of compute capability 8.0 or newer, got Old GPU of 7.5"


def test_each_gpu_is_asked_for_itself(csrc: Path, compiler: Any, library: Any) -> None:
    library.devices = [("New GPU", (9, 0)), ("Old GPU", (7, 5))]
    assert why_not(device="cuda:0") is None
    assert "Old GPU" in (why_not(device="cuda:1") or "")


def test_a_rocm_build_of_torch_is_no_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert why_not() == "needs an NVIDIA GPU, and this is a ROCm build of torch"


def test_an_old_driver_is_a_sentence(library: Any) -> None:
    library.version = 11080
    assert why_not() == (
        "needs kernels for this GPU: the NVIDIA driver supports CUDA 11.8 and 12.0 is needed: "
        "update the NVIDIA driver"
    )


def no_compiler() -> Any:
    raise nvrtc.CompilerError("NVRTC is not found: install it")


def test_no_compiler_is_a_sentence_unless_kernels_are_shipped(
    csrc: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "get", no_compiler)
    assert why_not() == "needs kernels for this GPU: NVRTC is not found: install it"
    cuda._remembered.cache_clear()
    for module in ("mask", "forward_sm90"):
        name = modules.file_name(module, modules.Variant("bf16", 128), "sm_90a")
        cache.write(modules.shipped_folder() / name, b"shipped")
    assert why_not() is None


def test_a_failure_is_logged_once_in_full_and_remembered(
    csrc: Path, compiler: Any, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.error = nvrtc.CompilerError(
        "nvrtc-12.8 cannot compile mask.cu: why\ncsrc/mask.cu(3): error: what"
    )
    with caplog.at_level(logging.WARNING):
        reasons = {why_not() for _ in range(3)}
    assert reasons == {"needs kernels for this GPU: nvrtc-12.8 cannot compile mask.cu: why"}
    (record,) = caplog.records
    assert "csrc/mask.cu(3): error: what" in record.getMessage()


def test_whatever_goes_wrong_nothing_is_raised(csrc: Path, compiler: Any, library: Any) -> None:
    compiler.error = ZeroDivisionError()
    assert why_not() == "needs kernels for this GPU: ZeroDivisionError"
