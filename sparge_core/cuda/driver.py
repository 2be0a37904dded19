"""The NVIDIA driver API through ctypes: loads and launches kernels without a toolchain or a torch extension.

`get()` opens the driver once per process and raises `DriverError` with one sentence where there is none or it
is too old. Nothing here imports torch, and nothing touches the driver before `get()` is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any

# cuLibraryLoadData and cuLibraryGetKernel, which load one binary for every device, came with CUDA 12.0.
MINIMUM_VERSION = 12000

SUCCESS = 0
INVALID_CONTEXT = 201  # no context is current in this thread
# Not an image, not for this GPU, bad PTX, PTX too new, invalid source.
_INVALID_BINARY = {200, 209, 218, 222, 300}

# CUdevice_attribute and CUfunction_attribute numbers of cuda.h.
_MULTIPROCESSOR_COUNT = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
_FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

# CUtensorMap enumerators of cuda.h.
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
FLOAT16 = 6
BFLOAT16 = 9


class DriverError(RuntimeError):
    """The driver is missing, too old or refused a call; the message is one sentence for a user."""


class InvalidBinary(DriverError):
    """The driver does not accept this cubin or PTX (another may do)."""


class Driver:
    """An open, initialised driver. Handles are integers; every method raises `DriverError` on failure."""

    def __init__(self, library: Any) -> None:
        self._library = library
        try:
            version = ctypes.c_int()
            code = library.cuDriverGetVersion(ctypes.byref(version))
        except AttributeError as error:
            raise DriverError(
                "the library found as the NVIDIA driver is not one: reinstall the NVIDIA driver"
            ) from error
        if code != SUCCESS:
            raise DriverError(
                f"the NVIDIA driver does not say its version (error {code}): reinstall the NVIDIA driver"
            )
        self.version = version.value
        if self.version < MINIMUM_VERSION:
            raise DriverError(
                f"the NVIDIA driver supports CUDA {version_text(self.version)} and "
                f"{version_text(MINIMUM_VERSION)} is needed: update the NVIDIA driver"
            )
        self._check(library.cuInit(0), "initialising the NVIDIA driver")
        # The raw function of the hot path. It returns the driver's code; without argtypes, a call with
        # ready-made ctypes objects costs less than half.
        self.launch = library.cuLaunchKernel

    def _check(self, code: int, what: str) -> None:
        if code == SUCCESS:
            return
        raise (InvalidBinary if code in _INVALID_BINARY else DriverError)(
            f"{what} failed: {self.error_text(code)}"
        )

    def error_text(self, code: int) -> str:
        """The driver's own name and words for an error code."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        if (
            self._library.cuGetErrorName(code, ctypes.byref(name)) != SUCCESS
            or self._library.cuGetErrorString(code, ctypes.byref(text)) != SUCCESS
        ):
            return f"error {code}"
        return f"{(name.value or b'').decode()} ({(text.value or b'').decode()})"

    def device_count(self) -> int:
        count = ctypes.c_int()
        self._check(self._library.cuDeviceGetCount(ctypes.byref(count)), "counting the GPUs")
        return count.value

    def _attribute(self, device: int, attribute: int) -> int:
        value = ctypes.c_int()
        code = self._library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        self._check(code, f"reading attribute {attribute} of GPU {device}")
        return value.value

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability, as (major, minor)."""
        return self._attribute(device, _CAPABILITY_MAJOR), self._attribute(device, _CAPABILITY_MINOR)

    def multiprocessors(self, device: int) -> int:
        return self._attribute(device, _MULTIPROCESSOR_COUNT)

    def shared_memory_limit(self, device: int) -> int:
        """Most bytes of shared memory that one block can ask for."""
        return self._attribute(device, _SHARED_MEMORY_PER_BLOCK_OPTIN)

    def name(self, device: int) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._check(
            self._library.cuDeviceGetName(buffer, len(buffer), device), f"reading the name of GPU {device}"
        )
        return buffer.value.decode(errors="replace")

    def primary_context(self, device: int) -> int:
        """The context that torch uses on the device; retained for the life of the process."""
        context = ctypes.c_void_p()
        code = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._check(code, f"opening GPU {device}")
        return context.value or 0

    @contextlib.contextmanager
    def current_context(self, context: int) -> Iterator[None]:
        """Makes the context this thread's current one; the one before comes back."""
        self._check(self._library.cuCtxPushCurrent_v2(ctypes.c_void_p(context)), "selecting a GPU")
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def allocate_zeroed_word(self, stream: int) -> int:
        """Address of four bytes in the current context, zero for what follows on the stream; never freed."""
        pointer = ctypes.c_uint64()
        self._check(
            self._library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4)), "allocating memory"
        )
        code = self._library.cuMemsetD32Async(pointer, 0, ctypes.c_size_t(1), ctypes.c_void_p(stream))
        self._check(code, "zeroing memory")
        return pointer.value

    def load_library(self, binary: bytes) -> int:
        """Loads a cubin, or PTX for the driver to compile; raises `InvalidBinary` if it is refused."""
        library = ctypes.c_void_p()
        # The driver keeps its own copy. The trailing NUL ends PTX text and does nothing to a cubin.
        code = self._library.cuLibraryLoadData(
            ctypes.byref(library), ctypes.c_char_p(binary), None, None, 0, None, None, 0
        )
        self._check(code, "loading the kernels")
        return library.value or 0

    def get_kernel(self, library: int, name: str) -> int:
        kernel = ctypes.c_void_p()
        code = self._library.cuLibraryGetKernel(ctypes.byref(kernel), ctypes.c_void_p(library), name.encode())
        self._check(code, f"finding the kernel {name}")
        return kernel.value or 0

    def get_function(self, kernel: int) -> int:
        """The kernel as loaded in the current context."""
        function = ctypes.c_void_p()
        code = self._library.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(kernel))
        self._check(code, "loading a kernel onto the GPU")
        return function.value or 0

    def allow_dynamic_shared_memory(self, kernel: int, device: int, size: int) -> None:
        """Lets launches of the kernel on the device ask for up to `size` bytes of dynamic shared memory."""
        code = self._library.cuKernelSetAttribute(
            _FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES, size, ctypes.c_void_p(kernel), device
        )
        self._check(code, f"asking GPU {device} for {size} bytes of shared memory per block")

    def encode_tensor_map(
        self,
        element_type: int,
        pointer: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        """A 128-byte CUtensorMap, swizzled by 128 bytes, zero outside the tensor.

        `sizes` and `box` count elements, innermost dimension first; `strides` are the bytes of every
        dimension but the innermost. The pointer and strides must be multiples of 16 bytes.
        """
        rank = len(sizes)
        storage = (ctypes.c_ubyte * (_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT))()
        address = ctypes.addressof(storage)
        offset = -address % _TENSOR_MAP_ALIGNMENT
        code = self._library.cuTensorMapEncodeTiled(
            ctypes.c_void_p(address + offset),
            element_type,
            rank,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            0,  # no interleave
            _SWIZZLE_128B,
            _L2_PROMOTION_256B,
            0,  # out of bounds reads as zero
        )
        self._check(code, f"describing a tensor of sizes {sizes}, strides {strides} bytes, box {box}")
        return bytes(storage[offset : offset + _TENSOR_MAP_BYTES])


def version_text(version: int) -> str:
    """12040 -> "12.4"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _open() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(f"there is no NVIDIA driver ({name} is not found): install one") from error


@functools.cache
def get() -> Driver:
    """The driver, opened and initialised at the first call; `DriverError` where it cannot be."""
    return Driver(_open())
