"""A fixed stand-in for the text encoder: an embedding of the clips' captions, drawn once from a seed.

A word's vector is that of the word plus that of the phrase it stands in, so that "red" belongs to its thing,
as an encoder that reads the whole caption would have it. The caption is repeated to fill Wan's 512 tokens; no
caption is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge_core.distill.data import TEXT_TOKENS

from . import clips

TEXT_WIDTH = 4096  # of umT5-XXL, which Wan is conditioned on
SEED = 2602_13515
PHRASES = clips.MAX_THINGS + 3  # and the ground, the camera and the light

WORDS = tuple(
    dict.fromkeys(
        word
        for names in (
            ("a", "over", "ground"),
            clips.SIZES,
            clips.TEXTURES,
            clips.COLOURS,
            clips.SHAPES,
            clips.MOTIONS,
            clips.PATTERNS,
            clips.GROUNDS,
            clips.PANS,
            clips.LIGHTS,
        )
        for name in names
        for word in name.split()
    )
)


class CaptionEmbedding:
    """(512, 4096) of a caption, fp32 on `device`, the same numbers on each."""

    def __init__(self, device: torch.device) -> None:
        source = torch.Generator().manual_seed(SEED)
        words = torch.randn(len(WORDS), TEXT_WIDTH, generator=source)
        phrases = torch.randn(PHRASES, TEXT_WIDTH, generator=source)
        # Each with a last row of zeros, for no caption.
        self._words, self._phrases = (F.pad(table, (0, 0, 0, 1)).to(device) for table in (words, phrases))

    def __call__(self, caption: str) -> Tensor:
        """ValueError for a word that no clip's caption has."""
        return self.look_up(self.places([caption])[0])

    def places(self, captions: Sequence[str]) -> Tensor:
        """(N, 2, 512) on the device: the word and the phrase of each token. ValueError as above.

        Apart from `look_up`, since moving indices to a GPU waits for all that it has to do.
        """
        return torch.stack([self._places(caption) for caption in captions]).to(self._words.device)

    def look_up(self, places: Tensor) -> Tensor:
        """(512, 4096) at one caption's places (2, 512)."""
        words, phrases = places
        return (self._words[words] + self._phrases[phrases]) * 0.5**0.5

    @staticmethod
    def _places(caption: str) -> Tensor:
        if not caption:
            return torch.tensor([[len(WORDS)], [PHRASES]]).expand(2, TEXT_TOKENS)
        phrases = caption.split(", ")
        if len(phrases) > PHRASES:
            raise ValueError(f"{caption!r} has {len(phrases)} parts; a caption has at most {PHRASES}.")
        words: list[int] = []
        parts: list[int] = []
        for part, phrase in enumerate(phrases):
            for word in phrase.split():
                if word not in WORDS:
                    raise ValueError(f"{word!r} is no word of the clips; they are {', '.join(WORDS)}.")
                words.append(WORDS.index(word))
                parts.append(part)
        return torch.tensor([words, parts])[:, torch.arange(TEXT_TOKENS) % len(words)]
