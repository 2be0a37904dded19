"""What a file's metadata says of the settings that its weights were distilled for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import SparseConfig
from . import keys as wan
from .header import StudentError, refusal

PEFT_METADATA = "lora_adapter_metadata"  # diffusers': JSON with the settings of the adapter

# Keys of metadata that may speak of attention; others may hold the same words by chance.
OF_ATTENTION = re.compile(r"attn|attention|spars|mask|method|sla|top_?k|blk|block")


def settings_of(path: Path, metadata: Mapping[str, str]) -> tuple[SparseConfig | None, str | None]:
    """Settings that the file carries, and the other method that it is for; None for what it does not say.

    StudentError when they are damaged or those of a method that cannot run here.
    """
    try:
        if (own := SparseConfig.from_metadata(metadata)) is not None:
            return own, None
        return _of_other_method(path, metadata)
    except StudentError:
        raise
    except ValueError as error:
        do = (
            "Get a file that was made for this version; its weights were distilled for settings unknown here."
        )
        what = f"carries settings that cannot be used: {str(error).rstrip('.')}"
        raise refusal(path, what, do, "settings as SpargeAttention2 writes them, or none") from None


def _of_other_method(path: Path, metadata: Mapping[str, str]) -> tuple[SparseConfig | None, str | None]:
    said = [(key, value) for key, value in _flat(metadata) if OF_ATTENTION.search(key)]
    words = _words(" ".join([path.stem, *(f"{key} {value}" for key, value in said)]))
    method = next((method for method in wan.METHODS if method.word.search(words)), None)
    if method is None:
        return None, None
    if not method.plain:
        raise lacking(path, method.name, method.has)
    values = {key.rsplit(".", 1)[-1]: value for key, value in said}
    rows, columns = _number(values, wan.ROWS), _number(values, wan.COLUMNS)
    if (rows, columns) not in wan.PLAIN_BLOCKS and (rows is not None or columns is not None):
        raise lacking(path, method.name, f"blocks of {rows} queries by {columns} keys")
    kept, skipped = _number(values, wan.KEPT), _number(values, wan.SKIPPED)
    if kept is None and skipped is not None:
        kept = round(1 - skipped, 6)  # 1 - 0.85 is a little more than 0.15 and would keep a block more
    return (None if kept is None else SparseConfig(top_k=kept, top_p=0.0)), method.name


def lacking(path: Path, method: str, has: str) -> StudentError:
    """The error for a student of another method. has: what its attention has and this one lacks."""
    return refusal(
        path,
        f"is a student of {method}, with {has}, which SpargeAttention2 does not have",
        "Run it with the nodes of that method.",
        "weights for plain block-sparse attention",
    )


def peft_alpha(path: Path, metadata: Mapping[str, str]) -> float | None:
    """The alpha that diffusers writes beside peft's factors, which do not carry it themselves."""
    try:
        content = json.loads(metadata.get(PEFT_METADATA, "{}"))
        settings = {key.rsplit(".", 1)[-1]: value for key, value in content.items()}
        special = [name for name in ("use_rslora", "use_dora", "alpha_pattern") if settings.get(name)]
        alpha = settings.get("lora_alpha")
        alpha = None if alpha is None else float(alpha)
        if alpha is not None and not math.isfinite(alpha):
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise refusal(path, f"has damaged metadata, {PEFT_METADATA}", "Save it again.") from None
    if special:
        raise refusal(path, f"is scaled by {', '.join(special)}", "Save it as a plain low-rank file or diff.")
    return alpha


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Metadata with the JSON objects in it opened: keys in lower case, joined by dots, and values as text."""
    for key, value in values.items():
        name = f"{prefix}{key}".lower()
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                continue
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, str(value)


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _number(values: Mapping[str, str], names: Sequence[str]) -> float | None:
    text = next((values[name] for name in names if name in values), None)
    try:
        return None if text is None else float(text)
    except ValueError:
        raise ValueError(f"its metadata says {text!r} where a number belongs; it is damaged.") from None
