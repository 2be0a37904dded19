"""What the phases share: the plan, the folder that they write to, the device, and how they report."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .plan import Clock, Plan

# Sets of clips, none of which has a clip of another.
SHORT, LONG, HELD_OUT, VAE = "short", "long", "held_out", "vae"
PURPOSES = {SHORT: 0, LONG: 1, HELD_OUT: 2, VAE: 3}

VAE_FILE = "evidence_vae.safetensors"
DIT_FILE = "evidence_wan.safetensors"
STUDENT_FILE = "evidence_student.safetensors"
DEMO_STUDENT_FILE = "evidence_student_short.safetensors"


@dataclass(frozen=True)
class Run:
    plan: Plan
    out: Path
    device: torch.device
    clock: Clock
    arguments: tuple[str, ...] = ()  # of the command line, for processes that do a part of the run
    seed: int | None = None  # the one that this process is for, None for all

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.plan.seeds if self.seed is None else (self.seed,)

    @property
    def dtype(self) -> str:
        """Of the computation, by the name that training options have for it."""
        return "bf16" if self.device.type == "cuda" else "fp32"  # which CPUs are far slower in

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16")

    def say(self, line: str) -> None:
        print(f"[evidence {self.clock.seconds:6.1f} s] {line}", flush=True)

    def has(self, name: str) -> bool:
        return (self.out / name).is_file()

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text(encoding="utf-8"))

    def write(self, name: str, content: Any) -> None:
        """Whole or not there, so that a file says that what it tells of is done."""
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".partial")
        fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
