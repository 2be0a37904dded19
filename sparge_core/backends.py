"""Back ends of `sparse_attention`: what each needs, as data with a sentence, and the choice among them.

Everything is asked of the tensors at hand, never of a current or default device, and anew at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask import BlockMask


class Constraint(Protocol):
    """A need of a back end. `str()` states it; `why_not` adds what was given, or is None if it is met."""

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None: ...


@dataclass(frozen=True)
class DeviceIs:
    type: str

    def __str__(self) -> str:
        return f"needs tensors on a {self.type} device"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return None if q.device.type == self.type else f"{self}, got {q.device.type}"


@dataclass(frozen=True)
class DtypeIn:
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return f"needs {_either(_name(dtype) for dtype in self.dtypes)} tensors"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return None if q.dtype in self.dtypes else f"{self}, got {_name(q.dtype)}"


@dataclass(frozen=True)
class HeadDimIn:
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"needs a head dim of {_either(map(str, self.dims))}"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return None if q.shape[-1] in self.dims else f"{self}, got {q.shape[-1]}"


@dataclass(frozen=True)
class OneDtype:
    def __str__(self) -> str:
        return "needs q, k and v of one dtype"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        if q.dtype == k.dtype == v.dtype:
            return None
        return f"{self}, got {_name(q.dtype)}, {_name(k.dtype)} and {_name(v.dtype)}"


@dataclass(frozen=True)
class OneHeadShape:
    def __str__(self) -> str:
        return "needs as many key as query heads and one head dim for q, k and v"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        if q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3]:
            return None
        heads = f"{q.shape[1]} query and {k.shape[1]} key heads"
        return f"{self}, got {heads}, head dims {q.shape[3]} and {v.shape[3]}"


@dataclass(frozen=True)
class UnitLastStride:
    def __str__(self) -> str:
        return "needs a head dim that is contiguous in memory"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        if q.stride(3) == k.stride(3) == v.stride(3) == 1:
            return None
        return f"{self}, got strides of {q.stride(3)}, {k.stride(3)} and {v.stride(3)} elements"


@dataclass(frozen=True)
class NoGradients:
    def __str__(self) -> str:
        return "needs q, k and v that require no gradient"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        gradients = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return str(self) if gradients else None


@dataclass(frozen=True)
class KernelsServe:
    """The CUDA runtime's own answer: driver, compiler, architecture, gradients."""

    def __str__(self) -> str:
        return "needs kernels for this GPU"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        if q.dtype in CASTS:  # asked about what the kernels would get; one token a tensor is enough to ask
            q, k, v = (x[:1, :1, :1].to(CASTS[q.dtype]) for x in (q, k, v))
        return cuda_kernels().why_not(q, k, v)


@dataclass(frozen=True)
class FlexProven:
    """FlexAttention's answer on a small problem, compiled for the same device, dtype and head dim."""

    def __str__(self) -> str:
        return "needs a FlexAttention that compiles and equals the reference"

    def why_not(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        return flex().why_not(q.device, q.dtype, q.shape[3])


# What the CUDA kernels make of a dtype that they do not compute in, when they are asked for by name.
CASTS = {torch.float32: torch.bfloat16}

Run = Callable[[Tensor, Tensor, Tensor, BlockMask, float], Tensor]


@dataclass(frozen=True)
class Backend:
    """name, what it needs at all, what "auto" asks of it first, and how it runs."""

    name: str
    needs: tuple[Constraint, ...]
    auto_needs: tuple[Constraint, ...]
    run: Run

    def why_not(self, q: Tensor, k: Tensor, v: Tensor, *, auto: bool = True) -> str | None:
        """Sentence that says why it cannot serve these tensors, or None. auto: as "auto" asks."""
        for need in self.auto_needs + self.needs if auto else self.needs:
            reason = need.why_not(q, k, v)
            if reason is not None:
                return reason
        return None


@dataclass(frozen=True)
class Choice:
    """What runs (a back end or "dense"), why each before it does not, the dtype that it casts to if any."""

    name: str
    reasons: dict[str, str] = field(default_factory=dict)
    cast: torch.dtype | None = None

    @property
    def why(self) -> str:
        """The reasons as one line, "" when the first choice serves."""
        return "; ".join(f"{name} {reason}" for name, reason in self.reasons.items())


_P = ParamSpec("_P")
_R = TypeVar("_R")


def decided_once(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """As `torch.compiler.assume_constant_result`, which imports the compiler: seconds at every start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Imported when first asked for, because they bring torch's compiler with them, which takes seconds; and by a
# statement, which that compiler can trace.


def cuda_kernels() -> ModuleType:
    """The CUDA package."""
    from . import cuda

    return cuda


def flex() -> ModuleType:
    """The FlexAttention back end."""
    from . import flex as module

    return module


def reference() -> ModuleType:
    """The reference."""
    from . import reference as module

    return module


def _run_cuda(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    return cuda_kernels().attention(q, k, v, mask, scale)


def _run_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    out: Tensor = flex().attention(q, k, v, mask, scale)
    return out


def _run_reference(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    out: Tensor = reference().attention(q, k, v, mask, scale=scale)
    return out


HALF = (torch.float16, torch.bfloat16)

CUDA = Backend(
    "cuda",
    needs=(
        DeviceIs("cuda"),
        OneDtype(),
        DtypeIn((*HALF, *CASTS)),
        OneHeadShape(),
        HeadDimIn((64, 128)),
        UnitLastStride(),
        KernelsServe(),
    ),
    auto_needs=(DeviceIs("cuda"), DtypeIn(HALF)),  # a cast loses bits, so it has to be asked for
    run=_run_cuda,
)
FLEX = Backend(
    "flex",
    # It has no backward pass for key blocks of 64: torch's tiles for it are 128 keys on most GPUs.
    needs=(OneDtype(), DtypeIn((*HALF, torch.float32)), OneHeadShape(), NoGradients(), FlexProven()),
    auto_needs=(DeviceIs("cuda"), DtypeIn(HALF)),  # on a CPU it takes a C++ compiler and a minute to start
    run=_run_flex,
)
REFERENCE = Backend(
    "reference",
    needs=(OneDtype(), OneHeadShape()),
    auto_needs=(DeviceIs("cpu"),),  # elsewhere it is right but slower than dense
    run=_run_reference,
)
BACKENDS = {backend.name: backend for backend in (CUDA, FLEX, REFERENCE)}  # in the order that "auto" tries
NAMES = ("auto", *BACKENDS, "dense")


def choose(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Choice:
    """Which back end serves q (B, H, Lq, D), k and v (B, H, Lk, D), and why the ones before it do not.

    backend: "auto" for the first that serves, or one name, which is that back end or dense.
    Raises ValueError for an unknown name and for tensors that do not belong together.
    """
    check_inputs(q, k, v)
    if backend == "dense":
        return Choice("dense")
    auto = backend == "auto"
    if not auto and backend not in BACKENDS:
        raise ValueError(f"The back end {backend!r} is unknown; choose one of {', '.join(NAMES)}.")
    reasons: dict[str, str] = {}
    for candidate in BACKENDS.values() if auto else (BACKENDS[backend],):
        reason = candidate.why_not(q, k, v, auto=auto)
        if reason is None:
            return Choice(candidate.name, reasons, CASTS.get(q.dtype) if candidate is CUDA else None)
        reasons[candidate.name] = reason
    return Choice("dense", reasons)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """torch's own attention, for what no sparse back end serves: grouped heads and mixed dtypes included."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    if q.shape[1] == k.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError, with what was given and what is needed, for tensors that no attention can take."""
    shapes = q.shape, k.shape, v.shape
    if not all(len(shape) == 4 for shape in shapes):
        raise ValueError(f"q, k and v must be (batch, heads, tokens, head dim); {_given(q, k, v)}.")
    (batch, heads, _, dim), (k_batch, k_heads, k_tokens, k_dim), (v_batch, v_heads, v_tokens, _) = shapes
    if any(0 in shape for shape in shapes):
        raise ValueError(f"q, k and v must not be empty; {_given(q, k, v)}.")
    if batch != k_batch or dim != k_dim:
        raise ValueError(f"q and k must have the same batch size and head dim; {_given(q, k, v)}.")
    if k_batch != v_batch or k_heads != v_heads or k_tokens != v_tokens:
        raise ValueError(f"k and v must have the same batch size, heads and tokens; {_given(q, k, v)}.")
    if heads % k_heads:
        raise ValueError(f"The heads of q must be a multiple of those of k; {_given(q, k, v)}.")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}.")
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise ValueError(f"q, k and v must be floating point; got {q.dtype}, {k.dtype} and {v.dtype}.")


def check_mask(q: Tensor, k: Tensor, mask: BlockMask) -> None:
    """ValueError if `mask` was made for other tensors."""
    given = (*mask.counts.shape[:2], mask.q_len, mask.k_len)
    needed = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if given != needed or mask.bits.device != q.device:
        raise ValueError(
            f"The mask is for (batch, heads, query tokens, key tokens) {given} on {mask.bits.device}, "
            f"but the tensors have {needed} on {q.device}; make it with block_mask(q, k, config)."
        )


def _given(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
