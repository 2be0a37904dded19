"""Phases "vae" and "latents": train the VAE on rendered clips, export it, and encode the clips with it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import clips
from .plan import LATENT_CHANNELS, Grid
from .run import HELD_OUT, LONG, PURPOSES, SHORT, VAE, VAE_FILE, Run
from .vae import Residual, Vae

WARMUP = 50  # steps
LOG_EVERY = 20  # steps, since reading a loss waits for the device
MEASURED_CLIPS = 32  # by which the latent's mean and deviation are taken
FEW_PIXELS = 10_000_000  # that are rendered or encoded at once
LOG_VARIANCE = (-20.0, 10.0)  # within which it is kept
FIRST_LOG_VARIANCE = -4.0


@cache
def wan_latent(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation (16,) that the latents of Wan's VAE have, by which every host normalises them."""
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        config: Any = AutoencoderKLWan().config
    return torch.tensor(config.latents_mean, device=device), torch.tensor(config.latents_std, device=device)


def scenes(run: Run, purpose: str, numbers: range) -> list[clips.Scene]:
    return [clips.scene(run.plan.seed, PURPOSES[purpose], number) for number in numbers]


def train(run: Run) -> None:
    """The VAE, in ComfyUI's scheme, fp16: `VAE_FILE`; vae.json tells of its training."""
    plan = run.plan.vae
    torch.manual_seed(run.plan.seed)
    vae = _random_vae(plan.width).to(run.device)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=plan.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    crops = _crops(run)
    started, step, progress, log = time.monotonic(), 0, 0.0, []
    while progress < 1.0:
        rate = plan.learning_rate * min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = max(rate, 1e-6)
        video = next(crops)
        with run.autocast():
            mean, log_variance = vae.distribution(video)
            log_variance = log_variance.float().clamp(*LOG_VARIANCE)
            latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp().to(mean.dtype)
            back = vae.decode(latent).float()
        kl = 0.5 * (mean.float().square() + log_variance.exp() - 1 - log_variance).mean()
        error = (back - video).abs().mean()
        loss = error + F.mse_loss(back, video) + plan.gradient * _gradient_error(back, video) + plan.kl * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % LOG_EVERY == 0 or step == plan.steps:
            log.append({"step": step, "l1": error.item(), "kl": kl.item()})
            if step % (10 * LOG_EVERY) == 0:
                run.say(f"vae step {step}: L1 {log[-1]['l1']:.4f}, KL {log[-1]['kl']:.3f}")
            progress = max(progress, (time.monotonic() - started) / (60 * plan.minutes))
        progress = max(progress, step / plan.steps)
    _normalise(run, vae)
    weights = {name: weight.detach().half().cpu().contiguous() for name, weight in vae.state_dict().items()}
    save_file(weights, run.out / VAE_FILE, {"format": "pt"})
    run.write("vae.json", {"steps": step, "psnr": _psnr(run, load(run)), "log": log})


def _random_vae(width: int) -> Vae:
    """Residual blocks that add nothing at first and latents with little noise: so it learns at once."""
    vae = Vae(width)
    for module in vae.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    for module in vae.modules():
        if isinstance(module, Residual):
            nn.init.zeros_(module.residual[-1].weight)  # type: ignore[arg-type]
    assert vae.conv1.bias is not None
    nn.init.zeros_(vae.conv1.weight[LATENT_CHANNELS:])
    nn.init.constant_(vae.conv1.bias[LATENT_CHANNELS:], FIRST_LOG_VARIANCE)
    return vae


def _crops(run: Run) -> Iterator[Tensor]:
    """Batches of clips to train on, without end; rendered many at once, since each time waits for the GPU."""
    plan = run.plan.vae
    batches = min(plan.steps, max(1, FEW_PIXELS // (plan.batch * math.prod(plan.crop))))
    for first in itertools.count(0, batches * plan.batch):
        shown = scenes(run, VAE, range(first, first + batches * plan.batch))
        videos = clips.render(shown, *plan.crop, run.device)
        yield from videos.contiguous(memory_format=torch.channels_last_3d).split(plan.batch)


def _gradient_error(back: Tensor, video: Tensor) -> Tensor:
    """L1 of differences between pixels beside each other, over each other and after each other."""
    difference = back - video
    return torch.stack([difference.diff(dim=dim).abs().mean() for dim in (2, 3, 4)]).mean()


@torch.no_grad()
def _normalise(run: Run, vae: Vae) -> None:
    """Give the latents the mean and deviation of Wan's."""
    shown = scenes(run, SHORT, range(min(MEASURED_CLIPS, run.plan.clips[SHORT])))
    latents = torch.cat([_encode(run, vae, [one], run.plan.short) for one in shown]).float()
    std, mean = torch.std_mean(latents, dim=(0, 2, 3, 4))
    vae.rescale(mean, std, *wan_latent(run.device))


@torch.no_grad()
def _encode(run: Run, vae: Vae, shown: list[clips.Scene], grid: Grid) -> Tensor:
    video = clips.render(shown, *grid.video, run.device).contiguous(memory_format=torch.channels_last_3d)
    with run.autocast():
        return vae.encode(video)


@torch.no_grad()
def _psnr(run: Run, vae: Vae) -> float:
    """Peak signal-to-noise ratio of held-out short clips that went through the VAE, in dB."""
    errors = []
    for one in scenes(run, HELD_OUT, range(min(8, run.plan.clips[HELD_OUT]))):
        video = clips.render([one], *run.plan.short.video, run.device)
        with run.autocast():
            back = vae.decode(vae.encode(video)).float().clamp(-1, 1)
        errors.append(F.mse_loss(back, video))
    return float(10 * torch.log10(4.0 / torch.stack(errors).mean()))


def load(run: Run) -> Vae:
    """The exported VAE."""
    vae = Vae(run.plan.vae.width)
    vae.load_state_dict({name: weight.float() for name, weight in load_file(run.out / VAE_FILE).items()})
    return vae.to(run.device).eval().requires_grad_(False)


@torch.no_grad()
def decode(run: Run, vae: Vae, latents: Tensor) -> Tensor:
    """Videos (B, 3, T, H, W), fp32 in [-1, 1], of normalised latents (B, 16, t, h, w)."""
    mean, std = (x.view(-1, 1, 1, 1) for x in wan_latent(run.device))
    videos = []
    for latent in latents:
        with run.autocast():
            videos.append(vae.decode((latent.to(run.device).float() * std + mean)[None]))
    return torch.cat(videos).float().clamp(-1, 1)


def latents_file(run: Run, purpose: str) -> Path:
    return run.out / f"latents-{purpose}.safetensors"


def encode(run: Run) -> None:
    """Normalised latents, fp16, of all clips: one file for each purpose."""
    vae = load(run)
    mean, std = (x.view(-1, 1, 1, 1) for x in wan_latent(run.device))
    for purpose, grid in ((HELD_OUT, run.plan.long), (SHORT, run.plan.short), (LONG, run.plan.long)):
        if latents_file(run, purpose).is_file():
            continue
        count = run.plan.clips[purpose]
        at_once = max(1, FEW_PIXELS // math.prod(grid.video))
        parts: list[Tensor] = []
        limit = math.inf if purpose == HELD_OUT else 60 * run.plan.encode_minutes
        started = time.monotonic()
        for first in range(0, count, at_once):
            run.clock.check()
            if time.monotonic() - started > limit:
                break
            shown = scenes(run, purpose, range(first, min(first + at_once, count)))
            parts.append(((_encode(run, vae, shown, grid) - mean) / std).half().cpu())
        latents = torch.cat(parts).contiguous()  # the VAE's are in channels-last order on a GPU
        save_file({"latents": latents}, latents_file(run, purpose))
        run.say(f"{len(latents)} of {count} {purpose} clips encoded")
