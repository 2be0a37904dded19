"""The shipped sources and their launchers without a GPU: the real compiler, and a driver that records.

Protected is the agreement of two files that no compiler checks together: the struct that a kernel takes
and the struct that its launcher packs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparge_core.cuda import (
    backward_mma,
    backward_sm90,
    forward_mma,
    forward_sm90,
    launch,
    mask_kernels,
    norm_rope_kernel,
    operators,
)


@pytest.fixture
def gpu(library: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """CPU tensors pass for those of the recording driver's GPU 0."""
    facts, kernel = launch.device, launch.kernel
    monkeypatch.setattr(launch, "device", lambda index: facts(0))
    monkeypatch.setattr(launch, "kernel", lambda module, name, index, *rest: kernel(module, name, 0, *rest))
    return library


def inputs(q_len: int, k_len: int) -> tuple[Tensor, ...]:
    """q, k, v as ComfyUI hands them over: (B, L, H·D), seen as (B, H, L, D)."""
    flat = (torch.zeros(2, length, 4 * 128, dtype=torch.float16) for length in (q_len, k_len, k_len))
    return tuple(x.view(2, x.shape[1], 4, 128).transpose(1, 2) for x in flat)


@pytest.mark.slow
def test_mask_launchers_pack_the_structs_of_their_kernels(gpu: Any) -> None:
    # A launcher chooses its kernels by the length of a row and by whether there is a target.
    for k_len in (500, 40_000, 100_000):
        for sparsity in (0.0, 0.5):
            before = len(gpu.launches)
            bits, counts, order = mask_kernels.block_mask(*inputs(300, k_len)[:2], 0.1, 0.2, sparsity, 1.0)
            assert len(gpu.launches) > before
            assert bits.shape == (2, 4, 3, -(-k_len // 2048))
            assert (counts.shape, order.shape) == ((2, 4, 3), (24,))
    assert {launch["stream"] for launch in gpu.launches} == {77}, (
        "torch's current stream of the tensors' device"
    )


@pytest.mark.slow
def test_the_longest_rows_fit_the_shared_memory_of_every_gpu(gpu: Any) -> None:
    q, k, _ = inputs(1, 1)
    k = k.expand(-1, -1, 64 * mask_kernels.MAX_KEY_BLOCKS, -1)
    sizes = mask_kernels.layout(*q.shape[:2], 1, k.shape[2], q.shape[3], 0.03, 0.5)
    mask_kernels.enqueue(q, k, sizes, 0.2, 0.5, 1.0, bits=0, counts=0, order=0, scratch=0)
    _, scores, *rest = (seen["shared"] for seen in gpu.launches)
    limit = 99 * 1024  # of compute capability 8.6, 8.9 and 12.0
    assert scores <= limit
    declared = 20 * 1024  # more than any of the others has besides, in its source
    assert 48 * 1024 < max(rest) <= limit - declared


def test_a_target_for_more_pairs_of_blocks_than_are_counted_is_refused() -> None:
    lengths = 128 * 4096, 64 * 8192
    assert mask_kernels.layout(1, 127, *lengths, 64, 0.0, 0.9).beyond_floor > 0
    assert mask_kernels.layout(1, 128, *lengths, 64, 0.0, 0.0).beyond_floor == 0
    with pytest.raises(ValueError, match=r"up to 4294967295 pairs .* got 4294967296; set sparsity to 0"):
        mask_kernels.layout(1, 128, *lengths, 64, 0.0, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [forward_mma, forward_sm90], ids=["mma", "sm90"])
def test_forward_launchers_pack_the_struct_of_their_kernels(launcher: Any, gpu: Any) -> None:
    q, k, v = inputs(300, 500)
    masks = [torch.zeros_like(x) for x in operators._block_mask_shapes(q, k, 0.1, 0.2, 0.0, 1.0)]
    out, lse = launcher.forward(q, k, v, *masks, 1.0)
    assert [seen["stream"] for seen in gpu.launches] == [77]
    assert out.stride() == q.stride()
    assert lse.shape == q.shape[:3]


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_attention_in_one_launches_what_the_two_operators_do(sparsity: float, gpu: Any) -> None:
    q, k, v = inputs(300, 500)
    out = operators.attention(q, k, v, 0.1, 0.2, sparsity, 1.0)
    assert out.stride() == q.stride()
    launches = list(gpu.launches)
    gpu.launches.clear()
    masks = mask_kernels.block_mask(q, k, 0.1, 0.2, sparsity, 1.0)
    forward_sm90.forward(q, k, v, *masks, 1.0)
    assert [seen["grid"] for seen in launches] == [seen["grid"] for seen in gpu.launches]


@pytest.mark.slow
def test_the_norm_and_rotation_launcher_packs_the_struct_of_its_kernels(gpu: Any) -> None:
    for channels in (1536, 5120, 8192):
        x, weight = torch.zeros(2, 9, channels).half(), torch.zeros(channels).half()
        out = norm_rope_kernel.norm_rope(x, weight, torch.zeros(1, 9, 1, 64, 2, 2), 1e-6)
        assert out.shape == x.shape
    assert [seen["grid"] for seen in gpu.launches] == [(18, 1, 1)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [backward_mma, backward_sm90], ids=["mma", "sm90"])
def test_backward_launchers_pack_the_structs_of_their_kernels(launcher: Any, gpu: Any) -> None:
    q, k, v = inputs(300, 500)
    masks = [torch.zeros_like(x) for x in operators._block_mask_shapes(q, k, 0.1, 0.2, 0.0, 1.0)]
    gradients = launcher.backward(torch.zeros_like(q), q, k, v, q, torch.zeros(q.shape[:3]), *masks, 1.0)
    assert [gradient.stride() for gradient in gradients] == [x.stride() for x in (q, k, v)]
    # The records, the transposed mask and its order; dK and dV of 8 columns a head; dQ of 3 rows a head.
    assert [seen["stream"] for seen in gpu.launches] == [77] * 5
    assert [seen["grid"][0] for seen in gpu.launches[-2:]] == [2 * 4 * 8, 2 * 4 * 3]
