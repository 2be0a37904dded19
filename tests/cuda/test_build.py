"""The ahead-of-time build: every architecture without a GPU, and nothing slow gets through."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparge_core.cuda import __main__ as command_line
from sparge_core.cuda import build, cache, modules
from sparge_core.cuda.modules import Variant

BF16 = Variant("bf16", 128)

NVCC_LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    256 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 256 bytes cumulative stack size
"""
NVRTC_LOG = NVCC_LOG.replace("\n    0 bytes", "\nptxas         .     0 bytes").replace(
    "\n    256", "\nptxas         .     256"
)
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in the function 'first'"
)


@pytest.mark.parametrize("log", [NVCC_LOG, NVRTC_LOG], ids=["nvcc", "nvrtc"])
def test_what_ptxas_says_is_read_for_each_kernel(log: str) -> None:
    assert list(build.resource_usage(log)) == [
        build.Usage("first", 0, 0, 168),
        build.Usage("second", 256, 28, 32),
    ]


def problems(log: str, allowed: str | None = None) -> list[str]:
    return list(build.find_problems(log, build.resource_usage(log), allowed))


def test_a_spill_needs_a_reason() -> None:
    (problem,) = problems(NVCC_LOG)
    assert problem.startswith("second 32 + 256 bytes of stack, 28 spilled")
    assert "modules.ALLOWED_SPILLS" in problem
    assert problems(NVCC_LOG, allowed="its indices are dynamic") == []


def test_serialised_wgmma_is_never_allowed() -> None:
    (problem,) = problems(NVCC_LOG + SERIALISED, allowed="any")
    assert "wgmma.mma_async instructions are serialized" in problem


def test_a_compiler_that_reports_nothing_is_not_trusted() -> None:
    assert problems("") == ["the compiler did not say what the kernels use"]


COMPILERS = [
    "nvrtc",
    pytest.param("nvcc", marks=pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")),
]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_worker_makes_the_files_that_the_runtime_looks_for(
    compiler: str, csrc: Path, tmp_path: Path
) -> None:
    build.compile_one("mask", "sm_90a", modules.shipped_folder(), compiler)
    for variant in modules.VARIANTS:
        origin, binary = next(cache.binaries("mask", variant, (9, 0)))
        assert origin == "shipped"
        assert binary.startswith(b"\x7fELF")


def test_a_kernel_that_spills_is_not_built_until_the_reason_is_listed(
    csrc: Path, tmp_path: Path, spilling_source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (csrc / "mask.cu").write_text(spilling_source)
    monkeypatch.setattr(modules, "ALLOWED_SPILLS", {})
    out = tmp_path / "out"
    with pytest.raises(build.BuildError, match=r"mask bf16 d128 sm_80: spilling .* bytes of stack"):
        build.compile_one("mask", "sm_80", out, "nvrtc")
    assert not out.exists()
    reasons = {("mask", variant, "sm_80"): "its indices are dynamic" for variant in modules.VARIANTS}
    monkeypatch.setattr(modules, "ALLOWED_SPILLS", reasons)
    build.compile_one("mask", "sm_80", out, "nvrtc")
    assert len(list(out.iterdir())) == len(modules.VARIANTS)


def test_every_allowed_spill_names_a_kernel_that_is_built_and_a_reason() -> None:
    for (module, variant, architecture), reason in modules.ALLOWED_SPILLS.items():
        assert module in modules.MODULES
        assert variant in modules.VARIANTS
        assert architecture in modules.ARCHITECTURES.values()
        assert reason.strip()


def run_build(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparge_core.cuda", "build", *arguments]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_module_builds_for_every_architecture_and_a_second_time_at_once(tmp_path: Path) -> None:
    out = tmp_path / "with a space"
    first = run_build("--out", str(out), "--compiler", "nvrtc", "-j", str(os.cpu_count()))
    assert first.returncode == 0, first.stdout + first.stderr
    assert {path.name for path in out.glob("*.cubin")} == build.file_names()
    assert len(build.file_names()) == 4 * (5 * 6 + 2), "five modules everywhere, two on 9.0 alone"
    assert all(cache.read(path) for path in out.glob("*.cubin"))

    stale = out / f"mask-bf16-d128-sm_80-{'0' * 16}.cubin"
    other = out / "someone-elses.cubin"
    stale.touch()
    other.touch()
    second = run_build("--out", str(out), "--compiler", "nvrtc")
    assert second.returncode == 0
    assert "no work to do" in second.stdout
    assert other.exists()
    assert not stale.exists(), "of sources that are gone"


def test_an_unknown_architecture_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["build", "--arch", "sm_70"])
    assert "sm_120a" in capsys.readouterr().err


def test_a_compiler_too_old_for_an_architecture_fails_with_its_name(
    csrc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (csrc / "mask.cu").write_text("#error too old\n")
    arguments = ["compile-one", "mask", "sm_120a", "--out", str(tmp_path / "out"), "--compiler", "nvrtc"]
    assert command_line.main(arguments) == 1
    assert "cannot compile mask.cu" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(
    csrc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    arguments = ["compile-one", "mask", "sm_80", "--out", str(tmp_path / "out"), "--compiler", "nvrtc"]
    assert command_line.main(arguments) == 1
    assert str(tmp_path / "out") in capsys.readouterr().err


def test_without_ninja_the_build_says_what_to_install(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda *arguments, **options: None)
    assert command_line.main(["build", "--out", str(tmp_path / "out"), "--compiler", "nvrtc"]) == 1
    assert "pip install ninja" in capsys.readouterr().err


def test_a_failing_worker_fails_the_build(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "no python here"))
    with pytest.raises(build.BuildError, match="The build failed"):
        build.build(tmp_path / "out", ["sm_80"], 1, "nvrtc")


def test_a_built_file_can_be_read_by_every_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is packed from them, so they have the permissions of ordinary files."""
    ordinary, built = tmp_path / "ordinary", tmp_path / "built"
    ordinary.touch()
    cache.write(built, b"kernel")
    assert built.stat().st_mode == ordinary.stat().st_mode
