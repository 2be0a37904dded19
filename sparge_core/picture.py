"""The picture of a report: what a run did, to be read at a glance when small and in detail at full size.

Needs Pillow, which ComfyUI always has.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont  # type: ignore[import-not-found,unused-ignore]

from .record import Example
from .tune import Tuning

# In pixels.
WIDTH = 1280
MARGIN = 32
GAP = 28
LABELS = 110  # names of layers, left of a map
MAP_TOP = 40  # title of a panel above it
MAP_HEIGHT = 440
HEAD_MAP_WIDTH = 340
BAR_WIDTH = 18
BAR_LABELS = 60
HEADLINE = 128
BARS_HEIGHT = 260
TILE_GAP = 8
TILE_ROWS = 480  # height that the frames of an example share
LINE = 28
NUMBER_SIZE, TITLE_SIZE, TEXT_SIZE, LABEL_SIZE = 60, 24, 20, 18
TEXT_CHARACTERS = 118  # of a line of text
TICKS = 24  # pixels that a label takes

BACKGROUND = (255, 255, 255)
PANEL = (244, 245, 247)
INK = (32, 32, 32)
FAINT = (110, 114, 120)
DENSE_GREY = (190, 190, 190)
ACCENT = (32, 144, 141)
QUERY = (228, 60, 50)
# Share 0, 1/4, … 1: dark to bright, so that the picture also reads without colour.
COLOURS = np.array([(48, 18, 84), (58, 82, 139), (32, 144, 141), (94, 201, 98), (253, 231, 37)], dtype=float)

Box = tuple[int, int, int, int]
# Its height, and what draws it at a distance from the top.
Panel = tuple[int, Callable[[ImageDraw.ImageDraw, Image.Image, int], None]]


def plot(
    summary: dict[str, Any], text: str = "", example: Example | None = None, head: int | None = None
) -> np.ndarray:
    """float32 (height, width, 3) in [0, 1] of a summary of `RunStatistics`.

    text: lines below. example: where a query block looked, shown for one head or for all (None).
    """
    panels: list[Panel] = [
        (HEADLINE, lambda draw, image, top: _headline(draw, top, summary)),
        (MAP_TOP + MAP_HEIGHT + 2 * LINE, lambda draw, image, top: _maps(draw, image, top, summary)),
    ]
    if example is not None:
        tiles = _Tiles(example, head)
        panels.append((MAP_TOP + tiles.height + LINE, tiles.draw))
    if summary["kept_mass"] is not None or summary["probe"] is not None:
        panels.append((MAP_TOP + BARS_HEIGHT + LINE, lambda draw, image, top: _bars(draw, top, summary)))
    return _stacked(panels, text)


def plot_text(text: str) -> np.ndarray:
    """float32 (height, width, 3) in [0, 1]: lines of text, where there are no numbers to show."""
    return _stacked([], text)


def plot_tuning(tuning: Tuning | None, text: str) -> np.ndarray:
    """float32 (height, width, 3) in [0, 1]: what each layer skips, its error, and `text`."""
    panels: list[Panel] = []
    if tuning is not None:
        layers = tuning.layers.values()
        charts = (
            _Chart("Attention skipped by layer", [layer.skipped for layer in layers], 1.0, ACCENT),
            _Chart(
                "Error by layer, up to the budget",
                [0.0 if layer.config is None else layer.error or 0.0 for layer in layers],
                tuning.budget,
                QUERY,
            ),
        )
        names = list(tuning.layers)
        height = MAP_TOP + BARS_HEIGHT + LINE
        panels.append((height, lambda draw, image, top: _draw_charts(draw, top, names, charts)))
    return _stacked(panels, text)


def _stacked(panels: list[Panel], text: str) -> np.ndarray:
    """float32 (height, width, 3) in [0, 1]: the panels from top to bottom, and lines of text below."""
    lines = [row for line in text.splitlines() for row in textwrap.wrap(line, TEXT_CHARACTERS) or [""]]
    panels = [*panels, (LINE * len(lines), lambda draw, image, top: _text(draw, top, lines))]
    height = 2 * MARGIN + sum(size for size, _ in panels) + GAP * (len(panels) - 1)
    image = Image.new("RGB", (WIDTH, height), BACKGROUND)
    draw, top = ImageDraw.Draw(image), MARGIN
    for size, paint in panels:
        paint(draw, image, top)
        top += size + GAP
    return np.asarray(image, dtype=np.float32) / 255.0


def map_boxes(top: int) -> tuple[Box, Box]:
    """Left, top, right and bottom of the maps by step and by head, of a panel at `top`."""
    y = top + MAP_TOP
    right = WIDTH - MARGIN - BAR_LABELS - BAR_WIDTH - GAP
    left = right - HEAD_MAP_WIDTH
    return (
        (MARGIN + LABELS, y, left - GAP, y + MAP_HEIGHT),
        (left, y, right, y + MAP_HEIGHT),
    )


def _font(size: int) -> Any:
    return ImageFont.load_default(size)


# ------------------------------------------------------------------------------------------------------------
# Panels


def _headline(draw: ImageDraw.ImageDraw, top: int, summary: dict[str, Any]) -> None:
    dense = sum(summary["dense_calls"].values())
    facts = [
        (_percent(summary["sparsity"]), "of sparse calls' work skipped"),
        (f"{summary['sparse_calls']} : {dense}", "sparse : dense calls"),
        (
            (f"{summary['speedup']:.1f} : 1", "time of a dense : sparse call")
            if summary["speedup"] is not None
            else (_duration(summary["attention_ms"]), "in attention")
        ),
        (_percent(summary["kept_mass"]), "of the softmax mass kept"),
    ]
    width = (WIDTH - 2 * MARGIN - (len(facts) - 1) * GAP // 2) / len(facts)
    for place, (number, words) in enumerate(facts):
        left = MARGIN + place * (width + GAP / 2)
        draw.rounded_rectangle((left, top, left + width, top + HEADLINE), 10, fill=PANEL)
        size = NUMBER_SIZE
        while draw.textlength(number, _font(size)) > width - GAP:
            size -= 2
        draw.text((left + width / 2, top + 52), number, INK, _font(size), anchor="mm")
        draw.text((left + width / 2, top + 104), words, FAINT, _font(TEXT_SIZE), anchor="mm")


def _maps(draw: ImageDraw.ImageDraw, image: Image.Image, top: int, summary: dict[str, Any]) -> None:
    layers, steps = summary["layers"], summary["steps"]
    by_step, by_head = map_boxes(top)
    sparsity = np.array(summary["sparsity_map"], dtype=float)  # None becomes NaN
    colours = _colours(np.nan_to_num(sparsity))
    idle = np.isnan(sparsity)
    colours[idle] = BACKGROUND
    colours[idle & (np.array(summary["dense_map"]) > 0)] = DENSE_GREY
    _map(draw, image, by_step, "Sparsity by layer and step (grey: dense)", colours)
    left, y, _, bottom = by_step
    for row in _ticks(len(layers), MAP_HEIGHT // TICKS):
        place = y + (row + 0.5) * MAP_HEIGHT / len(layers)
        draw.text((left - 8, place), _shortened(layers[row]), INK, _font(LABEL_SIZE), anchor="rm")
    _columns(draw, by_step, [str(step + 1) for step in range(steps)], "step")

    heads = max((len(row) for row in summary["sparsity_by_head"]), default=0)
    shares = np.full((len(layers), max(heads, 1)), np.nan)
    for row, values in enumerate(summary["sparsity_by_head"]):
        shares[row, : len(values)] = values
    colours = _colours(np.nan_to_num(shares))
    colours[np.isnan(shares)] = DENSE_GREY if summary["dense_calls"] else BACKGROUND
    _map(draw, image, by_head, "… and by head, all steps", colours)
    _columns(draw, by_head, [str(head) for head in range(heads)], "head")

    left = by_head[2] + GAP
    bar = Image.fromarray(_colours(np.linspace(1.0, 0.0, MAP_HEIGHT))[:, None])
    image.paste(bar.resize((BAR_WIDTH, MAP_HEIGHT)), (left, y))
    for share in np.linspace(0.0, 1.0, 5):
        place = bottom - share * MAP_HEIGHT
        draw.text((left + BAR_WIDTH + 8, place), f"{share:.0%}", INK, _font(LABEL_SIZE), anchor="lm")


def _map(draw: ImageDraw.ImageDraw, image: Image.Image, box: Box, title: str, colours: np.ndarray) -> None:
    left, top, right, bottom = box
    cells = Image.fromarray(colours).resize((right - left, bottom - top), Image.Resampling.NEAREST)
    image.paste(cells, (left, top))
    draw.rectangle((left - 1, top - 1, right, bottom), outline=FAINT)
    draw.text((left, top - MAP_TOP), title, INK, _font(TITLE_SIZE))


def _columns(draw: ImageDraw.ImageDraw, box: Box, names: Sequence[str], unit: str) -> None:
    left, _, right, bottom = box
    for column in _ticks(len(names), (right - left) // (2 * TICKS)):
        place = left + (column + 0.5) * (right - left) / len(names)
        draw.text((place, bottom + 6), names[column], INK, _font(LABEL_SIZE), anchor="mt")
    draw.text(((left + right) / 2, bottom + LINE), unit, FAINT, _font(LABEL_SIZE), anchor="mt")


class _Tiles:
    """Where a query block looked: a tile a frame, bright where tokens are looked at, the block itself red."""

    def __init__(self, example: Example, head: int | None) -> None:
        shares = example.token_shares(head)
        first, last = example.queries
        grid = example.grid
        if grid is None:  # only the order of the tokens is known
            columns = math.ceil(math.sqrt(example.tokens * 3))
            grid = (1, -(-example.tokens // columns), columns)
        self._frames, rows, columns = grid
        colours = np.full((math.prod(grid), 3), BACKGROUND, dtype=np.uint8)
        colours[: example.tokens] = _colours(shares)
        colours[first:last] = QUERY
        self._pixels = colours.reshape(self._frames, rows, columns, 3)
        looked = "all heads" if head is None else f"head {head}"
        self._title = f"Where the red tokens look: {example.layer}, step {example.step + 1}, {looked}"
        shown = (
            f"{self._frames} frames, {columns} tokens wide and {rows} high"
            if example.grid is not None
            else f"{example.tokens} tokens in their order, as the grid is unknown"
        )
        measure = "colours as above: share of the heads" if head is None else "bright: looked at"
        self._legend = f"{shown}; {measure}; the blocks kept hold {shares.mean():.1%} of all tokens"
        self._arrange(rows, columns)

    def _arrange(self, rows: int, columns: int) -> None:
        """The number of tiles in a row that makes them largest."""
        width, scale = WIDTH - 2 * MARGIN, 0.0
        for across in range(1, self._frames + 1):
            down = -(-self._frames // across)
            fits = min(
                (width - (across - 1) * TILE_GAP) / across / columns,
                (TILE_ROWS - (down - 1) * TILE_GAP) / down / rows,
            )
            if fits > scale:
                scale, self._across = fits, across
        self._tile = max(1, int(columns * scale)), max(1, int(rows * scale))
        self.height = -(-self._frames // self._across) * (self._tile[1] + TILE_GAP) - TILE_GAP

    def draw(self, draw: ImageDraw.ImageDraw, image: Image.Image, top: int) -> None:
        draw.text((MARGIN, top), self._title, INK, _font(TITLE_SIZE))
        width, height = self._tile
        top += MAP_TOP
        for frame, pixels in enumerate(self._pixels):
            down, across = divmod(frame, self._across)
            left, y = MARGIN + across * (width + TILE_GAP), top + down * (height + TILE_GAP)
            image.paste(Image.fromarray(pixels).resize(self._tile, Image.Resampling.NEAREST), (left, y))
        draw.text((MARGIN, top + self.height + 6), self._legend, FAINT, _font(LABEL_SIZE))


def _bars(draw: ImageDraw.ImageDraw, top: int, summary: dict[str, Any]) -> None:
    """Kept mass by layer and, after a probe, its error, side by side."""
    charts = []
    if summary["kept_mass"] is not None:
        masses = np.array(summary["kept_mass_map"], dtype=float)
        measured = np.isfinite(masses)
        means = np.where(measured, masses, 0.0).sum(1) / np.maximum(measured.sum(1), 1)
        charts.append(_Chart("Softmax mass kept by layer", [*means.tolist()], 1.0, ACCENT))
    if summary["probe"] is not None:
        errors = [error or 0.0 for error in summary["probe"]["error"]]
        title = "Error by layer: relative L1 of sparse against dense"
        charts.append(_Chart(title, errors, max(errors) or 1.0, QUERY))
    _draw_charts(draw, top, summary["layers"], charts)


@dataclass(frozen=True)
class _Chart:
    """A bar for each layer, from 0 to `most`."""

    title: str
    values: Sequence[float]
    most: float
    colour: tuple[int, int, int]


def _draw_charts(
    draw: ImageDraw.ImageDraw, top: int, layers: Sequence[str], charts: Sequence[_Chart]
) -> None:
    width = (WIDTH - 2 * MARGIN - (len(charts) - 1) * GAP) // len(charts)
    for place, chart in enumerate(charts):
        left = MARGIN + place * (width + GAP) + BAR_LABELS
        right, bottom = left + width - BAR_LABELS, top + MAP_TOP + BARS_HEIGHT - LINE
        draw.text((left, top), chart.title, INK, _font(TITLE_SIZE))
        for share in (0.0, 0.5, 1.0):
            y = bottom - share * (bottom - top - MAP_TOP)
            draw.line((left, y, right, y), fill=DENSE_GREY)
            draw.text(
                (left - 8, y), _percent(share * chart.most, chart.most), INK, _font(LABEL_SIZE), anchor="rm"
            )
        step = (right - left) / len(chart.values)
        for layer, value in enumerate(chart.values):
            x, y = left + layer * step, bottom - value / chart.most * (bottom - top - MAP_TOP)
            if y < bottom:
                draw.rectangle((x + 0.1 * step, y, x + 0.9 * step, bottom), fill=chart.colour)
        names = [_shortened(name.removeprefix("blocks.")) for name in layers]
        _columns(draw, (left, top, right, bottom), names, "layer")


def _text(draw: ImageDraw.ImageDraw, top: int, lines: Sequence[str]) -> None:
    for number, line in enumerate(lines):
        draw.text((MARGIN, top + number * LINE), line, INK, _font(TEXT_SIZE))


# ------------------------------------------------------------------------------------------------------------
# Small things


def _colours(shares: np.ndarray) -> np.ndarray:
    """uint8 (…, 3): colours of shares in [0, 1]."""
    stops = np.linspace(0.0, 1.0, len(COLOURS))
    channels = [np.interp(shares, stops, COLOURS[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _ticks(count: int, room: int) -> range:
    """Every n-th of `count` entries, so that at most `room` are named."""
    return range(0, count, -(-count // max(room, 1)) or 1)


def _shortened(name: str, length: int = 12) -> str:
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _percent(share: float | None, most: float = 1.0) -> str:
    """With a digit behind the point where the largest of its kind is small."""
    if share is None:
        return "–"
    return f"{share:.0%}" if most >= 0.1 else f"{share:.1%}" if most >= 0.01 else f"{share:.2%}"


def _duration(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.0f} s"
