"""What is measured: video shapes, inputs, block masks, and the truth that outputs are held against."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_DIM = 128  # of both Wan2.1 models
LARGEST_BLOCK = 128  # of any method: inputs are made this much longer for peers that need whole blocks
PATTERNS = ("uniform", "ragged", "structured")


@dataclass(frozen=True)
class Shape:
    """Self-attention of one video: `heads` heads over T x H x W tokens (after patching), batch 1."""

    name: str
    heads: int
    grid: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        frames, height, width = self.grid
        return frames * height * width


# Most wanted first: when time runs out, the later ones are missing. 161 frames are twice the usual clip.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("14B-720p", 40, (21, 45, 80)),
        Shape("1.3B-480p", 12, (21, 30, 52)),
        Shape("14B-480p", 40, (21, 30, 52)),
        Shape("1.3B-480p-161f", 12, (41, 30, 52)),
    )
}
TINY = Shape("tiny", 2, (3, 10, 13))  # 390 tokens: ragged in both block sizes, for a run without a GPU


@dataclass(frozen=True)
class Inputs:
    """q, k, v of one shape: (1, H, L, D) views of the host's (1, L, H * D) layout.

    padded: views of the same memory with a few tokens more, a multiple of LARGEST_BLOCK.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    padded: tuple[Tensor, Tensor, Tensor]

    @property
    def output_bytes(self) -> int:
        return self.q.numel() * self.q.element_size()


def make_inputs(shape: Shape, structured: bool, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Random normal q, k, v; `structured`: smooth in time and space as video tokens are, plus noise."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = ceil(shape.tokens / LARGEST_BLOCK) * LARGEST_BLOCK
    buffers = [
        torch.randn(1, tokens, shape.heads, HEAD_DIM, device=device, dtype=dtype, generator=generator)
        for _ in range(3)
    ]
    if structured:
        _add_fields(shape, buffers, generator)
    whole = tuple(buffer.transpose(1, 2) for buffer in buffers)
    q, k, v = (tensor[:, :, : shape.tokens] for tensor in whole)
    return Inputs(shape, q, k, v, (whole[0], whole[1], whole[2]))


# Control points of the fields over T x H x W: coarser along a row, over which a block of tokens averages.
FIELD_GRID = (5, 6, 4)
# Heads range from flat to sharp: a token's score with itself is about sharpness² · sqrt(D).
SHARPNESS = (0.3, 1.1)


def _add_fields(shape: Shape, buffers: list[Tensor], generator: torch.Generator) -> None:
    """Halves the noise in `buffers` and adds smooth fields; q and k share one, so near tokens attend."""
    device = buffers[0].device
    sharpness = torch.linspace(*SHARPNESS, shape.heads).tolist()

    def field() -> Tensor:
        coarse = torch.randn(1, HEAD_DIM, *FIELD_GRID, device=device, generator=generator)
        fine = F.interpolate(coarse, shape.grid, mode="trilinear", align_corners=True)
        return fine.flatten(2)[0].T  # (T * H * W, D)

    for head in range(shape.heads):
        shared, own = field(), field()
        for buffer, signal in zip(buffers, (0.8 * shared + 0.6 * own, shared, own), strict=True):
            tokens = buffer[0, : shape.tokens, head]
            tokens.copy_(0.5 * tokens + sharpness[head] * signal)


@dataclass(frozen=True)
class Blocks:
    """Which blocks of `block_q` x `block_k` tokens are kept: bool (1, H, n_q, n_k), True = kept."""

    kept: Tensor
    block_q: int
    block_k: int
    tokens: int

    @property
    def counts(self) -> Tensor:
        """int32 (1, H, n_q): kept key blocks of each row."""
        return self.kept.sum(-1, dtype=torch.int32)

    @property
    def indices(self) -> Tensor:
        """int32 (1, H, n_q, n_k): kept key blocks first, ascending, as flash-attn-4 and others take them."""
        return torch.argsort(~self.kept, dim=-1, stable=True).int().contiguous()

    def pairs(self) -> float:
        """Kept token pairs, counting real tokens only. Waits for the device."""
        queries, keys = (
            _block_tokens(n, block, self.tokens, self.kept.device)
            for n, block in zip(self.kept.shape[-2:], (self.block_q, self.block_k), strict=True)
        )
        per_row = torch.stack([head.to(keys.dtype) @ keys for head in self.kept[0]])
        return float((per_row * queries).sum().item())

    def coarsened(self, block_q: int, block_k: int) -> Blocks:
        """The same choice for larger blocks: one is kept when any part of it is."""
        by_q, by_k = block_q // self.block_q, block_k // self.block_k
        n_q, n_k = self.kept.shape[-2:]
        kept = F.pad(self.kept, (0, -n_k % by_k, 0, -n_q % by_q)).unflatten(-1, (-1, by_k)).any(-1)
        return Blocks(kept.unflatten(-2, (-1, by_q)).any(-2), block_q, block_k, self.tokens)


def _block_tokens(n: int, block: int, tokens: int, device: torch.device) -> Tensor:
    sizes = torch.full((n,), float(block), dtype=torch.float64, device=device)
    sizes[-1] = tokens - (n - 1) * block
    return sizes


def random_blocks(
    heads: int, tokens: int, block_q: int, block_k: int, density: float, ragged: bool, device: torch.device
) -> Blocks:
    """Random kept blocks: the same count in every row, or exponential counts of that mean.

    Ragged heads begin with a row that keeps all blocks beside a row that keeps one: the worst neighbours.
    """
    generator = torch.Generator(device).manual_seed(1)
    n_q, n_k = ceil(tokens / block_q), ceil(tokens / block_k)
    keep = max(1, round(density * n_k))
    counts = torch.full((heads, n_q), keep, device=device)
    if ragged:
        spread = torch.empty(heads, n_q, device=device).exponential_(generator=generator)
        counts = (keep * spread).round().long().clamp(1, n_k)
        counts[:, 0] = n_k
        counts[:, 1:2] = 1
    order = torch.rand(heads, n_q, n_k, device=device, generator=generator).argsort(-1)
    first = torch.arange(n_k, device=device) < counts[..., None]
    kept = torch.zeros(heads, n_q, n_k, dtype=torch.bool, device=device).scatter_(-1, order, first)
    return Blocks(kept[None], block_q, block_k, tokens)


def relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks | None) -> float:
    """Worst relative error of sampled query blocks of `out` (1, H, L, D) against float32.

    NaN if any element of `out` is, since its memory was poisoned with NaN. blocks: None = dense.
    """
    if bool(torch.isnan(out).any()):
        return float("nan")
    heads, tokens = out.shape[1], out.shape[2]
    block_q = blocks.block_q if blocks else LARGEST_BLOCK
    n_q = ceil(tokens / block_q)
    worst = 0.0
    for head, row in {
        (0, 0),
        (0, min(1, n_q - 1)),
        (heads // 2, n_q // 2),
        (heads - 1, 0),
        (heads - 1, n_q - 1),
    }:
        queries = slice(row * block_q, (row + 1) * block_q)
        keys = torch.ones(tokens, dtype=torch.bool, device=out.device)
        if blocks:
            keys = blocks.kept[0, head, row].repeat_interleave(blocks.block_k)[:tokens]
        scores = q[0, head, queries].float() @ k[0, head, keys].float().T * q.shape[-1] ** -0.5
        truth = scores.softmax(-1) @ v[0, head, keys].float()
        error = (out[0, head, queries].float() - truth).norm() / truth.norm()
        worst = max(worst, float(error))
    return worst


def gradient_error(
    gradients: tuple[Tensor, ...], d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks | None
) -> float:
    """Worst relative error of sampled blocks of dQ, dK and dV (1, H, L, D) against float32.

    Sampled are the first and last query and key block of the first and last head. NaN if any element of
    `gradients` is, since their memory was poisoned with NaN. blocks: None = dense.
    """
    if any(bool(torch.isnan(gradient).any()) for gradient in gradients):
        return float("nan")
    heads, tokens = q.shape[1], q.shape[2]
    block_q, block_k = (blocks.block_q, blocks.block_k) if blocks else (LARGEST_BLOCK, LARGEST_BLOCK)
    n_q, n_k = ceil(tokens / block_q), ceil(tokens / block_k)
    worst = 0.0
    for head in {0, heads - 1}:
        query, key, value, d_output = (x[0, head].float() for x in (q, k, v, d_out))
        d_query, d_key, d_value = (x[0, head].float() for x in gradients)
        kept = blocks.kept[0, head] if blocks else torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
        columns = [slice(j * block_k, (j + 1) * block_k) for j in {0, n_k - 1}]
        rows = kept[:, [0, -1]].any(1)
        rows[[0, -1]] = True
        wanted_key, wanted_value = (torch.zeros_like(x) for x in (key, value))
        for row in rows.nonzero().flatten().tolist():
            queries = slice(row * block_q, (row + 1) * block_q)
            hidden = ~kept[row].repeat_interleave(block_k)[:tokens]
            scores = query[queries] @ key.T * q.shape[-1] ** -0.5
            p = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            products = p * (d_output[queries] @ value.T)
            d_scores = (products - p * products.sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
            for keys in columns:
                wanted_key[keys] += d_scores[:, keys].T @ query[queries]
                wanted_value[keys] += p[:, keys].T @ d_output[queries]
            if row in (0, n_q - 1):
                wanted = d_scores @ key
                worst = max(worst, float((d_query[queries] - wanted).norm() / wanted.norm()))
        for keys in columns:
            for got, wanted in ((d_key[keys], wanted_key[keys]), (d_value[keys], wanted_value[keys])):
                # A block that no row keeps has gradients of zero.
                difference = (got - wanted).norm()
                worst = max(worst, float(difference / wanted.norm()) if float(difference) > 0 else 0.0)
    return worst
