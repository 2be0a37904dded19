"""A student's file for ComfyUI: full model, diff or low-rank, with the settings it was trained for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..config import METADATA_PREFIX, SparseConfig
from ..wan.convert import patch_name
from ..wan.keys import Role
from ..wan.transformer import DIFFUSERS, differences, read_config, transformer_folder
from . import DistillError, checkpoint
from .loop import AVERAGE, WEIGHT
from .options import LOW_RANK, TrainOptions, options_from

FULL_FILE, DIFF_FILE, LOW_RANK_FILE = "full", "diff", "low_rank"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class LowRankPair:
    """up (out, rank) @ down (rank, in), scaled by alpha / rank, is added to a weight (out, in)."""

    up: Tensor
    down: Tensor
    alpha: float

    def product(self) -> Tensor:
        return self.up.float() @ self.down.float() * (self.alpha / self.down.shape[0])


def export(
    out: Path,
    file: Path,
    kind: str,
    *,
    step: int | None = None,
    base: Path | None = None,
    dtype: str = "bf16",
) -> Path:
    """Write the student of the run in `out` to `file`, as it was at `step` or at the latest checkpoint.

    kind: "full", "diff" or "low_rank". base: where the base is now, if it has moved. The average is taken
    where the run keeps one. DistillError when that run has no such file.
    """
    path = checkpoint.find(out, step)
    run = checkpoint.read_run(path)
    options = options_from(run["options"])
    if kind == LOW_RANK_FILE and options.student != LOW_RANK:
        raise DistillError(
            f"The run in {out} trained the weights themselves, so it has no low-rank file; export full or "
            "diff."
        )
    trained = checkpoint.load_all(path, AVERAGE if options.ema else WEIGHT)
    about = describe_run(options, run["step"])
    if kind == LOW_RANK_FILE:
        return write_low_rank(file, _pairs(trained, options), options.config, about, dtype)
    weights = _BaseWeights(base or options.base, run["facts"]["model"])
    if options.student == LOW_RANK:
        diffs = {target: pair.product() for target, pair in _pairs(trained, options).items()}
        changed = {target: weights[target].float() + diff for target, diff in diffs.items()}
    else:
        changed = {_wan(name): tensor for name, tensor in trained.items()}
        diffs = {target: tensor.float() - weights[target].float() for target, tensor in changed.items()}
    if kind == DIFF_FILE:
        tensors = {patch_name(target, Role.DIFF): diff for target, diff in diffs.items()}
    else:
        tensors = {target: changed[target] if target in changed else weights[target] for target in weights}
    return _write(file, tensors, options.config, about, dtype)


def describe_run(options: TrainOptions, step: int) -> dict[str, str]:
    """What a student's metadata says of its training; no folders of the machine that it was made on."""
    named = {
        key: value for key, value in options.to_json().items() if not isinstance(getattr(options, key), Path)
    }
    return {
        "base_model": options.base.name,
        "steps": str(step),
        "loss": options.loss,
        "run": json.dumps(named),
    }


def write_low_rank(
    file: Path, pairs: Mapping[str, LowRankPair], config: SparseConfig, about: Mapping[str, str], dtype: str
) -> Path:
    """A low-rank student. pairs: by Wan's names of the weights; about: more metadata."""
    tensors: dict[str, Tensor] = {}
    for target, pair in pairs.items():
        tensors[patch_name(target, Role.UP)] = pair.up
        tensors[patch_name(target, Role.DOWN)] = pair.down
        tensors[patch_name(target, Role.ALPHA)] = torch.tensor(pair.alpha)
    return _write(file, tensors, config, about, dtype)


def _write(
    file: Path, tensors: Mapping[str, Tensor], config: SparseConfig, about: Mapping[str, str], dtype: str
) -> Path:
    if file.suffix != ".safetensors":
        raise DistillError(f"{file} must end in .safetensors, the only kind of file that is written.")
    metadata = {
        "format": "pt",
        **config.to_metadata(),
        **{METADATA_PREFIX + key: value for key, value in about.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    stored = {
        # An alpha is a number of its own, and 2 bytes may not hold it.
        key: (tensor if tensor.ndim == 0 else tensor.to(DTYPES[dtype])).detach().cpu().contiguous()
        for key, tensor in tensors.items()
    }
    try:
        save_file(stored, partial, metadata)
        os.replace(partial, file)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        partial.unlink(missing_ok=True)
        raise DistillError(f"{file} could not be written ({error}); make room, or name another.") from error
    return file


def _pairs(trained: Mapping[str, Tensor], options: TrainOptions) -> dict[str, LowRankPair]:
    """peft's factors as pairs by Wan's names of the weights."""
    factors: dict[str, dict[Role, Tensor]] = {}
    for key, tensor in trained.items():
        name = DIFFUSERS.parse(key)
        assert name is not None, key
        factors.setdefault(name.target, {})[name.role] = tensor
    return {
        target: LowRankPair(pair[Role.UP], pair[Role.DOWN], options.alpha) for target, pair in factors.items()
    }


def _wan(key: str) -> str:
    name = DIFFUSERS.parse(key)
    if name is None:
        raise DistillError(f"{key} is no parameter of a Wan model that ComfyUI knows.")
    return name.target


class _BaseWeights(Mapping[str, Tensor]):
    """The base's weights by Wan's names, read from its files one by one when asked for."""

    def __init__(self, base: Path, model: Mapping[str, object]) -> None:
        try:
            folder = transformer_folder(base)
        except ValueError as error:
            raise DistillError(f"The base is needed for this kind of file. {error}") from None
        if unlike := differences(read_config(base), model):
            raise DistillError(f"{base} is not the base of this run ({unlike}).")
        self._at: dict[str, tuple[Path, str]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as content:
                self._at |= {_wan(key): (file, key) for key in content.keys()}  # noqa: SIM118
        if not self._at:
            raise DistillError(f"{folder} holds no .safetensors files with the base's weights.")

    def __getitem__(self, target: str) -> Tensor:
        file, key = self._at[target]
        with safe_open(file, framework="pt") as content:
            tensor: Tensor = content.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)
