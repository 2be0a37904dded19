"""A small run of every kernel, for NVIDIA's compute-sanitizer. From the repository root:

    compute-sanitizer --tool memcheck  --error-exitcode 1 python3 tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python3 tests/gpu/sanitize.py
    compute-sanitizer --tool initcheck --error-exitcode 1 python3 tests/gpu/sanitize.py

Inputs are made on the CPU, so that next to nothing but our kernels runs instrumented, and torch's caching of
memory is off, so that each tensor has its own allocation and reading past its end is seen. Names of kernels
("mask", "norm-rope", the forward passes "mma", "mma-narrow" and "sm90", and "mma-backward" and so on, which
are both passes) as arguments run those alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read when torch first allocates
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge_core import BlockMask, SparseConfig, reference
from sparge_core.cuda import (
    backward_mma,
    backward_sm90,
    forward_mma,
    forward_sm90,
    mask_kernels,
    norm_rope_kernel,
)

DEVICE = "cuda"
BACKWARD = "-backward"  # behind the name of a family: its backward pass too
# "mma-narrow" are the kernels of GPUs that have little shared memory.
FORWARDS = {"mma": forward_mma.forward, "mma-narrow": forward_mma.forward, "sm90": forward_sm90.forward}
BACKWARDS = {
    "mma": backward_mma.backward,
    "mma-narrow": backward_mma.backward,
    "sm90": backward_sm90.backward,
}
WIDE_CAPABILITIES = {launcher: launcher._WIDE_CAPABILITIES for launcher in (forward_mma, backward_mma)}
# (batch, heads, query tokens, key tokens): one token, ragged ends, several mask words, and more rows of a
# mask than a GPU has multiprocessors.
SHAPES = [
    (1, 1, 1, 1),
    (2, 2, 300, 333),
    (1, 2, 129, 64 * 33 + 1),
    (1, 2, 128 * 80, 130),
]
# Rows long enough for each of the mask's ways to select; attention does nothing in them that is new.
MASK_SHAPES = [*SHAPES, (1, 1, 130, 64 * 600 + 1), (1, 1, 5, 64 * 1300)]
# (top_k, top_p, sparsity)
RULES = [(0.03, 0.2, 0.0), (0.0, 0.2, 0.6), (1.0, 1.0, 0.0)]
TOLERANCE = {"out": 5e-3, "LSE": 5e-3, "dQ": 2e-2, "dK": 2e-2, "dV": 1e-2}


def tokens(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(B, H, L, D) on the GPU, as a view of (B, L, H * D)."""
    return torch.randn(batch, length, heads, dim).to(dtype).to(DEVICE).transpose(1, 2)


def check_mask(q: Tensor, k: Tensor) -> BlockMask:
    """Runs the mask kernels by every rule; returns the first rule's mask."""
    scale = q.shape[-1] ** -0.5
    masks = []
    for top_k, top_p, sparsity in RULES:
        bits, counts, order = mask_kernels.block_mask(q, k, top_k, top_p, sparsity, scale)
        mask = BlockMask(bits.cpu(), counts.cpu(), q.shape[2], k.shape[2], order.cpu())
        assert torch.equal(mask.counts, mask.dense().sum(-1, dtype=torch.int32)), "counts and bits disagree"
        assert torch.equal(order.cpu().sort().values, torch.arange(counts.numel(), dtype=torch.int32))
        masks.append(mask)
    return masks[0]


def check_attention(family: str, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, backward: bool) -> None:
    order = mask.order if mask.order is not None else torch.arange(mask.counts.numel(), dtype=torch.int32)
    scale = q.shape[-1] ** -0.5
    for launcher, capabilities in WIDE_CAPABILITIES.items():
        launcher._WIDE_CAPABILITIES = set() if family == "mma-narrow" else capabilities
    blocks = mask.bits.to(DEVICE), mask.counts.to(DEVICE), order.to(DEVICE)
    out, lse = FORWARDS[family](q, k, v, *blocks, scale)
    exact = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = reference.attention(*exact, mask, scale=scale, return_lse=True)
    errors = {
        "out": (out.cpu().double() - wanted).norm() / wanted.norm(),
        "LSE": (lse.cpu() - wanted_lse).abs().max(),
    }
    if backward:
        d_out = torch.randn(out.shape).to(out.dtype)
        gradients = BACKWARDS[family](d_out.to(DEVICE), q, k, v, out, lse, *blocks, scale)
        exact_gradients = torch.autograd.grad(wanted, exact, d_out.double())
        # The softmax over one key has gradients of zero, which rounding does not hit: hence a floor.
        floor = exact_gradients[2].norm() * 1e-1
        for name, got, right in zip(("dQ", "dK", "dV"), gradients, exact_gradients, strict=True):
            errors[name] = (got.cpu().double() - right).norm() / right.norm().clamp(min=floor)
    wrong = {name: f"{error.item():.1e}" for name, error in errors.items() if not error < TOLERANCE[name]}
    assert not wrong, f"{family} {tuple(q.shape)}: {wrong}"


def check_norm_rope(tokens: int, channels: int, dim: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, tokens, channels).to(dtype), torch.randn(channels).to(dtype)
    rotation = torch.randn(1, tokens, 1, dim // 2, 2, 2)
    out = norm_rope_kernel.norm_rope(*(given.to(DEVICE) for given in (x, weight, rotation)), 1e-6)
    normalised = F.rms_norm(x.double(), (channels,), weight.double(), 1e-6)
    right = (rotation * normalised.unflatten(-1, (-1, dim // 2, 1, 2))).sum(-1).flatten(2)
    error = (out.cpu().double() - right).norm() / right.norm()
    assert error < TOLERANCE["out"], f"norm and rotation of {channels} channels: {error.item():.1e}"


def main(names: list[str]) -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    families = [family for family in FORWARDS if hopper or family != "sm90"]
    names = names or ["mask", "norm-rope", *(family + BACKWARD for family in families)]
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (64, 128):
            if "norm-rope" in names:
                for channels in (dim, 1536, 5120, 8192):
                    check_norm_rope(9, channels, dim, dtype)
            for shape in MASK_SHAPES if "mask" in names else SHAPES:
                batch, heads, q_len, k_len = shape
                q = tokens(batch, heads, q_len, dim, dtype)
                k, v = (tokens(batch, heads, k_len, dim, dtype) for _ in range(2))
                if "mask" in names:
                    mask = check_mask(q, k)
                    if k_len > 64 * 512:
                        check_mask(torch.zeros_like(q), k)  # equal scores: a target sorts the whole row
                elif names != ["norm-rope"]:
                    mask = reference.block_mask(q.cpu(), k.cpu(), SparseConfig(*RULES[0]))
                for family in FORWARDS:
                    backward = family + BACKWARD in names
                    if shape in SHAPES and (backward or family in names):
                        check_attention(family, q, k, v, mask, backward=backward)
    print(f"{', '.join(names)}: right for all shapes, two head dims and two dtypes")


if __name__ == "__main__":
    main(sys.argv[1:])
