"""Result files: what a row holds, whether a file is sound, reading and writing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cases import PATTERNS

FOLDER = Path(__file__).parent / "results"
ATTENTION = "h200-attention.json"
WAN_STEP = "h200-wan-step.json"
START = "h200-start.json"

PARTS = ("mask", "kernel", "total", "backward", "fwd+bwd")
STATUSES = ("ok", "not installed", "unsupported", "failed", "wrong", "out of time")
MACHINE = ("gpu", "driver", "torch", "commit", "date")


@dataclass(frozen=True)
class Row:
    """One measurement, or why there is none (`status` other than "ok": no numbers, and `note` says more).

    sparsity: what was asked; achieved: 1 - kept token pairs / all token pairs of the blocks that were used.
    part: "kernel" = attention alone over given blocks, "mask" = choosing the blocks, "total" = both;
    "backward" = the gradients of q, k and v alone, "fwd+bwd" = all three.
    ms: median of one call; tflops: operations * D * kept token pairs / ms, with 4 operations forward and 10
    backward, whatever is computed twice; host_us: host time to issue one call; peak_mb: memory beyond inputs
    and outputs, in 10^6 bytes; rel_err: worst sampled block against float32.
    """

    shape: str
    method: str
    part: str
    sparsity: float | None
    pattern: str | None
    dtype: str
    ms: float | None = None
    tflops: float | None = None
    peak_mb: float | None = None
    host_us: float | None = None
    rel_err: float | None = None
    achieved: float | None = None
    config: str = ""
    status: str = "ok"
    note: str = ""


@dataclass(frozen=True)
class StepRow:
    """One denoising step of a whole model, in milliseconds; factor: the same mode's dense step over this one.

    attention_ms: self-attention, its mask included; linear_ms: the linear layers; rest_ms: everything else.
    clock_mhz, power_w: means over the timed steps.
    """

    shape: str
    method: str  # "dense" = the host's own attention, "ours"
    mode: str  # "eager" or "compiled"
    sparsity: float
    dtype: str
    step_ms: float
    attention_ms: float
    linear_ms: float
    rest_ms: float
    factor: float
    peak_mb: float | None = None
    clock_mhz: float | None = None
    power_w: float | None = None
    config: str = ""


@dataclass(frozen=True)
class StartRow:
    """Seconds of the first attention call of a process, with an empty or a filled cache of kernels."""

    cache: str
    start_s: float


Rule = tuple[tuple[type, ...], tuple[str, ...] | None]
NUMBER: Rule = ((int, float), None)
OPTIONAL: Rule = ((int, float, type(None)), None)
TEXT: Rule = ((str,), None)

ROW_RULES: dict[str, Rule] = {
    "shape": TEXT,
    "method": TEXT,
    "part": ((str,), PARTS),
    "sparsity": OPTIONAL,
    "pattern": ((str, type(None)), PATTERNS),
    "dtype": TEXT,
    "ms": OPTIONAL,
    "tflops": OPTIONAL,
    "peak_mb": OPTIONAL,
    "host_us": OPTIONAL,
    "rel_err": OPTIONAL,
    "achieved": OPTIONAL,
    "config": TEXT,
    "status": ((str,), STATUSES),
    "note": TEXT,
}
STEP_RULES: dict[str, Rule] = {
    "shape": TEXT,
    "method": ((str,), ("dense", "ours")),
    "mode": ((str,), ("eager", "compiled")),
    "sparsity": NUMBER,
    "dtype": TEXT,
    "step_ms": NUMBER,
    "attention_ms": NUMBER,
    "linear_ms": NUMBER,
    "rest_ms": NUMBER,
    "factor": NUMBER,
    "peak_mb": OPTIONAL,
    "clock_mhz": OPTIONAL,
    "power_w": OPTIONAL,
    "config": TEXT,
}
START_RULES: dict[str, Rule] = {"cache": ((str,), ("empty", "filled")), "start_s": NUMBER}


def problems(data: Mapping[str, Any]) -> list[str]:
    """What is wrong with a result file's content, one sentence each; empty when it is sound."""
    found = [f"machine.{key} is missing" for key in MACHINE if not data.get("machine", {}).get(key)]
    rows = data.get("rows") or []
    if not rows:
        found.append("there are no rows")
    for number, row in enumerate(rows):
        rules = STEP_RULES if "step_ms" in row else START_RULES if "start_s" in row else ROW_RULES
        found += [f"row {number}: {problem}" for problem in _row_problems(row, rules)]
    return found


def _row_problems(row: Mapping[str, Any], rules: Mapping[str, Rule]) -> list[str]:
    found = [f"{key} is missing" for key in rules if key not in row]
    found += [f"{key} is not a known field" for key in row if key not in rules]
    for key, (types, allowed) in rules.items():
        value = row.get(key)
        if key in row and (isinstance(value, bool) or not isinstance(value, types)):
            found.append(f"{key} is {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            found.append(f"{key} is {value}")
        elif allowed and value is not None and value not in allowed:
            found.append(f"{key} is {value!r}, not one of {', '.join(allowed)}")
    measured = row.get("ms") and row.get("sparsity") is not None and row.get("pattern") is not None
    if row.get("status") == "ok" and not measured:
        found.append("a measured row needs ms, sparsity and pattern")
    return found


def write(path: Path, machine: Mapping[str, str], rows: list[Row] | list[StepRow] | list[StartRow]) -> None:
    """Writes a result file, one row a line; ValueError when the content is not sound."""
    rounded = [{key: _rounded(value) for key, value in asdict(row).items()} for row in rows]
    data = {"machine": dict(machine), "rows": rounded}
    if found := problems(data):
        raise ValueError("These results are not sound: " + "; ".join(found[:5]))
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in data["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(data["machine"], ensure_ascii=False)
    path.write_text(f'{{"machine": {head},\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The content of a result file; ValueError when it is not sound."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found := problems(data):
        raise ValueError(f"{path.name} is not sound: " + "; ".join(found[:5]))
    return data


def _rounded(value: object) -> object:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
