"""A fixed stand-in for the text encoder: an embedding of the clips' captions, drawn once from a seed.

A word's vector is that of the word plus that of the phrase it stands in, so that "red" belongs to its thing,
as an encoder that reads the whole caption would have it. The caption is repeated to fill Wan's 512 tokens; no
caption is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
        self._words = torch.randn(len(WORDS), TEXT_WIDTH, generator=source).to(device)
        self._phrases = torch.randn(PHRASES, TEXT_WIDTH, generator=source).to(device)

    def __call__(self, caption: str) -> Tensor:
        """ValueError for a word that no clip's caption has."""
        if not caption:
            return self._words.new_zeros(TEXT_TOKENS, TEXT_WIDTH)
        words, phrases = self._places(caption)
        spread = torch.arange(TEXT_TOKENS) % len(words)
        return (self._words[words] + self._phrases[phrases])[spread] * 0.5**0.5

    @staticmethod
    def _places(caption: str) -> tuple[list[int], list[int]]:
        phrases: Sequence[str] = caption.split(", ")
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
        return words, parts
