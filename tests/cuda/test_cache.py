"""The cubin cache: whole files or none, whatever the disk and other processes do."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sparge_core.cuda import cache, modules, nvrtc
from sparge_core.cuda.modules import Variant

BF16 = Variant("bf16", 128)
HOPPER = (9, 0)


def origins() -> list[str]:
    """Where the binaries for one module come from, in the order in which they are offered."""
    return [origin for origin, _ in cache.binaries("mask", BF16, HOPPER)]


def cached_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.cubin")
    return path


def test_the_second_process_reads_what_the_first_compiled(
    csrc: Path, compiler: Any, cache_folder: Path
) -> None:
    assert origins() == ["compiled"]
    assert next(cache.binaries("mask", BF16, HOPPER)) == ("cached", cache.read(cached_file(cache_folder)))
    assert len(compiler.compiled) == 1
    assert cached_file(cache_folder).parent.name == "nvrtc-12.8"


def test_a_cached_start_does_not_open_the_compiler(
    csrc: Path, compiler: Any, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins()
    monkeypatch.setattr(nvrtc, "get", lambda: pytest.fail("the compiler was opened"))
    assert next(cache.binaries("mask", BF16, HOPPER))[0] == "cached"


@pytest.mark.parametrize("change", ["source", "compiler", "architecture", "variant"])
def test_whatever_a_binary_depends_on_compiles_it_again(change: str, csrc: Path, compiler: Any) -> None:
    origins()
    variant, capability = BF16, HOPPER
    if change == "source":
        (csrc / "mask.cu").write_text("// another")
        modules.source.cache_clear()
    elif change == "compiler":
        compiler.name = "nvrtc-13.0"
    elif change == "architecture":
        capability = (8, 9)
    else:
        variant = Variant("fp16", 128)
    assert [origin for origin, _ in cache.binaries("mask", variant, capability)] == ["compiled"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_noticed_and_made_again(
    damage: str, csrc: Path, compiler: Any, cache_folder: Path
) -> None:
    origins()
    path = cached_file(cache_folder)
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[:-5],
            "flipped": bytes((content[0] ^ 1,)) + content[1:],
            "empty": b"",
            "foreign": b"not a cubin" * 10,
        }[damage]
    )
    assert origins() == ["compiled"]
    assert path.read_bytes() == content
    assert next(cache.binaries("mask", BF16, HOPPER))[0] == "cached"


def test_shipped_kernels_need_neither_cache_nor_compiler(csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "get", lambda: pytest.fail("the compiler was opened"))
    cache.write(modules.shipped_folder() / modules.file_name("mask", BF16, "sm_90a"), b"made ahead of time")
    assert next(cache.binaries("mask", BF16, HOPPER)) == ("shipped", b"made ahead of time")


def test_shipped_kernels_of_older_sources_are_not_used(csrc: Path, compiler: Any) -> None:
    cache.write(modules.shipped_folder() / modules.file_name("mask", BF16, "sm_90a"), b"old")
    (csrc / "mask.cu").write_text("// newer")
    modules.source.cache_clear()
    assert origins() == ["compiled"]


def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file where the folder should be")


def full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_a_little(path: Path, content: bytes) -> int:
        with open(path, "wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_a_little)


def locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(errno.EACCES, "The file is used by another process")

    monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.parametrize("disk", [read_only, full, locked], ids=lambda disk: disk.__name__)
def test_a_disk_that_refuses_costs_one_log_line_and_leaves_nothing(
    disk: Any,
    csrc: Path,
    compiler: Any,
    cache_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk(cache_folder, monkeypatch)
    with caplog.at_level(logging.WARNING):
        for module in ("mask", "forward_mma"):
            ((origin, binary),) = cache.binaries(module, BF16, HOPPER)
            assert origin == "compiled"
            assert b"tiny" in binary
    (record,) = caplog.records
    assert str(cache_folder) in record.getMessage()
    assert [path for path in cache_folder.rglob("*") if path.is_file()] == []


def test_without_platformdirs_kernels_are_compiled_in_memory(
    csrc: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(cache.FOLDER_VARIABLE)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert origins() == ["compiled"]
    assert "no platformdirs" in caplog.text


def homeless(*_: object, **__: object) -> str:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("answer", [homeless, lambda *_, **__: "~/.cache/x"], ids=["refuses", "relative"])
def test_without_a_home_kernels_are_compiled_in_memory(
    answer: Any, csrc: Path, compiler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import platformdirs

    monkeypatch.delenv(cache.FOLDER_VARIABLE)
    monkeypatch.setattr(platformdirs, "user_cache_dir", answer)
    assert origins() == ["compiled"]
    assert "no home folder" in caplog.text


def test_the_cache_is_the_users_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.delenv(cache.FOLDER_VARIABLE)
    assert cache.folder() == Path(platformdirs.user_cache_dir("sparge_attention2", appauthor=False))


def _write_often(path: Path, fill: int) -> None:
    for _ in range(200):
        cache.write(path, bytes((fill,)) * 100_000)


def test_two_processes_that_write_at_once_never_show_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kernel.cubin"
    cache.write(path, bytes(100_000))
    fork = multiprocessing.get_context("fork" if sys.platform != "win32" else "spawn")
    writers = [fork.Process(target=_write_often, args=(path, fill)) for fill in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        binary = cache.read(path)
        assert binary is not None
        assert len(set(binary)) == 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_source_that_does_not_compile_says_so(csrc: Path, compiler: Any) -> None:
    compiler.error = nvrtc.CompilerError("nvrtc-12.8 cannot compile mask.cu: why")
    with pytest.raises(nvrtc.CompilerError, match=r"cannot compile mask\.cu"):
        origins()
