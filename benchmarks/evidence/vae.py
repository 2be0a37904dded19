"""Wan2.1's VAE at any width, over whole clips at once, under the names that ComfyUI's own loader knows.

Same weights, same result as the original, which works through a clip in pieces: convolutions in time look
back only, and the first frame is never joined with others. 4 frames of 8 × 8 pixels are 16 values of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .plan import LATENT_CHANNELS

WIDTHS = (1, 2, 4, 4)  # times the width, from the pixels to the latent
BLOCKS = 2  # residual blocks of each level; the decoder has one more
IN_TIME = (False, True, True)  # which of the three halvings in space halve in time too


class CausalConv(nn.Conv3d):
    """A convolution that sees the past alone in time; kernel (t, h, w) with h and w padded."""

    def __init__(self, into: int, out: int, kernel: tuple[int, int, int], stride: int = 1) -> None:
        padding = (0, kernel[1] // 2, kernel[2] // 2)
        super().__init__(into, out, kernel, stride=(stride, 1, 1), padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride[0] > 1 or self.kernel_size[0] == 1:
            return super().forward(x)
        past = self.kernel_size[0] - 1
        # Padded on both sides and cut: padding one side alone would copy the clip.
        padding = (past, *self.padding[1:])
        return F.conv3d(x, self.weight, self.bias, padding=padding)[:, :, : x.shape[2]]


class Norm(nn.Module):
    """RMS norm over the channels. gamma: as the original shapes it, (C, 1, 1, 1) or (C, 1, 1)."""

    def __init__(self, width: int, dimensions: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, *(1,) * dimensions))

    def forward(self, x: Tensor) -> Tensor:
        # Not F.rms_norm, whose kernels give a thread block to each pixel, however few channels it has.
        norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp(min=1e-12)
        scale = self.gamma.shape[0] ** 0.5 / norm
        return x * scale.to(x.dtype) * self.gamma.to(x.dtype)


class Residual(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            Norm(into), nn.SiLU(), CausalConv(into, out, (3, 3, 3)),
            Norm(out), nn.SiLU(), nn.Dropout(0.0), CausalConv(out, out, (3, 3, 3)),
        )  # fmt: skip
        self.shortcut = CausalConv(into, out, (1, 1, 1)) if into != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.residual(x)


class FrameAttention(nn.Module):
    """Attention of one head within each frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width, 2)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, frames, height, _ = x.shape
        flat = x.transpose(1, 2).flatten(0, 1)  # (B T, C, H, W)
        q, k, v = self.to_qkv(self.norm(flat)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        out = self.proj(out.transpose(1, 2).unflatten(2, (height, -1)))
        return x + out.unflatten(0, (batch, frames)).transpose(1, 2)


def _each_frame(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A layer of pictures on every frame of (B, C, T, H, W)."""
    batch, _, frames = x.shape[:3]
    return layer(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, frames)).transpose(1, 2)


class Down(nn.Module):
    """Half the height and width; in_time: half the frames behind the first too."""

    def __init__(self, width: int, in_time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(width, width, 3, stride=2))
        self.time_conv = CausalConv(width, width, (3, 1, 1), stride=2) if in_time else None

    def forward(self, x: Tensor) -> Tensor:
        x = _each_frame(self.resample, x)
        if self.time_conv is None or x.shape[2] == 1:
            return x
        return torch.cat((x[:, :, :1], self.time_conv(x)), dim=2)


class Up(nn.Module):
    """Twice the height and width at half the channels; in_time: two frames for each behind the first."""

    def __init__(self, width: int, in_time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact"),
            nn.Conv2d(width, width // 2, 3, padding=1),
        )
        self.time_conv = CausalConv(width, 2 * width, (3, 1, 1)) if in_time else None

    def forward(self, x: Tensor) -> Tensor:
        if self.time_conv is not None and x.shape[2] > 1:
            pairs = self.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))  # (B, 2, C, T - 1, H, W)
            x = torch.cat((x[:, :, :1], pairs.movedim(1, 3).flatten(2, 3)), dim=2)
        return _each_frame(self.resample, x)


def _middle(width: int) -> nn.Sequential:
    return nn.Sequential(Residual(width, width), FrameAttention(width), Residual(width, width))


def _head(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(Norm(width), nn.SiLU(), CausalConv(width, out, (3, 3, 3)))


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * times for times in (1, *WIDTHS)]
        layers: list[nn.Module] = []
        for level, (into, out) in enumerate(pairwise(widths)):
            layers += [Residual(into if block == 0 else out, out) for block in range(BLOCKS)]
            if level < len(IN_TIME):
                layers.append(Down(out, IN_TIME[level]))
        self.conv1 = CausalConv(3, width, (3, 3, 3))
        self.downsamples = nn.Sequential(*layers)
        self.middle = _middle(widths[-1])
        self.head = _head(widths[-1], 2 * LATENT_CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.downsamples(self.conv1(x))))


class Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * times for times in (WIDTHS[-1], *reversed(WIDTHS))]
        layers: list[nn.Module] = []
        for level, (into, out) in enumerate(pairwise(widths)):
            into = into if level == 0 else into // 2  # the layer before has halved them
            layers += [Residual(into if block == 0 else out, out) for block in range(BLOCKS + 1)]
            if level < len(IN_TIME):
                layers.append(Up(out, IN_TIME[::-1][level]))
        self.conv1 = CausalConv(LATENT_CHANNELS, widths[0], (3, 3, 3))
        self.middle = _middle(widths[0])
        self.upsamples = nn.Sequential(*layers)
        self.head = _head(width, 3)

    def forward(self, z: Tensor) -> Tensor:
        return self.head(self.upsamples(self.middle(self.conv1(z))))


class Vae(nn.Module):
    """Videos (B, 3, 4 n + 1, H, W) in [-1, 1] to latents (B, 16, n + 1, H / 8, W / 8) and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = Encoder(width)
        self.conv1 = CausalConv(2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, (1, 1, 1))
        self.conv2 = CausalConv(LATENT_CHANNELS, LATENT_CHANNELS, (1, 1, 1))
        self.decoder = Decoder(width)

    def distribution(self, video: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance of a video's latent."""
        mean, log_variance = self.conv1(self.encoder(video)).chunk(2, dim=1)
        return mean, log_variance

    def encode(self, video: Tensor) -> Tensor:
        return self.distribution(video)[0]

    def decode(self, latent: Tensor) -> Tensor:
        return self.decoder(self.conv2(latent))

    @torch.no_grad()
    def rescale(self, mean: Tensor, std: Tensor, to_mean: Tensor, to_std: Tensor) -> None:
        """Let latents that have `mean` and `std` (16,) by channel have others; videos stay the same.

        By the two 1 × 1 × 1 convolutions around the latent, so that the change is exact.
        """
        scale = to_std / std
        shift = to_mean - mean * scale
        before, after = self.conv1, self.conv2
        assert before.bias is not None
        assert after.bias is not None
        means = slice(0, LATENT_CHANNELS)
        before.weight[means] *= scale.view(-1, 1, 1, 1, 1)
        before.bias[means] = before.bias[means] * scale + shift
        weight = after.weight / scale.view(1, -1, 1, 1, 1)
        after.bias -= (weight.flatten(1) * shift).sum(1)
        after.weight.copy_(weight)
