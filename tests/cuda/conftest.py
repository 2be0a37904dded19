"""A driver and a compiler that record what they are told, and a `csrc/` of one tiny kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge_core import cuda
from sparge_core.cuda import cache, driver, launch, modules, nvrtc

# A kernel with the parameters that real ones have: 128-byte maps first, 8-byte fields, then smaller ones.
TINY_SOURCE = """
struct alignas(64) Map { unsigned long long words[16]; };
struct Params { Map map; float* out; int count; float factor; };
extern "C" __global__ void tiny(const __grid_constant__ Params params) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < params.count) params.out[i] = params.factor * HEAD_DIM;
}
"""
SPILLING_SOURCE = """
extern "C" __global__ void spilling(float* out, int step) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = out[i];
  for (int i = 0; i < 64; ++i) values[(i * step) & 63] += values[i];
  for (int i = 0; i < 64; ++i) out[i] = values[i];
}
"""


class FakeLibrary:
    """libcuda as ctypes would hand it over: functions that fill in pointers and return codes.

    Attributes set what it answers; `calls` lists (function name, arguments) in order.
    """

    def __init__(self) -> None:
        self.version = 13000
        self.devices = [("Test GPU", (9, 0))]
        self.refused: set[bytes] = set()  # binaries that it does not load
        self.loaded: list[bytes] = []
        self.current_context: int | None = None
        self.launch_codes: list[int] = []  # of the next launches; 0 after them
        self.launches: list[dict[str, Any]] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        self.calls.append(("cuInit", (flags,)))
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"what it means"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        major, minor = self.devices[device or 0][1]  # the tests' tensors lie on the CPU: None
        value._obj.value = {16: 132, 75: major, 76: minor, 97: 232448}[attribute]
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: int) -> int:
        buffer.value = self.devices[device or 0][0].encode()
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 1000 + (device or 0)
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current_context = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current_context = None
        return 0

    def cuLibraryLoadData(self, library: Any, binary: Any, *options: Any) -> int:
        if binary.value in self.refused:
            return 200
        self.loaded.append(binary.value)
        library._obj.value = 2000 + len(self.loaded)
        return 0

    def cuLibraryGetKernel(self, kernel: Any, library: Any, name: bytes) -> int:
        kernel._obj.value = 3000
        return 0

    def cuKernelGetFunction(self, function: Any, kernel: Any) -> int:
        function._obj.value = 4000
        return 0

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: Any, device: int) -> int:
        self.calls.append(("cuKernelSetAttribute", (attribute, value, device)))
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *shape, shared, stream, parameters, _ = rest
        code = self.launch_codes.pop(0) if self.launch_codes else 0
        if code == 0:
            self.launches.append(
                {
                    "grid": tuple(shape[:3]),
                    "block": tuple(shape[3:]),
                    "shared": shared,
                    "stream": stream.value,
                    "address": parameters[0],
                    "parameters": ctypes.string_at(parameters[0], 64),
                    "context": self.current_context,
                }
            )
        return code

    def cuMemAlloc_v2(self, pointer: Any, size: Any) -> int:
        pointer._obj.value = 0x7F00_0000_0000 + 512 * len(self.named("cuMemsetD32Async"))
        return 0 if self.current_context is not None else 201

    def cuMemsetD32Async(self, pointer: Any, value: int, count: Any, stream: Any) -> int:
        self.calls.append(("cuMemsetD32Async", (pointer.value, value, count.value, stream.value)))
        return 0

    def cuTensorMapEncodeTiled(self, target: Any, kind: int, rank: int, pointer: Any, *rest: Any) -> int:
        if self.current_context is None:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        sizes, strides, box = (tuple(array) for array in rest[:3])
        self.calls.append(
            ("cuTensorMapEncodeTiled", (target.value % 64, kind, pointer.value, sizes, strides, box))
        )
        ctypes.memset(target, len(self.calls), 128)
        return 0

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


class FakeCompiler:
    """A compiler that returns the source and options that it is given."""

    def __init__(self) -> None:
        self.name = "nvrtc-12.8"
        self.path = "libnvrtc.so.12"
        self.architectures = frozenset((80, 86, 89, 90, 100, 120))
        self.error: Exception | None = None
        self.compiled: list[tuple[str, ...]] = []

    def compile(self, source: str, name: str, options: tuple[str, ...]) -> nvrtc.Compiled:
        if self.error is not None:
            raise self.error
        self.compiled.append((name, *options))
        return nvrtc.Compiled("\n".join((source, *options)).encode(), "")


@pytest.fixture(autouse=True)
def no_memory() -> Iterator[None]:
    """What the package remembers for the life of a process is forgotten around each test."""
    memories = (
        driver.get,
        nvrtc.get,
        cache._say_once,
        modules.source,
        launch.device,
        launch.kernel,
        launch._library,
        launch._tensor_map,
        cuda._remembered,
        cuda._remembered_gradients,
    )
    for memory in memories:
        memory.cache_clear()
    launch._counters.clear()
    yield
    for memory in memories:
        memory.cache_clear()
    launch._counters.clear()


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA cannot say whether a stream is being captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the user's own cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(folder))
    return folder


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with its own tiny `csrc/`, in which every module is one kernel `tiny`."""
    folder = tmp_path / "checkout" / "csrc"
    folder.mkdir(parents=True)
    for module in modules.MODULES.values():
        *headers, kernels = module.files
        for header in headers:
            (folder / header).write_text("// nothing\n")
        (folder / kernels).write_text(TINY_SOURCE)
    monkeypatch.setattr(modules, "source_folder", lambda: folder)
    return folder


@pytest.fixture
def spilling_source() -> str:
    """A kernel that needs a stack frame, as it indexes registers by a run-time value."""
    return SPILLING_SOURCE


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """A working driver with one GPU of compute capability 9.0, which is torch's current device."""
    fake = FakeLibrary()
    monkeypatch.setattr(driver, "_open", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return fake


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(nvrtc, "get", lambda: fake)
    monkeypatch.setattr(nvrtc, "likely_name", lambda: fake.name)
    return fake
