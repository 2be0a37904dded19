"""Phase "seeds", last part: every arm samples the held-out captions from one noise, beside dense."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from sparge_core.distill.flow import noise_like
from sparge_core.distill.pair import Batch

from . import autoencoder, latents
from .latents import Clips
from .plan import SamplingPlan
from .run import HELD_OUT, Run
from .students import Students, cases, demo_case

SAMPLING = 100  # stream of the random numbers of the first noise
PATCH = (4, 8, 8)  # frames, rows and columns of a patch of `video_distance`
SCALES = (1, 2, 4)  # at which patches are taken: by how much the video is made smaller
DIRECTIONS = 256  # that patches are projected on, at each scale
DENSE = "dense"
DEMO_DENSE, DEMO_FREE = "demo-dense", "demo-training-free"
KEPT = 3  # videos of each arm of the first seed that are kept to be shown
REAL = "held-out clips"

Velocity = Callable[[Tensor, Tensor, Batch], Tensor]


@torch.no_grad()
def sample(velocity: Velocity, noise: Tensor, clips: Clips, plan: SamplingPlan) -> Tensor:
    """Latents for the captions of `clips`, by Euler's steps from t = 1 to 0 with classifier-free guidance.

    noise, and what is returned: (B, 16, T, H, W), fp32.
    """
    told = [clips.read(i) for i in range(len(clips))]
    untold = [replace(one, text=torch.zeros_like(one.text)) for one in told]
    batch = Batch(told + untold, noise.device)
    even = torch.linspace(1, 0, plan.steps + 1, dtype=torch.float64)
    times = (plan.shift * even / (1 + (plan.shift - 1) * even)).tolist()
    x = noise
    for t, following in pairwise(times):
        given = velocity(torch.cat((x, x)), torch.full((2 * len(x),), t, device=x.device), batch).float()
        with_caption, without = given.chunk(2)
        x = x + (following - t) * torch.lerp(without, with_caption, plan.guidance)
    return x


def video_distance(one: Tensor, other: Tensor, patches: int, seed: int = 0) -> float:
    """Sliced Wasserstein distance between patches in space and time of videos (B, 3, T, H, W) in [-1, 1].

    At each of 3 scales, patches of 4 × 8 × 8, at places drawn from the seed, are projected on random
    directions; the distance is the mean difference of the sorted projections, over directions and scales.
    Both sets need as many videos of one size. No network is asked: whoever has the videos can recompute it.
    """
    source = torch.Generator().manual_seed(seed)
    distances = []
    for scale in SCALES:
        small = [F.avg_pool3d(videos.float(), (1, scale, scale)) for videos in (one, other)]
        size = small[0].shape[2:]
        sides = [min(side, room) for side, room in zip(PATCH, size, strict=True)]
        places = []
        for axis, (side, room) in enumerate(zip(sides, size, strict=True)):
            start = torch.randint(room - side + 1, (patches, 1, 1, 1), generator=source)
            within = torch.arange(side).view([-1 if axis == i else 1 for i in range(3)])
            places.append((start + within).to(one.device))
        t, y, x = places
        directions = torch.randn(3 * math.prod(sides), DIRECTIONS, generator=source).to(one.device)
        directions = directions / directions.norm(dim=0)
        sorted_ones = []
        for videos in small:
            cut = videos[:, :, t, y, x]  # (B, 3, patch, 4, 8, 8)
            flat = cut.transpose(1, 2).flatten(2).flatten(0, 1)
            sorted_ones.append((flat @ directions).sort(dim=0).values)
        distances.append((sorted_ones[0] - sorted_ones[1]).abs().mean())
    return float(torch.stack(distances).mean())


def psnr(videos: Tensor, truth: Tensor) -> float:
    """Mean over videos of the peak signal-to-noise ratio, in dB, of values in [-1, 1]."""
    errors = (videos - truth).square().flatten(1).mean(1)
    return float((10 * torch.log10(4.0 / errors.clamp(min=1e-10))).mean())


def run_all(run: Run) -> None:
    """videos-SEED.json of every seed, with its results by case, and the videos of the first seed."""
    todo = [seed for seed in run.seeds if not run.has(f"videos-{seed}.json")]
    if not todo:
        return
    students = Students(run)
    for seed in todo:
        run.clock.check()
        run.write(f"videos-{seed}.json", _one_seed(run, students, seed))


def _keep(run: Run, name: str, videos: Tensor) -> None:
    frames = ((videos[:KEPT] + 1) * 127.5).round().to(torch.uint8).cpu().contiguous()
    (run.out / "videos").mkdir(exist_ok=True)
    save_file({"videos": frames}, run.out / "videos" / f"{name}.safetensors")


def run_demo(run: Run) -> None:
    """Short videos of held-out captions: dense, training-free, and by the demo's student."""
    students = Students(run)
    vae, case = autoencoder.load(run), demo_case(run)
    clips = latents.load(run, HELD_OUT).subset(range(min(KEPT, run.plan.held_out_each)))
    like = torch.empty(run.plan.short.latent)
    noise = torch.stack([noise_like(like, case.seed, place, SAMPLING) for place in clips.places]).to(
        run.device
    )
    for name, trained in ((DEMO_DENSE, None), (DEMO_FREE, False), (case.name, True)):
        students.become(case, trained=bool(trained))
        velocity = students.pair.teacher if trained is None else students.pair.student
        _keep(run, name, autoencoder.decode(run, vae, sample(velocity, noise, clips, run.plan.sampling)))


def _one_seed(run: Run, students: Students, seed: int) -> list[dict[str, Any]]:
    vae = autoencoder.load(run)
    clips = latents.load(run, HELD_OUT).subset(run.plan.held_out(seed))
    noise = torch.stack([noise_like(clips.latents[0], seed, place, SAMPLING) for place in clips.places])
    noise = noise.to(run.device)
    patches = run.plan.sampling.patches
    keep = seed == run.plan.seeds[0]

    def show(name: str, latent: Tensor) -> Tensor:
        videos = autoencoder.decode(run, vae, latent)
        if keep:
            _keep(run, name, videos)
        return videos

    truth = sample(students.pair.teacher, noise, clips, run.plan.sampling)
    dense = show(DENSE, truth)
    real = show("real", clips.latents[list(clips.places)])
    results = [
        {
            "arm": DENSE,
            "sparsity": 0.0,
            "seed": seed,
            "distance_to_real": video_distance(dense, real, patches),
        }
    ]
    for case in cases(run):
        if case.seed != seed:
            continue
        students.become(case, trained=True)
        latent = sample(students.pair.student, noise, clips, run.plan.sampling)
        videos = show(case.name, latent)
        errors = (latent - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        results.append(
            {
                "arm": case.arm.name,
                "sparsity": case.sparsity,
                "seed": seed,
                "latent_error": float(errors.mean()),
                "psnr_to_dense": psnr(videos, dense),
                "distance_to_dense": video_distance(videos, dense, patches),
                "distance_to_real": video_distance(videos, real, patches),
            }
        )
        run.say(f"{case.name}: latent error {results[-1]['latent_error']:.3f}")
    return results
