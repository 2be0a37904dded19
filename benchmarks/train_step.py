"""One training step of Wan2.1 1.3B at 480p with activation checkpointing: sparse and dense students.

    python -m benchmarks.train_step --out results.json
    python -m benchmarks.train_step --tiny    # needs no GPU: checks itself

Random weights and one random sample, through the loop of `sparge-distill train`. With the velocity loss a
step holds the dense teacher's forward too, which both students need; with the diffusion loss it is the
student's alone. "cudnn" runs every dense attention, the teacher's included, by cuDNN; "torch" by what torch
chooses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparge_core.distill.cli import start_processes
from sparge_core.distill.data import open_dataset, write_sample
from sparge_core.distill.flow import DIFFUSION, VELOCITY
from sparge_core.distill.loop import Distillation
from sparge_core.distill.options import ALL, FULL, LOW_RANK, TrainOptions, options_from
from sparge_core.distill.pair import WanPair

from .measure import machine

WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, "text_dim": 4096}
LATENT = (16, 21, 60, 104)  # 81 frames of 832 × 480: 32,760 tokens
TINY_WAN = {"num_attention_heads": 2, "ffn_dim": 256, "num_layers": 2, "text_dim": 32}
TINY_LATENT = (16, 2, 16, 32)
TEXT_TOKENS = 512
KERNELS = {"torch": None, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class TrainRow:
    """One training step; factor: the dense student's step, all else equal, over this one."""

    student: str  # "full" or "low_rank"
    loss: str
    dense_kernels: str
    compiled: bool  # the blocks, by torch
    method: str  # "dense" or "ours"
    sparsity: float
    step_ms: float
    peak_mb: float | None
    factor: float


def make_base(folder: Path, config: dict[str, Any], device: torch.device) -> Path:
    """A Wan of random weights in diffusers' format, bf16."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = WanTransformer3DModel(**config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_data(folder: Path, latent: Sequence[int], text: int) -> Path:
    """One sample of noise."""
    source = torch.Generator().manual_seed(0)
    clip, words = torch.randn(*latent, generator=source), torch.randn(TEXT_TOKENS, text, generator=source)
    write_sample(folder, {"latent": clip.half(), "text": (0.1 * words).half()})
    return folder


def measure(options: TrainOptions, device: torch.device, steps: int) -> Iterator[TrainRow]:
    """Steps of the sparse and of the dense student of one pair, with each loss and each dense kernel."""
    pair = WanPair(options, device)
    data = open_dataset(options.data)
    cuda = device.type == "cuda"
    for loss in (VELOCITY, DIFFUSION):
        run = Distillation(options_from({**options.to_json(), "loss": loss}), pair, data)
        records = run.records()
        for kernels in KERNELS if cuda else ("torch",):
            timed: dict[str, tuple[float, float | None]] = {}
            chosen = KERNELS[kernels]
            for method in ("ours", "dense"):
                with (
                    pair.attention.dense() if method == "dense" else nullcontext(),
                    sdpa_kernel(chosen) if chosen else nullcontext(),
                ):
                    next(records)  # warms up
                    if cuda:
                        torch.cuda.reset_peak_memory_stats(device)
                    seconds = statistics.median(next(records)["seconds"] for _ in range(steps))
                peak = torch.cuda.max_memory_allocated(device) / 1e6 if cuda else None
                timed[method] = (seconds * 1e3, peak)
            for method, (ms, peak) in timed.items():
                share = options.sparsity if method == "ours" else 0.0
                factor = timed["dense"][0] / ms
                yield TrainRow(options.student, loss, kernels, pair.compiled, method, share, ms, peak, factor)


def line(row: TrainRow) -> str:
    memory = "" if row.peak_mb is None else f"{row.peak_mb / 1e3:7.1f} GB"
    mode = "compiled" if row.compiled else "eager"
    return (
        f"{row.student:9} {row.loss:10} {row.dense_kernels:6} {mode:8} {row.method:6} {row.sparsity:4.0%} "
        f"{row.step_ms:10.1f} ms {memory} {row.factor:6.2f}x"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.train_step", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU if there is no GPU")
    parser.add_argument("--students", nargs="+", choices=(FULL, LOW_RANK), default=(FULL, LOW_RANK))
    parser.add_argument("--sparsity", type=float, default=0.95, help="target of the sparse student")
    parser.add_argument("--compile", action="store_true", help="let torch compile the blocks")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each kind")
    parser.add_argument("--commit", help="commit to name in the results, where there is no git checkout")
    args = parser.parse_args(arguments)

    if not torch.cuda.is_available() and not args.tiny:
        parser.error("no NVIDIA GPU is visible to torch; --tiny runs a check of the benchmark without one")
    config, latent = (TINY_WAN, TINY_LATENT) if args.tiny else (WAN, LATENT)
    device, _ = start_processes("auto")
    facts = machine(device, args.commit)
    print(", ".join(facts.values()), flush=True)
    rows: list[TrainRow] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        common = {
            "base": make_base(place / "base", config, device),
            "data": make_data(place / "data", latent, int(config["text_dim"])),
            **{"out": place / "out", "parameters": ALL, "top_k": 0.0, "sparsity": args.sparsity},
            **{"batch": 1, "steps": 10**6, "save_every": 10**6, "held_out": 0, "learning_rate": 1e-6},
            "dtype": "bf16" if device.type == "cuda" else "fp32",
        }
        for student in args.students:
            options = options_from({**common, "student": student, "compile": args.compile})
            for row in measure(options, device, args.steps):
                rows.append(row)
                print(line(row), flush=True)
                if args.out:  # each time: the run may be cut off
                    content = {"machine": facts, "model": config, "latent": latent}
                    content["rows"] = [asdict(one) for one in rows]
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
