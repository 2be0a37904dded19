"""FlexAttention on a GPU, as it would serve one that our kernels do not."""

from __future__ import annotations

import pytest
import torch

from sparge_core import BlockMask, SparseConfig, flex, reference, sparse_attention
from sparge_core.geometry import BLOCK_K, BLOCK_Q, num_blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_rows_of_any_mix_of_counts_equal_the_reference_at_ragged_lengths(
    dtype: torch.dtype, dim: int
) -> None:
    device = torch.device("cuda")
    if dim != 96:  # torch may refuse a head dim that is no power of two, with a sentence
        assert flex.why_not(device, dtype, dim) is None
    elif flex.why_not(device, dtype, dim) is not None:
        pytest.skip(str(flex.why_not(device, dtype, dim)))
    for q_len, k_len in ((640, 640), (401, 401), (4000, 4000), (129, 700), (17, 130)):
        q = torch.randn(2, q_len, 3 * dim, dtype=dtype, device=device).view(2, q_len, 3, dim).transpose(1, 2)
        k, v = (torch.randn(2, 3, k_len, dim, dtype=dtype, device=device) for _ in range(2))
        kept = torch.rand(2, 3, num_blocks(q_len, BLOCK_Q), num_blocks(k_len, BLOCK_K), device=device) < 0.4
        kept[..., -1] |= ~kept.any(-1)
        mask = BlockMask.from_dense(kept, q_len, k_len)
        out = sparse_attention(q, k, v, SparseConfig(), backend="flex", mask=mask)
        expected = reference.attention(q.double(), k.double(), v.double(), mask)
        assert (out - expected).norm() < 1e-2 * expected.norm()
