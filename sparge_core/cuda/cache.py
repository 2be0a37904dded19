"""Compiled kernels on disk: what a release ships, and a per-user cache of what this machine compiled.

A file is the binary followed by its SHA-256, so that a truncated or damaged one is noticed and made again.
Files are written under a temporary name and renamed, so that several processes may compile at once. A disk
that cannot be written costs one log line, no more: the kernels are then compiled in memory.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from . import modules, nvrtc
from .modules import Variant

FOLDER_VARIABLE = "SPARGE_CACHE_DIR"
_APPLICATION = "sparge_attention2"
_DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


def folder() -> Path | None:
    """The user's cache folder (SPARGE_CACHE_DIR if set); None where there is no way to know one."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    try:
        import platformdirs

        found = Path(platformdirs.user_cache_dir(_APPLICATION, appauthor=False))
    except (ImportError, RuntimeError):  # RuntimeError: the user has no home, as in some containers
        return None
    return found if found.is_absolute() else None  # older platformdirs then says "~/.cache"


def read(path: Path) -> bytes | None:
    """The binary in the file; None if it is missing, unreadable or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    binary, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return binary if binary and hashlib.sha256(binary).digest() == digest else None


def write(path: Path, binary: bytes) -> None:
    """Puts the binary into the file, whole or not at all; raises `OSError` where the disk refuses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(binary + hashlib.sha256(binary).digest())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def binaries(module: str, variant: Variant, capability: tuple[int, int]) -> Iterator[tuple[str, bytes]]:
    """(where from, binary) for a GPU, best first: shipped, cached, compiled now. Take the first that loads.

    Raises `nvrtc.CompilerError` if it comes to compiling and that fails.
    """
    root = folder()
    tried: set[Path] = set()

    def stored(origin: str, path: Path | None) -> Iterator[tuple[str, bytes]]:
        if path is None or path in tried:
            return
        tried.add(path)
        binary = read(path)
        if binary is not None:
            yield origin, binary

    def cached(compiler: str | None, name: str) -> Path | None:
        return root / compiler / name if root is not None and compiler is not None else None

    # Opening the compiler takes longer than all the rest of a start, so first what can be found without it.
    target = modules.shipped_architecture(capability)
    if target is not None:
        name = modules.file_name(module, variant, target)
        yield from stored("shipped", modules.shipped_folder() / name)
        yield from stored("cached", cached(nvrtc.likely_name(), name))

    compiler = nvrtc.get()
    target = modules.architecture(capability, compiler.architectures)
    path = cached(compiler.name, modules.file_name(module, variant, target))
    yield from stored("cached", path)
    options = modules.options(variant, target)
    binary = compiler.compile(modules.source(module), f"{module}.cu", options).binary
    if path is None:
        _say_once(f"there is no home folder or no platformdirs, and {FOLDER_VARIABLE} is not set")
    else:
        try:
            write(path, binary)
        except OSError as error:
            _say_once(f"{root} cannot be written ({error})")
    yield "compiled", binary


@functools.cache
def _say_once(why: str) -> None:
    logger.warning("Compiled kernels are not kept, so every start compiles them again: %s.", why)
