"""What a run did: sparsity by layer and step, dense calls by reason, time; as numbers, text and a picture.

Recording never waits for the device: sparsity is summed there, times come from events.
"""

from __future__ import annotations

import textwrap
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import SparseConfig
from .geometry import target_blocks, top_k_blocks
from .mask import BlockMask


class Timer:
    """Time of the work that `device` is given between construction and `stop`, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._mark()
        self._end = self._start

    def stop(self) -> None:
        self._end = self._mark()

    def finished(self) -> bool:
        """Whether `milliseconds` would not wait."""
        return isinstance(self._end, float) or self._end.query()

    def milliseconds(self) -> float:
        """The time; waits for the device."""
        if isinstance(self._start, float) or isinstance(self._end, float):
            return (self._end - self._start) * 1e3  # type: ignore[operator]
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class RunStatistics:
    """Statistics of one run of a model with these attention `layers` (names) over `steps` sampling steps."""

    def __init__(self, layers: Sequence[str], steps: int) -> None:
        self.layers = tuple(layers)
        self.steps = steps
        shape = (len(self.layers), steps)
        self._rows = {name: row for row, name in enumerate(self.layers)}
        self._pairs = np.zeros(shape)  # token pairs of the sparse calls, skipped ones included
        self._skipped: dict[
            torch.device, Tensor
        ] = {}  # token pairs that they skipped, float32, on each device
        self._dense_map = np.zeros(shape, dtype=int)
        self._dense_calls: Counter[str] = Counter()
        self._sparse_calls = 0
        self._floor_calls = 0
        self._running: deque[tuple[bool, Timer]] = deque()
        self._milliseconds = {True: 0.0, False: 0.0}  # of sparse and of dense calls

    def prepare(self, device: torch.device) -> None:
        """Allocate what recording on `device` needs, so that no call has to."""
        if device not in self._skipped:
            self._skipped[device] = torch.zeros(self._pairs.shape, device=device)

    def record_sparse(
        self, layer: str, step: int, mask: BlockMask, config: SparseConfig, timer: Timer | None = None
    ) -> None:
        """A sparse call: its mask, the settings that made it, the timer started before it (stopped here)."""
        self._time(True, timer)
        batch, heads, n_q = mask.counts.shape
        pairs = float(batch * heads * mask.q_len * mask.k_len)
        cell = (self._rows[layer], step)
        self.prepare(mask.counts.device)
        self._skipped[mask.counts.device][cell].add_(mask.sparsity, alpha=pairs)
        self._pairs[cell] += pairs
        self._sparse_calls += 1
        if config.sparsity > 0.0:
            floor = heads * n_q * top_k_blocks(config.top_k, mask.n_k)
            self._floor_calls += floor > target_blocks(config.sparsity, heads * n_q * mask.n_k)

    def record_dense(self, layer: str, step: int, reason: str, timer: Timer | None = None) -> None:
        """A dense call, why it was dense, and the timer started before it (stopped here)."""
        self._time(False, timer)
        self._dense_calls[reason] += 1
        self._dense_map[self._rows[layer], step] += 1

    def _time(self, sparse: bool, timer: Timer | None) -> None:
        if timer is not None:
            timer.stop()
            self._running.append((sparse, timer))
        while self._running and self._running[0][1].finished():
            self._collect()

    def _collect(self) -> None:
        sparse, timer = self._running.popleft()
        self._milliseconds[sparse] += timer.milliseconds()

    def summary(self) -> dict[str, Any]:
        """JSON-able account of the run so far; waits for the device.

        sparsity: share of token pairs that the sparse calls skipped, None without any.
        sparsity_map: the same by layer and step, None where no call was sparse; dense_map: dense calls there.
        sparse_calls, dense_calls (by reason), floor_calls (whose Top-k floor alone exceeds the target
        sparsity's budget), attention_ms (all timed calls), sparse_ms, dense_ms, layers (names), steps.
        """
        while self._running:
            self._collect()
        skipped = np.zeros(self._pairs.shape)
        for tensor in self._skipped.values():
            skipped += tensor.cpu().double().numpy()
        cells = [
            [float(s / p) if p else None for s, p in zip(*rows, strict=True)]
            for rows in zip(skipped, self._pairs, strict=True)
        ]
        return {
            "sparsity": float(skipped.sum() / self._pairs.sum()) if self._sparse_calls else None,
            "sparse_calls": self._sparse_calls,
            "dense_calls": dict(self._dense_calls),
            "floor_calls": self._floor_calls,
            "attention_ms": sum(self._milliseconds.values()),
            "sparse_ms": self._milliseconds[True],
            "dense_ms": self._milliseconds[False],
            "layers": list(self.layers),
            "steps": self.steps,
            "sparsity_map": cells,
            "dense_map": self._dense_map.tolist(),
        }


def describe(summary: dict[str, Any]) -> str:
    """The summary in a user's words, one line a fact."""
    sparse, skipped = summary["sparse_calls"], summary["sparsity"]
    lines = [
        f"Sparse calls: {sparse}, which skipped {skipped:.1%} of the work."
        if sparse
        else "Sparse calls: none."
    ]
    lines.append(f"Dense calls: {sum(summary['dense_calls'].values()) or 'none.'}")
    by_count = sorted(summary["dense_calls"].items(), key=lambda item: -item[1])
    lines += [f"  {count}: {reason}" for reason, count in by_count]
    if summary["floor_calls"]:
        lines.append(
            f"Calls whose top_k alone keeps more than the target sparsity allows: {summary['floor_calls']}."
        )
    lines.append(
        f"Time in attention: {summary['attention_ms']:.0f} ms "
        f"({summary['sparse_ms']:.0f} sparse, {summary['dense_ms']:.0f} dense)."
    )
    return "\n".join(lines)


# Picture, in pixels.
MARGIN = 24
AXIS = 92  # layer names stand left of the map
MAP_WIDTH, MAP_HEIGHT = 720, 480
BAR_WIDTH = 18
LINE_HEIGHT = 20
TEXT_WIDTH = 110  # characters
FONT_SIZE = 14

BACKGROUND = (255, 255, 255)
INK = (32, 32, 32)
DENSE_GREY = (190, 190, 190)
# Sparsity 0, 1/4, … 1: dark to bright, so that the picture also reads without colour.
COLOURS = np.array([(48, 18, 84), (58, 82, 139), (32, 144, 141), (94, 201, 98), (253, 231, 37)], dtype=float)


def plot(summary: dict[str, Any]) -> np.ndarray:
    """Picture of a summary, float32 (height, width, 3) in [0, 1]: sparsity by layer (down) and step (right).

    Grey cells ran dense, white ones did not run. Needs Pillow, which ComfyUI always has.
    """
    from PIL import Image, ImageDraw, ImageFont  # type: ignore[import-not-found,unused-ignore]

    text = [row for line in describe(summary).splitlines() for row in textwrap.wrap(line, TEXT_WIDTH)]
    top = MARGIN + 2 * LINE_HEIGHT
    left = MARGIN + AXIS
    bottom = top + MAP_HEIGHT
    right = left + MAP_WIDTH
    width = right + MARGIN + BAR_WIDTH + AXIS
    height = bottom + 3 * LINE_HEIGHT + len(text) * LINE_HEIGHT + MARGIN

    image = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE)
    cells = Image.fromarray(_cell_colours(summary))
    image.paste(cells.resize((MAP_WIDTH, MAP_HEIGHT), Image.Resampling.NEAREST), (left, top))
    draw.rectangle((left - 1, top - 1, right, bottom), outline=INK)
    draw.text((left, MARGIN), "Sparsity of each attention layer at each step (grey: dense)", INK, font)

    layers, steps = summary["layers"], summary["steps"]
    for row in _ticks(len(layers), MAP_HEIGHT // LINE_HEIGHT):
        y = top + (row + 0.5) * MAP_HEIGHT / len(layers)
        draw.text((left - 8, y), _shortened(layers[row]), INK, font, anchor="rm")
    for step in _ticks(steps, MAP_WIDTH // (2 * LINE_HEIGHT)):
        x = left + (step + 0.5) * MAP_WIDTH / steps
        draw.text((x, bottom + 6), str(step + 1), INK, font, anchor="mt")
    draw.text(((left + right) / 2, bottom + LINE_HEIGHT + 6), "step", INK, font, anchor="mt")

    bar = Image.fromarray(_colours(np.linspace(1.0, 0.0, MAP_HEIGHT))[:, None])
    image.paste(bar.resize((BAR_WIDTH, MAP_HEIGHT)), (right + MARGIN, top))
    for share in np.linspace(0.0, 1.0, 5):
        y = bottom - share * MAP_HEIGHT
        draw.text((right + MARGIN + BAR_WIDTH + 8, y), f"{share:.0%}", INK, font, anchor="lm")

    for number, line in enumerate(text):
        draw.text((left, bottom + (3 + number) * LINE_HEIGHT), line, INK, font)
    return np.asarray(image, dtype=np.float32) / 255.0


def _cell_colours(summary: dict[str, Any]) -> np.ndarray:
    """uint8 (layers, steps, 3)."""
    sparsity = np.array(summary["sparsity_map"], dtype=float)  # None becomes NaN
    colours = _colours(np.nan_to_num(sparsity))
    idle = np.isnan(sparsity)
    colours[idle] = BACKGROUND
    colours[idle & (np.array(summary["dense_map"]) > 0)] = DENSE_GREY
    return colours


def _colours(shares: np.ndarray) -> np.ndarray:
    """uint8 (…, 3): colours of shares in [0, 1]."""
    stops = np.linspace(0.0, 1.0, len(COLOURS))
    channels = [np.interp(shares, stops, COLOURS[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _ticks(count: int, room: int) -> range:
    """Every n-th of `count` entries, so that at most `room` are named."""
    return range(0, count, -(-count // max(room, 1)))


def _shortened(name: str, length: int = 12) -> str:
    return name if len(name) <= length else f"…{name[1 - length :]}"
