"""Samples of videos and captions, by the VAE and the encoders of a Wan pipeline in diffusers' format.

A caption lies beside its video: clip.mp4 and clip.txt. Videos are read at Wan's 16 frames a second, scaled to
cover the size and cut to it in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..wan.transformer import read_config
from . import DistillError
from .data import TEXT_TOKENS, write_sample

SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
FRAMES_A_SECOND = 16.0  # of Wan2.1's clips
TIME_STRIDE, PATCHED_STRIDE = 4, 16  # frames a latent frame; pixels a token


class Encoders:
    """A pipeline's parts, loaded one by one without reaching for the network. image: for image-to-video."""

    def __init__(self, pipeline: Path, device: torch.device) -> None:
        from diffusers import AutoencoderKLWan
        from transformers import AutoTokenizer, UMT5EncoderModel

        try:
            self.image = bool(read_config(pipeline)["image_dim"])
        except ValueError as error:
            raise DistillError(str(error)) from None
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device = device
        self.vae = _load(AutoencoderKLWan, pipeline / "vae", torch.float32).to(device)
        self.tokenizer = _load(AutoTokenizer, pipeline / "tokenizer")
        self.encoder = _load(UMT5EncoderModel, pipeline / "text_encoder", half).to(device)
        if self.image:
            from transformers import CLIPImageProcessor, CLIPVisionModel

            self.processor = _load(CLIPImageProcessor, pipeline / "image_processor")
            self.vision = _load(CLIPVisionModel, pipeline / "image_encoder", half).to(device)

    @torch.no_grad()
    def sample(self, frames: Tensor, caption: str) -> dict[str, Tensor]:
        """Tensors of a sample, fp16. frames: (T, H, W, 3), uint8."""
        pixels = frames.movedim(-1, 0).float()[None] / 127.5 - 1.0  # (1, 3, T, H, W)
        sample = {"latent": self._latent(pixels), "text": self._text(caption)}
        if self.image:
            still = torch.zeros_like(pixels)
            still[:, :, 0] = pixels[:, :, 0]  # only the first frame is given
            seen = self._latent(still)
            given = torch.zeros_like(seen[:TIME_STRIDE])
            given[:, 0] = 1.0
            sample |= {"image_latent": torch.cat((given, seen)), "image_embedding": self._seen(frames[0])}
        return {name: tensor.half().cpu() for name, tensor in sample.items()}

    def _latent(self, pixels: Tensor) -> Tensor:
        """Normalised latent (C, T, H, W), as the transformer works on it."""
        config = self.vae.config
        latent = self.vae.encode(pixels.to(self.device)).latent_dist.mode()[0]
        mean, std = (torch.tensor(x, device=self.device).view(-1, 1, 1, 1)
                     for x in (config.latents_mean, config.latents_std))  # fmt: skip
        return (latent - mean) / std

    def _text(self, caption: str) -> Tensor:
        """(n, width) of the caption's own tokens."""
        tokens = self.tokenizer(
            " ".join(caption.split()), max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
        ).to(self.device)
        hidden: Tensor = self.encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
        return hidden[0]

    def _seen(self, frame: Tensor) -> Tensor:
        """(257, width): what CLIP's last but one layer makes of a frame (H, W, 3)."""
        pixels = self.processor(images=frame.numpy(), return_tensors="pt").pixel_values
        states = self.vision(
            pixels.to(self.device, self.vision.dtype), output_hidden_states=True
        ).hidden_states
        seen: Tensor = states[-2][0]
        return seen


def _load(kind: Any, folder: Path, dtype: torch.dtype | None = None) -> Any:
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, **({"torch_dtype": dtype} if dtype else {})
        )
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise DistillError(
            f"{folder} cannot be loaded ({first}); --model must be the folder of a whole Wan pipeline in "
            "diffusers' format."
        ) from None


def encode_folder(
    videos: Path, pipeline: Path, out: Path, *, frames: int, height: int, width: int, device: torch.device
) -> Iterator[tuple[Path, str]]:
    """Make a sample of every video with a caption; yields each video, and why it was left out or "".

    DistillError for sizes that Wan does not work in, and for a folder without a video.
    """
    if frames % TIME_STRIDE != 1:
        raise DistillError(f"frames is {frames}; Wan's clips have 4 n + 1 frames, such as 81.")
    if height < 1 or width < 1 or height % PATCHED_STRIDE or width % PATCHED_STRIDE:
        raise DistillError(f"The size is {width} × {height}; both must be multiples of {PATCHED_STRIDE}.")
    files = sorted(path for path in videos.glob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise DistillError(f"{videos} holds no video ({', '.join(SUFFIXES)}).")
    encoders = Encoders(pipeline, device)
    for file in files:
        caption = file.with_suffix(".txt")
        if not caption.is_file():
            yield file, f"there is no {caption.name}"
            continue
        clip = read_frames(file, frames, height, width)
        if len(clip) < frames:
            yield file, f"it has {len(clip)} of {frames} frames at {FRAMES_A_SECOND:g} a second"
            continue
        text = caption.read_text(encoding="utf-8").strip()
        write_sample(out, encoders.sample(clip, text), text)
        yield file, ""


def read_frames(file: Path, frames: int, height: int, width: int) -> Tensor:
    """Up to `frames` frames from the start, (T, height, width, 3) in uint8."""
    import av

    taken: list[Tensor] = []
    try:
        with av.open(str(file)) as container:
            for picture in container.decode(video=0):
                # A frame of the clip is the first of the video at its time or later.
                while picture.time is not None and picture.time >= len(taken) / FRAMES_A_SECOND - 1e-6:
                    taken.append(_fit(torch.from_numpy(picture.to_ndarray(format="rgb24")), height, width))
                    if len(taken) == frames:
                        return torch.stack(taken)
    except av.FFmpegError as error:
        raise DistillError(f"The video {file} cannot be read ({error}); take it out of the folder.") from None
    return torch.stack(taken) if taken else torch.empty(0, height, width, 3, dtype=torch.uint8)


def _fit(picture: Tensor, height: int, width: int) -> Tensor:
    """A picture (h, w, 3) scaled to cover height × width and cut to it in the middle."""
    scale = max(height / picture.shape[0], width / picture.shape[1])
    size = [max(round(picture.shape[0] * scale), height), max(round(picture.shape[1] * scale), width)]
    channels = picture.movedim(-1, 0)[None].float()
    scaled = F.interpolate(channels, size=size, mode="bicubic", antialias=True, align_corners=False)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    cut = scaled[0, :, top : top + height, left : left + width]
    return cut.round().clamp(0, 255).to(torch.uint8).movedim(0, -1)
