"""The CUDA back end: hybrid mask, block-sparse forward and backward for compute capability 8.0 and newer.

Nothing to install: the kernels ship compiled, or NVRTC, which every CUDA build of torch brings, compiles them
for the GPU at hand at the first use. `python -m sparge_core.cuda info` says what this machine runs and why;
`... build` compiles for every architecture ahead of time.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ..backends import decided_once
from ..config import SparseConfig
from ..geometry import BLOCK_K
from ..mask import BlockMask
from . import launch, mask_kernels, modules, norm_rope_kernel, operators
from .operators import NAMESPACE, force

__all__ = [
    "attention",
    "block_mask",
    "fastest_when_dense",
    "force",
    "norm_rope",
    "sparse_attention",
    "why_not",
    "why_not_norm_rope",
]

logger = logging.getLogger(__name__)
_operators = getattr(torch.ops, NAMESPACE)
MAX_NORM_CHANNELS = norm_rope_kernel.MAX_CHANNELS
_MAX_KEY_TOKENS = mask_kernels.MAX_KEY_BLOCKS * BLOCK_K


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot serve q, k, v (B, H, L, D), as one sentence; None if they can.

    The first call for a GPU, dtype and head dim compiles and loads the kernels (or reads them from disk), so
    None means that they are ready; the answer is remembered. Tensors on the CPU never touch CUDA. Nothing is
    raised.
    """
    if not q.is_cuda:
        return f"needs tensors on a CUDA device, got {q.device.type}"
    if k.shape[2] > _MAX_KEY_TOKENS:
        return f"needs up to {_MAX_KEY_TOKENS} key tokens, got {k.shape[2]}"
    reason = _why_not(q.device.index, q.dtype, q.shape[3])
    if reason is None and _differentiated(q, k, v):
        reason = _why_no_gradients(q.device.index, q.dtype, q.shape[3])
    return reason


def block_mask(q: Tensor, k: Tensor, config: SparseConfig, scale: float) -> BlockMask:
    """Hybrid mask of q (B, H, Lq, D), k (B, H, Lk, D), decided on the GPU without a synchronisation.

    It is not differentiated.
    """
    q, k = q.detach(), k.detach()
    bits, counts, order = _operators.block_mask(q, k, config.top_k, config.top_p, config.sparsity, scale)
    return BlockMask(bits, counts, q.shape[2], k.shape[2], order)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, H, Lq, D) to the kept blocks of k, v (B, H, Lk, D); the output has q's strides.

    Differentiable once in q, k and v. return_lse: also log2(sum over kept keys of exp(scale * q . k)),
    float32 (B, H, Lq), which is not differentiated.
    """
    order = mask.order
    if order is None:  # a mask that did not come from these kernels: any order is right
        order = torch.arange(mask.counts.numel(), dtype=torch.int32, device=q.device)
    out, lse = _operators.forward(q, k, v, mask.bits, mask.counts, order, scale)
    return (out, lse) if return_lse else out


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, config: SparseConfig, scale: float) -> Tensor:
    """`block_mask` and `attention` in one, with less work for the host where nothing needs them apart."""
    if (
        type(q) is type(k) is type(v) is Tensor
        and not torch.compiler.is_compiling()
        and not _differentiated(q, k, v)
    ):
        return operators.attention(q, k, v, config.top_k, config.top_p, config.sparsity, scale)
    out = attention(q, k, v, block_mask(q, k, config, scale), scale)
    assert isinstance(out, Tensor)
    return out


def fastest_when_dense(device_index: int, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention that keeps all blocks is faster than any kernel that torch brings for the device.

    Measured for compute capability 9.0 alone (benchmarks/results).
    """
    return _why_not(device_index, dtype, head_dim) is None and _is_sm90(device_index)


def why_not_norm_rope(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `norm_rope` cannot serve, as one sentence; None if it can. The first call compiles its kernel."""
    reason = _why_not(device_index, dtype, head_dim)
    return _why_no_norm_rope(device_index, dtype, head_dim) if reason is None else reason


def norm_rope(x: Tensor, weight: Tensor, rotation: Tensor, epsilon: float) -> Tensor:
    """RMSNorm(x) * weight, then rotated, in one pass and rounded as in two; without gradients.

    x (B, L, H * D), weight (H * D,), float16 or bfloat16; rotation (1 or B, L, 1, D / 2, 2, 2), float32: the
    matrix that each pair of channels of a head is multiplied with. epsilon: added to the mean square.
    """
    rotated: Tensor = _operators.norm_rope(x, weight, rotation, epsilon)
    return rotated


def _differentiated(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


@decided_once
def _why_not(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    return _remembered(device_index, dtype, head_dim)


@decided_once
def _why_no_gradients(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    return _remembered_gradients(device_index, dtype, head_dim)


@decided_once
def _is_sm90(device_index: int) -> bool:
    return modules.family(launch.device(device_index).capability) == "sm90"


@decided_once
def _why_no_norm_rope(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    return _remembered_norm_rope(device_index, dtype, head_dim)


@functools.cache
def _remembered(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, and this is a ROCm build of torch"
    if dtype not in launch.VARIANT_DTYPES:
        return f"needs float16 or bfloat16 tensors, got {str(dtype).removeprefix('torch.')}"
    if head_dim not in modules.HEAD_DIMS:
        return f"needs a head dim of {' or '.join(map(str, modules.HEAD_DIMS))}, got {head_dim}"
    try:
        device = launch.device(device_index)
        if device.capability < modules.MINIMUM_CAPABILITY:
            return (
                f"needs a GPU of compute capability {_dotted(modules.MINIMUM_CAPABILITY)} or newer, "
                f"got {device.name} of {_dotted(device.capability)}"
            )
        launch.prepare(device_index, dtype, head_dim)
    except Exception as error:  # whatever it is, the next back end serves; it is said once and remembered
        return _failure(device_index, error)
    return None


@functools.cache
def _remembered_gradients(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    """Asked only where `_remembered` says None: most processes never take a gradient."""
    try:
        family = modules.family(launch.device(device_index).capability)
        for module, name in (("backward_prepare", "row_records"), (f"backward_{family}", "row_gradients")):
            launch.kernel(module, name, device_index, dtype, head_dim)
    except Exception as error:
        return _failure(device_index, error)
    return None


@functools.cache
def _remembered_norm_rope(device_index: int, dtype: torch.dtype, head_dim: int) -> str | None:
    try:
        for channels in norm_rope_kernel.CHANNELS:
            name = norm_rope_kernel.kernel_name(channels)
            launch.kernel(norm_rope_kernel.MODULE, name, device_index, dtype, head_dim)
    except Exception as error:
        return _failure(device_index, error)
    return None


def _failure(device_index: int, error: Exception) -> str:
    logger.warning("The CUDA kernels cannot be used on GPU %d: %s", device_index, error)
    sentence = next(iter(str(error).splitlines()), type(error).__name__)
    return f"needs kernels for this GPU: {sentence}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
