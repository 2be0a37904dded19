"""One denoising step of Wan2.1 in ComfyUI's own model code at real sizes: dense and sparse, eager, compiled.

    COMFYUI_PATH=/path/to/ComfyUI python -m benchmarks.wan_step --out results.json
    COMFYUI_PATH=/path/to/ComfyUI python -m benchmarks.wan_step --tiny    # needs no GPU: checks itself

Weights are random and made on the GPU. "dense" is the host's own attention, as it comes; "ours" patches every
self-attention as the node does. Both are compiled as the host's own compile node does it: the whole model.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sparge_core import DensePolicy, SparseConfig

from .cases import HEAD_DIM, SHAPES, TINY, Shape
from .measure import Load, machine, watched
from .results import StepRow, write

LATENT_CHANNELS, TEXT_TOKENS, TEXT_WIDTH = 16, 512, 4096
PATCH = (1, 2, 2)
LONG_STEP = 5.0  # seconds; steps beyond it are not repeated: they vary by far less than they cost
ROOT = Path(__file__).resolve().parent.parent
PACK = "sparge_attention2_pack"
FORWARD_KERNELS, ROTATION_KERNELS = "forward_", "norm_rope_"  # the product's that make no mask
SDPA_KERNELS = r"flash|fmha|sdpa|attention"
LINEAR_KERNELS = r"gemm|nvjet|cutlass|cublas|xmma|splitk|addmm"


@dataclass(frozen=True)
class Model:
    """A Wan2.1 T2V model and the clip it denoises."""

    shape: Shape
    ffn_dim: int
    layers: int

    @property
    def dim(self) -> int:
        return self.shape.heads * HEAD_DIM

    @property
    def latent(self) -> tuple[int, ...]:
        return tuple(size * patch for size, patch in zip(self.shape.grid, PATCH, strict=True))


MODELS = {
    "14B-720p": Model(SHAPES["14B-720p"], 13824, 40),
    "1.3B-480p": Model(SHAPES["1.3B-480p"], 8960, 30),
}
MODES = ("eager", "compiled")
TINY_MODEL = Model(TINY, 512, 2)


def load_host(device: torch.device) -> Any:
    """ComfyUI's Wan model class, from COMFYUI_PATH; SystemExit, with what to do, if it is not there."""
    folder = os.environ.get("COMFYUI_PATH", "")
    if not (Path(folder) / "comfy" / "ldm" / "wan" / "model.py").is_file():
        raise SystemExit(
            f"COMFYUI_PATH is {folder!r}; set it to a ComfyUI folder (one that holds comfy/ldm/wan)."
        )
    sys.path.insert(0, folder)
    importlib.import_module("comfy.options").enable_args_parsing(False)
    importlib.import_module("comfy.cli_args").args.cpu = device.type == "cpu"
    return importlib.import_module("comfy.ldm.wan.model").WanModel


def make_model(model: Model, wan_model: Any, device: torch.device) -> nn.Module:
    """The network with random weights in bf16, made on the device."""
    torch.manual_seed(0)
    network: nn.Module = wan_model(
        model_type="t2v",
        dim=model.dim,
        ffn_dim=model.ffn_dim,
        num_heads=model.shape.heads,
        num_layers=model.layers,
        in_dim=LATENT_CHANNELS,
        out_dim=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        cross_attn_norm=True,
        operations=importlib.import_module("comfy.ops").disable_weight_init,
        dtype=torch.bfloat16,
        device=device,
    )
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "norm" in name and weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0, 0.02)
    return network.requires_grad_(False)


Step = Callable[[], Tensor]


def make_step(network: Any, model: Model, device: torch.device) -> Step:
    """One call of the network on random input, as the sampler makes it."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator)

    latent, text = random(1, LATENT_CHANNELS, *model.latent), 0.1 * random(1, TEXT_TOKENS, TEXT_WIDTH)
    timestep = torch.tensor([500.0], device=device)
    return lambda: network(latent, timestep, text, transformer_options={})


@contextmanager
def patched(network: Any, config: SparseConfig, device: torch.device) -> Iterator[Any]:
    """Within it the node's own patch is on every self-attention, inside a sampling run; yields that run."""
    host, attention = (load_pack(f"nodes.{name}") for name in ("host", "attention"))
    holder = nn.Module()
    holder.diffusion_model = network
    patcher = host.ModelPatcher(holder, load_device=device, offload_device=device)
    policy = DensePolicy(min_tokens=0)
    settings = attention.Settings(config, policy, "auto", "benchmark", student=True)
    sparse = attention.SparseAttention(settings, host.self_attention_layers(patcher))
    patches = host.patch_self_attention(patcher, sparse).object_patches
    modules = {key: holder.get_submodule(key.removesuffix(".forward")) for key in patches}
    for key, forward in patches.items():
        modules[key].forward = forward
    try:
        with sparse.run([1.0, 0.0], (1.0, 0.0), [], device) as run:
            run.begin_step(1.0, {})
            yield run
    finally:
        for module in modules.values():
            del module.forward  # the class's own shows again
    if run.summary["dense_calls"] or not run.summary["sparse_calls"]:
        raise RuntimeError(f"the patched step was not sparse throughout: {run.summary['dense_calls']}")


def load_pack(module: str) -> Any:
    """A module of the pack, which has a name of its own as in ComfyUI; the classes of its nodes stay out."""
    if PACK not in sys.modules:
        package = ModuleType(PACK)
        package.__path__ = [str(ROOT)]
        sys.modules[PACK] = package
    return importlib.import_module(f"{PACK}.{module}")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one step, and of its kernels by kind; peak memory in 10^6 bytes."""

    step: float
    attention: float
    linear: float
    peak_mb: float | None
    load: Load | None


def measure(step: Step, model: Model, steps: int, device: torch.device, compiled: bool) -> Timing:
    """Times whole steps, then says where the time of one more went."""
    cuda = device.type == "cuda"

    def seconds() -> float:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    first = seconds()
    print(f"  first step {first:.1f} s", flush=True)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    times = []
    with watched(device) as load:
        with profile(activities=[activity]) as profiled:
            times.append(seconds())
        if times[0] < LONG_STEP:
            times = [seconds() for _ in range(steps)]
        elif not compiled:
            times.append(first)
    attention, linear = kinds(profiled.events(), model.layers, cuda)
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if cuda else None
    return Timing(statistics.median(times) * 1e3, attention, linear, peak, load())


def kinds(events: Any, layers: int, cuda: bool) -> tuple[float, float]:
    """Milliseconds of a step's self-attention (mask included) and linear kernels."""
    ours = our_kernels()
    mask = linear = 0.0
    attention: list[float] = []
    for event in events:
        if event.device_type != (DeviceType.CUDA if cuda else DeviceType.CPU):
            continue
        if event.name.startswith("triton_"):
            continue  # fused by the compiler, and named after all that they stand beside
        ms = event.time_range.elapsed_us() / 1e3
        if event.name in ours and event.name.startswith(FORWARD_KERNELS):
            attention.append(ms)
        elif event.name in ours and not event.name.startswith(ROTATION_KERNELS):
            mask += ms
        elif re.search(SDPA_KERNELS, event.name, re.IGNORECASE):
            attention.append(ms)
        elif re.search(LINEAR_KERNELS, event.name, re.IGNORECASE):
            linear += ms
    # Text cross-attention runs the same kernels over 512 keys: the longest ones are the self-attention.
    return mask + sum(sorted(attention)[-layers:]), linear


def our_kernels() -> set[str]:
    """Names of the product's kernels, each of which takes exactly one parameter struct."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "csrc").glob("*.cu"))
    return {name for text in sources for name in re.findall(r"(\w+)\(const __grid_constant__", text)}


def run(
    name: str,
    model: Model,
    wan_model: Any,
    config: SparseConfig,
    modes: Sequence[str],
    steps: int,
    device: torch.device,
) -> Iterator[StepRow]:
    """Every way to run one model. Sparse first: its short steps warm up what both need."""
    network = make_model(model, wan_model, device)
    for mode in modes:
        timings: dict[str, Timing] = {}
        achieved = 0.0
        for method in ("ours", "dense"):
            torch.compiler.reset()
            callee = torch.compile(network) if mode == "compiled" else network
            print(f"{name} {mode} {method}", flush=True)
            sparse = method == "ours"
            with torch.no_grad(), patched(network, config, device) if sparse else nullcontext() as sampling:
                step = make_step(callee, model, device)
                timing = timings[method] = measure(step, model, steps, device, mode == "compiled")
            print(f"  step {timing.step:.1f} ms, self-attention {timing.attention:.1f} ms", flush=True)
            if sampling is not None:
                achieved = sampling.summary["sparsity"]
        for method, timing in timings.items():
            sparse = method == "ours"
            yield StepRow(
                shape=name,
                method=method,
                mode=mode,
                sparsity=achieved if sparse else 0.0,
                dtype="bf16",
                step_ms=timing.step,
                attention_ms=timing.attention,
                linear_ms=timing.linear,
                rest_ms=timing.step - timing.attention - timing.linear,
                factor=timings["dense"].step / timing.step,
                peak_mb=timing.peak_mb,
                clock_mhz=timing.load.clock_mhz if timing.load else None,
                power_w=timing.load.power_w if timing.load else None,
                config=f"top_k={config.top_k:.3g}, sparsity={config.sparsity:.3g}" if sparse else "",
            )


def line(row: StepRow) -> str:
    """A row as one line of the table."""
    times = f"{row.step_ms:10.1f} {row.attention_ms:10.1f} {row.linear_ms:10.1f} {row.rest_ms:10.1f}"
    known = row.clock_mhz is not None and row.power_w is not None
    load = f" {row.clock_mhz:6.0f} MHz {row.power_w:4.0f} W" if known else ""
    return f"{row.shape:12} {row.mode:9} {row.method:6} {row.sparsity:5.0%} {times} {row.factor:6.2f}x{load}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.wan_step", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="one tiny model, on a CPU if there is no GPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--sparsity", type=float, default=0.95, help="target of the sparse steps")
    parser.add_argument("--top-k", type=float, default=0.03, help="floor of each row")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, for models whose step is short")
    parser.add_argument("--commit", help="commit to name in the results, where there is no git checkout")
    args = parser.parse_args(arguments)

    if not torch.cuda.is_available() and not args.tiny:
        parser.error("no NVIDIA GPU is visible to torch; --tiny runs a check of the benchmark without one")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    config = SparseConfig(top_k=args.top_k, sparsity=args.sparsity)
    models = {"tiny": TINY_MODEL} if args.tiny else {name: MODELS[name] for name in args.models or MODELS}
    wan_model = load_host(device)
    facts = machine(device, args.commit)
    print(", ".join(facts.values()), flush=True)
    rows: list[StepRow] = []
    for name, model in models.items():
        for row in run(name, model, wan_model, config, args.modes, args.steps, device):
            rows.append(row)
            print(line(row), flush=True)
            if args.out:
                write(args.out, facts, rows)  # each time: the run may be cut off
    print(f"{'':35}{'step ms':>10} {'attention':>10} {'linear':>10} {'rest':>10}  factor")
    print("\n".join(map(line, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
