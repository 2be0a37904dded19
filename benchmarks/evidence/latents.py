"""Encoded clips with their captions, as a data set that lies on the device, for the loop of `distill`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from safetensors.torch import load_file
from torch import Tensor

from sparge_core.distill.data import Dataset, Entry, Sample

from .autoencoder import latents_file, scenes
from .captions import CaptionEmbedding
from .run import Run

COPIES = 8  # of every clip to train on, one of which has no caption: guidance needs the model without it


@dataclass(frozen=True)
class Clips(Dataset):
    """latents: (N, 16, T, H, W), fp16, normalised. places: each sample's clip; its entry has its caption.

    texts: (N + 1, 2, 512), places in the embedding of each clip's caption and, last, of none.
    """

    latents: Tensor
    places: tuple[int, ...]
    texts: Tensor
    embed: CaptionEmbedding

    def subset(self, indices: Sequence[int]) -> Clips:
        entries = tuple(self.entries[i] for i in indices)
        return replace(self, entries=entries, places=tuple(self.places[i] for i in indices))

    def read(self, index: int) -> Sample:
        place = self.places[index]
        text = self.texts[place if self.entries[index].caption else -1]
        return Sample(self.latents[place].float(), self.embed.look_up(text), None, None)


def load(run: Run, purpose: str, copies: int = 1) -> Clips:
    """The clips of a purpose; with copies, the first of each has no caption."""
    file = latents_file(run, purpose)
    latents = load_file(file)["latents"].to(run.device)
    captions = [scene.caption for scene in scenes(run, purpose, range(len(latents)))]
    size = tuple(latents.shape[1:])
    entries = tuple(
        Entry(f"{purpose}-{number}-{copy}", 0, f"{run.plan.seed}-{purpose}-{number}-{copy}", {"latent": size},
              caption if copies == 1 or copy else "")
        for copy in range(copies)
        for number, caption in enumerate(captions)
    )  # fmt: skip
    places = tuple(range(len(latents))) * copies
    embed = CaptionEmbedding(run.device)
    return Clips(file.parent, entries, latents, places, embed.places([*captions, ""]), embed)
