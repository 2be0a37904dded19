"""What this machine would run and why, in words. Works without a GPU, a driver or a compiler."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import cache, driver, modules, nvrtc


def report() -> str:
    """A line for torch, the driver, the compiler, the cache, the shipped kernels and each GPU."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield f"torch     {torch.__version__} ({build})"
    try:
        api = driver.get()
        count = api.device_count()
        yield f"driver    CUDA {driver.version_text(api.version)}, {count} GPU{'' if count == 1 else 's'}"
    except driver.DriverError as error:
        api = None
        yield f"driver    {error}"
    try:
        compiler = nvrtc.get()
        yield f"compiler  {compiler.name} ({compiler.path})"
    except nvrtc.CompilerError as error:
        compiler = None
        yield f"compiler  {error}"
    yield f"cache     {_cache()}"
    shipped = modules.shipped_folder()
    yield f"shipped   {len(list(shipped.glob('*.cubin')))} compiled kernels in {shipped}"
    if api is None or not count:
        yield "result    the CUDA kernels do not run here; attention runs on another back end"
        return
    for index in range(count):
        try:
            yield f"GPU {index}     {_gpu(api, index, compiler)}"
        except driver.DriverError as error:
            yield f"GPU {index}     {error}"
    if torch.version.cuda is None:
        yield "result    this torch cannot use the GPU: install a CUDA build of torch"


def _cache() -> str:
    folder = cache.folder()
    if folder is None:
        return f"no home folder or no platformdirs, so every start compiles; set {cache.FOLDER_VARIABLE}"
    return f"{folder} ({len(list(folder.glob('*/*')))} compiled kernels; {cache.FOLDER_VARIABLE} moves it)"


def _gpu(api: driver.Driver, index: int, compiler: nvrtc.Compiler | None) -> str:
    major, minor = capability = api.capability(index)
    name = f"{api.name(index)}, compute capability {major}.{minor}"
    if capability < modules.MINIMUM_CAPABILITY:
        return f"{name}: too old, {'.'.join(map(str, modules.MINIMUM_CAPABILITY))} is needed"
    target = modules.shipped_architecture(capability)
    kernels = f"mask and {modules.forward_module(capability)}"
    if target is not None and _shipped(target):
        return f"{name}: {kernels}, shipped for {target}"
    if compiler is None:
        return f"{name}: nothing is shipped for it and there is no compiler"
    target = modules.architecture(capability, compiler.architectures)
    finish = (
        " and finished by the driver, as the compiler is older than the GPU" if "compute" in target else ""
    )
    return f"{name}: {kernels}, compiled at the first use for {target}{finish}, then cached"


def _shipped(target: str) -> bool:
    folder = modules.shipped_folder()
    return (folder / modules.file_name("mask", modules.VARIANTS[0], target)).is_file()
