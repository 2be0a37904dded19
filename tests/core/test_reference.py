"""The reference mask and attention against torch's dense attention over an expanded token mask."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparge_core import BlockMask, SparseConfig, reference
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks
from sparge_core.mask import select_blocks

KEEP_ALL = SparseConfig(1.0, 1.0)
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def inputs(length: int, dim: int = 16, batch: int = 2, heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (normal(batch, heads, length, dim, seed=seed) for seed in range(3))
    return q, k, v


def uneven_mask(batch: int, heads: int, q_len: int, k_len: int) -> BlockMask:
    """Random rows of unequal length, a row of one block and a full row among them."""
    n_q, n_k = num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K)
    share = torch.rand(batch, heads, n_q, 1, generator=torch.Generator().manual_seed(7))
    dense = torch.rand(batch, heads, n_q, n_k, generator=torch.Generator().manual_seed(8)) < share
    dense[:, 0, 0], dense[:, -1, -1] = False, True
    dense[..., -1] |= ~dense.any(-1)
    return BlockMask.from_dense(dense, q_len, k_len)


def expanded(mask: BlockMask) -> Tensor:
    """bool (B, H, Lq, Lk): the mask token by token."""
    rows = mask.dense().repeat_interleave(BLOCK_Q, 2)[:, :, : mask.q_len]
    return rows.repeat_interleave(BLOCK_K, 3)[..., : mask.k_len]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("block", [BLOCK_Q, BLOCK_K])
def test_block_means_are_over_the_tokens_that_exist(length: int, block: int) -> None:
    tokens = normal(1, 2, length, 4)
    means = torch.stack([chunk.mean(2) for chunk in tokens.split(block, dim=2)], dim=2)
    torch.testing.assert_close(reference.block_means(tokens, block), means)


def test_half_precision_scores_stay_float32() -> None:
    """In bfloat16 the means of these keys, 1 + j/8192, would tie, and the earliest blocks would win."""
    k = torch.ones(1, 1, 8 * BLOCK_K, 64, dtype=torch.bfloat16)
    for j in range(8):
        k[:, :, j * BLOCK_K : j * BLOCK_K + j] = 1 + 2**-7
    q = torch.ones(1, 1, BLOCK_Q, 64, dtype=torch.bfloat16)
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            mask = reference.block_mask(q, k, SparseConfig(2 / 8, 0.0))
        assert mask.dense().flatten().nonzero().flatten().tolist() == [6, 7]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_mask_is_the_rule_on_pooled_scores(length: int) -> None:
    q, k, _ = inputs(length)
    q_means = torch.stack([chunk.mean(2) for chunk in q.split(BLOCK_Q, dim=2)], dim=2)
    k_means = torch.stack([chunk.mean(2) for chunk in k.split(BLOCK_K, dim=2)], dim=2)
    for config in (SparseConfig(0.03, 0.4), SparseConfig(0.0, 0.0, 0.5)):
        mask = reference.block_mask(q, k, config, scale=0.5)
        assert torch.equal(
            mask.dense(), select_blocks(torch.einsum("bhid,bhjd->bhij", q_means, k_means) / 2, config)
        )
        assert (mask.q_len, mask.k_len) == (length, length)


def test_the_mask_of_inputs_with_gradients_has_none() -> None:
    q, k, _ = (x.requires_grad_() for x in inputs(200))
    mask = reference.block_mask(q, k, SparseConfig(sparsity=0.5))
    assert not mask.bits.requires_grad
    assert not mask.sparsity.requires_grad


@pytest.mark.parametrize("config", [SparseConfig(), SparseConfig(sparsity=0.5), KEEP_ALL])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_inputs_that_are_not_finite_leave_no_row_empty(config: SparseConfig, value: float) -> None:
    q, k, _ = (x.float() for x in inputs(300))
    q[0, 0, 5], k[1, 2, 7] = value, -value
    assert (reference.block_mask(q, k, config).counts > 0).all()


def test_keeping_all_blocks_is_dense_attention_at_every_length() -> None:
    for length in range(1, 258):
        q, k, v = inputs(length, dim=8, batch=1, heads=2)
        out = reference.attention(q, k, v, reference.block_mask(q, k, KEEP_ALL))
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("k_len", [40, 300])
def test_rows_of_any_mix_of_counts_equal_dense_attention_over_the_token_mask(length: int, k_len: int) -> None:
    q = normal(2, 3, length, 16)
    k, v = normal(2, 3, k_len, 16, seed=1), normal(2, 3, k_len, 16, seed=2)
    mask = uneven_mask(2, 3, length, k_len)
    out, lse = reference.attention(q, k, v, mask, scale=0.3, return_lse=True)
    tokens = expanded(mask)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=tokens, scale=0.3))
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~tokens, -torch.inf)
    torch.testing.assert_close(lse, torch.log2(scores.exp().sum(-1)))  # base 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in inputs(300))
    mask = uneven_mask(2, 3, 300, 300)
    exact = reference.attention(q.float(), k.float(), v.float(), mask)
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            out, lse = reference.attention(q, k, v, mask, return_lse=True)
        assert torch.equal(out, exact.to(dtype))
        assert lse.dtype == torch.float32


# At 1e5 the softmax is one-hot, and scores of 1e10 decide it, of which float32 rounds away about 1e3.
@pytest.mark.parametrize(("size", "tolerance"), [(1e-30, 1e-6), (1.0, 1e-6), (1e5, 1e-2)])
def test_tiny_and_huge_values_are_right(size: float, tolerance: float) -> None:
    q, k, v = inputs(200)
    mask = uneven_mask(2, 3, 200, 200)
    q, k = (q * size).float(), (k * size).float()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v, attn_mask=expanded(mask))
    out = reference.attention(q, k, v.float(), mask)
    assert (out - exact).norm() < tolerance * exact.norm()


def test_memory_around_the_tensors_has_no_influence() -> None:
    """What lies behind the ragged ends is NaN here; reading it would show."""
    shape, padded = (2, 3, 200, 16), (2, 3, 256, 32)
    clean = inputs(200)
    poisoned = []
    for x in clean:
        buffer = torch.full(padded, torch.nan, dtype=x.dtype)
        buffer[:, :, : shape[2], : shape[3]] = x
        poisoned.append(buffer[:, :, : shape[2], : shape[3]])
    config = SparseConfig(0.1, 0.3)
    expected = reference.attention(*clean, reference.block_mask(clean[0], clean[1], config))
    out = reference.attention(*poisoned, reference.block_mask(poisoned[0], poisoned[1], config))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_the_output_has_the_layout_of_q() -> None:
    q, k, v = (normal(2, 150, 3 * 16, seed=i).view(2, 150, 3, 16).transpose(1, 2) for i in range(3))
    out = reference.attention(q, k, v, uneven_mask(2, 3, 150, 150))
    assert out.stride() == q.stride()
    assert out.transpose(1, 2).reshape(2, 150, 48).data_ptr() == out.data_ptr()


def test_a_row_without_blocks_gives_zero() -> None:
    q, k, v = inputs(200)
    dense = torch.ones(2, 3, 2, 4, dtype=torch.bool)
    dense[:, :, 1] = False
    out, lse = reference.attention(q, k, v, BlockMask.from_dense(dense, 200, 200), return_lse=True)
    assert (out[:, :, 128:] == 0).all()
    assert (lse[:, :, 128:] == -torch.inf).all()
    assert out[:, :, :128].abs().min() > 0


@pytest.mark.parametrize("k_len", [70, 130])
def test_gradients_are_those_of_finite_differences(k_len: int) -> None:
    q = normal(1, 2, 130, 2).requires_grad_()
    k, v = normal(1, 2, k_len, 2, seed=1).requires_grad_(), normal(1, 2, k_len, 2, seed=2).requires_grad_()
    mask = uneven_mask(1, 2, 130, k_len)
    assert torch.autograd.gradcheck(lambda *qkv: reference.attention(*qkv, mask), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("length", [1, 65, 129, 257])
def test_gradients_equal_those_of_dense_attention_over_the_token_mask(length: int) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(length))
    mask = uneven_mask(2, 3, length, length)
    grad = normal(2, 3, length, 16, seed=9)
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=expanded(mask))
    expected = torch.autograd.grad(dense, (q, k, v), grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = reference.attention(q, k, v, mask)
        found = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(found, expected)


def test_blocks_that_no_row_keeps_get_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(128))
    dense = torch.tensor([True, False]).expand(2, 3, 1, 2)
    reference.attention(q, k, v, BlockMask.from_dense(dense, 128, 128)).sum().backward()
    assert k.grad is not None
    assert v.grad is not None
    assert (k.grad[:, :, 64:] == 0).all()
    assert (v.grad[:, :, 64:] == 0).all()
    assert v.grad[:, :, :64].abs().min() > 0


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform == "win32", reason="the peak memory of a process is read with the resource module"
)
def test_a_wan_480p_layer_runs_in_8_gib_on_a_cpu() -> None:
    """32,760 tokens x 12 heads x 128; an L x L tensor of one head alone would take 4 GiB."""
    program = """
import resource, torch
torch.set_num_threads(1)
from sparge_core import SparseConfig, reference
q, k, v = (torch.randn(1, 12, 32_760, 128) for _ in range(3))
mask = reference.block_mask(q, k, SparseConfig(sparsity=0.95))
out = reference.attention(q, k, v, mask)
assert out.isfinite().all() and abs(mask.sparsity.item() - 0.95) < 0.001
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak = int(result.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert peak < 8 * 2**30
