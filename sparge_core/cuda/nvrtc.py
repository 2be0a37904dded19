"""NVRTC, the compiler that every CUDA build of torch brings, through ctypes.

Nothing here imports torch: its copy is found by where it is installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WINDOWS = sys.platform == "win32"
_MAJORS = (13, 12)
# The library, with its major version, and what it needs beside it, with major and minor version. Windows also
# has an nvrtc64_120_0.alt.dll, which is another compiler.
_LIBRARY = re.compile(r"libnvrtc\.so\.(\d+)|nvrtc64_(\d+)0_0\.dll")
_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.(\d+)\.(\d+)|nvrtc-builtins64_(\d+)(\d)\.dll")


class CompilerError(RuntimeError):
    """NVRTC is missing or refused a source: a sentence, followed by the compiler's log if there is one."""


@dataclass(frozen=True)
class Compiled:
    """binary: a cubin, or PTX text that ends in NUL. log: all that the compiler said."""

    binary: bytes
    log: str


class Compiler:
    """An open NVRTC. Calls release Python's lock, so threads compile side by side."""

    def __init__(self, library: Any, path: str) -> None:
        self._library = library
        self.path = path
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "reading NVRTC's version")
        self.version = (major.value, minor.value)
        count = ctypes.c_int()
        self._check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "reading what NVRTC compiles for")
        numbers = (ctypes.c_int * count.value)()
        self._check(library.nvrtcGetSupportedArchs(numbers), "reading what NVRTC compiles for")
        self.architectures = frozenset(numbers)

    @property
    def name(self) -> str:
        return f"nvrtc-{self.version[0]}.{self.version[1]}"

    def compile(self, source: str, name: str, options: Sequence[str]) -> Compiled:
        """Compiles CUDA C++ text. `name` stands for the source in messages; `options` name the architecture.

        Machine code for "sm_..." and PTX for "compute_...". Raises `CompilerError` with the log.
        """
        library = self._library
        program = ctypes.c_void_p()
        code = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        )
        self._check(code, f"starting to compile {name}")
        try:
            encoded = [option.encode() for option in options]
            code = library.nvrtcCompileProgram(
                program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
            )
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if code:
                raise CompilerError(f"{self.name} cannot compile {name}: {self._error(code)}\n{log}".rstrip())
            what = "PTX" if any("=compute_" in option for option in options) else "CUBIN"
            return Compiled(self._text(program, what), log)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        code = getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        self._check(code, f"reading the {what}")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), f"reading the {what}")
        return buffer.raw

    def _error(self, code: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(code)
        return text.decode()

    def _check(self, code: int, what: str) -> None:
        if code:
            raise CompilerError(f"{what} failed: {self._error(code)}")


def likely_name() -> str | None:
    """`get().name`, told from the files beside the library without opening it; None if they do not tell."""
    path = Path(next(candidates()))
    if not path.is_absolute():
        return None
    for builtins in _builtins(path):
        major, minor = _version(_BUILTINS, builtins.name)
        if major == _version(_LIBRARY, path.name)[0]:
            return f"nvrtc-{major}.{minor}"
    return None


@functools.cache
def get() -> Compiler:
    """The compiler, found and opened at the first call; `CompilerError` where there is none."""
    failures = []
    for candidate in candidates():
        try:
            return Compiler(_open(candidate), candidate)
        except (OSError, AttributeError, CompilerError) as error:
            failures.append(f"{candidate}: {error}")
    found = "; ".join(failures) or "no library of that name"
    raise CompilerError(
        "NVRTC, the compiler of CUDA builds of torch, is not found: install a CUDA build of torch, or "
        f"`pip install nvidia-cuda-nvrtc` ({found})"
    )


def candidates() -> Iterator[str]:
    """Where NVRTC may be: full paths that exist, best first, then names for the system's own search."""
    found: dict[Path, int] = {}
    for folder in _folders():
        for path in _listed(folder):
            version = _version(_LIBRARY, path.name)
            if version and version[0] in _MAJORS:
                found.setdefault(path, version[0])
    # torch's own CUDA first: the driver that runs torch accepts what that NVRTC makes.
    own = _torch_cuda_major()
    yield from map(str, sorted(found, key=lambda path: found[path] != own))
    majors = sorted(_MAJORS, key=lambda major: major != own)
    yield from (f"nvrtc64_{major}0_0.dll" if _WINDOWS else f"libnvrtc.so.{major}" for major in majors)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _version(pattern: re.Pattern[str], name: str) -> tuple[int, ...]:
    match = pattern.fullmatch(name)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def _builtins(library: Path) -> list[Path]:
    return [path for path in _listed(library.parent) if _BUILTINS.fullmatch(path.name)]


def _folders() -> Iterator[Path]:
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        yield Path(torch.origin).parent / "lib"
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or ()) if nvidia is not None else ():
        # nvidia/cuda_nvrtc/lib up to CUDA 12, nvidia/cu13/lib since.
        for package in ("cu13", "cuda_nvrtc"):
            yield from (
                Path(root) / package / "bin" / "x86_64",
                Path(root) / package / "bin",
                Path(root) / package / "lib",
            )
    # conda, on Linux and on Windows
    yield from (Path(sys.prefix) / "lib", Path(sys.prefix) / "Library" / "bin")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield from (Path(home) / "lib64", Path(home) / "bin" / "x64", Path(home) / "bin")
    if not _WINDOWS:
        yield Path("/usr/local/cuda/lib64")


def _torch_cuda_major() -> int | None:
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None)
    return int(version.split(".")[0]) if version else None


def _open(path: str) -> Any:
    if Path(path).is_absolute():
        # NVRTC opens its builtins by bare name when it compiles; loaded before, they are found anywhere.
        for builtins in _builtins(Path(path)):
            ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path)
