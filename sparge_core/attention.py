"""Sparse attention: the mask, then the back end that serves the tensors, or dense with the reasons."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends
from .backends import Choice, choose
from .config import SparseConfig
from .mask import BlockMask

__all__ = ["Choice", "block_mask", "choose", "sparse_attention"]


@torch.no_grad()
def block_mask(q: Tensor, k: Tensor, config: SparseConfig, *, scale: float | None = None) -> BlockMask:
    """Hybrid block mask of q (B, H, Lq, D) and k (B, H, Lk, D), by the CUDA kernels where they serve.

    scale: factor of the pooled scores, head_dim ** -0.5 by default. The mask is not differentiated.
    Raises ValueError for shapes, dtypes or devices that do not belong together.
    """
    backends.check_inputs(q, k, k)
    reason = backends.REFERENCE.why_not(q, k, k, auto=False)
    if reason is not None:
        raise ValueError(f"A block mask {reason}.")
    q, k = q.detach(), k.detach()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backends.CUDA.why_not(q, k, k) is None:
        return backends.cuda_kernels().block_mask(q, k, config, scale)
    return backends.reference().block_mask(q, k, config, scale=scale)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: SparseConfig,
    *,
    scale: float | None = None,
    backend: str = "auto",
    mask: BlockMask | None = None,
) -> Tensor:
    """Attention over the key blocks that `config` keeps, or over those of `mask`; arXiv 2602.13515.

    q (B, H, Lq, D), k and v (B, H, Lk, D): any strides; scale: head_dim ** -0.5 by default.
    backend: "auto", "cuda", "flex", "reference" or "dense". Where the asked one cannot serve the tensors,
    dense attention runs; `choose` with the same arguments says what runs and why.
    Returns (B, H, Lq, D) in q's dtype, differentiable in q, k and v; the mask is not differentiated.
    Raises ValueError for an unknown back end and for shapes, dtypes or devices that do not belong together.
    """
    choice = choose(q, k, v, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choice.name == "dense":
        return backends.dense_attention(q, k, v, scale)
    dtype = q.dtype
    if choice.cast is not None:
        q, k, v = q.to(choice.cast), k.to(choice.cast), v.to(choice.cast)
    if mask is not None:
        backends.check_mask(q, k, mask)
    elif choice.name == "cuda":  # what serves the attention serves the mask: no need to ask again
        return backends.cuda_kernels().sparse_attention(q, k, v, config, scale).to(dtype)
    else:
        mask = block_mask(q, k, config, scale=scale)
    return backends.BACKENDS[choice.name].run(q, k, v, mask, scale).to(dtype)
