"""Compiles every module for every architecture ahead of time: `python -m sparge_core.cuda build`.

ninja runs one worker per module and architecture; a worker drives nvcc where there is one, else NVRTC, and
fails on anything that would make the kernels slow: spilled registers, a stack frame, serialised wgmma. No GPU
is needed. The files are those that `cache.binaries` looks for: a release carries them, and nothing is
compiled on the user's machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cache, modules, nvrtc
from .modules import Variant

_BUILD_FOLDER = ".build"  # inside the output folder, for what ninja keeps
_OUTPUT = re.compile(r"\w+-(?:bf16|fp16)-d\d+-sm_\w+-[0-9a-f]{16}\.cubin")
_REPORT = "--ptxas-options=-v"
_FUNCTION = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALISED = re.compile(r".*(?:C7510|wgmma\.mma_async instructions are serialized).*")


class BuildError(RuntimeError):
    """The build cannot start or a kernel is not as it must be; the message says what to do."""


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one function; sizes in bytes. registers is 0 for a function that is no kernel."""

    function: str
    stack: int
    spills: int
    registers: int

    def __str__(self) -> str:
        memory = f" + {self.stack} bytes of stack, {self.spills} spilled" if self.stack or self.spills else ""
        return f"{self.function} {self.registers}{memory}"


def build(out: Path, architectures: Sequence[str], jobs: int, compiler: str) -> None:
    """Compiles for the architectures into the folder. compiler: "nvcc" or "nvrtc"."""
    folder = out / _BUILD_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    ninja_file = folder / "build.ninja"
    ninja_file.write_text(_ninja_text(architectures, compiler), encoding="utf-8")
    command = [_find_ninja(), "-C", str(out), "-f", str(ninja_file.resolve()), "-j", str(jobs), "-k", "0"]
    # The workers import this package, from wherever it lies.
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode:
        raise BuildError("The build failed; the messages above say where.")
    for path in out.iterdir():
        if _OUTPUT.fullmatch(path.name) and path.name not in file_names():
            path.unlink()  # of sources that have changed since


def file_names() -> set[str]:
    """Names of all that a whole build makes, which is what a release carries."""
    every = _targets(list(modules.ARCHITECTURES.values()))
    return {name for module, architecture in every for name in _names(module, architecture)}


def compile_one(module: str, architecture: str, out: Path, compiler: str) -> None:
    """Compiles and checks all variants of a module for one architecture, and puts them into the folder."""
    failures = []
    for variant in modules.VARIANTS:
        label = f"{module} {variant.dtype} d{variant.head_dim} {architecture}"
        compiled = (_nvcc if compiler == "nvcc" else _nvrtc)(module, variant, architecture)
        usages = list(resource_usage(compiled.log))
        print(f"{label} registers: {', '.join(map(str, usages))}", flush=True)
        allowed = modules.ALLOWED_SPILLS.get((module, variant, architecture))
        problems = list(find_problems(compiled.log, usages, allowed))
        if problems:
            failures.append(f"{label}: {'; '.join(problems)}")
        else:
            cache.write(out / modules.file_name(module, variant, architecture), compiled.binary)
    if failures:
        raise BuildError("\n".join(failures))


def default_compiler() -> str:
    return "nvcc" if find_nvcc() else "nvrtc"


def resource_usage(log: str) -> Iterator[Usage]:
    """What `ptxas -v` printed, from nvcc or from NVRTC."""
    function, stack, spills = "", 0, 0
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            function = match[1]
        elif match := _STACK.search(line):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif match := _REGISTERS.search(line):
            yield Usage(function, stack, spills, int(match[1]))


def find_problems(log: str, usages: Iterable[Usage], allowed: str | None) -> Iterator[str]:
    """What must not ship. allowed: the reason why this variant may spill, from `modules.ALLOWED_SPILLS`."""
    usages = list(usages)
    if not usages:
        yield "the compiler did not say what the kernels use"
    for usage in usages:
        if (usage.stack or usage.spills) and allowed is None:
            yield f"{usage} (to allow it, give the reason in modules.ALLOWED_SPILLS)"
    yield from (match[0].strip() for match in _SERIALISED.finditer(log))


def find_nvcc() -> str | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            found = shutil.which("nvcc", path=str(Path(home) / "bin"))
            if found:
                return found
    return shutil.which("nvcc")


def _nvrtc(module: str, variant: Variant, architecture: str) -> nvrtc.Compiled:
    options = (*modules.options(variant, architecture), _REPORT)
    return nvrtc.get().compile(modules.source(module), f"{module}.cu", options)


def _nvcc(module: str, variant: Variant, architecture: str) -> nvrtc.Compiled:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "nvcc is not found: put it on PATH or set CUDA_HOME, or build with --compiler nvrtc."
        )
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, f"{module}.cu"), Path(folder, f"{module}.cubin")
        source.write_text(modules.source(module), encoding="utf-8")
        command = [
            nvcc,
            "--cubin",
            *modules.options(variant, architecture),
            _REPORT,
            "-o",
            str(cubin),
            str(source),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        log = result.stdout + result.stderr
        if result.returncode:
            raise BuildError(f"nvcc cannot compile {module} for {architecture}:\n{log}")
        return nvrtc.Compiled(cubin.read_bytes(), log)


def _names(module: str, architecture: str) -> list[str]:
    return [modules.file_name(module, variant, architecture) for variant in modules.VARIANTS]


def _targets(architectures: Sequence[str]) -> Iterator[tuple[str, str]]:
    for module in modules.MODULES.values():
        for architecture in architectures:
            if module.architectures is None or architecture in module.architectures:
                yield module.name, architecture


def _ninja_text(architectures: Sequence[str], compiler: str) -> str:
    # A file is named after the source and options that it was made of, so one that exists is up to date.
    worker = [sys.executable, "-m", __package__, "compile-one", "--compiler", compiler, "--out", "."]
    command = subprocess.list2cmdline(worker) if sys.platform == "win32" else shlex.join(worker)
    lines = [
        f"builddir = {_BUILD_FOLDER}",
        "rule compile",
        f"  command = {command.replace('$', '$$')} $module $arch",
        "  description = $module $arch",
    ]
    for module, architecture in _targets(architectures):
        outputs = " ".join(_names(module, architecture))
        lines += [f"build {outputs}: compile", f"  module = {module}", f"  arch = {architecture}"]
    return "\n".join(lines) + "\n"


def _find_ninja() -> str:
    # A virtual environment's programs lie beside its Python, also when it is not activated.
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    ninja = shutil.which("ninja", path=places)
    if ninja is None:
        raise BuildError("ninja is not found: `pip install ninja`.")
    return ninja
