"""Settings: what to keep (`SparseConfig`) and when to stay dense (`DensePolicy`). Frozen and validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from .geometry import BLOCK_K, BLOCK_Q

METHOD_VERSION = "1"  # raised when the same settings would choose other blocks
METADATA_PREFIX = "sparge_attention2."

# Below 64 key blocks the default 3 % of a row is at most two blocks: there is too little to choose from.
DEFAULT_MIN_TOKENS = 64 * BLOCK_K


def _fraction(name: str, value: object, *, below_one: bool = False) -> float:
    """`value` as a float in [0, 1] (or [0, 1)); ValueError with one sentence otherwise."""
    allowed = "a number from 0 up to, but not including, 1" if below_one else "a number from 0 to 1"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r}; it must be {allowed}.")
    number = float(value)
    if not 0.0 <= number <= 1.0 or (below_one and number == 1.0):  # NaN fails the first comparison
        raise ValueError(f"{name} is {number}; it must be {allowed}.")
    return number


def _whole(name: str, value: object) -> int:
    """`value` as an int of at least 0; ValueError with one sentence otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ValueError(f"{name}: {value!r} is no whole number of 0 or more.")
    return int(value)


@dataclass(frozen=True)
class SparseConfig:
    """Which key blocks a query block attends to: Top-k united with Top-p (arXiv 2602.13515, Eq. 9).

    top_k: share of the key blocks that every row keeps, in [0, 1]; rounded up to whole blocks.
    top_p: softmax mass that every row keeps at least, in [0, 1].
    sparsity: target in [0, 1), 0 = off. When set, it replaces top_p: each sample keeps exactly the share
        1 - sparsity of its block pairs over all heads and rows, and top_k stays the floor of each row.

    A row never keeps fewer than one block; (top_k, top_p) = (1, 1) is exact dense attention.
    Raises ValueError with one sentence for a value outside its range.
    """

    top_k: float = 0.03
    top_p: float = 0.2
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "top_k", _fraction("top_k", self.top_k))
        object.__setattr__(self, "top_p", _fraction("top_p", self.top_p))
        object.__setattr__(self, "sparsity", _fraction("sparsity", self.sparsity, below_one=True))

    def to_metadata(self) -> dict[str, str]:
        """Settings as safetensors metadata: strings, with the geometry and the method they were made for."""
        values = {
            "method_version": METHOD_VERSION,
            "block_q": str(BLOCK_Q),
            "block_k": str(BLOCK_K),
            "top_k": repr(self.top_k),
            "top_p": repr(self.top_p),
            "sparsity": repr(self.sparsity),
        }
        return {METADATA_PREFIX + key: value for key, value in values.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None) -> SparseConfig | None:
        """Settings that a file carries, or None when it carries none of ours.

        ValueError when they were made for another method or block size, or are incomplete or not numbers.
        """
        ours = {
            key.removeprefix(METADATA_PREFIX): value
            for key, value in (metadata or {}).items()
            if key.startswith(METADATA_PREFIX)
        }
        if not ours:
            return None
        expected = {"method_version": METHOD_VERSION, "block_q": str(BLOCK_Q), "block_k": str(BLOCK_K)}
        for key, value in expected.items():
            if ours.get(key) != value:
                raise ValueError(
                    f"The file's {METADATA_PREFIX}{key} is {ours.get(key)!r}, but this version works with "
                    f"{value!r}: use a file made for it, or the version of the pack that made the file."
                )
        settings: dict[str, float] = {}
        for name in ("top_k", "top_p", "sparsity"):
            try:
                settings[name] = float(ours[name])
            except (KeyError, ValueError):
                raise ValueError(
                    f"The file's {METADATA_PREFIX}{name} is {ours.get(name)!r}; it must be a number: "
                    "the file is damaged or was made by another tool."
                ) from None
        return cls(**settings)


@dataclass(frozen=True)
class DensePolicy:
    """When to stay dense.

    start_percent, end_percent: part of the sampling during which attention is sparse, in [0, 1].
    dense_layers: transformer blocks (0-based) that always stay dense; see `parse_layers`.
    min_tokens: sequences shorter than this stay dense, because the mask costs more than it saves.
    Raises ValueError with one sentence for a value outside its range.
    """

    start_percent: float = 0.0
    end_percent: float = 1.0
    dense_layers: tuple[int, ...] = ()
    min_tokens: int = DEFAULT_MIN_TOKENS

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_percent", _fraction("start_percent", self.start_percent))
        object.__setattr__(self, "end_percent", _fraction("end_percent", self.end_percent))
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"start_percent is {self.start_percent} and end_percent is {self.end_percent}; "
                "start_percent must not be greater than end_percent."
            )
        layers = {_whole("dense_layers", layer) for layer in self.dense_layers}
        object.__setattr__(self, "dense_layers", tuple(sorted(layers)))
        object.__setattr__(self, "min_tokens", _whole("min_tokens", self.min_tokens))

    def why_dense(self, *, layer: int, tokens: int) -> str | None:
        """Reason to run this layer dense for `tokens` tokens, or None. The percents are the caller's part."""
        if layer in self.dense_layers:
            return "layer set to dense"
        if tokens < self.min_tokens:
            return f"fewer than {self.min_tokens} tokens"
        return None


def parse_layers(text: str, total: int | None = None) -> tuple[int, ...]:
    """Layers named by text such as "0, 1, 38-39", sorted, each once; "" names none.

    total: number of layers of the model. A layer outside it raises ValueError, as does text that is no such
    list.
    """
    layers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(
                f'dense layers: "{part}" is neither a layer nor a rising range of layers; '
                'write for example "0, 1, 28-29".'
            )
        if total is not None and last >= total:
            raise ValueError(
                f'dense layers: "{part}" names layer {last}, but this model has {total} layers '
                f"(0 to {total - 1}); remove it or leave the field empty."
            )
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))
