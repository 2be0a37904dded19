"""The definition of correct: the mask and block-sparse attention in plain torch, on any device.

float64 inputs are computed in float64, all others in float32. No L x L tensor is ever built: one query
block of one head is worked on at a time, over the keys it keeps. Ragged blocks are sliced, never padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .config import SparseConfig
from .geometry import BLOCK_K, BLOCK_Q
from .mask import BlockMask, select_blocks, unpack_bits

LN_2 = math.log(2.0)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """dtype that the reference computes in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _as_computed(tensor: Tensor) -> torch.autocast:
    """Context in which an autocast around the call does not lower the compute dtype."""
    return torch.autocast(tensor.device.type, enabled=False)


def block_means(tokens: Tensor, block: int) -> Tensor:
    """Means (B, H, n, D) over the real tokens of each block of (B, H, L, D), in the compute dtype."""
    whole = tokens.shape[2] // block * block
    dtype = compute_dtype(tokens)
    means = [tokens[:, :, :whole].unflatten(2, (-1, block)).mean(3, dtype=dtype)] if whole else []
    if whole < tokens.shape[2]:
        means.append(tokens[:, :, whole:].mean(2, keepdim=True, dtype=dtype))
    return torch.cat(means, dim=2)


@torch.compiler.disable  # tracing its shape arithmetic takes far longer than it could save
@torch.no_grad()
def block_mask(q: Tensor, k: Tensor, config: SparseConfig, *, scale: float | None = None) -> BlockMask:
    """Hybrid mask of q (B, H, Lq, D) and k (B, H, Lk, D); arXiv 2602.13515, Alg. 1. It is not differentiated.

    scale: factor of the pooled scores, head_dim ** -0.5 by default.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with _as_computed(q):
        scores = block_means(q, BLOCK_Q) @ block_means(k, BLOCK_K).transpose(-1, -2) * scale
    return BlockMask.from_dense(select_blocks(scores, config), q.shape[2], k.shape[2])


@torch.compiler.disable
@torch.no_grad()
def kept_mass(
    q: Tensor, k: Tensor, mask: BlockMask, *, scale: float | None = None, rows: int | None = None
) -> Tensor:
    """Share of the pooled scores' softmax (arXiv 2602.13515, Alg. 1) that `mask` keeps, () on its device.

    Mean over the heads and query blocks of the first sample; with `rows`, over about so many query blocks,
    evenly spread, which bounds the memory taken. q (B, H, Lq, D), k (B, H, Lk, D); scale: as in `block_mask`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    stride = 1 if rows is None else -(-mask.n_q // rows)
    with _as_computed(q):
        q_means = block_means(q[:1], BLOCK_Q)[:, :, ::stride]
        scores = q_means @ block_means(k[:1], BLOCK_K).transpose(-1, -2) * scale
    kept = unpack_bits(mask.bits[:1, :, ::stride], mask.n_k)
    return (scores.softmax(-1) * kept).sum(-1).mean()


@torch.compiler.disable  # rows differ in length, so a traced graph would be one per mask
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query block over its kept key blocks alone; arXiv 2602.13515, section 3.

    q (B, H, Lq, D), k and v (B, H, Lk, D): any floating dtype and strides. Differentiable once in q, k and v.
    scale: factor of the scores, head_dim ** -0.5 by default.
    Returns the output in q's dtype and layout; with return_lse also the LSE (B, H, Lq) in the compute dtype
    and base 2, log2(sum_j exp(scale * q . k_j)), which is not differentiated. A row that keeps no block
    gives 0 and an LSE of -inf.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = _BlockSparseAttention.apply(q, k, v, mask, scale)
    return (out, lse) if return_lse else out


class _BlockSparseAttention(torch.autograd.Function):
    """Forward and backward written out, so that memory stays linear in the sequence under autograd too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.mask, ctx.scale = mask, scale
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=compute_dtype(q), device=q.device)
        with _as_computed(q):
            for b, h, kept_blocks in _heads(mask):
                query, keys, values = (x[b, h].to(lse.dtype) for x in (q, k, v))
                for row, kept in _rows(kept_blocks, mask.k_len):
                    scores = query[row] @ keys.index_select(0, kept).T * scale
                    out[b, h, row] = scores.softmax(-1) @ values.index_select(0, kept)
                    lse[b, h, row] = scores.logsumexp(-1) / LN_2
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        """With probabilities P: dV = P'dO; dP = dO V'; dS = P (dP - rowsum(P dP)); dQ = dS K; dK = dS'Q."""
        q, k, v = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        with _as_computed(q):
            for b, h, kept_blocks in _heads(ctx.mask):
                query, keys, values, d_out = (x[b, h].to(compute_dtype(q)) for x in (q, k, v, grad_out))
                d_query, d_keys, d_values = (torch.zeros_like(x) for x in (query, keys, values))
                for row, kept in _rows(kept_blocks, ctx.mask.k_len):
                    kept_keys = keys.index_select(0, kept)
                    p = (query[row] @ kept_keys.T * ctx.scale).softmax(-1)
                    d_p = d_out[row] @ values.index_select(0, kept).T
                    d_scores = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * ctx.scale
                    d_query[row] = d_scores @ kept_keys
                    d_keys.index_add_(0, kept, d_scores.T @ query[row])
                    d_values.index_add_(0, kept, p.T @ d_out[row])
                for grad, head_grad in zip(grads, (d_query, d_keys, d_values), strict=True):
                    grad[b, h] = head_grad
        return (*grads, None, None)


def _heads(mask: BlockMask) -> Iterator[tuple[int, int, Tensor]]:
    """Batch index, head index and kept blocks, bool (n_q, n_k), of every head."""
    for b, heads in enumerate(mask.dense()):
        for h, kept_blocks in enumerate(heads):
            yield b, h, kept_blocks


def _rows(kept_blocks: Tensor, k_len: int) -> Iterator[tuple[slice, Tensor]]:
    """Query tokens of each row of blocks, as a slice, and the ascending ids of the key tokens it keeps."""
    tokens = torch.arange(k_len, device=kept_blocks.device)
    for i, kept in enumerate(kept_blocks):
        yield slice(i * BLOCK_Q, (i + 1) * BLOCK_Q), tokens[kept.repeat_interleave(BLOCK_K)[:k_len]]
