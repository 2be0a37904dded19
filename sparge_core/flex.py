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
from .geometry import BLOCK_K, BLOCK_Q, num_blocks
from .mask import BlockMask

# Tiles that divide our blocks and, in two stages, fit the 99 KB of shared memory of consumer parts.
KERNEL_OPTIONS = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}
PROBE_TOKENS = 3 * BLOCK_Q + 17  # ragged in both block sizes
# torch.compile makes a kernel for each head dim, dtype and kind of length, and gives up after 8 by default.
COMPILATIONS = 64
# Largest error of a token's output, in mean lengths of one: bfloat16 rounding gives 0.006, a wrong block 0.2.
PROBE_TOLERANCE = 0.05


@torch.compiler.disable  # it compiles itself, for the caller's tensors
def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """FlexAttention over the kept blocks; q (B, H, Lq, D), k and v (B, H, Lk, D), float16 or bfloat16."""
    from torch._dynamo import config  # slow to import, and few need it

    with config.patch(cache_size_limit=COMPILATIONS):
        return _compiled()(q, k, v, block_mask=_flex_mask(mask), scale=scale, kernel_options=KERNEL_OPTIONS)


@torch.compiler.disable
def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Sentence that says why FlexAttention cannot be used here, or None after it has proved itself."""
    return prove(device, dtype, head_dim)


@cache
def prove(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The same, asked once: compiles FlexAttention and compares it with the reference."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, 2, PROBE_TOKENS, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=generator) for _ in range(3))
    n_q, n_k = num_blocks(PROBE_TOKENS, BLOCK_Q), num_blocks(PROBE_TOKENS, BLOCK_K)
    row = torch.arange(2 * n_q, device=device).view(1, 2, n_q, 1)
    mask = BlockMask.from_dense(torch.arange(n_k, device=device) <= row, PROBE_TOKENS, PROBE_TOKENS)
    try:
        out = attention(q, k, v, mask, head_dim**-0.5)
    except Exception as error:  # whatever it is, the next back end serves
        logging.getLogger(__name__).debug("FlexAttention failed", exc_info=True)
        return f"cannot run here: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    expected = reference.attention(q, k, v, mask)
    right = (out - expected).norm(dim=-1).max() <= PROBE_TOLERANCE * expected.norm(
        dim=-1
    ).mean()  # not so for NaN
    return None if right else "gives wrong results on this device with this version of torch"


@cache
def _compiled() -> Any:
    """flex_attention, compiled for any length: without compilation it would build an L x L tensor."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _flex_mask(mask: BlockMask) -> Any:
    """Our mask as FlexAttention's: lists of kept blocks, no rule inside them; it cuts ragged ends itself."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    indices = mask.dense().byte().argsort(dim=-1, descending=True, stable=True).int()
    return FlexMask.from_kv_blocks(
        mask.counts, indices, BLOCK_SIZE=(BLOCK_Q, BLOCK_K), seq_lengths=(mask.q_len, mask.k_len)
    )
