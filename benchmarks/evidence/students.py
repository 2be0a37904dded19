"""Phase "seeds", first part: students of every arm and sparsity, and velocity errors of all arms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from sparge_core import SparseConfig, sparse_attention
from sparge_core.distill import checkpoint
from sparge_core.distill.export import DIFF_FILE, export
from sparge_core.distill.flow import VELOCITY
from sparge_core.distill.loop import WEIGHT, Distillation
from sparge_core.distill.options import FULL, SELF_ATTENTION, TrainOptions, options_from
from sparge_core.distill.pair import WanPair

from . import latents
from .dit import base_folder, follow
from .plan import TILES, Arm, Grid
from .run import DEMO_STUDENT_FILE, HELD_OUT, LONG, SHORT, STUDENT_FILE, Run

RESULT = "result.json"
TILE = 4  # tokens along each side of a cube, so that it is a block of 64 keys
IN_RASTER, IN_TILES = "T t U u V v", "T U V t u v"  # cubes in capitals, tokens in a cube in small letters
SHIPPED = "union"  # the arm whose student of the first seed and highest sparsity is exported

Attend = Callable[[Tensor, Tensor, Tensor, SparseConfig], Tensor]


@dataclass(frozen=True)
class Case:
    """An arm at a sparsity, with a seed's student where it has one."""

    arm: Arm
    sparsity: float
    seed: int

    @property
    def name(self) -> str:
        words = "".join(sign if sign.isalnum() else " " for sign in self.arm.name).split()
        return f"{'-'.join(words)}-{self.sparsity:.0%}-{self.seed}".replace("%", "")


def cases(run: Run) -> Iterator[Case]:
    for seed in run.seeds:
        for sparsity in run.plan.sparsities:
            yield from (Case(arm, sparsity, seed) for arm in run.plan.arms)


def demo_case(run: Run) -> Case:
    """The union's student at the highest sparsity and the short grid; in no table."""
    (union,) = (arm for arm in run.plan.arms if arm.name == SHIPPED)
    return Case(replace(union, name="demo"), max(run.plan.sparsities), run.plan.seeds[0])


def folder(run: Run, case: Case) -> Path:
    return run.out / "students" / case.name


def to_tiles(x: Tensor, grid: Grid) -> Tensor:
    """Tokens of x (B, H, L, D) cube by cube of 4 × 4 × 4, so that each block of 64 keys is one cube.

    Two cubes beside each other are a block of queries. ValueError for a grid that 4 does not divide.
    """
    if any(side % TILE for side in (grid.time, grid.rows, grid.columns)):
        raise ValueError(f"{grid} cannot be cut into cubes: make its sides multiples of {TILE} tokens.")
    return rearrange(x, f"b h ({IN_RASTER}) d -> b h ({IN_TILES}) d", **_sides(grid))


def from_tiles(x: Tensor, grid: Grid) -> Tensor:
    """Undo `to_tiles`."""
    return rearrange(x, f"b h ({IN_TILES}) d -> b h ({IN_RASTER}) d", **_sides(grid))


def _sides(grid: Grid) -> dict[str, int]:
    return {
        **{"t": TILE, "u": TILE, "v": TILE},
        **{"T": grid.time // TILE, "U": grid.rows // TILE, "V": grid.columns // TILE},
    }


def tiled(grid: Grid) -> Attend:
    """Sparse attention of tokens in the order of `to_tiles`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, config: SparseConfig) -> Tensor:
        q, k, v = (to_tiles(x, grid) for x in (q, k, v))
        return from_tiles(sparse_attention(q, k, v, config), grid)

    return attend


class Students:
    """The base as teacher, and in turn every arm as student of one `WanPair`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pair = WanPair(self.options(next(cases(run))), run.device)
        self._base = {name: weight.detach().clone() for name, weight in self.pair.trained.items()}

    def options(self, case: Case) -> TrainOptions:
        run = self.run
        plan = run.plan.demo if case == demo_case(run) else run.plan.distil
        config = case.arm.config(case.sparsity)
        return options_from(
            {
                "base": base_folder(run),
                "data": run.out,
                "out": folder(run, case),
                "student": FULL,
                "parameters": SELF_ATTENTION,
                "loss": case.arm.loss or VELOCITY,
                "top_k": config.top_k,
                "top_p": config.top_p,
                "sparsity": config.sparsity,
                "steps": plan.steps,
                "batch": plan.batch,
                "micro_batch": plan.batch,
                "learning_rate": plan.learning_rate,
                "validate_every": plan.steps,
                "save_every": plan.steps,
                "keep": 1,
                "held_out": 0,
                "seed": case.seed,
                "checkpointing": False,
                "tensorboard": False,
                "dtype": run.dtype,
                "device": run.device.type,
                "compile": run.device.type == "cuda",
            }
        )

    @torch.no_grad()
    def become(self, case: Case, *, trained: bool) -> None:
        """Let the pair's student be the case's; trained: with its student's weights, or else the base's."""
        attention = self.pair.attention
        attention.config = case.arm.config(case.sparsity)
        attention.attend = tiled(self.run.plan.long) if case.arm.order == TILES else sparse_attention
        weights: Mapping[str, Tensor] = self._base
        if trained and case.arm.loss:
            weights = checkpoint.load_all(checkpoint.find(folder(self.run, case)), WEIGHT)
        for name, weight in self.pair.trained.items():
            weight.copy_(weights[name])


def train(run: Run) -> None:
    """Students and velocity errors of all cases, each in a folder of its own."""
    todo = [case for case in cases(run) if not (folder(run, case) / RESULT).is_file()]
    if todo:
        students = Students(run)
        clips, held_out = latents.load(run, LONG, latents.COPIES), latents.load(run, HELD_OUT)
        for case in todo:
            run.clock.check()
            students.become(case, trained=False)
            loop = Distillation(students.options(case), students.pair, clips)
            result: dict[str, Any] = {"arm": case.arm.name, "sparsity": case.sparsity, "seed": case.seed}
            if case.arm.loss:
                log = follow(run, loop)
                result |= {"steps": loop.step, "seconds": sum(line.get("seconds", 0.0) for line in log)}
            loop.held_out = held_out.subset(run.plan.held_out(case.seed))
            validation = loop.validate()
            result |= {"velocity_error": validation["error"], "at": validation["at"]}
            run.write(str((folder(run, case) / RESULT).relative_to(run.out)), result)
            run.say(f"{case.name}: velocity error {result['velocity_error']:.3%}")


def export_shipped(run: Run) -> None:
    """The first seed's student by `SHIPPED` at the highest sparsity, in ComfyUI's scheme: `STUDENT_FILE`."""
    shipped = next(
        case for case in cases(run) if (case.arm.name, case.sparsity) == (SHIPPED, max(run.plan.sparsities))
    )
    export(folder(run, shipped), run.out / STUDENT_FILE, DIFF_FILE, base=base_folder(run), dtype="fp16")


def train_demo(run: Run) -> None:
    """The demo's student, exported."""
    case, students = demo_case(run), Students(run)
    students.become(case, trained=False)
    follow(run, Distillation(students.options(case), students.pair, latents.load(run, SHORT, latents.COPIES)))
    export(folder(run, case), run.out / DEMO_STUDENT_FILE, DIFF_FILE, base=base_folder(run), dtype="fp16")
