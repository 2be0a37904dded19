"""The header of a safetensors file, read without what lies behind it; other files are refused."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .keys import INTEGER_WEIGHT, METHODS

SUFFIXES = (".safetensors", ".sft")
PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pt2")
MAX_HEADER = 100_000_000  # bytes; the format's own limit

# First bytes of what often lies where a safetensors file should.
MAGICS = (
    (b"PK\x03\x04", "a PyTorch pickle (a zip archive, as .pt, .pth and .ckpt files are)"),
    (b"\x80", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"version https://git-lfs", "a Git LFS pointer, which stands for a file that was not downloaded"),
    (b"<", "a web page, saved instead of the file"),
)

# Bytes an element, by the format's names.
ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}

AGAIN = "Download or copy it again."
CHOOSE = "Choose its bf16, fp16 or fp8 version."


class StudentError(ValueError):
    """A file that is no usable student. The message names it, what it is, what was expected, what to do."""


def refusal(
    path: Path,
    what: str,
    do: str,
    expected: str = "a Wan student in a .safetensors file: a full model, a diff or a low-rank file",
) -> StudentError:
    """The error for the file at `path`, in one line. what: "looks like …" or "is …"; do: a sentence."""
    text = f"{path.name} {what}; expected {expected}. {do}"
    printable = "".join(sign if sign.isprintable() else " " for sign in text)  # the file chose its keys
    return StudentError(" ".join(printable.split()))


@dataclass(frozen=True)
class TensorInfo:
    """dtype: as safetensors names it; begin, end: bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: Path) -> Header:
    """The header of the file at `path`, checked against the file's size.

    Nothing behind the header is read. StudentError when it is no whole safetensors file of that name.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        length = int.from_bytes(start[:8], "little")
        if start[8:9] != b"{" or length > MAX_HEADER:
            raise _not_safetensors(path, start)
        if 8 + length > size:
            raise refusal(path, f"is cut off in its header, after {_bytes(size)}", AGAIN)
        file.seek(8)
        text = file.read(length)
    if path.suffix.lower() not in SUFFIXES:
        raise refusal(
            path,
            f"is a safetensors file under the suffix {path.suffix or 'of no kind'}",
            "Rename it to .safetensors: ComfyUI goes by the suffix and would open it as a pickle.",
        )
    header, whole = _parse(path, text)
    whole += 8 + length
    if size < whole:
        raise refusal(path, f"is cut off: {_bytes(size)} of its {_bytes(whole)} are there", AGAIN)
    if size > whole:
        raise refusal(path, f"goes on for {_bytes(size - whole)} behind its last tensor", AGAIN)
    return header


def _parse(path: Path, text: bytes) -> tuple[Header, int]:
    """The header, and the bytes of the tensors that it describes."""
    damaged = refusal(path, "has a damaged header", AGAIN)
    try:
        content = json.loads(text.decode("utf-8"))
        metadata = content.pop("__metadata__", None) or {}
        tensors = {
            name: TensorInfo(info["dtype"], tuple(info["shape"]), *info["data_offsets"])
            for name, info in content.items()
        }
        if not all(isinstance(value, str) for value in metadata.values()):
            raise damaged
        at = 0
        for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
            if not all(type(number) is int and number >= 0 for number in (*info.shape, info.begin, info.end)):
                raise damaged
            if info.dtype not in ITEM_SIZES:
                raise refusal(path, f"stores numbers as {info.dtype}", CHOOSE)
            if info.begin != at or info.end - at != math.prod(info.shape) * ITEM_SIZES[info.dtype]:
                raise damaged
            at = info.end
    except StudentError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise damaged from None
    return Header(tensors, metadata), at


def _not_safetensors(path: Path, start: bytes) -> StudentError:
    if not start:
        return refusal(path, "is empty", AGAIN)
    looks = next((name for magic, name in MAGICS if start.startswith(magic)), None)
    if looks is None and path.suffix.lower() in PICKLE_SUFFIXES:
        looks = "a pickle, by its suffix"
    if looks is not None and "pickle" in looks:
        unopened = "A pickle can run any program when it is opened, so it was not opened"
        if lacking := _named_inside(path):
            do = f"{unopened}; as .safetensors it could not run here either: use the nodes of that method."
            return refusal(path, f"looks like {looks} with parameters of {lacking}", do)
        do = f"{unopened}: look for its weights as .safetensors, or convert it where that does no harm."
        return refusal(path, f"looks like {looks}", do)
    looks = looks or "no kind of file known here"
    return refusal(path, f"looks like {looks}", "Download the .safetensors file.")


def _named_inside(path: Path) -> str:
    """Other methods whose parameters a PyTorch archive names: in plain text, so that nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            index = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            with archive.open(index) as file:
                text = file.read(MAX_HEADER).decode("latin-1")
    except Exception:  # whatever is wrong with it: it is refused anyway
        return ""
    found = [method.name for method in METHODS if method.parameters and method.parameters.search(text)]
    found += ["8-bit linear layers"] if INTEGER_WEIGHT.search(text) else []
    return " and ".join(found)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
