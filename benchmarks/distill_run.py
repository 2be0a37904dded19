"""A small Wan, trained on the spot and then distilled: the velocity error falls, with its curve as a picture.

    python -m benchmarks.distill_run --out FOLDER
    python -m benchmarks.distill_run --tiny --out FOLDER    # needs no GPU: checks itself

Wan's own architecture at a small size learns to make clips of moving blobs, with full attention. Then it is
distilled for sparse attention twice, with the velocity loss and, to compare, with the plain diffusion loss.
All is done by the command `sparge-distill`. FOLDER gets run.json, and curve.png of the velocity run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge_core.distill import checkpoint, cli
from sparge_core.distill.data import write_sample
from sparge_core.distill.log import CURVE, read_records
from sparge_core.distill.loop import AVERAGE

from .measure import machine

CHANNELS = 16
BLOBS = 3


@dataclass(frozen=True)
class Size:
    """model: of the transformer; latent: (T, H, W); clips: samples; pretrain, distil: steps."""

    model: dict[str, int]
    latent: tuple[int, int, int]
    clips: int
    batch: int
    pretrain: int
    distil: int


# 13 × 24 × 24 = 7,488 tokens: 117 blocks of keys, of which 95 % sparsity keeps about 6.
SMALL = Size(
    {"num_attention_heads": 4, "ffn_dim": 1408, "num_layers": 6, "text_dim": 64},
    (13, 48, 48),
    clips=256,
    batch=4,
    pretrain=800,
    distil=500,
)
TINY = Size(
    {"num_attention_heads": 1, "ffn_dim": 64, "num_layers": 1, "text_dim": 64},
    (2, 16, 32),
    clips=6,
    batch=2,
    pretrain=2,
    distil=2,
)


def moving_blobs(seed: int, size: tuple[int, int, int], text_width: int) -> dict[str, Tensor]:
    """A clip of soft blobs that drift, each in a colour of its own, and a caption that says how."""
    source = torch.Generator().manual_seed(seed)
    frames, height, width = size
    start, speed = torch.rand(BLOBS, 2, generator=source), 0.5 * torch.randn(BLOBS, 2, generator=source)
    colours = torch.randn(BLOBS, CHANNELS, generator=source)
    time = torch.linspace(0, 1, frames).view(frames, 1, 1, 1)
    rows, columns = (
        torch.linspace(0, 1, height).view(1, height, 1),
        torch.linspace(0, 1, width).view(1, 1, width),
    )
    place = (start + speed * time.view(frames, 1, 1)).remainder(1.0)  # (T, blob, 2)
    clip = torch.zeros(CHANNELS, frames, height, width)
    for blob in range(BLOBS):
        y, x = place[:, blob, 0].view(frames, 1, 1), place[:, blob, 1].view(frames, 1, 1)
        weight = torch.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 0.01)
        clip += colours[blob].view(CHANNELS, 1, 1, 1) * weight
    # Fine texture, as in a real latent: without it a coarse look at the clip would say all.
    clip += 0.3 * torch.randn(CHANNELS, 1, height, width, generator=source)
    words = torch.zeros(BLOBS, text_width)
    described = torch.cat((start, speed, colours), dim=1)
    words[:, : described.shape[1]] = described
    return {"latent": (clip / clip.std()).half(), "text": words.half()}


def command(*arguments: Any, **options: Any) -> None:
    """`sparge-distill` with these arguments and options; SystemExit if it fails."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    if code := cli.main([*map(str, arguments), *flags]):
        raise SystemExit(code)


def pretrain(place: Path, size: Size, data: Path, common: dict[str, Any]) -> Path:
    """The small Wan with random weights, trained on the clips with full attention; in diffusers' format."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(attention_head_dim=128, **size.model)
    model.save_pretrained(place / "random")
    command(
        "train",
        **{
            **common,
            "base": place / "random",
            "data": data,
            "out": place / "pretrained",
            "loss": "diffusion",
        },
        **{"top_k": 1.0, "top_p": 1.0, "steps": size.pretrain, "learning_rate": 5e-4, "warmup": 100},
        **{
            "ema": 0.99,
            "timestep_mean": 0.0,
            "timestep_std": 1.0,
            "held_out": 0,
            "save_every": size.pretrain,
        },
    )
    weights = checkpoint.load_all(checkpoint.find(place / "pretrained"), AVERAGE)
    model.load_state_dict(weights)
    model.save_pretrained(place / "base")
    return place / "base"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.distill_run", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for run.json and curve.png")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--sparsity", type=float, default=0.95, help="target of the student")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the distillation")
    parser.add_argument("--commit", help="commit to name in the results, where there is no git checkout")
    args = parser.parse_args(arguments)

    size = TINY if args.tiny else SMALL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = machine(device, args.commit)
    print(", ".join(facts.values()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for seed in range(size.clips):
            write_sample(place / "clips", moving_blobs(seed, size.latent, size.model["text_dim"]))
        common = {
            "dtype": "bf16" if device.type == "cuda" else "fp32",  # which CPUs are far slower in
            **{"student": "full", "parameters": "all", "batch": size.batch, "micro_batch": size.batch},
            **{"tensorboard": False, "checkpointing": False, "keep": 1},
        }
        base = pretrain(place, size, place / "clips", common)
        settings = {
            **{**common, "base": base, "data": place / "clips", "steps": size.distil, "top_k": 0.0},
            **{"sparsity": args.sparsity, "learning_rate": args.learning_rate, "held_out": size.batch},
            **{"validate_every": 50, "save_every": 100},
        }
        records = {}
        for loss in ("velocity", "diffusion"):
            command("train", **settings, out=place / loss, loss=loss)
            records[loss] = read_records(place / loss)
        args.out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(place / "velocity" / CURVE, args.out / CURVE)
        config = {"model": size.model, "latent": size.latent, "clips": size.clips, "pretrain": size.pretrain}
        kept = {name: str(value) for name, value in settings.items() if name not in ("base", "data")}
        content = {"machine": facts, "setup": config, "options": kept, "records": records}
        (args.out / "run.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for loss, lines in records.items():
        errors = [record["validation"]["error"] for record in lines if "validation" in record]
        print(f"{loss:10} velocity error {errors[0]:.3%} before, {errors[-1]:.3%} after {size.distil} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
