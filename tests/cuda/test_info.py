"""`python -m sparge_core.cuda info`: what this machine runs and why, whatever it lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge_core.cuda import __main__ as command_line
from sparge_core.cuda import cache, driver, info, modules, nvrtc


def lines(name: str) -> list[str]:
    """What the report says of one subject."""
    return [line.removeprefix(name).strip() for line in info.report().splitlines() if line.startswith(name)]


def test_a_machine_with_nothing_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver() -> Any:
        raise driver.DriverError("there is no NVIDIA driver")

    monkeypatch.setattr(driver, "_open", no_driver)
    monkeypatch.setattr(nvrtc, "candidates", lambda: iter(()))
    assert command_line.main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert "there is no NVIDIA driver" in text
    assert "NVRTC, the compiler of CUDA builds of torch, is not found" in text
    assert "attention runs on another back end" in text


def test_a_gpu_says_its_kernels_and_where_they_come_from(csrc: Path, compiler: Any, library: Any) -> None:
    library.devices = [("Hopper", (9, 0)), ("Ada", (8, 9)), ("Old", (7, 5)), ("Blackwell", (12, 0))]
    assert lines("driver") == ["CUDA 13.0, 4 GPUs"]
    assert lines("compiler") == ["nvrtc-12.8 (libnvrtc.so.12)"]
    (hopper,), (ada,), (old,), (blackwell,) = (lines(f"GPU {index}") for index in range(4))
    kernels = "mask and forward_sm90, compiled at the first use for sm_90a, then cached"
    assert hopper == f"Hopper, compute capability 9.0: {kernels}"
    assert "forward_mma, compiled at the first use for sm_89" in ada
    assert old == "Old, compute capability 7.5: too old, 8.0 is needed"
    assert "sm_120a" in blackwell


def test_a_gpu_that_does_not_answer_is_said_beside_those_that_do(
    csrc: Path, compiler: Any, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.devices = [("Lost", (9, 0)), ("Ada", (8, 9))]
    answer = library.cuDeviceGetAttribute
    monkeypatch.setattr(
        library,
        "cuDeviceGetAttribute",
        lambda value, number, index: answer(value, number, index) if index else 1,
    )
    assert "of GPU 0 failed" in lines("GPU 0")[0]
    assert lines("GPU 1")[0].startswith("Ada")


def test_shipped_kernels_are_told_from_compiled_ones(csrc: Path, compiler: Any, library: Any) -> None:
    cache.write(
        modules.shipped_folder() / modules.file_name("mask", modules.VARIANTS[0], "sm_90a"), b"kernel"
    )
    assert lines("GPU 0")[0].endswith("shipped for sm_90a")
    assert lines("shipped")[0].startswith("1 compiled kernels in ")


def test_a_gpu_newer_than_the_compiler_runs_what_the_driver_finishes(
    csrc: Path, compiler: Any, library: Any
) -> None:
    library.devices = [("Next", (14, 0))]
    assert (
        "for compute_120 and finished by the driver, as the compiler is older than the GPU"
        in lines("GPU 0")[0]
    )


def test_a_torch_without_cuda_beside_a_gpu_is_said(
    csrc: Path, compiler: Any, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert lines("result") == ["this torch cannot use the GPU: install a CUDA build of torch"]
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert lines("result") == []


def test_the_cache_is_named_with_the_way_to_move_it(
    cache_folder: Path, csrc: Path, compiler: Any, library: Any
) -> None:
    list(cache.binaries("mask", modules.VARIANTS[0], (9, 0)))
    assert lines("cache") == [f"{cache_folder} (1 compiled kernels; SPARGE_CACHE_DIR moves it)"]


def test_a_python_that_ignores_the_current_folder_can_ask_too(tmp_path: Path) -> None:
    """As the one of ComfyUI's portable build for Windows."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "info.py"
    done = subprocess.run(
        [sys.executable, "-I", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("torch ")
