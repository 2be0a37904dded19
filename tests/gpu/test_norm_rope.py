"""RMSNorm and rotation in one kernel, against torch's RMSNorm and the rotation's formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparge_core import cuda

pytestmark = pytest.mark.gpu

EPSILON = 1e-6


def inputs(
    batch: int,
    tokens: int,
    heads: int,
    head_dim: int,
    *,
    samples: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda:0",
) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and rotation; the matrices are any, so that a transposed one shows."""
    generator = torch.Generator().manual_seed(tokens)
    channels = heads * head_dim
    x = torch.randn(batch, tokens, channels, generator=generator) * 3
    weight = 1 + torch.randn(channels, generator=generator)
    rotation = torch.randn(samples, tokens, 1, head_dim // 2, 2, 2, generator=generator)
    return x.to(device, dtype), weight.to(device, dtype), rotation.to(device)


def expected(x: Tensor, weight: Tensor, rotation: Tensor) -> Tensor:
    """In two steps, each rounded to the dtype of x: torch's own norm, then out_i = sum_j matrix_ij x_j."""
    normalised = F.rms_norm(x, weight.shape, weight, EPSILON)
    pairs = normalised.float().unflatten(-1, (-1, rotation.shape[3], 2))
    return (
        torch.einsum("blhpij,blhpj->blhpi", rotation.expand(len(x), *[-1] * 5), pairs).flatten(2).to(x.dtype)
    )


def check(x: Tensor, weight: Tensor, rotation: Tensor) -> None:
    out, right = cuda.norm_rope(x, weight, rotation, EPSILON), expected(x, weight, rotation)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    # The sums are rounded in another order, which can turn a rounding of the norm, rarely.
    resolution = torch.finfo(x.dtype).eps
    torch.testing.assert_close(out, right, rtol=2 * resolution, atol=4 * resolution)
    assert (out != right).float().mean() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [(1, 64), (1, 128), (2, 128), (12, 128), (24, 128), (40, 128), (64, 128), (17, 64), (7, 128)],
)
def test_it_is_the_norm_and_then_the_rotation(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check(*inputs(2, 37, heads, head_dim, dtype=dtype))


@pytest.mark.parametrize(("batch", "samples"), [(1, 1), (3, 1), (3, 3)])
def test_samples_share_a_rotation_or_have_their_own(batch: int, samples: int) -> None:
    check(*inputs(batch, 50, 3, 128, samples=samples))


def test_rows_that_are_zero_huge_or_nan_stay_what_the_norm_makes_of_them() -> None:
    x, weight, rotation = inputs(1, 8, 4, 128)
    x[0, 0], x[0, 1], x[0, 2] = 0, 1e15, 1e-15
    x[0, 3, 5] = float("nan")
    out = cuda.norm_rope(x, weight, rotation, EPSILON)
    assert not out[0, 0].any()
    assert out[0, 3].isnan().all()
    rest = torch.tensor([1, 2, 4, 5, 6, 7], device=x.device)
    torch.testing.assert_close(out[:, rest], expected(x, weight, rotation)[:, rest], rtol=2**-6, atol=2**-6)


def test_what_the_kernel_cannot_read_is_copied() -> None:
    x, weight, rotation = inputs(2, 40, 2, 128)
    strided = torch.cat([x, x], dim=2)[:, :, 3 : 3 + x.shape[2]]
    check(strided, torch.cat([weight, weight])[1 : 1 + len(weight)], rotation.transpose(4, 5))


def test_offsets_beyond_32_bits() -> None:
    tokens, channels = 280_000, 8192  # 2.3e9 elements
    x = torch.zeros(1, tokens, channels, device="cuda:0", dtype=torch.bfloat16)
    x[0, -1] = torch.randn(channels, device="cuda:0")
    _, weight, _ = inputs(1, 1, 64, 128)
    rotation = torch.eye(2, device="cuda:0").expand(1, tokens, 1, 64, 2, 2).contiguous()
    out = cuda.norm_rope(x, weight, rotation, EPSILON)
    torch.testing.assert_close(
        out[:, -1:], expected(x[:, -1:], weight, rotation[:, -1:]), rtol=2**-7, atol=2**-7
    )
    assert not out[0, -2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_finds_nothing_wrong_with_the_operator(dtype: torch.dtype) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.sparge_attention2.norm_rope
    torch.library.opcheck(operator, (*inputs(2, 9, 2, 128, dtype=dtype), EPSILON), test_utils=checks)


def test_it_refuses_to_be_differentiated() -> None:
    x, weight, rotation = inputs(1, 4, 1, 128)
    out = cuda.norm_rope(x.requires_grad_(), weight, rotation, EPSILON)
    with pytest.raises(RuntimeError, match="no gradients"):
        out.sum().backward()


def test_tensors_that_do_not_belong_together_are_named_before_any_launch() -> None:
    x, weight, rotation = inputs(1, 6, 2, 128)
    for wrong in (
        (x, weight[:-1], rotation),
        (x, weight.float(), rotation),
        (x.float(), weight.float(), rotation),
        (x, weight, rotation.double()),
        (x, weight, rotation[:, :-1]),
        (x[..., :96], weight[:96], rotation[:, :, :, :48]),
        (x[:, :0], weight, rotation[:, :0]),
        (x, weight, rotation.expand(2, *rotation.shape[1:])),
        (x, weight, rotation.flatten(4)),
    ):
        with pytest.raises(ValueError, match="norm_rope takes x"):
            cuda.norm_rope(*wrong, EPSILON)
