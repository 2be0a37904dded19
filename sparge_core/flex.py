"""FlexAttention as a back end, for GPUs that our own kernels do not serve. Forward only.

It is compiled at first use, and trusted only after its answer on a small problem with ragged ends and rows of
unequal length has been held against the reference, once for each device, dtype and head dim.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import reference
from .geometry import BLOCK_K, BLOCK_Q
from .mask import BlockMask

# Tiles that divide our blocks and, in two stages, fit the 99 KB of shared memory of consumer parts.
KERNEL_OPTIONS = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}
PROBE_TOKENS = 3 * BLOCK_Q + 17  # ragged in both block sizes
PROBE_TOLERANCE = (
    2e-2  # relative L1; float16 and bfloat16 stay below 1e-2, a wrong block costs more than 1e-1
)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """FlexAttention over the kept blocks; q (B, H, Lq, D), k and v (B, H, Lk, D), float16 or bfloat16."""
    return _compiled()(q, k, v, block_mask=_flex_mask(mask), scale=scale, kernel_options=KERNEL_OPTIONS)


@cache
def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Sentence that says why FlexAttention cannot be used here, or None after it has proved itself."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, PROBE_TOKENS, head_dim, device=device, dtype=dtype, generator=generator)
        for _ in range(3)
    )
    n_q, n_k = -(-PROBE_TOKENS // BLOCK_Q), -(-PROBE_TOKENS // BLOCK_K)
    rows = torch.arange(2 * n_q, device=device).view(1, 2, n_q, 1)
    mask = BlockMask.from_dense(torch.arange(n_k, device=device) <= rows, PROBE_TOKENS, PROBE_TOKENS)
    try:
        out = attention(q, k, v, mask, head_dim**-0.5)
    except Exception as error:
        logging.getLogger(__name__).debug("FlexAttention failed", exc_info=True)
        return f"cannot be compiled here ({type(error).__name__})"
    expected = reference.attention(q, k, v, mask)
    distance = (out - expected).abs().sum() / expected.abs().sum()
    return (
        None if distance < PROBE_TOLERANCE else "gives wrong results on this GPU with this version of torch"
    )


@cache
def _compiled() -> Any:
    """flex_attention, compiled for any length: without compilation it would build an L x L tensor."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _flex_mask(mask: BlockMask) -> Any:
    """Our mask as FlexAttention's: every kept block is a full one, its ragged end being cut by the kernel."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    indices = mask.dense().byte().argsort(dim=-1, descending=True, stable=True).int()
    return FlexMask.from_kv_blocks(
        mask.counts, indices, BLOCK_SIZE=(BLOCK_Q, BLOCK_K), seq_lengths=(mask.q_len, mask.k_len)
    )
