"""Phase "report": tables.json and tables.md of all seeds, and pictures and a video to look at."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from torch import Tensor

from . import autoencoder, clips
from .maps import ALL, MASS, RULES, SKEWED, UNIFORM
from .plan import RASTER, TILES
from .run import HELD_OUT, Run
from .sampling import DEMO_DENSE, DEMO_FREE, DENSE, KEPT
from .students import RESULT, Case, cases, demo_case, folder

TABLES = "tables.json"
FONT_SIZE = 13
LINE = 20  # pixels of a line of text in a picture
COLUMNS = 6  # frames of each clip in a picture
FRAME_MS = round(1000 / clips.FRAMES_A_SECOND)
MEASURES = ("velocity_error", "latent_error", "psnr_to_dense", "distance_to_dense", "distance_to_real")

Numbers = Mapping[str, float]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample deviation and the values themselves, in the order of the seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": deviation, "values": list(values)}


def over_seeds(results: Iterable[Numbers]) -> dict[str, Any]:
    """`spread` of each number that the seeds' results hold."""
    gathered: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.items():
            gathered[name].append(value)
    return {name: spread(values) for name, values in gathered.items()}


def tables(run: Run) -> dict[str, Any]:
    """All tables, from the phases' files alone."""
    maps = [run.read(f"maps-{seed}.json") for seed in run.plan.seeds]
    measured: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for seed in run.plan.seeds:
        for result in run.read(f"videos-{seed}.json"):
            measured[result["arm"], result["sparsity"]].append(result)
    for case in cases(run):
        place = run.plan.seeds.index(case.seed)
        result = run.read(str((folder(run, case) / RESULT).relative_to(run.out)))
        measured[case.arm.name, case.sparsity][place] |= {
            name: result[name] for name in ("velocity_error", "steps") if name in result
        }
    ablation = []
    for (arm, sparsity), results in measured.items():
        numbers = [{name: one[name] for name in (*MEASURES, "steps") if name in one} for one in results]
        ablation.append({"arm": arm, "sparsity": sparsity, **over_seeds(numbers)})
    return {
        "seeds": list(run.plan.seeds),
        "rules": over_seeds(one["rules"] for one in maps),
        "distillation": {
            model: over_seeds(one["distillation"][model] for one in maps) for model in maps[0]["distillation"]
        },
        "ablation": ablation,
        "orders": over_seeds(one["orders"] for one in maps),
    }


def make(run: Run, machine: Mapping[str, str], seconds: Mapping[str, float]) -> None:
    """Write tables.json and tables.md, clips.png, videos.png and videos.webp."""
    content = tables(run)
    facts = {"machine": dict(machine), "seconds": dict(seconds), "vae": run.read("vae.json")["psnr"]}
    run.write(TABLES, {**facts, "dit": run.read("dit.json"), **content})
    (run.out / "tables.md").write_text(markdown(content, run.plan.sparsities), encoding="utf-8")
    show_clips(run).save(run.out / "clips.png")
    _show_videos(run)


# ----------------------------------------------------------------------------------------------------------
# Tables


def markdown(content: Mapping[str, Any], sparsities: Sequence[float]) -> str:
    """The tables for a reader: mean ± deviation over the seeds."""
    rules, orders = content["rules"], content["orders"]
    parts = [
        f"Mean ± sample deviation over seeds {', '.join(map(str, content['seeds']))}.\n",
        "## (a) Relative L1 of the attention output, by how spread a row is\n",
        _table(
            ["sparsity", "rule", UNIFORM, SKEWED, "all rows", "sparsity reached"],
            [
                [
                    f"{s:.0%}",
                    rule,
                    *(_cell(rules[f"{rule} {s:g} {kind}"]) for kind in (UNIFORM, SKEWED, ALL, "sparsity")),
                ]
                for s in sparsities
                for rule in RULES
            ],
        ),
        "## (b) Before and after distillation\n",
        _table(
            ["model", *next(iter(content["distillation"].values()))],
            [[model, *map(_cell, numbers.values())] for model, numbers in content["distillation"].items()],
        ),
        "## (c) Against the dense teacher, on held-out clips\n",
        _table(
            ["sparsity", "arm", *(name.replace("_", " ") for name in MEASURES)],
            [
                [f"{row['sparsity']:.0%}", row["arm"], *(_cell(row.get(name)) for name in MEASURES)]
                for row in sorted(content["ablation"], key=lambda row: row["sparsity"])
            ],
        ),
        "## (d) Order of the tokens, training-free\n",
        _table(
            ["order", *(f"L1 at {s:.0%}" for s in sparsities), f"sparsity at {MASS:g} mass"],
            [
                [
                    order,
                    *(_cell(orders[f"{order} {s:g}"]) for s in sparsities),
                    _cell(orders[f"{order} sparsity at {MASS:g} mass"]),
                ]
                for order in (RASTER, TILES)
            ],
        ),
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(numbers: Mapping[str, Any] | None) -> str:
    return "–" if numbers is None else f"{numbers['mean']:.4g} ± {numbers['std']:.2g}"


# ----------------------------------------------------------------------------------------------------------
# Pictures


def show_clips(run: Run) -> Image.Image:
    """Rendered clips with their captions, and under each what the VAE makes of it."""
    vae = autoencoder.load(run)
    rows: list[tuple[str, Tensor]] = []
    for scene in autoencoder.scenes(run, HELD_OUT, range(KEPT)):
        video = clips.render([scene], *run.plan.short.video, run.device)
        with torch.no_grad(), run.autocast():
            back = vae.decode(vae.encode(video)).float()
        rows += [(scene.caption, video[0]), ("through the VAE", back[0])]
    return strips([(text, pixels(video)) for text, video in rows])


def pixels(video: Tensor) -> np.ndarray:
    """(T, H, W, 3), uint8, of a video (3, T, H, W) in [-1, 1], or of one in uint8."""
    if video.dtype != torch.uint8:
        video = ((video.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    frames: np.ndarray = video.movedim(0, -1).cpu().numpy()
    return frames


def strips(rows: Sequence[tuple[str, np.ndarray]], width: int = 240) -> Image.Image:
    """Each row: a text, and under it frames from a video's start to its end."""
    height = round(width * rows[0][1].shape[1] / rows[0][1].shape[2])
    image = Image.new("RGB", (COLUMNS * width, len(rows) * (height + LINE)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE)
    for row, (text, video) in enumerate(rows):
        top = row * (height + LINE)
        draw.text((4, top + 2), text, "black", font)
        for column, frame in enumerate(np.linspace(0, len(video) - 1, COLUMNS).round().astype(int)):
            picture = Image.fromarray(video[frame]).resize((width, height), Image.Resampling.LANCZOS)
            image.paste(picture, (column * width, top + LINE))
    return image


def _show_videos(run: Run) -> None:
    """Long clips of the first seed, dense and at the highest sparsity."""
    seed, sparsity = run.plan.seeds[0], max(run.plan.sparsities)
    arms = {arm.name: Case(arm, sparsity, seed).name for arm in run.plan.arms}
    files = {
        "dense": DENSE,
        f"training-free, {sparsity:.0%} sparse": arms["union, training-free"],
        f"distilled, {sparsity:.0%} sparse": arms["union"],
        f"diffusion loss, {sparsity:.0%} sparse": arms["union, diffusion loss"],
    }
    _show(run, "videos", files)


def show_demo(run: Run) -> None:
    """demo.png and demo.webp: short clips, dense, training-free and by the demo's student."""
    case = demo_case(run)
    files = {
        "dense": DEMO_DENSE,
        f"training-free, {case.sparsity:.0%} sparse": DEMO_FREE,
        f"distilled, {case.sparsity:.0%} sparse": case.name,
    }
    _show(run, "demo", files)


def _show(run: Run, name: str, files: Mapping[str, str]) -> None:
    """Kept videos under each other as a picture, and the first of each beside each other as an animation."""
    held = run.out / "videos"
    videos = {text: load_file(held / f"{file}.safetensors")["videos"] for text, file in files.items()}
    scenes = autoencoder.scenes(run, HELD_OUT, run.plan.held_out(run.plan.seeds[0])[:KEPT])
    rows = []
    for clip, scene in enumerate(scenes):
        for number, (text, made) in enumerate(videos.items()):
            rows.append((f"{scene.caption}: {text}" if number == 0 else text, pixels(made[clip])))
    strips(rows).save(run.out / f"{name}.png")
    save_webp(run.out / f"{name}.webp", [(text, pixels(made[0])) for text, made in videos.items()])


def save_webp(
    path: Path, videos: Sequence[tuple[str, np.ndarray]], width: int = 360, columns: int = 2
) -> None:
    """An animation of videos beside each other, so many in a row, each under its name."""
    height = round(width * videos[0][1].shape[1] / videos[0][1].shape[2])
    size = (columns * width, -(-len(videos) // columns) * (height + LINE))
    font = ImageFont.load_default(FONT_SIZE)
    frames = []
    for number in range(len(videos[0][1])):
        image = Image.new("RGB", size, "white")
        draw = ImageDraw.Draw(image)
        for place, (name, video) in enumerate(videos):
            left, top = place % columns * width, place // columns * (height + LINE)
            draw.text((left + 4, top + 2), name, "black", font)
            image.paste(Image.fromarray(video[number]).resize((width, height)), (left, top + LINE))
        frames.append(image)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0, quality=70)
