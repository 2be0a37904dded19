"""The operators of the namespace `sparge_attention2`: schemas, shapes, gradients, and what runs on CUDA.

Importing this module registers them, once per process even where the package is imported under two names.
They are the door to the kernels: tensors that do not belong together are refused here, before any launch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks
from . import (
    backward_mma,
    backward_sm90,
    forward_mma,
    forward_sm90,
    launch,
    mask_kernels,
    modules,
    norm_rope_kernel,
)

NAMESPACE = "sparge_attention2"
_BLOCK_MASK_SCHEMA = (
    "block_mask(Tensor q, Tensor k, float top_k, float top_p, float sparsity, float scale)"
    " -> (Tensor bits, Tensor counts, Tensor order)"
)
_FORWARD_SCHEMA = (
    "forward(Tensor q, Tensor k, Tensor v, Tensor bits, Tensor counts, Tensor order, float scale)"
    " -> (Tensor out, Tensor lse)"
)
_BACKWARD_SCHEMA = (
    "backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor bits, Tensor counts,"
    " Tensor order, float scale) -> (Tensor d_q, Tensor d_k, Tensor d_v)"
)
_NORM_ROPE_SCHEMA = "norm_rope(Tensor x, Tensor weight, Tensor rotation, float epsilon) -> Tensor"
# A compiled graph must hand over q, k and v with the strides it was traced with: the output gets those of q.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

# By family of kernels: "sm90" for compute capability 9.0, "mma" for every GPU.
_FORWARD: dict[str, ModuleType] = {"sm90": forward_sm90, "mma": forward_mma}
_BACKWARD: dict[str, ModuleType] = {"sm90": backward_sm90, "mma": backward_mma}
_forced: str | None = None


@contextlib.contextmanager
def force(family: str) -> Iterator[None]:
    """Within it every pass uses the "sm90" or the "mma" kernels, for tests and measurements."""
    if family not in _FORWARD:
        raise ValueError(f"There are no kernels {family!r}; choose 'sm90' or 'mma'.")
    global _forced
    before, _forced = _forced, family
    try:
        yield
    finally:
        _forced = before


def _block_mask(
    q: Tensor, k: Tensor, top_k: float, top_p: float, sparsity: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_tensors(q, k, k)
    return mask_kernels.block_mask(q, k, top_k, top_p, sparsity, scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, counts: Tensor, order: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    _check_tensors(q, k, v)
    _check_mask(q, k, bits, counts, order)
    _check_scale(scale)
    return _FORWARD[_family(q.device.index)].forward(q, k, v, bits, counts, order, scale)


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bits: Tensor,
    counts: Tensor,
    order: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_tensors(q, k, v)
    _check_mask(q, k, bits, counts, order)
    _check_results(q, d_out, out, lse)
    _check_scale(scale)
    return _BACKWARD[_family(q.device.index)].backward(d_out, q, k, v, out, lse, bits, counts, order, scale)


def attention(
    q: Tensor, k: Tensor, v: Tensor, top_k: float, top_p: float, sparsity: float, scale: float
) -> Tensor:
    """The operators `block_mask` and `forward` in one, to the same bits, where nobody needs mask or LSE.

    It is none itself: not to be traced, not differentiable. It saves the host the dispatch of two operators
    and half of the allocations.
    """
    _check_tensors(q, k, v)
    _check_scale(scale)
    q_given = q
    batch, heads, q_len, head_dim = q.shape
    sizes = mask_kernels.layout(batch, heads, q_len, k.shape[2], head_dim, top_k, sparsity)
    parts = launch.Parts()
    lse, bits = parts.add(batch * heads * q_len * 4), parts.add(sizes.rows * sizes.words * 4)
    counts, order = parts.add(sizes.rows * 4), parts.add(sizes.rows * 4)
    kept = q.new_empty((parts.size,), dtype=torch.uint8)
    base = kept.data_ptr()
    q, k, v = launch.aligned(q), launch.aligned(k), launch.aligned(v)
    scratch = q.new_empty((sizes.scratch_bytes,), dtype=torch.uint8)
    mask_kernels.enqueue(
        q, k, sizes, top_p, sparsity, scale,
        bits=base + bits, counts=base + counts, order=base + order, scratch=scratch.data_ptr(),
    )  # fmt: skip
    del scratch  # before the output is allocated, which may lie in its place
    out = torch.empty_like(q_given)
    _FORWARD[_family(q.device.index)].enqueue(
        out, q, k, v, scale, lse=base + lse, bits=base + bits, counts=base + counts, order=base + order
    )
    return out


def _norm_rope(x: Tensor, weight: Tensor, rotation: Tensor, epsilon: float) -> Tensor:
    _check_rotation(x, weight, rotation)
    return norm_rope_kernel.norm_rope(x, weight, rotation, epsilon)


def _family(device_index: int) -> str:
    return _forced or modules.family(launch.device(device_index).capability)


def _block_mask_shapes(
    q: Tensor, k: Tensor, top_k: float, top_p: float, sparsity: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, q_len, _ = q.shape
    rows = num_blocks(q_len, BLOCK_Q)
    return (
        q.new_empty((batch, heads, rows, _words(k.shape[2])), dtype=torch.int32),
        q.new_empty((batch, heads, rows), dtype=torch.int32),
        q.new_empty((batch * heads * rows,), dtype=torch.int32),
    )


def _forward_shapes(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, counts: Tensor, order: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward_shapes(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _norm_rope_shapes(x: Tensor, weight: Tensor, rotation: Tensor, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, out, lse)


def _gradients(ctx: Any, d_out: Tensor, _d_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bits, counts, order, out, lse = ctx.saved_tensors
    grads = getattr(torch.ops, NAMESPACE).backward(d_out, q, k, v, out, lse, bits, counts, order, ctx.scale)
    return (*grads, None, None, None, None)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _refuse_derivatives(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("norm_rope has no gradients; take torch's RMSNorm and rotate its result to train.")


def _refuse_second_derivatives(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError(
        'The CUDA kernels of sparse attention can be differentiated once; use the back end "dense" for more.'
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shape, other = q.shape, k.shape
    if len(shape) == len(other) == 4:
        batch, heads, q_len, head_dim = shape
        k_len, dtype, device = other[2], q.dtype, q.get_device()
        if (
            other == (batch, heads, k_len, head_dim)
            and v.shape == other
            and batch * heads * q_len * k_len > 0
            and head_dim in modules.HEAD_DIMS
            and dtype in launch.VARIANT_DTYPES
            and dtype == k.dtype == v.dtype
            and device == k.get_device() == v.get_device()
        ):
            return
    raise ValueError(
        "The CUDA kernels take q, k and v (batch, heads, tokens, head dim) that are not empty, on one GPU, "
        "of one dtype (float16 or bfloat16), batch size, number of heads and head dim (64 or 128), k and v "
        "also of one number of tokens; got "
        f"{_described(q, k, v)}."
    )


def _check_rotation(x: Tensor, weight: Tensor, rotation: Tensor) -> None:
    if x.dim() == 3 and rotation.dim() == 6:
        batch, tokens, channels = x.shape
        samples, _, _, pairs, _, _ = rotation.shape
        if (
            rotation.shape == (samples, tokens, 1, pairs, 2, 2)
            and samples in (1, batch)
            and 2 * pairs in modules.HEAD_DIMS
            and channels % (2 * pairs) == 0
            and weight.shape == (channels,)
            and x.numel() > 0
            and channels <= norm_rope_kernel.MAX_CHANNELS
            and x.dtype in launch.VARIANT_DTYPES
            and weight.dtype == x.dtype
            and rotation.dtype == torch.float32
            and x.get_device() == weight.get_device() == rotation.get_device()
        ):
            return
    raise ValueError(
        "norm_rope takes x (batch, tokens, heads * head dim) that is not empty, float16 or bfloat16, with up "
        f"to {norm_rope_kernel.MAX_CHANNELS} channels and a head dim of 64 or 128, a weight of its dtype for "
        "each channel, and float32 rotations (1 or batch, tokens, 1, head dim / 2, 2, 2), all on one GPU; "
        f"got {_described(x, weight, rotation)}."
    )


def _check_results(q: Tensor, d_out: Tensor, out: Tensor, lse: Tensor) -> None:
    if not (
        d_out.shape == out.shape == q.shape
        and d_out.dtype == out.dtype == q.dtype
        and lse.shape == q.shape[:3]
        and lse.dtype == torch.float32
        and lse.is_contiguous()
        and q.get_device() == d_out.get_device() == out.get_device() == lse.get_device()
    ):
        raise ValueError(
            f"The output of q {tuple(q.shape)}, {q.dtype} on {q.device} and its gradient are like q, the LSE "
            f"is contiguous float32 {tuple(q.shape[:3])}; got {_described(d_out, out, lse)}."
        )


def _check_scale(scale: float) -> None:
    if not 0.0 < scale < math.inf:  # the online softmax takes the largest score for the largest exponent
        raise ValueError(f"The CUDA kernels take a finite scale above 0; got {scale}.")


def _check_mask(q: Tensor, k: Tensor, bits: Tensor, counts: Tensor, order: Tensor) -> None:
    batch, heads, q_len, _ = q.shape
    rows, words, device = num_blocks(q_len, BLOCK_Q), _words(k.shape[2]), q.get_device()
    if not (
        bits.shape == (batch, heads, rows, words)
        and counts.shape == (batch, heads, rows)
        and order.shape == (batch * heads * rows,)
        and bits.dtype == counts.dtype == order.dtype == torch.int32
        and device == bits.get_device() == counts.get_device() == order.get_device()
        and bits.is_contiguous()
        and counts.is_contiguous()
        and order.is_contiguous()
    ):
        raise ValueError(
            f"The mask of q {tuple(q.shape)} and k {tuple(k.shape)} on {q.device} is contiguous int32: bits "
            f"{(batch, heads, rows, words)}, counts {(batch, heads, rows)}, order {(batch * heads * rows,)}; "
            f"got {_described(bits, counts, order)}."
        )


def _words(k_len: int) -> int:
    return num_blocks(num_blocks(k_len, BLOCK_K), WORD_BITS)


def _described(*tensors: Tensor) -> str:
    return ", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in tensors)


def _register() -> torch.library.Library | None:
    """Defines the operators; they live as long as the result. None if another copy of the package has."""
    if hasattr(getattr(torch.ops, NAMESPACE), "forward"):
        return None
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema, run, shapes in (
        (_BLOCK_MASK_SCHEMA, _block_mask, _block_mask_shapes),
        (_FORWARD_SCHEMA, _forward, _forward_shapes),
        (_BACKWARD_SCHEMA, _backward, _backward_shapes),
        (_NORM_ROPE_SCHEMA, _norm_rope, _norm_rope_shapes),
    ):
        name = schema.partition("(")[0]
        library.define(schema, tags=_TAGS)
        library.impl(name, run, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::forward", _gradients, setup_context=_save, lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::backward", _refuse_second_derivatives, lib=library)
    torch.library.register_autograd(
        f"{NAMESPACE}::norm_rope", _refuse_derivatives, setup_context=_save_nothing, lib=library
    )
    return library


_LIBRARY = _register()
