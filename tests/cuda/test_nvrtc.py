"""NVRTC: found where torch's wheels put it, and its complaints reach the reader with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparge_core.cuda import cubin, modules, nvrtc
from sparge_core.cuda.modules import Variant

BF16 = Variant("bf16", 128)


@pytest.mark.parametrize("architecture", modules.ARCHITECTURES.values())
def test_every_architecture_compiles_without_an_include_path(architecture: str, csrc: Path) -> None:
    compiled = nvrtc.get().compile(modules.source("mask"), "mask.cu", modules.options(BF16, architecture))
    # 128 + 8 + 4 + 4 bytes, padded to the alignment of the map.
    assert cubin.parameter_bytes(compiled.binary) == {"tiny": 192}


def test_an_architecture_of_the_future_becomes_ptx(csrc: Path) -> None:
    compiled = nvrtc.get().compile(modules.source("mask"), "mask.cu", modules.options(BF16, "compute_90"))
    assert b".entry tiny" in compiled.binary
    assert compiled.binary.endswith(b"\0"), "the driver reads PTX up to a NUL"
    assert cubin.parameter_bytes(compiled.binary) == {}


def test_an_error_names_the_file_and_line_of_the_source(csrc: Path) -> None:
    (csrc / "mask.cu").write_text("__device__ int fine;\n__device__ int wrong = unknown_name;\n")
    with pytest.raises(nvrtc.CompilerError, match=r"cannot compile mask\.cu") as caught:
        nvrtc.get().compile(modules.source("mask"), "mask.cu", modules.options(BF16, "sm_80"))
    assert "csrc/mask.cu(2): error" in str(caught.value)
    assert "unknown_name" in str(caught.value)


def test_an_architecture_that_it_does_not_know_is_an_error(csrc: Path) -> None:
    with pytest.raises(nvrtc.CompilerError, match=r"cannot compile mask\.cu"):
        nvrtc.get().compile(modules.source("mask"), "mask.cu", modules.options(BF16, "sm_55"))


def test_the_version_told_from_file_names_is_that_of_the_library() -> None:
    if not Path(nvrtc.get().path).is_absolute():
        pytest.skip("NVRTC was found by the system's search, so no file name tells its version")
    assert nvrtc.likely_name() == nvrtc.get().name


def lay_out(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "version"),
    [
        (("libnvrtc.so.12", "libnvrtc-builtins.so.12.8", "libnvrtc.alt.so.12"), "nvrtc-12.8"),
        (("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"), "nvrtc-13.0"),
        (("nvrtc64_120_0.dll", "nvrtc64_120_0.alt.dll", "nvrtc-builtins64_126.dll"), "nvrtc-12.6"),
        (("nvrtc64_130_0.dll", "nvrtc-builtins64_130.dll"), "nvrtc-13.0"),
        (("libnvrtc.so.13", "libnvrtc-builtins.so.12.8", "libnvrtc-builtins.so.13.0"), "nvrtc-13.0"),
    ],
)
def test_linux_and_windows_names_are_known(
    names: tuple[str, ...], version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lay_out(tmp_path, *names)
    monkeypatch.setattr(nvrtc, "_folders", lambda: [folder])
    found = [candidate for candidate in nvrtc.candidates() if Path(candidate).is_absolute()]
    assert found == [str(folder / names[0])]
    assert nvrtc.likely_name() == version


@pytest.mark.parametrize(("torch_cuda", "first"), [(12, "a"), (13, "b"), (None, "a")])
def test_the_nvrtc_of_torchs_own_cuda_comes_first(
    torch_cuda: int | None, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = lay_out(tmp_path / "a", "libnvrtc.so.12"), lay_out(tmp_path / "b", "libnvrtc.so.13")
    monkeypatch.setattr(nvrtc, "_folders", lambda: [older, newer])
    monkeypatch.setattr(nvrtc, "_torch_cuda_major", lambda: torch_cuda)
    assert Path(next(iter(nvrtc.candidates()))).parent.name == first


def test_no_compiler_anywhere_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "candidates", lambda: iter(["libnvrtc-that-does-not-exist.so.13"]))
    with pytest.raises(nvrtc.CompilerError, match="install a CUDA build of torch") as caught:
        nvrtc.get()
    assert "libnvrtc-that-does-not-exist.so.13" in str(caught.value)
