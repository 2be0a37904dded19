"""What a run is asked to do: one frozen dataclass, from a TOML file and flags, checked before any work."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from ..config import SparseConfig
from . import DistillError
from .flow import DIFFUSION, LOGIT_NORMAL, UNIFORM, VELOCITY, Timesteps

FULL, LOW_RANK = "full", "low_rank"
ALL, SELF_ATTENTION = "all", "self_attention"
LEARNING_RATES = {FULL: 1e-5, LOW_RANK: 1e-4}  # 1e-5: of sparse-linear attention on the same models


def _about(help: str, **limits: Any) -> dict[str, Any]:
    """Metadata of an option. limits: `choices`, or `low` and `high`; above, below: that end itself is out."""
    return {"help": help, **limits}


@dataclass(frozen=True)
class TrainOptions:
    """Options of `sparge-distill train`; DistillError names every one that is out of range.

    The recipe behind the defaults is that of sparse-linear attention on the same models (AdamW, weight decay,
    timesteps) with the steps of arXiv 2602.13515, which does not state its own.
    """

    base: Path = field(metadata=_about("folder of the Wan transformer, or pipeline, in diffusers' format"))
    data: Path = field(metadata=_about("folder of samples with its manifest.json"))
    out: Path = field(metadata=_about("folder for checkpoints, logs and the curve"))
    teacher: Path | None = field(
        default=None, metadata=_about("full only: folder of another teacher of the same shape [the base]")
    )
    adapter: Path | None = field(
        default=None, metadata=_about("low_rank only: a low-rank student to start from")
    )

    student: str = field(
        default=LOW_RANK,
        metadata=_about(
            "what is trained: the weights themselves, or factors beside them", choices=(FULL, LOW_RANK)
        ),
    )
    parameters: str = field(
        default=SELF_ATTENTION,
        metadata=_about("train all of the model, or its self-attention alone", choices=(ALL, SELF_ATTENTION)),
    )
    rank: int = field(default=64, metadata=_about("low_rank: rank of the factors", low=1, high=4096))
    alpha: float = field(
        default=64.0,
        metadata=_about("low_rank: the factors' product is scaled by alpha / rank", low=0, above=True),
    )

    top_k: float = field(
        default=0.03, metadata=_about("share of key blocks that every row keeps", low=0, high=1)
    )
    top_p: float = field(
        default=0.2,
        metadata=_about("softmax mass that every row keeps (the paper: 0.16 for 14B)", low=0, high=1),
    )
    sparsity: float = field(
        default=0.0, metadata=_about("target sparsity in place of top_p; 0: off", low=0, high=1, below=True)
    )

    loss: str = field(
        default=VELOCITY,
        metadata=_about(
            "velocity: to the teacher's; diffusion: to the data's, to compare", choices=(VELOCITY, DIFFUSION)
        ),
    )
    steps: int = field(default=500, metadata=_about("optimiser steps", low=1))
    batch: int = field(
        default=16,
        metadata=_about("samples a step, over all processes (the paper: 64 for 1.3B, 16 for 14B)", low=1),
    )
    micro_batch: int = field(
        default=1, metadata=_about("samples at once on a device; the rest of a batch is accumulated", low=1)
    )
    learning_rate: float | None = field(
        default=None, metadata=_about("AdamW's [1e-5 for full, 1e-4 for low_rank]", low=0, above=True, high=1)
    )
    weight_decay: float = field(default=0.01, metadata=_about("AdamW's", low=0, high=1))
    beta1: float = field(default=0.9, metadata=_about("AdamW's", low=0, high=1, below=True))
    beta2: float = field(default=0.999, metadata=_about("AdamW's", low=0, high=1, below=True))
    warmup: int = field(default=20, metadata=_about("steps over which the learning rate rises", low=0))
    clip: float = field(default=1.0, metadata=_about("largest norm of the gradients", low=0, above=True))
    ema: float = field(
        default=0.0,
        metadata=_about(
            "decay of the average that is validated and exported; 0: off", low=0, high=1, below=True
        ),
    )

    timesteps: str = field(
        default=LOGIT_NORMAL, metadata=_about("how t is drawn", choices=(LOGIT_NORMAL, UNIFORM))
    )
    timestep_mean: float = field(default=1.5, metadata=_about("logit_normal: mean of log(t / (1 - t))"))
    timestep_std: float = field(
        default=1.6, metadata=_about("logit_normal: its standard deviation", low=0, above=True)
    )
    shift: float = field(default=1.0, metadata=_about("moves t towards noise", low=0, above=True))

    dtype: str = field(
        default="bf16",
        metadata=_about("of the computation; master weights are fp32", choices=("bf16", "fp32")),
    )
    checkpointing: bool = field(
        default=True, metadata=_about("recompute activations in the backward pass, to save memory")
    )
    compile: bool = field(
        default=False, metadata=_about("let torch compile the model's blocks; needs a C compiler")
    )
    device: str = field(
        default="auto", metadata=_about("auto: the GPU where there is one", choices=("auto", "cuda", "cpu"))
    )
    deterministic: bool = field(
        default=False,
        metadata=_about("on a GPU: only algorithms of torch that give the same bits every time; slower"),
    )
    seed: int = field(default=0, metadata=_about("of samples, noise, timesteps and initial factors", low=0))

    held_out: int = field(default=4, metadata=_about("samples kept for validation; 0: none", low=0))
    validate_every: int = field(default=50, metadata=_about("steps between validations", low=1))
    validation_timesteps: tuple[float, ...] = field(
        default=(0.1, 0.3, 0.5, 0.7, 0.9),
        metadata=_about("t at which velocities are compared", low=0, above=True, high=1, below=True),
    )
    save_every: int = field(default=50, metadata=_about("steps between checkpoints", low=1))
    keep: int = field(default=2, metadata=_about("checkpoints kept, the latest ones", low=1))
    tensorboard: bool = field(default=True, metadata=_about("write TensorBoard's files beside log.jsonl"))

    def __post_init__(self) -> None:
        problems = []
        for one in fields(self):
            problems += _check(one.name, getattr(self, one.name), one.metadata)
        if not problems:
            problems = self._contradictions()
        if problems:
            raise DistillError("These options cannot be used: " + "; ".join(problems) + ".")

    def _contradictions(self) -> list[str]:
        found = []
        if self.student == LOW_RANK and self.teacher is not None:
            found.append(
                f"teacher is {self.teacher}, but a low-rank student's teacher is its base without the "
                "factors: leave it out, or set student to full"
            )
        if self.student == FULL and self.adapter is not None:
            found.append(f"adapter is {self.adapter}, but student is full: set it to low_rank")
        if self.batch % self.micro_batch:
            found.append(f"batch is {self.batch}, which micro_batch, {self.micro_batch}, does not divide")
        if not self.validation_timesteps and self.held_out:
            found.append("validation_timesteps is empty; name at least one, or set held_out to 0")
        return found

    @property
    def config(self) -> SparseConfig:
        return SparseConfig(self.top_k, self.top_p, self.sparsity)

    @property
    def rate(self) -> float:
        return LEARNING_RATES[self.student] if self.learning_rate is None else self.learning_rate

    @property
    def draws(self) -> Timesteps:
        return Timesteps(self.timesteps, self.timestep_mean, self.timestep_std, self.shift)

    def to_json(self) -> dict[str, Any]:
        """All options as JSON has them."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        plain = {Path: str, tuple: list}
        return {
            name: next((to(value) for of, to in plain.items() if isinstance(value, of)), value)
            for name, value in values.items()
        }


REQUIRED = ("base", "data", "out")
# What may change when a run is resumed: it decides where and how long a run goes, not what it computes.
FREE_ON_RESUME = {
    *(
        "base",
        "teacher",
        "adapter",
        "data",
        "out",
        "steps",
        "micro_batch",
        "checkpointing",
        "compile",
        "device",
        "deterministic",
    ),
    *("validate_every", "save_every", "keep", "tensorboard"),
}
HINTS = get_type_hints(TrainOptions)


def _check(name: str, value: Any, limits: Mapping[str, Any]) -> list[str]:
    """What is wrong with an option's value: a list with one sentence part, or empty."""
    if isinstance(value, tuple):
        return [problem for one in value for problem in _check(name, one, limits)]
    choices = limits.get("choices")
    if choices is not None:
        return [] if value in choices else [f"{name} is {value!r}; it must be {' or '.join(choices)}"]
    if value is None or isinstance(value, (bool, Path)):
        return []
    low, high = limits.get("low", -math.inf), limits.get("high", math.inf)
    inside = low <= value <= high and math.isfinite(value)  # NaN fails the comparison
    if inside and not (limits.get("above") and value == low) and not (limits.get("below") and value == high):
        return []
    least = "" if low == -math.inf else f"{'above' if limits.get('above') else 'at least'} {low}"
    most = "" if high == math.inf else f"{'below' if limits.get('below') else 'at most'} {high}"
    return [f"{name} is {value}; it must be {' and '.join(filter(None, (least, most))) or 'a finite number'}"]


def options_from(values: Mapping[str, Any]) -> TrainOptions:
    """Options from plain values, as a TOML file or JSON holds them; those left out keep their defaults.

    DistillError for names that are none and values of another type.
    """
    unknown = sorted(values.keys() - HINTS.keys())
    if unknown:
        raise DistillError(
            f"There is no option {', '.join(unknown)}; `sparge-distill train --help` lists them all."
        )
    missing = [name for name in REQUIRED if values.get(name) is None]
    if missing:
        raise DistillError(f"The option {' and '.join(missing)} is not given; it must be a folder.")
    return TrainOptions(**{name: _convert(name, value) for name, value in values.items()})


def _convert(name: str, value: Any) -> Any:
    wanted = HINTS[name]
    if value is None:
        return None
    if wanted in (Path, Path | None) and isinstance(value, (str, Path)):
        return Path(value).expanduser()
    if wanted == tuple[float, ...] and isinstance(value, (list, tuple)):
        if all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value):
            return tuple(float(one) for one in value)
    elif wanted in (float, float | None) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(wanted, type) and type(value) is wanted:
        return value
    named = "a list of numbers" if wanted == tuple[float, ...] else kind_name(wanted)
    raise DistillError(f"The option {name} is {value!r}; it must be {named}.")


def kind_name(wanted: Any) -> str:
    """A type of an option in a user's words."""
    names = {int: "a whole number", bool: "true or false", str: "a word", Path: "a folder"}
    return names.get(wanted) or ("a path" if wanted == Path | None else "a number")


def read_toml(path: Path) -> dict[str, Any]:
    """Options in a TOML file; relative paths in it start at its own folder."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DistillError(f"There is no file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DistillError(f"{path} is no TOML file: {error}.") from None
    for name, value in values.items():
        if HINTS.get(name) in (Path, Path | None) and isinstance(value, str):
            values[name] = path.parent / Path(value).expanduser()
    return values
