"""Flow matching: noised latents, sampling of t, and the two losses. t = 0 is the clip and t = 1 is noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LOGIT_NORMAL, UNIFORM = "logit_normal", "uniform"
VELOCITY, DIFFUSION = "velocity", "diffusion"
MODEL_STEPS = 1000.0  # Wan is given t as a step of this many

# Streams of random numbers: each depends on the seed, its stream and a sample's position in the run alone, so
# that neither a resume nor another number of processes changes what is drawn.
ORDER, NOISE, TIME, HELD_OUT, INITIAL = range(5)


def generator(seed: int, stream: int, position: int) -> torch.Generator:
    """Random numbers on the CPU for one purpose."""
    words = np.random.SeedSequence([seed, stream, position]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> 1))


@dataclass(frozen=True)
class Timesteps:
    """How t is drawn.

    kind: "logit_normal" (the ratio of noise to signal, t / (1 - t), is log-normal; `mean` and `std` are those
    of its logarithm) or "uniform". shift: moves t towards noise, t' = shift t / (1 + (shift - 1) t).
    """

    kind: str
    mean: float
    std: float
    shift: float

    def draw(self, seed: int, position: int) -> float:
        """t in (0, 1) for the sample at `position` of the run."""
        source = generator(seed, TIME, position)
        if self.kind == UNIFORM:
            t = torch.rand((), generator=source, dtype=torch.float64)
        else:
            t = torch.sigmoid(self.mean + self.std * torch.randn((), generator=source, dtype=torch.float64))
        return float(self.shift * t / (1 + (self.shift - 1) * t))


def noise_like(latent: Tensor, seed: int, position: int, stream: int = NOISE) -> Tensor:
    """Standard normal noise, fp32, drawn on the CPU so that every device sees the same."""
    return torch.randn(latent.shape, generator=generator(seed, stream, position))


def noised(latent: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x_0 + t ε for latents (B, C, T, H, W) and t (B,)."""
    t = t.view(-1, 1, 1, 1, 1).to(latent.dtype)
    return (1 - t) * latent + t * noise


def squared_error(velocity: Tensor, target: Tensor) -> Tensor:
    """Mean squared error, fp32. The target is the teacher's velocity, or ε - x_0 for the diffusion loss."""
    return torch.nn.functional.mse_loss(velocity.float(), target.float())
