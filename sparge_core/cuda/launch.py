"""Kernels as callables, and what a launcher needs around them. How the launcher files use it:

    from . import launch

    _PARAMS = struct.Struct("<128s Q 3q 2i f")            # one struct, in the order of the kernel's Params

    def forward(q, k, v, ...):
        device = launch.device(q.device.index)           # .capability, .multiprocessors, .shared_memory_limit
        kernel = launch.kernel("forward_mma", "forward_mma", q.device.index, q.dtype, q.shape[-1])
        q = launch.aligned(q)                            # copies only what TMA or 16-byte loads cannot read
        stream = launch.stream(q.device.index)           # torch's current stream of the tensor's own device
        kernel((x, y, z), threads, dynamic_shared_bytes, stream, _PARAMS.pack(launch.tensor_map(q, 64), ...))

`kernel`, `device` and `tensor_map` are cached: call them every time. A kernel runs on its own device whatever
device is current. Nothing synchronises.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from . import cache, cubin, driver, modules
from .modules import Variant

VARIANT_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ALIGNMENT = 16  # bytes that TMA, cp.async and vector loads need of every pointer and stride
_ELEMENT_BYTES = 2
_STRIDE_MASK = ALIGNMENT // _ELEMENT_BYTES - 1

_STATIC_SHARED_LIMIT = 48 * 1024  # dynamic shared memory beyond this must be asked for
_PARAMETER_BYTES = 4096  # most that a kernel takes
_PARAMETER_ALIGNMENT = 64  # of a struct that starts with a tensor map

_TENSOR_MAP_TYPES = {torch.bfloat16: driver.BFLOAT16, torch.float16: driver.FLOAT16}
_TENSOR_MAP_COLUMNS = 64  # 128 bytes, the width of the swizzle

logger = logging.getLogger(__name__)


class LaunchError(RuntimeError):
    """A launch that was refused before or by the driver; the message says which and why."""


@dataclass(frozen=True)
class Device:
    """What launchers decide by. shared_memory_limit: most bytes that one block can have."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_limit: int
    context: int


@functools.cache
def device(index: int) -> Device:
    """The facts of a GPU that torch has already initialised."""
    api = driver.get()
    return Device(
        index=index,
        name=api.name(index),
        capability=api.capability(index),
        multiprocessors=api.multiprocessors(index),
        shared_memory_limit=api.shared_memory_limit(index),
        context=api.primary_context(index),
    )


def _context(index: int) -> int:
    return device(index).context


def stream(index: int) -> int:
    """torch's current stream of the device, as a raw handle."""
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle


def aligned(tensor: Tensor) -> Tensor:
    """The (B, H, L, D) tensor, or a contiguous copy if the kernels cannot read its pointer or a stride."""
    batch, head, token, channel = tensor.stride()
    if channel == 1 and batch and head and token and not (batch | head | token) & _STRIDE_MASK:
        readable = True
    else:  # the stride of a dimension of size 1 is never used
        readable = (channel == 1 or tensor.shape[3] == 1) and all(
            size == 1 or (step > 0 and not step & _STRIDE_MASK)
            for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        )
    if readable and not tensor.data_ptr() % ALIGNMENT:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def tensor_map(tensor: Tensor, box_rows: int) -> bytes:
    """A TMA descriptor of an aligned (B, H, L, D) tensor, zero outside it.

    Dimensions (D, L, H, B), boxes of 64 channels x `box_rows` tokens, swizzled by 128 bytes.
    """
    return _tensor_map(
        tensor.device.index, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, box_rows
    )


@functools.lru_cache(maxsize=1024)  # 128 bytes each; a model's tensors come back at the same addresses
def _tensor_map(
    index: int, pointer: int, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, box_rows: int
) -> bytes:
    steps = [
        step * _ELEMENT_BYTES if size > 1 else ALIGNMENT
        for size, step in zip(shape[2::-1], strides[2::-1], strict=True)
    ]
    api = driver.get()
    with api.current_context(device(index).context):  # a thread that has not used CUDA yet has none
        return api.encode_tensor_map(
            _TENSOR_MAP_TYPES[dtype],
            pointer,
            tuple(shape[::-1]),
            tuple(steps),
            (_TENSOR_MAP_COLUMNS, box_rows, 1, 1),
        )


class _Parameters(threading.local):
    """Where a thread's kernel parameters lie during a launch; the driver copies them before it returns."""

    def __init__(self) -> None:
        storage = (ctypes.c_ubyte * (_PARAMETER_BYTES + _PARAMETER_ALIGNMENT))()
        offset = -ctypes.addressof(storage) % _PARAMETER_ALIGNMENT
        self.view = memoryview(storage).cast("B")[offset : offset + _PARAMETER_BYTES]
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(storage) + offset)


_parameters = _Parameters()
_pointer = functools.lru_cache(maxsize=256)(ctypes.c_void_p)  # of streams; making the object costs more


def _submit(device: Device, function: Callable[..., int], *arguments: object) -> int:
    """Calls the driver with the device's context current, and returns its code."""
    if torch._C._cuda_getDevice() == device.index:
        code = function(*arguments)
        if code != driver.INVALID_CONTEXT:
            return code
    # Another device is current, or this thread has not used CUDA yet.
    with driver.get().current_context(device.context):
        return function(*arguments)


class Kernel:
    """A kernel loaded on one device. Call it to launch it."""

    def __init__(
        self, name: str, handle: int, function: int, device: Device, parameter_bytes: int | None
    ) -> None:
        self.name = name
        self.device = device
        self._driver = driver.get()
        self._handle = handle
        self._function = ctypes.c_void_p(function)
        self._parameter_bytes = parameter_bytes  # None: not known (PTX)
        self._shared_limit = _STATIC_SHARED_LIMIT

    def __call__(
        self, grid: tuple[int, int, int], block: int, smem: int, stream: int, params: bytes | bytearray
    ) -> None:
        """Launches on `stream`, of the kernel's own device.

        block: threads; smem: bytes of dynamic shared memory; params: the fields of the kernel's one struct.
        Raises `LaunchError` where the driver refuses, or before it is asked.
        """
        size = len(params)
        expected = self._parameter_bytes
        # A struct may end in padding, up to its alignment.
        if expected is not None and not 0 <= expected - size < _PARAMETER_ALIGNMENT:
            raise LaunchError(f"{self.name} takes {expected} bytes of parameters, and {size} were given")
        if smem > self._shared_limit:
            self._allow_shared(smem)
        parameters = _parameters
        parameters.view[:size] = params
        x, y, z = grid
        code = _submit(
            self.device, self._driver.launch, self._function, x, y, z, block, 1, 1, smem, _pointer(stream),
            parameters.pointers, None,
        )  # fmt: skip
        if code != driver.SUCCESS:
            raise LaunchError(
                f"{self.name} was not launched on GPU {self.device.index} with grid {grid}, {block} threads "
                f"and {smem} bytes of shared memory: {self._driver.error_text(code)}"
            )

    def _allow_shared(self, size: int) -> None:
        if size > self.device.shared_memory_limit:
            raise LaunchError(
                f"{self.name} needs {size} bytes of shared memory per block, and {self.device.name} has "
                f"{self.device.shared_memory_limit}"
            )
        self._driver.allow_dynamic_shared_memory(self._handle, self.device.index, size)
        self._shared_limit = size


@dataclass(frozen=True)
class _Word:
    """Four bytes on a GPU, for the life of the process."""

    address: int

    def data_ptr(self) -> int:
        return self.address


_counters: dict[tuple[torch.device, int], _Word] = {}


def counter(device: torch.device, stream: int) -> Tensor | _Word:
    """An int32 that is zero, for a kernel on torch's current `stream` of the device to count with.

    The kernel must leave it at zero: the next launch on the stream gets the same one. It is none of torch's
    memory, because the call may be one of those after which torch takes back all that it handed out. A launch
    that a CUDA graph records gets its own, because the graph may be replayed on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    found = _counters.get((device, stream))
    if found is None:
        api = driver.get()
        with api.current_context(_context(device.index)):
            found = _counters.setdefault((device, stream), _Word(api.allocate_zeroed_word(stream)))
    return found


class Parts:
    """Lays arrays out one behind the other, each from a multiple of 256 bytes on, as whole memory sectors."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, size: int) -> int:
        """Offset of an array of `size` bytes."""
        offset = self.size
        self.size += -(-size // 256) * 256
        return offset


@dataclass(frozen=True)
class _Library:
    handle: int
    parameter_bytes: dict[str, int]


@functools.cache
def kernel(module: str, name: str, device_index: int, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel of a module, compiled and loaded for the device if it is not yet.

    Raises `driver.DriverError` or `nvrtc.CompilerError`, whose messages are sentences.
    """
    owner, api = device(device_index), driver.get()
    library = _library(module, Variant(VARIANT_DTYPES[dtype], head_dim), owner.capability)
    handle = api.get_kernel(library.handle, name)
    with api.current_context(owner.context):
        function = api.get_function(handle)
    return Kernel(name, handle, function, owner, library.parameter_bytes.get(name))


def prepare(device_index: int, dtype: torch.dtype, head_dim: int) -> None:
    """Compiles and loads what attention needs on the device, side by side. Raises like `kernel`."""
    capability, variant = device(device_index).capability, Variant(VARIANT_DTYPES[dtype], head_dim)
    names = ("mask", modules.forward_module(capability))
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: _library(name, variant, capability), names))


@functools.cache
def _library(module: str, variant: Variant, capability: tuple[int, int]) -> _Library:
    api = driver.get()
    refused: driver.InvalidBinary | None = None
    for origin, binary in cache.binaries(module, variant, capability):
        try:
            handle = api.load_library(binary)
        except driver.InvalidBinary as error:
            logger.warning("The %s %s kernels were not accepted: %s.", origin, module, error)
            refused = error
            continue
        logger.debug("Loaded the %s %s kernels.", origin, module)
        return _Library(handle, cubin.parameter_bytes(binary))
    raise driver.DriverError(
        f"the NVIDIA driver (CUDA {driver.version_text(api.version)}) does not accept the kernels compiled "
        f"for compute capability {capability[0]}.{capability[1]}: update the NVIDIA driver"
    ) from refused
