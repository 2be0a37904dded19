"""The two operators of the namespace `sparge_attention2`: schemas, shapes for tracing, and what runs on CUDA.

Importing this module registers them, once per process even where the package is imported under two names. They
are the door to the kernels: tensors that do not belong together are refused here, before any launch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks
from . import launch, modules

NAMESPACE = "sparge_attention2"
_BLOCK_MASK = (
    "block_mask(Tensor q, Tensor k, float top_k, float top_p, float sparsity, float scale)"
    " -> (Tensor bits, Tensor counts, Tensor order)"
)
_FORWARD = (
    "forward(Tensor q, Tensor k, Tensor v, Tensor bits, Tensor counts, Tensor order, float scale)"
    " -> (Tensor out, Tensor lse)"
)
# A compiled graph must hand over q, k and v with the strides it was traced with: the output gets those of q.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

_forced: str | None = None


@contextlib.contextmanager
def force(family: str) -> Iterator[None]:
    """Within it every forward pass uses the "sm90" or the "mma" kernels, for tests and measurements."""
    module = f"forward_{family}"
    if module not in modules.FORWARD:
        raise ValueError(f"There are no forward kernels {family!r}; choose 'sm90' or 'mma'.")
    global _forced
    before, _forced = _forced, module
    try:
        yield
    finally:
        _forced = before


def _block_mask(
    q: Tensor, k: Tensor, top_k: float, top_p: float, sparsity: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_tensors(q, k)
    return _launcher("mask_kernels", "block_mask")(q, k, top_k, top_p, sparsity, scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, counts: Tensor, order: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    _check_tensors(q, k, v)
    _check_mask(q, k, bits, counts, order)
    module = _forced or modules.forward_module(launch.device(q.device.index).capability)
    return _launcher(module, "forward")(q, k, v, bits, counts, order, scale)


@functools.cache
def _launcher(module: str, function: str) -> Callable[..., tuple[Tensor, ...]]:
    launcher: Callable[..., tuple[Tensor, ...]] = getattr(
        importlib.import_module(f".{module}", __package__), function
    )
    return launcher


def _block_mask_shapes(
    q: Tensor, k: Tensor, top_k: float, top_p: float, sparsity: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len, _ = q.shape
    rows, words = num_blocks(q_len, BLOCK_Q), num_blocks(num_blocks(k.shape[2], BLOCK_K), WORD_BITS)
    return (
        q.new_empty((batch, heads, rows, words), dtype=torch.int32),
        q.new_empty((batch, heads, rows), dtype=torch.int32),
        q.new_empty((batch * heads * rows,), dtype=torch.int32),
    )


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, counts: Tensor, order: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _check_tensors(q: Tensor, *others: Tensor) -> None:
    if (
        q.dim() != 4
        or q.dtype not in launch.VARIANT_DTYPES
        or q.shape[3] not in modules.HEAD_DIMS
        or not q.numel()
    ):
        raise ValueError(
            "The CUDA kernels take (batch, heads, tokens, head dim) tensors that are not empty, of float16 or "
            f"bfloat16 and a head dim of 64 or 128; got {q.dtype} {tuple(q.shape)}."
        )
    device, dtype = q.device, q.dtype
    batch, heads, _, head_dim = q.shape
    shape = others[0].shape  # v has that of k
    for other in others:
        if (
            other.device != device
            or other.dtype != dtype
            or other.shape != shape
            or (*shape[:2], *shape[3:]) != (batch, heads, head_dim)
            or not shape[2]
        ):
            raise ValueError(
                "q, k and v must share device, dtype, batch size, heads and head dim, k and v also the tokens; got "
                + ", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (q, *others))
                + "."
            )


def _check_mask(q: Tensor, k: Tensor, bits: Tensor, counts: Tensor, order: Tensor) -> None:
    batch, heads, q_len, _ = q.shape
    rows, words = num_blocks(q_len, BLOCK_Q), num_blocks(num_blocks(k.shape[2], BLOCK_K), WORD_BITS)
    needed = ((batch, heads, rows, words), (batch, heads, rows), (batch * heads * rows,))
    for tensor, shape in zip((bits, counts, order), needed, strict=True):
        if (
            tensor.shape != shape
            or tensor.dtype != torch.int32
            or tensor.device != q.device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"bits, counts and order must be contiguous int32 on {q.device} of shapes {needed}; got "
                + ", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (bits, counts, order))
                + "."
            )


def _register() -> torch.library.Library | None:
    """Defines the operators; the returned object keeps them alive. None if another copy of the package has."""
    if hasattr(getattr(torch.ops, NAMESPACE), "forward"):
        return None
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema, run, shapes in (
        (_BLOCK_MASK, _block_mask, _block_mask_shapes),
        (_FORWARD, _forward, _forward_shapes),
    ):
        name = schema.partition("(")[0]
        library.define(schema, tags=_TAGS)
        library.impl(name, run, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
    return library


_LIBRARY = _register()
