"""The table of modules: what each GPU gets, and names that change with all that a binary depends on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparge_core.cuda import modules
from sparge_core.cuda.modules import Variant

BF16 = Variant("bf16", 128)
NVRTC_12_6 = {50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90}
NVRTC_13_0 = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121}


@pytest.mark.parametrize(
    ("capability", "known", "expected"),
    [
        ((8, 0), NVRTC_12_6, "sm_80"),
        ((8, 6), NVRTC_12_6, "sm_86"),
        ((8, 7), NVRTC_13_0, "sm_86"),  # the nearest lower of its family, which ships
        ((8, 9), NVRTC_13_0, "sm_89"),
        ((9, 0), NVRTC_12_6, "sm_90a"),
        ((10, 0), NVRTC_13_0, "sm_100a"),
        ((10, 3), NVRTC_13_0, "sm_103"),  # sm_100a does not run there
        ((12, 0), NVRTC_13_0, "sm_120a"),
        ((12, 1), NVRTC_13_0, "sm_121"),
        ((12, 0), NVRTC_12_6, "compute_90"),  # a compiler older than the GPU: PTX
        ((14, 0), NVRTC_13_0, "compute_121"),
    ],
)
def test_each_gpu_gets_the_best_that_its_compiler_makes(
    capability: tuple[int, int], known: set[int], expected: str
) -> None:
    assert modules.architecture(capability, known) == expected


def test_shipped_kernels_serve_only_gpus_that_run_them() -> None:
    assert modules.shipped_architecture((8, 7)) == "sm_86"
    assert modules.shipped_architecture((9, 0)) == "sm_90a"
    for other in ((7, 5), (10, 3), (11, 0), (12, 1), (13, 0)):
        assert modules.shipped_architecture(other) is None


def test_only_compute_capability_9_0_takes_the_hopper_kernels() -> None:
    assert modules.family((9, 0)) == "sm90"
    assert modules.forward_module((9, 0)) == "forward_sm90"
    for other in ((8, 0), (8, 9), (10, 0), (12, 0), (13, 0)):
        assert modules.forward_module(other) == "forward_mma"


def test_a_file_name_changes_with_source_options_and_architecture(
    csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        modules.file_name("mask", variant, architecture)
        for variant in modules.VARIANTS
        for architecture in ("sm_80", "sm_90a", "compute_90")
    }
    assert len(names) == 12
    before = modules.file_name("mask", BF16, "sm_80")
    (csrc / "common.cuh").write_text("// changed\n")
    modules.source.cache_clear()
    changed = modules.file_name("mask", BF16, "sm_80")
    assert changed != before
    monkeypatch.setattr(modules, "OPTIONS", (*modules.OPTIONS, "--maxrregcount=64"))
    assert modules.file_name("mask", BF16, "sm_80") not in (before, changed)


def test_line_ends_of_a_checkout_do_not_change_the_name(csrc: Path) -> None:
    before = modules.file_name("mask", BF16, "sm_80")
    for path in csrc.iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    modules.source.cache_clear()
    assert modules.file_name("mask", BF16, "sm_80") == before


def test_sources_are_found_in_a_checkout_and_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "sparge_core"
    (package / "cuda").mkdir(parents=True)
    monkeypatch.setattr(modules, "__file__", str(package / "cuda" / "modules.py"))
    # Another package's csrc/ beside the installed one must not be taken.
    (tmp_path / "site" / "csrc").mkdir()
    assert modules.source_folder() == tmp_path / "site" / "csrc"
    (package / "csrc").mkdir()
    assert modules.source_folder() == package / "csrc"
    assert modules.shipped_folder() == package / "cubins"


def test_the_sources_exist_and_include_nothing() -> None:
    for module in modules.MODULES:
        text = modules.source(module)
        assert '#line 1 "csrc/common.cuh"' in text
        assert not re.search(r"^\s*#\s*include", text, re.MULTILINE), module


GENERIC_LAMBDA = re.compile(r"\[[&=\w\s,]*\]\s*\([^)]*\bauto\b")


def test_no_source_has_a_generic_lambda() -> None:
    """NVRTC up to 13.0 takes `[&](auto x) {...}` for a host function, and refuses it."""
    assert GENERIC_LAMBDA.search("call([&, this](int i, const auto& value) { use(i, value); });")
    assert not GENERIC_LAMBDA.search("const auto each = [&](int i) { auto x = a[i]; use(x); };")
    for path in modules.source_folder().iterdir():
        found = GENERIC_LAMBDA.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: {found and found[0]}"
