"""Draws a workflow's picture for the template browser: what it makes, over its own graph in small."""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageDraw, ImageFont

from workflow import NOTES

SIZE = (640, 360)  # pixels; the browser shows it at about half of this
MARGIN, HEADER = 24, 104
OURS = "Sparge"  # begins the types of this pack's nodes

BACKGROUND, LINK, TITLE, ABOUT = "#16181d", "#6b7280", "#f4f4f5", "#a8b0bd"
NODE, NOTE, ACCENT, ACCENT_TEXT = "#343a46", "#4a4430", "#3f9d6b", "#ffffff"
CURVE_POINTS = 16
SOURCE_TITLE = 30  # of a node's box, above its position, in the front end's pixels


def draw(graph: dict[str, Any], title: str, about: str) -> Image.Image:
    """graph: in the front end's format. title, about: two lines above it."""
    picture = Image.new("RGB", SIZE, BACKGROUND)
    pen = ImageDraw.Draw(picture)
    pen.text((MARGIN, 18), title, TITLE, ImageFont.load_default(34))
    pen.text((MARGIN, 62), about, ABOUT, ImageFont.load_default(20))

    boxes = _boxes(graph["nodes"])
    for _, source, source_slot, target, target_slot, _ in graph["links"]:
        _curve(
            pen, _slot(boxes[source], source_slot, right=True), _slot(boxes[target], target_slot, right=False)
        )
    for node in graph["nodes"]:
        box, ours = boxes[node["id"]], node["type"].startswith(OURS)
        fill = ACCENT if ours else NOTE if node["type"] in NOTES else NODE
        pen.rounded_rectangle(box, 4, fill)
        if ours:
            centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
            label = "Report" if "Report" in node["type"] else "Sparse"
            pen.text(centre, label, ACCENT_TEXT, ImageFont.load_default(18), anchor="mm")
    return picture


Box = tuple[float, float, float, float]


def _boxes(nodes: list[dict[str, Any]]) -> dict[int, Box]:
    """Each node's rectangle in the picture, under the header, all of them filling the room."""
    edges = {
        node["id"]: (
            node["pos"][0],
            node["pos"][1] - SOURCE_TITLE,
            node["pos"][0] + node["size"][0],
            node["pos"][1] + node["size"][1],
        )
        for node in nodes
    }
    left, top = (min(edge[i] for edge in edges.values()) for i in (0, 1))
    right, bottom = (max(edge[i] for edge in edges.values()) for i in (2, 3))
    across = (SIZE[0] - 2 * MARGIN) / (right - left)
    down = (SIZE[1] - HEADER - MARGIN) / (bottom - top)

    def placed(edge: Box) -> Box:
        x0, x1 = (MARGIN + (x - left) * across for x in (edge[0], edge[2]))
        y0, y1 = (HEADER + (y - top) * down for y in (edge[1], edge[3]))
        return x0, y0, x1, y1

    return {node: placed(edge) for node, edge in edges.items()}


def _slot(box: Box, slot: int, *, right: bool) -> tuple[float, float]:
    return (box[2] if right else box[0], min(box[1] + 8 + 5 * slot, box[3]))


def _curve(pen: ImageDraw.ImageDraw, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A cubic Bézier curve that leaves and arrives level, as the front end draws links."""
    (x0, y0), (x3, y3) = start, end
    reach = max(abs(x3 - x0) / 2, 12)
    points = []
    for step in range(CURVE_POINTS + 1):
        t = step / CURVE_POINTS
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
        points.append((a * x0 + b * (x0 + reach) + c * (x3 - reach) + d * x3, (a + b) * y0 + (c + d) * y3))
    pen.line(points, LINK, 2, joint="curve")
