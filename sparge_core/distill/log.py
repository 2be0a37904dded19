"""Where a run's records go: log.jsonl, TensorBoard, a progress bar, and a picture of the curves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LOG = "log.jsonl"
CURVE = "curve.png"

# Picture, in pixels.
WIDTH, PANEL = 760, 260
LEFT, RIGHT, TOP, GAP = 84, 20, 40, 44
FONT_SIZE = 14
BACKGROUND, INK, GRID = (255, 255, 255), (32, 32, 32), (222, 222, 222)
PALE, COLOUR = (170, 190, 220), (31, 84, 160)
SMOOTHING = 25  # steps over which the loss's bold line is averaged: single steps differ by their timestep


Points = Sequence[tuple[int, float]]  # steps and values


class JsonLines:
    """log.jsonl of a run: one record a line, those behind the step at which it goes on cut off."""

    def __init__(self, out: Path, step: int) -> None:
        self.path = out / LOG
        kept = [record for record in read_records(out) if record["step"] <= step and step > 0]
        fresh = self.path.with_name(LOG + ".partial")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(fresh, self.path)

    def write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_records(out: Path) -> list[dict[str, Any]]:
    """The records in a run's folder. A line that a kill cut short is left out."""
    path = out / LOG
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


class TensorBoard:
    """The same numbers for TensorBoard, in `out`/tensorboard."""

    def __init__(self, out: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, record: dict[str, Any]) -> None:
        for name in ("loss", "norm", "rate", "seconds"):
            if name in record:
                self._writer.add_scalar(f"train/{name}", record[name], record["step"])
        if validation := record.get("validation"):
            self._writer.add_scalar("validation/error", validation["error"], record["step"])
            for t, error in validation["at"].items():
                self._writer.add_scalar(f"validation/error at t={t}", error, record["step"])

    def close(self) -> None:
        self._writer.close()


def describe(record: dict[str, Any]) -> str:
    """A record in a few words."""
    parts = [f"loss {record['loss']:.4g}"] if "loss" in record else []
    if validation := record.get("validation"):
        parts.append(f"velocity error {validation['error']:.3%}")
    return ", ".join(parts)


def plot(records: Iterable[dict[str, Any]], title: str = "") -> np.ndarray:
    """Picture of a run, float32 (height, width, 3) in [0, 1]: its loss, and below the validation's error.

    Both on logarithmic axes. Needs Pillow, which diffusers and ComfyUI bring.
    """
    from PIL import Image, ImageDraw, ImageFont  # type: ignore[import-not-found,unused-ignore]

    records = list(records)
    losses = [(r["step"], r["loss"]) for r in records if r.get("loss", 0) > 0]
    errors = [(r["step"], r["validation"]["error"]) for r in records if "validation" in r]
    errors = [point for point in errors if point[1] > 0]
    panels = [("loss", losses, _smooth(losses))] if losses else []
    panels += [("velocity error on held-out samples, relative", errors, errors)] if errors else []
    height = TOP + max(len(panels), 1) * (PANEL + GAP)
    image = Image.new("RGB", (WIDTH, height), BACKGROUND)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE)
    draw.text((LEFT, 10), title or "Velocity distillation", INK, font)
    for number, (name, points, bold) in enumerate(panels):
        top = TOP + number * (PANEL + GAP)
        _panel(draw, font, top, name, points, bold)
    return np.asarray(image, dtype=np.float32) / 255.0


def _panel(draw: Any, font: Any, top: int, name: str, points: Points, bold: Points) -> None:
    """One curve in a frame that starts `top` pixels down."""
    values = [math.log10(value) for _, value in points]
    low, high = math.floor(min(values) * 4) / 4, math.ceil(max(values) * 4) / 4
    high = max(high, low + 0.25)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    inner = (LEFT, top + FONT_SIZE + 8, WIDTH - RIGHT, top + PANEL)

    def place(point: tuple[int, float]) -> tuple[float, float]:
        x = inner[0] + (point[0] - first) / (last - first) * (inner[2] - inner[0])
        y = inner[3] - (math.log10(point[1]) - low) / (high - low) * (inner[3] - inner[1])
        return x, y

    draw.text((inner[0], top), name, INK, font)
    for tick in np.linspace(low, high, 5):
        y = place((first, 10.0**tick))[1]
        draw.line((inner[0], y, inner[2], y), GRID)
        draw.text((inner[0] - 8, y), f"{10.0**tick:.3g}", INK, font, anchor="rm")
    for step in np.linspace(first, last, 6).round().astype(int):
        draw.text((place((int(step), 10.0**low))[0], inner[3] + 6), str(step), INK, font, anchor="mt")
    draw.rectangle(inner, outline=INK)
    draw.line([place(point) for point in points], PALE, 1)
    draw.line([place(point) for point in bold], COLOUR, 3)


def _smooth(points: Points) -> Points:
    """Running mean over the last SMOOTHING values."""
    values = np.array([value for _, value in points])
    sums = np.concatenate(([0.0], values.cumsum()))
    return [
        (step, float((sums[i + 1] - sums[max(0, i + 1 - SMOOTHING)]) / min(i + 1, SMOOTHING)))
        for i, (step, _) in enumerate(points)
    ]


def write_curve(out: Path, title: str = "") -> Path:
    """The picture of the run in `out`, beside its log."""
    from PIL import Image

    pixels = (plot(read_records(out), title) * 255).round().astype(np.uint8)
    path = out / CURVE
    Image.fromarray(pixels).save(path)
    return path
