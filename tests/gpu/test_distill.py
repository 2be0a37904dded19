"""Distillation on GPUs: two of them make the steps of one, and one goes on from what two have saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="needs the extra `distill`: pip install -e .[distill]")

from sparge_core.distill.checkpoint import checkpoints
from sparge_core.distill.data import write_sample
from sparge_core.distill.log import read_records

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
WAN = {"num_attention_heads": 2, "attention_head_dim": 64, "ffn_dim": 256, "num_layers": 2, "text_dim": 32}
LATENT = (16, 2, 32, 64)  # 1,024 tokens
STEPS, SAVED = 6, 3


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(**WAN)
    with torch.no_grad():  # sharp attention: with the initial weights every block weighs the same
        for block in model.blocks:
            block.attn1.norm_q.weight.mul_(4)
    model.save_pretrained(tmp_path / "base")
    for seed in range(8):
        source = torch.Generator().manual_seed(seed)
        latent, text = (torch.randn(shape, generator=source) for shape in (LATENT, (7, WAN["text_dim"])))
        write_sample(tmp_path / "data", {"latent": latent, "text": text}, f"clip {seed}")
    return {
        "base": str(tmp_path / "base"),
        "data": str(tmp_path / "data"),
        "sparsity": 0.5,
        "top_k": 0.0,
        "steps": STEPS,
        "batch": 2,
        "warmup": 1,
        "learning_rate": 1e-3,
        "device": "cuda",
        "held_out": 2,
        "validate_every": SAVED,
        "validation_timesteps": [0.5],
        "save_every": SAVED,
        "tensorboard": False,
    }


def train(options: dict[str, Any], out: Path, *flags: str, processes: int = 1) -> None:
    config = out.with_suffix(".toml")
    given = {**options, "out": str(out)}
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = ["-m", "sparge_core.distill", "train", "--config", str(config), *flags]
    done = subprocess.run(
        [sys.executable, *(launch if processes > 1 else []), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("student", ["low_rank", "full"])
def test_two_gpus_make_the_steps_of_one_and_one_goes_on_from_theirs(
    student: str, options: dict[str, Any], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    options = {**options, "student": student}
    train(options, one)
    train({**options, "steps": SAVED}, two, processes=2)
    assert [step for step, _ in checkpoints(two)] == [SAVED]
    train(options, two, "--resume")
    assert [step for step, _ in checkpoints(two)][-1] == STEPS
    ours, theirs = ([r for r in read_records(out) if "loss" in r] for out in (two, one))
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for two_made, one_made in zip(ours, theirs, strict=True):
        for name in ("loss", "norm"):
            assert two_made[name] == pytest.approx(one_made[name], rel=0.05)
    validated = [
        [r["validation"]["error"] for r in read_records(out) if "validation" in r] for out in (two, one)
    ]
    assert validated[0] == pytest.approx(validated[1], rel=0.05)
