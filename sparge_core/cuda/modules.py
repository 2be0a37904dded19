"""The table of CUDA modules: their files, the GPUs they are for, and what each compiled variant is called.

A module is a list of files of `csrc/` put one behind the other (the sources include nothing) and compiled
once per variant (element type and head dim) and architecture.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

# Compute capability -> the architecture that releases are built for. A cubin of "sm_86" also runs on later
# 8.x; one of "sm_90a" (whose matrix instructions need the "a") runs on 9.0 alone.
ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120a",
}
MINIMUM_CAPABILITY = min(ARCHITECTURES)


@dataclass(frozen=True)
class Module:
    """files: names in `csrc/`, in order. architectures: those it compiles for, None for every one."""

    name: str
    files: tuple[str, ...]
    architectures: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Variant:
    """dtype: "bf16" or "fp16", the type of q, k and v."""

    dtype: str
    head_dim: int

    @property
    def defines(self) -> tuple[str, ...]:
        element = ("ELEMENT_FP16=1",) if self.dtype == "fp16" else ()
        return (*element, f"HEAD_DIM={self.head_dim}")


MODULES = {
    module.name: module
    for module in (
        Module("mask", ("common.cuh", "mask.cu")),
        Module("norm_rope", ("common.cuh", "norm_rope.cu")),
        Module("forward_mma", ("common.cuh", "mma.cuh", "forward_mma.cu")),
        Module("forward_sm90", ("common.cuh", "sm90.cuh", "forward_sm90.cu"), ("sm_90a",)),
        Module("backward_prepare", ("common.cuh", "backward.cuh", "backward_prepare.cu")),
        Module("backward_mma", ("common.cuh", "backward.cuh", "mma.cuh", "backward_mma.cu")),
        Module("backward_sm90", ("common.cuh", "backward.cuh", "sm90.cuh", "backward_sm90.cu"), ("sm_90a",)),
    )
}
HEAD_DIMS = (64, 128)
DTYPES = ("bf16", "fp16")
VARIANTS = tuple(Variant(dtype, head_dim) for dtype in DTYPES for head_dim in HEAD_DIMS)

# Options of every compilation; NVRTC and nvcc read them alike. Warning 177 is about unused declarations: no
# module uses all that common.cuh declares.
OPTIONS = ("--std=c++17", "--diag-suppress=177")

# (module, variant, architecture) -> why its kernels may spill registers or use a stack frame. The build fails
# on any other.
_ROW_GRADIENTS = "row_gradients, which has use for all 255 registers, spills 4 to 48 bytes a tile"
ALLOWED_SPILLS: dict[tuple[str, Variant, str], str] = {
    ("backward_mma", Variant(dtype, 128), architecture): _ROW_GRADIENTS
    for dtype in DTYPES
    for architecture in ("sm_80", "sm_100a", "sm_120a")
}


def shipped_architecture(capability: tuple[int, int]) -> str | None:
    """The architecture whose ahead-of-time binaries run on a GPU; None if there is none."""
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    older = [known for known in ARCHITECTURES if known[0] == capability[0] == 8 and known < capability]
    return ARCHITECTURES[max(older)] if older else None


def architecture(capability: tuple[int, int], compiler_knows: Collection[int]) -> str:
    """What to compile for a GPU with a compiler that knows these numbers (90 is 9.0).

    "sm_..." is machine code; for a GPU newer than the compiler "compute_...", which is PTX that the driver
    finishes.
    """
    named = shipped_architecture(capability)
    if named is not None and _number(named) in compiler_knows:
        return named
    number = 10 * capability[0] + capability[1]
    if number in compiler_knows:
        return f"sm_{number}"
    return f"compute_{max(known for known in compiler_knows if known < number)}"


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").removesuffix("a"))


def family(capability: tuple[int, int]) -> str:
    """The fastest kernels for a GPU: "sm90" or "mma"."""
    return "sm90" if capability == (9, 0) else "mma"


def forward_module(capability: tuple[int, int]) -> str:
    """The fastest forward module for a GPU."""
    return f"forward_{family(capability)}"


def source_folder() -> Path:
    """`csrc/`: inside the package when it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def shipped_folder() -> Path:
    """Where a release carries binaries made ahead of time: `cubins/` beside `csrc/`."""
    return source_folder().parent / "cubins"


@functools.cache
def source(module: str) -> str:
    """The module's text; `#line` directives make compiler messages name the real file and line."""
    folder = source_folder()
    return "".join(
        f'#line 1 "csrc/{name}"\n{(folder / name).read_text(encoding="utf-8")}\n'
        for name in MODULES[module].files
    )


def options(variant: Variant, architecture: str) -> tuple[str, ...]:
    return (f"--gpu-architecture={architecture}", *OPTIONS, *(f"-D{define}" for define in variant.defines))


def file_name(module: str, variant: Variant, architecture: str) -> str:
    """Name of the compiled file, shipped or cached: it changes with the source and the options."""
    text = "\0".join((source(module), *options(variant, architecture)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    suffix = "ptx" if architecture.startswith("compute_") else "cubin"
    return f"{module}-{variant.dtype}-d{variant.head_dim}-{architecture}-{digest}.{suffix}"
