"""Launching: parameters, streams, contexts and limits, told to a driver that records them."""

from __future__ import annotations

import logging
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge_core.cuda import cache, cubin, driver, launch, modules
from sparge_core.cuda.modules import Variant

PARAMETERS = struct.Struct("<128s Q i f")
BF16 = Variant("bf16", 128)


def kernel(device: int = 0) -> launch.Kernel:
    return launch.kernel("mask", "tiny", device, torch.bfloat16, 128)


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake compiler's binaries are no ELF files: this is what a real one says of `tiny`."""
    monkeypatch.setattr(cubin, "parameter_bytes", lambda binary: {"tiny": 192})


def test_a_launch_hands_over_shape_stream_and_parameters(csrc: Path, compiler: Any, library: Any) -> None:
    parameters = PARAMETERS.pack(bytes(range(128)), 1, 2, 3.0)
    kernel()((5, 6, 7), 256, 1024, 0x7F00_0000_1234, parameters)
    (seen,) = library.launches
    assert (seen["grid"], seen["block"], seen["shared"]) == ((5, 6, 7), (256, 1, 1), 1024)
    assert seen["stream"] == 0x7F00_0000_1234, "a 64-bit handle arrives whole"
    assert seen["parameters"] == parameters[:64]
    assert seen["address"] % 64 == 0, "a struct that starts with a tensor map"


@pytest.mark.parametrize("size", [0, 128, 193])
def test_a_struct_of_another_size_is_never_launched(
    size: int, csrc: Path, compiler: Any, library: Any
) -> None:
    with pytest.raises(
        launch.LaunchError, match=f"tiny takes 192 bytes of parameters, and {size} were given"
    ):
        kernel()((1, 1, 1), 32, 0, 0, bytes(size))
    assert library.launches == []


def test_a_kernel_runs_in_the_context_of_its_device_whatever_is_current(
    csrc: Path, compiler: Any, library: Any
) -> None:
    library.devices.append(("Second GPU", (9, 0)))
    kernel(1)((1, 1, 1), 32, 0, 0, PARAMETERS.pack(b"", 1, 2, 3.0))
    assert library.launches[0]["context"] == 1001
    assert library.current_context is None, "and the current device is as before"


def test_a_thread_that_has_not_used_cuda_yet_gets_a_context(csrc: Path, compiler: Any, library: Any) -> None:
    library.launch_codes = [driver.INVALID_CONTEXT]
    kernel()((1, 1, 1), 32, 0, 0, PARAMETERS.pack(b"", 1, 2, 3.0))
    assert [seen["context"] for seen in library.launches] == [1000]


def test_threads_do_not_share_parameter_memory(csrc: Path, compiler: Any, library: Any) -> None:
    parameters = PARAMETERS.pack(b"", 1, 2, 3.0)
    kernel()((1, 1, 1), 32, 0, 0, parameters)
    other = threading.Thread(target=kernel(), args=((1, 1, 1), 32, 0, 0, parameters))
    other.start()
    other.join()
    first, second = library.launches
    assert first["address"] != second["address"]


def test_a_refused_launch_says_what_was_asked(csrc: Path, compiler: Any, library: Any) -> None:
    library.launch_codes = [701]
    with pytest.raises(launch.LaunchError, match=r"tiny .*GPU 0.*\(1, 2, 3\), 32 threads.*CUDA_ERROR_701"):
        kernel()((1, 2, 3), 32, 0, 0, PARAMETERS.pack(b"", 1, 2, 3.0))


def test_shared_memory_beyond_48_kib_is_asked_for_once(csrc: Path, compiler: Any, library: Any) -> None:
    for size in (48 * 1024, 100_000, 90_000, 100_000):
        kernel()((1, 1, 1), 32, size, 0, PARAMETERS.pack(b"", 1, 2, 3.0))
    assert library.named("cuKernelSetAttribute") == [(8, 100_000, 0)]


def test_more_shared_memory_than_the_gpu_has_is_refused_before_the_driver(
    csrc: Path, compiler: Any, library: Any
) -> None:
    with pytest.raises(launch.LaunchError, match=r"needs 300000 bytes.*Test GPU has 232448"):
        kernel()((1, 1, 1), 32, 300_000, 0, PARAMETERS.pack(b"", 1, 2, 3.0))
    assert library.named("cuKernelSetAttribute") == []
    assert library.launches == []


def test_a_counter_is_made_once_for_a_stream_and_zeroed_on_it(library: Any) -> None:
    gpu = torch.device("cuda", 0)
    first = launch.counter(gpu, 98)
    assert launch.counter(gpu, 98) is first
    assert library.named("cuMemsetD32Async") == [(first.data_ptr(), 0, 1, 98)]
    assert launch.counter(gpu, 99).data_ptr() != first.data_ptr()


def test_a_recorded_launch_has_a_counter_of_its_own(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs recorded on one stream may be replayed on two."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first, second = (launch.counter(torch.device("cpu"), 98) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert launch._counters == {}


def test_kernels_that_the_driver_refuses_are_replaced_by_compiled_ones(
    csrc: Path, compiler: Any, library: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A release built by a newer CUDA than the driver knows."""
    library.refused = {b"newer"}
    cache.write(modules.shipped_folder() / modules.file_name("mask", BF16, "sm_90a"), b"newer")
    with caplog.at_level(logging.WARNING):
        kernel()
    assert "shipped mask kernels were not accepted" in caplog.text
    (loaded,) = library.loaded
    assert b"tiny" in loaded


def test_a_driver_that_accepts_no_binary_is_told_to_be_updated(
    csrc: Path, compiler: Any, library: Any
) -> None:
    library.cuLibraryLoadData = lambda *arguments: 222
    with pytest.raises(driver.DriverError, match=r"driver \(CUDA 13\.0\) does not accept.*update"):
        kernel()


def test_devices_of_one_kind_share_a_compilation(csrc: Path, compiler: Any, library: Any) -> None:
    library.devices.append(("Second GPU", (9, 0)))
    assert kernel(0) is kernel(0)
    assert kernel(0) is not kernel(1)
    assert len(compiler.compiled) == len(library.loaded) == 1


def test_prepare_compiles_mask_and_forward_side_by_side(csrc: Path, compiler: Any, library: Any) -> None:
    both = threading.Barrier(2, timeout=10)  # broken if one waits for the other
    compile_alone = compiler.compile
    compiler.compile = lambda *arguments: (both.wait(), compile_alone(*arguments))[1]
    launch.prepare(0, torch.bfloat16, 128)
    assert sorted(name for name, *_ in compiler.compiled) == ["forward_sm90.cu", "mask.cu"]


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


COMFY = bf16(2, 300, 3 * 4 * 128)  # (B, L, 3·H·D), as a fused projection makes it


@pytest.mark.parametrize(
    "tensor",
    [
        bf16(2, 4, 300, 128),
        COMFY[..., :512].view(2, 300, 4, 128).transpose(1, 2),
        COMFY[..., 512:1024].view(2, 300, 4, 128).transpose(1, 2),
        bf16(1, 4, 300, 64).as_strided((1, 4, 300, 64), (3, 19200, 64, 1)),  # the batch stride is never used
    ],
    ids=["contiguous", "comfy", "offset", "odd stride of one"],
)
def test_what_the_kernels_can_read_is_not_copied(tensor: torch.Tensor) -> None:
    assert launch.aligned(tensor) is tensor


@pytest.mark.parametrize(
    "tensor",
    [
        bf16(4 * 300 * 128 + 1)[1:].view(1, 4, 300, 128),
        bf16(1, 4, 300, 132)[..., :128],
        bf16(1, 4, 128, 300).transpose(2, 3),
        bf16(1, 1, 300, 128).expand(1, 4, 300, 128),
    ],
    ids=["pointer", "stride", "channel stride", "expanded"],
)
def test_what_the_kernels_cannot_read_is_copied_once(tensor: torch.Tensor) -> None:
    torch.manual_seed(0)
    tensor.storage_offset()
    copy = launch.aligned(tensor)
    assert copy is not tensor
    assert torch.equal(copy, tensor)
    assert launch.aligned(copy) is copy


def test_a_tensor_map_describes_the_view_in_place(library: Any) -> None:
    view = COMFY[..., 512:1024].view(2, 300, 4, 128).transpose(1, 2)
    launch.tensor_map(view, 64)
    ((_, kind, pointer, sizes, strides, box),) = library.named("cuTensorMapEncodeTiled")
    assert kind == driver.BFLOAT16
    assert pointer == view.data_ptr() == COMFY.data_ptr() + 1024
    assert sizes == (128, 300, 4, 2)
    assert strides == (2 * 3 * 512, 2 * 128, 2 * 300 * 3 * 512)
    assert box == (64, 64, 1, 1)


def test_a_tensor_map_ignores_strides_that_are_never_used(library: Any) -> None:
    launch.tensor_map(bf16(1, 4, 300, 64).as_strided((1, 4, 300, 64), (3, 19200, 64, 1)), 16)
    ((_, _, _, _, strides, _),) = library.named("cuTensorMapEncodeTiled")
    assert strides[:2] == (128, 38400)
    assert strides[2] % 16 == 0


def test_tensor_maps_are_made_once_per_view(library: Any) -> None:
    tensor = bf16(1, 2, 300, 128)
    assert launch.tensor_map(tensor, 64) == launch.tensor_map(tensor, 64)
    assert launch.tensor_map(tensor, 64) != launch.tensor_map(tensor, 16)
    assert launch.tensor_map(tensor, 64) != launch.tensor_map(tensor.view(torch.float16), 64)
    assert launch.tensor_map(tensor, 64) != launch.tensor_map(tensor[:, :1], 64)
    assert len(library.named("cuTensorMapEncodeTiled")) == 4
