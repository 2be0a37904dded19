"""The operators on a GPU: torch's own checks, compilation, streams, devices, threads, passing errors."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

from sparge_core import BlockMask, SparseConfig, block_mask, choose, cuda, sparse_attention
from sparge_core.cuda import cache, launch, nvrtc

pytestmark = pytest.mark.gpu

CONFIG = SparseConfig(top_k=0.1, top_p=0.3)
CYCLES = 200_000_000  # about 0.1 s: long enough for anything that does not wait to be wrong


def qkv(
    length: int = 1000, *, device: str = "cuda:0", dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """q, k, v (2, 3, length, 128) as ComfyUI hands them over, the same for every device."""
    generator = torch.Generator().manual_seed(0)
    flat = (torch.randn(2, length, 3 * 128, generator=generator) for _ in range(3))
    return tuple(x.to(device, dtype).view(2, length, 3, 128).transpose(1, 2) for x in flat)


def forward_arguments(q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...]:
    mask = block_mask(q, k, CONFIG)
    return q, k, v, mask.bits, mask.counts, mask.order, 128**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_finds_nothing_wrong_with_the_operators(dtype: torch.dtype) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    q, k, v = qkv(dtype=dtype)
    operators = torch.ops.sparge_attention2
    torch.library.opcheck(operators.block_mask, (q, k, 0.1, 0.3, 0.0, 0.1), test_utils=checks)
    torch.library.opcheck(operators.block_mask, (q, k, 0.1, 0.3, 0.5, 0.1), test_utils=checks)
    torch.library.opcheck(operators.forward, forward_arguments(q, k, v), test_utils=checks)


@pytest.mark.parametrize("config", [CONFIG, SparseConfig(top_k=0.05, sparsity=0.6)], ids=["top-p", "target"])
def test_mask_and_attention_in_one_give_the_bits_of_the_two_operators(config: SparseConfig) -> None:
    q, k, v = qkv()
    expected = sparse_attention(q, k, v, config, mask=block_mask(q, k, config))
    for _ in range(3):  # the kernels leave the counter that they share at zero
        assert torch.equal(sparse_attention(q, k, v, config), expected)


def test_inputs_that_the_kernels_cannot_read_are_copied() -> None:
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv())
    assert choose(q, k, v).why.startswith("cuda needs a head dim that is contiguous")
    odd = tuple(F.pad(x, (1, 3))[..., 1:-3] for x in qkv())
    assert torch.equal(sparse_attention(*odd, CONFIG), sparse_attention(*qkv(), CONFIG))


def test_the_cuda_kernels_are_chosen() -> None:
    assert choose(*qkv()).name == "cuda"


COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="inductor needs triton"),
        ],
    ),
]


@pytest.mark.parametrize("backend", COMPILERS)
def test_compiled_whole_equals_eager_and_compiles_no_more_for_new_lengths(backend: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, CONFIG) + 1.0

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    with torch.no_grad():
        # Above 2048 tokens a mask row has several words. One word, like any size of 1, torch compiles apart.
        for length in (3000, 2777, 2304, 4097, 2049):
            tensors = qkv(length)
            assert torch.equal(compiled(*tensors), run(*tensors)), length
    assert counter.frame_count == 2, "one for the first length, one for any length"


def test_kernels_wait_for_what_their_own_stream_made() -> None:
    expected = sparse_attention(*qkv(), CONFIG)
    source = [x.clone() for x in qkv()]
    late = [torch.full_like(x, float("nan")) for x in source]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        for target, x in zip(late, source, strict=True):
            target.copy_(x)
        out = sparse_attention(*late, CONFIG)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, expected)


def test_nothing_waits_for_the_gpu() -> None:
    q, k, v = qkv()
    for config in (CONFIG, SparseConfig(0.1, 0.0, 0.5)):
        sparse_attention(q, k, v, config)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            sparse_attention(q, k, v, config)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # Launches come back while the GPU is still busy: had one waited, the event would have passed.
        torch.cuda._sleep(CYCLES)
        busy = torch.cuda.Event()
        busy.record()
        sparse_attention(q, k, v, config)
        assert not busy.query()


def test_a_captured_graph_replays_with_new_values() -> None:
    q, k, v = qkv()
    sparse_attention(q, k, v, CONFIG)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_attention(q, k, v, CONFIG)
    for tensor in (q, k, v):
        tensor.copy_(tensor.flip(2))
    graph.replay()
    assert torch.equal(out, sparse_attention(q, k, v, CONFIG))


def test_kernels_run_on_the_tensors_device_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    expected = sparse_attention(*qkv(), CONFIG).cpu()
    assert torch.cuda.current_device() == 0
    out = sparse_attention(*qkv(device="cuda:1"), CONFIG)
    assert out.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), expected)


def test_a_thread_whose_first_use_of_cuda_is_a_launch() -> None:
    arguments = forward_arguments(*qkv())
    expected = torch.ops.sparge_attention2.forward(*arguments)[0]
    results: list[Tensor] = []
    # What the launcher allocates was freed before, so that no allocation makes a context current there.
    torch.ops.sparge_attention2.forward(*arguments)
    thread = threading.Thread(
        target=lambda: results.append(torch.ops.sparge_attention2.forward(*arguments)[0])
    )
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


def test_many_threads_at_once_do_not_mix_their_parameters() -> None:
    inputs = [tuple(x + i for x in qkv()) for i in range(4)]
    expected = [sparse_attention(*tensors, CONFIG) for tensors in inputs]
    torch.cuda.synchronize()
    right = [0] * len(inputs)  # an error in a thread counts nothing

    def work(index: int) -> None:
        for _ in range(50):
            right[index] += torch.equal(sparse_attention(*inputs[index], CONFIG), expected[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [50] * len(inputs)


def offset_by_one(x: Tensor) -> Tensor:
    """The same values, 2 bytes off."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return storage[1:].view(x.shape).copy_(x)


def wide_rows(x: Tensor) -> Tensor:
    """The same values in rows of 132 elements, which are 264 bytes apart."""
    storage = torch.full((*x.shape[:3], 132), float("nan"), dtype=x.dtype, device=x.device)
    storage[..., :128] = x
    return storage[..., :128]


@pytest.mark.parametrize("spoil", [offset_by_one, wide_rows], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("family", ["mma", "sm90"])
def test_views_that_the_kernels_cannot_read_are_copied(
    spoil: Callable[[Tensor], Tensor], family: str
) -> None:
    skip_unless_it_runs(family)
    tensors = [x.contiguous() for x in qkv()]
    with cuda.force(family):
        assert torch.equal(sparse_attention(*map(spoil, tensors), CONFIG), sparse_attention(*tensors, CONFIG))


def skip_unless_it_runs(family: str) -> None:
    if family == "sm90" and launch.device(0).capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def test_both_families_of_kernels_agree() -> None:
    skip_unless_it_runs("sm90")
    q, k, v = qkv()
    mask = block_mask(q, k, CONFIG)
    results = []
    for family in ("sm90", "mma"):
        with cuda.force(family):
            out, lse = cuda.attention(q, k, v, mask, 128**-0.5, return_lse=True)
            results.append((out.float(), lse))
    (out, lse), (other_out, other_lse) = results
    assert (out - other_out).norm() <= 3e-3 * out.norm()
    assert torch.allclose(lse, other_lse, atol=1e-3)


def test_a_mask_of_the_caller_needs_no_order() -> None:
    q, k, v = qkv()
    made = block_mask(q, k, CONFIG)
    own = BlockMask(made.bits, made.counts, made.q_len, made.k_len)
    assert torch.equal(
        sparse_attention(q, k, v, CONFIG, mask=own), sparse_attention(q, k, v, CONFIG, mask=made)
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, k, v, *rest: (q.cpu(), k, v, *rest),
        lambda q, k, v, *rest: (q, k, v.cpu(), *rest),
        lambda q, k, v, *rest: (q, k.half(), v, *rest),
        lambda q, k, v, *rest: (q[..., :96], k[..., :96], v[..., :96], *rest),
        lambda q, k, v, *rest: (q[:, :, :0], k, v, *rest),
        lambda q, k, v, bits, *rest: (q, k, v, bits.cpu(), *rest),
        lambda q, k, v, bits, counts, *rest: (q, k, v, bits[:, :, :1], counts, *rest),
        lambda q, k, v, bits, counts, *rest: (q, k, v, bits, counts.long(), *rest),
    ],
    ids=[
        "q on the CPU",
        "v on the CPU",
        "dtypes",
        "head dim 96",
        "no queries",
        "bits on the CPU",
        "rows",
        "counts",
    ],
)
def test_what_does_not_fit_is_an_error_and_cuda_goes_on(spoil: Callable[..., tuple[object, ...]]) -> None:
    arguments = forward_arguments(*qkv())
    expected = torch.ops.sparge_attention2.forward(*arguments)[0]
    with pytest.raises(ValueError, match="got"):
        torch.ops.sparge_attention2.forward(*spoil(*arguments))
    torch.cuda.synchronize()
    assert torch.equal(torch.ops.sparge_attention2.forward(*arguments)[0], expected)


def test_a_launch_that_the_driver_refuses_does_not_stick() -> None:
    q, k, v = qkv()
    expected = sparse_attention(q, k, v, CONFIG)
    kernel = launch.kernel("mask", "block_means", 0, q.dtype, 128)
    parameters = bytes(kernel._parameter_bytes or 0)
    with pytest.raises(launch.LaunchError, match="block_means was not launched"):
        kernel((1, 1, 1), 100_000, 0, launch.stream(0), parameters)
    with pytest.raises(launch.LaunchError, match="bytes of shared memory per block"):
        kernel((1, 1, 1), 32, 1 << 20, launch.stream(0), parameters)
    torch.cuda.synchronize()
    assert torch.equal(sparse_attention(q, k, v, CONFIG), expected)


def test_head_dims_and_dtypes_without_kernels_take_another_back_end() -> None:
    for tensors, reason in (
        ([x[..., :96] for x in qkv()], "96"),
        ([x.float() for x in qkv()], "float32"),
    ):
        choice = choose(*tensors)
        assert choice.name != "cuda"
        assert reason in choice.reasons["cuda"]
        assert sparse_attention(*tensors, CONFIG).shape == tensors[0].shape


@pytest.mark.slow
def test_a_start_with_kernels_on_disk_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))

    def start() -> None:
        launch._library.cache_clear()
        launch.prepare(0, torch.bfloat16, 128)

    start()
    assert len(list(tmp_path.rglob("*.cubin"))) == 2
    monkeypatch.setattr(nvrtc, "get", lambda: pytest.fail("the compiler was opened"))
    start()
