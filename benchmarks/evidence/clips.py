"""Synthetic video with captions: textured things that move, turn, bounce and hide each other.

Every clip is a function of a seed and its number: what is in it is drawn on the CPU, so that each device
shows the same, and rendered in batches on any device. Things keep their size in pixels whatever that of the
frame, so that a larger clip shows more, not larger things.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FRAMES_A_SECOND = 16.0  # of Wan2.1's clips
MAX_THINGS = 3

COLOURS = {
    "red": (0.90, 0.16, 0.14),
    "green": (0.20, 0.72, 0.24),
    "blue": (0.16, 0.34, 0.92),
    "yellow": (0.96, 0.84, 0.16),
    "purple": (0.62, 0.22, 0.80),
    "orange": (0.97, 0.53, 0.10),
    "white": (0.95, 0.95, 0.95),
}
# Corners, how far the sides are drawn in between them (a star's), and the share of a hole in the middle.
SHAPES = {
    "disc": (64, 0.0, 0.0),
    "ring": (64, 0.0, 0.5),
    "square": (4, 0.0, 0.0),
    "triangle": (3, 0.0, 0.0),
    "star": (5, 0.55, 0.0),
}
TEXTURES = ("plain", "striped", "checkered", "dotted")
SIZES = {"small": (24.0, 34.0), "large": (42.0, 58.0)}  # radius in pixels
MOTIONS = ("moving left", "moving right", "moving up", "moving down", "bouncing", "circling", "falling")
GROUNDS = {
    "grey": (0.46, 0.47, 0.50),
    "brown": (0.46, 0.34, 0.24),
    "teal": (0.16, 0.42, 0.44),
    "navy": (0.12, 0.15, 0.32),
}
PATTERNS = ("smooth", "striped", "checkered", "cloudy")
PANS = {"": 0.0, "panning left": -1.0, "panning right": 1.0}
LIGHTS = {"": (1.0, 1.0), "getting darker": (1.0, 0.4), "getting brighter": (0.4, 1.0)}

TEXTURE_WAVES = 5.0  # waves across a thing's radius, in radians
PAN_SPEED = 40.0  # pixels a second
PULL = 260.0  # of what falls, pixels a second squared
SHADE = 0.45  # brightness of a texture's dark half
DEPTH = 0.25  # by how much a thing darkens from its middle to its rim


@dataclass(frozen=True)
class Thing:
    """start: its centre's place, as a share of where it may be; speed, spin: pixels and radians a second."""

    size: str
    texture: str
    colour: str
    shape: str
    motion: str
    radius: float
    start: tuple[float, float]
    speed: float
    heading: float
    angle: float
    spin: float

    @property
    def caption(self) -> str:
        return f"a {self.size} {self.texture} {self.colour} {self.shape} {self.motion}"


@dataclass(frozen=True)
class Scene:
    """things: the later ones are nearer and hide the earlier ones. waves: (4, 3), of a cloudy ground."""

    things: tuple[Thing, ...]
    ground: str
    pattern: str
    pan: str
    light: str
    waves: np.ndarray

    @property
    def caption(self) -> str:
        parts = [thing.caption for thing in self.things]
        parts.append(f"over {self.pattern} {self.ground} ground")
        parts += [part for part in (self.pan, self.light) if part]
        return ", ".join(parts)


def scene(seed: int, purpose: int, number: int) -> Scene:
    """The scene of a clip. purpose: sets of clips for different purposes share none."""
    random = np.random.default_rng([seed, purpose, number])

    def one(names: Sequence[str]) -> str:
        return names[int(random.integers(len(names)))]

    def thing() -> Thing:
        size = one(list(SIZES))
        return Thing(
            size=size,
            texture=one(TEXTURES),
            colour=one(list(COLOURS)),
            shape=one(list(SHAPES)),
            motion=one(MOTIONS),
            radius=random.uniform(*SIZES[size]),
            start=(random.uniform(), random.uniform()),
            speed=random.uniform(40, 110),
            heading=random.uniform(0, 2 * math.pi),
            angle=random.uniform(0, 2 * math.pi),
            spin=random.choice((-1, 1)) * random.uniform(0.3, 1.5),
        )

    things = tuple(thing() for _ in range(random.integers(1, MAX_THINGS + 1)))
    waves = random.uniform(-1, 1, (4, 3))
    # Most cameras and lights stay as they are, so that the captions that tell of a change mean something.
    pan = one(list(PANS)) if random.uniform() < 0.5 else ""
    light = one(list(LIGHTS)) if random.uniform() < 0.4 else ""
    return Scene(things, one(list(GROUNDS)), one(PATTERNS), pan, light, waves)


def track(thing: Thing, frames: int, height: int, width: int) -> np.ndarray:
    """(frames, 2): x and y of a thing's centre in pixels; it turns back where its rim meets the frame's."""
    time = np.arange(frames) / FRAMES_A_SECOND
    room = np.maximum(np.array([width, height]) - 2 * thing.radius, 1.0)
    start = np.array(thing.start) * room
    if thing.motion == "circling":
        orbit = np.minimum(40.0, room / 2)
        middle = orbit + np.array(thing.start) * (room - 2 * orbit)
        turn = thing.heading + thing.speed / 40.0 * time
        place = middle + orbit * np.stack((np.cos(turn), np.sin(turn)), 1)
    elif thing.motion == "falling":  # and bouncing off the lower edge, without loss
        period = 2 * math.sqrt(2 * room[1] / PULL)
        since_top = (time + (thing.start[1] + 0.5) * period) % period - period / 2
        place = np.stack((start[0] + 0 * time, 0.5 * PULL * since_top**2), 1)
    else:
        towards = {
            "moving left": (-1.0, 0.0),
            "moving right": (1.0, 0.0),
            "moving up": (0.0, -1.0),
            "moving down": (0.0, 1.0),
            "bouncing": (math.cos(thing.heading), math.sin(thing.heading)),
        }[thing.motion]
        place = start + thing.speed * time[:, None] * np.array(towards)
        if thing.motion == "bouncing":
            place = room - np.abs(place % (2 * room) - room)
        else:  # leaves on one side and comes back on the other
            span = room + 4 * thing.radius
            place = (place + 2 * thing.radius) % span - 2 * thing.radius
    return thing.radius + place


def render(scenes: Sequence[Scene], frames: int, height: int, width: int, device: torch.device) -> Tensor:
    """Videos (B, 3, frames, height, width) of the scenes, fp32 in [-1, 1]."""
    y = torch.arange(height, device=device, dtype=torch.float32).view(1, 1, -1, 1) + 0.5
    x = torch.arange(width, device=device, dtype=torch.float32).view(1, 1, 1, -1) + 0.5
    time = torch.arange(frames, device=device, dtype=torch.float32) / FRAMES_A_SECOND
    video = _ground(scenes, x, y, time)
    for place in range(MAX_THINGS):
        present = [b for b, one in enumerate(scenes) if place < len(one.things)]
        if present:
            cover, colour = _thing([scenes[b].things[place] for b in present], x, y, time, height, width)
            video[present] = torch.lerp(video[present], colour, cover)
    light = torch.tensor([LIGHTS[one.light] for one in scenes], device=device)
    progress = (torch.arange(frames, device=device) / max(frames - 1, 1))[None]
    brightness = torch.lerp(light[:, :1], light[:, 1:], progress)
    return (video * brightness[:, None, :, None, None]) * 2 - 1


def _ground(scenes: Sequence[Scene], x: Tensor, y: Tensor, time: Tensor) -> Tensor:
    """(B, 3, T, H, W): the ground, which a panning camera moves."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=x.device, dtype=torch.float32).view(-1, 1, 1, 1)

    shift = column([PANS[one.pan] * PAN_SPEED for one in scenes]) * time.view(1, -1, 1, 1)
    across = x + shift  # (B, T, 1, W)
    kinds = [PATTERNS.index(one.pattern) for one in scenes]
    chosen = {name: column([float(kind == i) for kind in kinds]) for i, name in enumerate(PATTERNS)}
    waves = torch.tensor(np.stack([one.waves for one in scenes]), device=x.device, dtype=torch.float32)
    cloudy = sum(
        torch.sin(
            waves[:, i, 0].view(-1, 1, 1, 1) * across / 24
            + waves[:, i, 1].view(-1, 1, 1, 1) * y / 24
            + math.pi * waves[:, i, 2].view(-1, 1, 1, 1)
        )
        for i in range(waves.shape[1])
    )
    stripes, rows = torch.sin(across * (math.pi / 40)), torch.sin(y * (math.pi / 40))
    value = (
        chosen["smooth"] * (y / y.max() - 0.5)
        + chosen["striped"] * _edge(stripes, 12.0)
        + chosen["checkered"] * _edge(stripes * rows, 12.0)
        + chosen["cloudy"] * 0.4 * cloudy
    )
    brightness = 1.0 + 0.3 * value  # (B, T, H, W)
    colours = torch.tensor([GROUNDS[one.ground] for one in scenes], device=x.device)
    return (colours.view(-1, 3, 1, 1, 1) * brightness[:, None]).clamp_(0, 1)


def _thing(
    things: Sequence[Thing], x: Tensor, y: Tensor, time: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """One thing of each of B clips: cover (B, 1, T, H, W) in [0, 1], and colour (B, 3, T, H, W)."""
    device = x.device

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32).view(-1, 1, 1, 1)

    tracks = np.stack([track(thing, len(time), height, width) for thing in things])
    places = torch.tensor(tracks, device=device, dtype=torch.float32)
    radius = column([thing.radius for thing in things])
    spin = column([thing.spin for thing in things])
    turned = column([thing.angle for thing in things]) + spin * time.view(1, -1, 1, 1)
    dx = (x - places[..., 0, None, None]) / radius
    dy = (y - places[..., 1, None, None]) / radius
    cos, sin = turned.cos(), turned.sin()
    u, v = cos * dx + sin * dy, cos * dy - sin * dx
    rho = torch.hypot(u, v)

    corners, inset, hole = (column([SHAPES[t.shape][i] for t in things]) for i in range(3))
    share = torch.atan2(v, u) * corners / (2 * math.pi)
    share = share - share.floor()  # 0 at a corner, 1/2 in the middle of a side
    polygon = torch.cos(math.pi / corners) / torch.cos((share - 0.5) * (2 * math.pi / corners))
    star = 1 - inset * (1 - (2 * share - 1).abs())
    rim = torch.where(inset > 0, star, polygon)
    cover = ((rim - rho) * radius + 0.5).clamp(0, 1) * ((rho - hole) * radius + 0.5).clamp(0, 1)

    textures = [TEXTURES.index(thing.texture) for thing in things]
    chosen = {name: column([float(kind == i) for kind in textures]) for i, name in enumerate(TEXTURES)}
    along, across = u * TEXTURE_WAVES, v * TEXTURE_WAVES
    wave = (
        chosen["plain"]
        + chosen["striped"] * along.sin()
        + chosen["checkered"] * along.sin() * across.sin()
        + chosen["dotted"] * ((1.6 * along).cos() + (1.6 * across).cos() - 0.6)
    )
    bright = torch.lerp(torch.full_like(wave, SHADE), torch.ones_like(wave), 0.5 + 0.5 * _edge(wave, 6.0))
    bright = bright * (1 - DEPTH * rho.clamp(max=1))
    colours = torch.tensor([COLOURS[thing.colour] for thing in things], device=device).view(-1, 3, 1, 1, 1)
    return cover[:, None], colours * bright[:, None]


def _edge(wave: Tensor, sharpness: float) -> Tensor:
    """A wave in [-1, 1] made into two levels with soft edges between them."""
    return (wave * sharpness).clamp(-1, 1)
