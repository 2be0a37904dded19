"""A tiny Wan of random weights in diffusers' format, samples for it, and runs of the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="needs the extra `distill`: pip install -e .[distill]")
pytest.importorskip("peft", reason="needs the extra `distill`: pip install -e .[distill]")

from sparge_core.distill import cli, data
from sparge_core.distill.log import read_records

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 48,
    "num_layers": 2,
    "text_dim": 12,
    "freq_dim": 16,
}
IMAGE = {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 32}
SIZE = (2, 16, 32)  # of the latent: 256 tokens, which are 2 blocks of queries and 4 of keys
TEXT = 7


def make_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(seed)
    model = WanTransformer3DModel(**{**TINY, **changes})
    with torch.no_grad():  # sharp attention: with the initial weights every block weighs the same
        for block in model.blocks:
            block.attn1.norm_q.weight.mul_(4)
    model.save_pretrained(folder)
    return folder


def tensors(seed: int, size: tuple[int, int, int] = SIZE, image: bool = False) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    sample = {"latent": random(16, *size), "text": random(TEXT, TINY["text_dim"])}
    if image:
        sample |= {"image_latent": random(20, *size), "image_embedding": random(257, IMAGE["image_dim"])}
    return sample


def make_data(folder: Path, count: int = 6, **kwargs: Any) -> Path:
    for seed in range(count):
        data.write_sample(folder, tensors(seed, **kwargs), f"clip {seed}")
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "clips")


@pytest.fixture
def values(base: Path, samples: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of a short run."""
    return {
        "base": base,
        "data": samples,
        "out": tmp_path / "run",
        "student": "low_rank",
        "rank": 4,
        "alpha": 8.0,
        "sparsity": 0.5,
        "top_k": 0.0,
        "steps": 4,
        "batch": 2,
        "warmup": 2,
        "learning_rate": 3e-3,
        "dtype": "fp32",
        "device": "cpu",
        "held_out": 2,
        "validate_every": 4,
        "validation_timesteps": [0.2, 0.8],
        "save_every": 2,
        "tensorboard": False,
    }


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `sparge-distill` with these arguments; exit code, and what it said."""

    def command(*arguments: Any) -> tuple[int, str]:
        code = cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return command


@pytest.fixture
def train(command: Callable[..., tuple[int, str]], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs `sparge-distill train` with these options; the flags come after a TOML file of them."""

    def train(values: dict[str, Any], *flags: Any) -> tuple[int, str]:
        return command("train", "--config", write_toml(tmp_path / "run.toml", values), *flags)

    return train


def write_toml(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(
        "".join(
            f"{key} = {json.dumps(str(value) if isinstance(value, Path) else value)}\n"
            for key, value in values.items()
        ),
        encoding="utf-8",
    )
    return path


def errors(out: Path) -> list[float]:
    """The validation errors in a run's log."""
    return [record["validation"]["error"] for record in read_records(out) if "validation" in record]
