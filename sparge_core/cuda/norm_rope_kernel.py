"""Host side of `csrc/norm_rope.cu`: RMSNorm and rotary embedding in one pass."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from . import launch

MODULE = "norm_rope"
CHANNELS = (2048, 5120, 8192)  # each the most that a kernel takes
MAX_CHANNELS = CHANNELS[-1]
_PARAMS = struct.Struct("<QQQQ ii f")
_THREADS = 128


def norm_rope(x: Tensor, weight: Tensor, rotation: Tensor, epsilon: float) -> Tensor:
    """Rotates RMSNorm(x) * weight. x (B, L, H * D), weight (H * D,), both float16 or both bfloat16.

    rotation: (1 or B, L, 1, D / 2, 2, 2), float32: for each pair of channels of a head the matrix that it is
    multiplied with. epsilon: as in torch's RMSNorm, added to the mean square. Returns (B, L, H * D).
    """
    x, weight, rotation = (_contiguous(tensor) for tensor in (x, weight, rotation))
    out = torch.empty_like(x)
    batch, tokens, channels = x.shape
    index = x.device.index
    name = kernel_name(next(most for most in CHANNELS if channels <= most))
    kernel = launch.kernel(MODULE, name, index, x.dtype, 2 * rotation.shape[3])
    params = _PARAMS.pack(
        x.data_ptr(), weight.data_ptr(), rotation.data_ptr(), out.data_ptr(),
        channels, rotation.shape[0] * tokens, epsilon,
    )  # fmt: skip
    kernel((batch * tokens, 1, 1), _THREADS, 0, launch.stream(index), params)
    return out


def kernel_name(channels: int) -> str:
    """Of the kernel for up to so many channels, one of `CHANNELS`."""
    return f"norm_rope_{channels}"


def _contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if it is not contiguous or its pointer not a multiple of 16 bytes."""
    if tensor.is_contiguous() and not tensor.data_ptr() % launch.ALIGNMENT:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
