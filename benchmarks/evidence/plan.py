"""What the evidence run does, as frozen data from evidence.toml, and the clock that it keeps to."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparge_core import SparseConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG = Path(__file__).with_name("evidence.toml")
RASTER, TILES = "raster", "tiles"
FRAMES, PIXELS = 4, 16  # of a token, in time and in each direction of space
LATENT_CHANNELS = 16

Table = Mapping[str, Any]


@dataclass(frozen=True)
class Grid:
    """A video's size in tokens."""

    time: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.time * self.rows * self.columns

    @property
    def latent(self) -> tuple[int, int, int, int]:
        """(C, T, H, W): the model's patches are 1 × 2 × 2."""
        return LATENT_CHANNELS, self.time, 2 * self.rows, 2 * self.columns

    @property
    def video(self) -> tuple[int, int, int]:
        """Frames, height and width in pixels; the first latent frame stands for one frame alone."""
        return FRAMES * (self.time - 1) + 1, PIXELS * self.rows, PIXELS * self.columns


@dataclass(frozen=True)
class VaePlan:
    width: int
    crop: tuple[int, int, int]
    steps: int
    minutes: float
    batch: int
    learning_rate: float
    kl: float
    gradient: float


@dataclass(frozen=True)
class Stage:
    grid: Grid
    steps: int
    minutes: float
    batch: int
    learning_rate: float
    name: str


@dataclass(frozen=True)
class DitPlan:
    heads: int
    ffn_dim: int
    layers: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class DistilPlan:
    """How students are trained: as many steps for every arm, however long they take."""

    steps: int
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class SamplingPlan:
    steps: int
    guidance: float
    shift: float
    patches: int


@dataclass(frozen=True)
class Arm:
    """A way to run the model sparsely. loss: that its student was trained with, "" for none."""

    name: str
    top_k_share: float
    loss: str = ""
    order: str = RASTER

    def config(self, sparsity: float) -> SparseConfig:
        """The rule that keeps the share 1 - sparsity of the blocks, Top-k's part of them in every row."""
        if self.top_k_share == 1.0:
            return SparseConfig(top_k=1.0 - sparsity, top_p=0.0)
        return SparseConfig(top_k=self.top_k_share * (1.0 - sparsity), sparsity=sparsity)


@dataclass(frozen=True)
class Plan:
    seed: int
    seeds: tuple[int, ...]
    sparsities: tuple[float, ...]
    encode_minutes: float
    short: Grid
    long: Grid
    vae: VaePlan
    clips: Mapping[str, int]
    dit: DitPlan
    distil: DistilPlan
    demo: DistilPlan
    sampling: SamplingPlan
    arms: tuple[Arm, ...]

    @property
    def held_out_each(self) -> int:
        """Held-out clips of each seed."""
        return self.clips["held_out"] // len(self.seeds)

    def held_out(self, seed: int) -> range:
        """The places of a seed's held-out clips."""
        first = self.seeds.index(seed) * self.held_out_each
        return range(first, first + self.held_out_each)


def load(path: Path = CONFIG, *, smoke: bool = False) -> Plan:
    """The plan in a TOML file; smoke: with the sizes that only check that everything runs."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    changes = table.pop("smoke")
    return plan_from(_merged(table, changes) if smoke else table)


def _merged(table: Table, changes: Table) -> dict[str, Any]:
    """`table` with `changes`, table by table; lists are replaced."""
    return {
        name: _merged(value, changes[name])
        if isinstance(value, dict) and name in changes
        else changes.get(name, value)
        for name, value in table.items()
    }


def plan_from(table: Table) -> Plan:
    grids = {name: Grid(*size) for name, size in table["grids"].items()}
    dit = dict(table["dit"])
    stages = tuple(
        Stage(**{**stage, "grid": grids[stage["grid"]], "name": stage["grid"]}) for stage in dit.pop("stages")
    )
    return Plan(
        seed=table["seed"],
        seeds=tuple(table["seeds"]),
        sparsities=tuple(table["sparsities"]),
        encode_minutes=table["encode_minutes"],
        **grids,
        vae=VaePlan(**{**table["vae"], "crop": tuple(table["vae"]["crop"])}),
        clips=table["clips"],
        dit=DitPlan(**dit, stages=stages),
        distil=DistilPlan(**table["distil"]),
        demo=DistilPlan(**table["demo"]),
        sampling=SamplingPlan(**table["sampling"]),
        arms=tuple(Arm(**arm) for arm in table["arms"]),
    )


class OutOfTime(Exception):
    """The time that this process was given is over; what was done is saved, and the next one goes on."""


class Clock:
    """How long this process has run. minutes: that it may, None for as long as it takes."""

    def __init__(self, minutes: float | None = None) -> None:
        self._started = time.monotonic()
        self._minutes = minutes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self._minutes is not None and self.seconds > 60 * self._minutes

    @property
    def minutes_left(self) -> float | None:
        """0.0 when they are over, None when there is no limit."""
        return None if self._minutes is None else max(0.0, self._minutes - self.seconds / 60)

    def check(self) -> None:
        """OutOfTime when there is no more."""
        if self.over:
            raise OutOfTime
