"""A data set: a folder of safetensors samples and a manifest. Written one by one, read with every check.

A sample holds, in the latent space that the model works in (normalised, not as the VAE gives it):

    latent           (C, T, H, W)       the clip
    text             (n, width)         its caption as the text encoder gives it, n up to 512
    image_latent     (C', T, H, W)      image-to-video: mask and latent that are appended to the channels
    image_embedding  (257, width)       image-to-video with CLIP vision (Wan2.1)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..wan.header import StudentError, read_header
from . import DistillError
from .flow import HELD_OUT, ORDER

MANIFEST = "manifest.json"
FORMAT, VERSION = "sparge_attention2.samples", 1
TEXT_TOKENS = 512  # Wan pads its text embedding with zeros to this length
NAMES = {"latent": 4, "text": 2, "image_latent": 4, "image_embedding": 2}  # tensors and their dimensions
REQUIRED = ("latent", "text")
FLOATS = {"F32", "F16", "BF16"}
AGAIN = "Run `sparge-distill prepare` on the folder to take it as it is now, or restore the file."


@dataclass(frozen=True)
class Entry:
    """A sample as the manifest lists it. shapes: of its tensors by name."""

    file: str
    bytes: int
    sha256: str
    shapes: Mapping[str, tuple[int, ...]]
    caption: str = ""

    @property
    def widths(self) -> dict[str, int]:
        """Channels or width of each tensor: what must be equal for samples of one model."""
        return {name: shape[0 if NAMES[name] == 4 else 1] for name, shape in sorted(self.shapes.items())}

    def to_json(self) -> dict[str, Any]:
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        entry = {"file": self.file, "bytes": self.bytes, "sha256": self.sha256, "shapes": shapes}
        return {**entry, "caption": self.caption} if self.caption else entry


@dataclass(frozen=True)
class Sample:
    """One training sample, fp32 on the CPU, as described above; the text is padded to 512 tokens."""

    latent: Tensor
    text: Tensor
    image_latent: Tensor | None
    image_embedding: Tensor | None


@dataclass(frozen=True)
class Dataset:
    folder: Path
    entries: tuple[Entry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def fingerprint(self) -> str:
        """Of the samples and their order: two data sets with the same one train the same."""
        return hashlib.sha256("\n".join(entry.sha256 for entry in self.entries).encode()).hexdigest()

    @property
    def resolutions(self) -> dict[str, int]:
        """How many samples have each latent size, "T × H × W"."""
        sizes = Counter(" × ".join(map(str, entry.shapes["latent"][1:])) for entry in self.entries)
        return dict(sizes.most_common())

    def subset(self, indices: Sequence[int]) -> Dataset:
        return Dataset(self.folder, tuple(self.entries[i] for i in indices))

    def split(self, held_out: int, seed: int) -> tuple[Dataset, Dataset]:
        """Samples to train on, and `held_out` others to validate on, chosen by the seed."""
        order = _permutation(len(self), seed, HELD_OUT, 0)
        return self.subset(sorted(order[held_out:])), self.subset(sorted(order[:held_out]))

    def at(self, position: int, seed: int) -> int:
        """The sample at `position` of an endless run: each epoch has an order of its own."""
        epoch, place = divmod(position, len(self))
        return int(_permutation(len(self), seed, ORDER, epoch)[place])

    def read(self, index: int) -> Sample:
        """The sample, checked against the manifest; DistillError names the file that does not hold to it."""
        entry = self.entries[index]
        path = self.folder / entry.file
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise DistillError(f"The sample {path} is not what the manifest lists: it was changed. {AGAIN}")
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise DistillError(f"The sample {path} is damaged ({error}). {AGAIN}") from None
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise DistillError(
                    f"The sample {path} holds numbers that are not finite in {name}. Delete it and run "
                    "`sparge-distill prepare` on the folder."
                )
        latent, text = tensors["latent"].float(), tensors["text"].float()
        text = torch.nn.functional.pad(text, (0, 0, 0, TEXT_TOKENS - len(text)))
        image = (tensors.get(name) for name in ("image_latent", "image_embedding"))
        return Sample(latent, text, *(None if tensor is None else tensor.float() for tensor in image))


@lru_cache(maxsize=2)  # an epoch's is asked for again with each of its samples
def _permutation(count: int, seed: int, stream: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, stream, epoch]).permutation(count)


# ----------------------------------------------------------------------------------------------------------
# Reading a folder


def open_dataset(folder: Path) -> Dataset:
    """The data set in `folder`, its files' headers checked against the manifest; DistillError otherwise."""
    manifest = folder / MANIFEST
    make = "Write samples with the node Save Distillation Sample, or run `sparge-distill prepare`."
    if not manifest.is_file():
        raise DistillError(f"{folder} has no {MANIFEST}, so it is no data set. {make}")
    entries = _read_manifest(manifest)
    if not entries:
        raise DistillError(f"{manifest} lists no samples. {make}")
    for entry in entries:
        found = _describe(folder / entry.file)
        if found != (entry.bytes, dict(entry.shapes)):
            raise DistillError(
                f"{manifest} lists {entry.file} with {entry.bytes} bytes and {dict(entry.shapes)}, and the "
                f"file has {found[0]} bytes and {found[1]}. {AGAIN}"
            )
    return Dataset(folder, entries)


def _read_manifest(path: Path) -> tuple[Entry, ...]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise DistillError(
                f"{path} is a {content['format']} of version {content['version']}, and this version of the "
                f"pack reads {FORMAT} of version {VERSION}. Run `sparge-distill prepare` on the folder."
            )
        entries = tuple(
            Entry(
                str(one["file"]),
                int(one["bytes"]),
                str(one["sha256"]),
                {name: tuple(shape) for name, shape in one["shapes"].items()},
                str(one.get("caption", "")),
            )
            for one in content["samples"]
        )
    except DistillError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DistillError(f"{path} is damaged. Run `sparge-distill prepare` on the folder.") from None
    outside = [entry.file for entry in entries if Path(entry.file).name != entry.file]
    if outside:
        raise DistillError(f"{path} names {outside[0]}; a sample lies in the manifest's own folder.")
    return entries


def _describe(path: Path) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Bytes and shapes of a sample's file, from its header; DistillError when it is no sample."""
    try:
        header = read_header(path)
    except FileNotFoundError:
        raise DistillError(f"The sample {path} is missing. {AGAIN}") from None
    except StudentError as error:
        raise DistillError(f"The sample {path} cannot be read: {error} {AGAIN}") from None
    shapes = {name: info.shape for name, info in header.tensors.items()}
    problem = _problem(shapes) or next(
        (f"{name} is {info.dtype}" for name, info in header.tensors.items() if info.dtype not in FLOATS), None
    )
    if problem:
        raise DistillError(
            f"{path} is no sample: {problem}. Take it out of the folder and prepare that anew."
        )
    return path.stat().st_size, shapes


def _problem(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why tensors of these shapes are no sample, or None."""
    if missing := [name for name in REQUIRED if name not in shapes]:
        return f"it lacks {' and '.join(missing)}"
    if unknown := sorted(shapes.keys() - NAMES.keys()):
        return f"it holds {', '.join(unknown)}, which no sample has"
    for name, shape in shapes.items():
        if len(shape) != NAMES[name] or 0 in shape:
            return f"{name} has the shape {shape} and needs {NAMES[name]} dimensions"
    if shapes["text"][0] > TEXT_TOKENS:
        return f"text has {shapes['text'][0]} tokens and Wan reads {TEXT_TOKENS}"
    image = shapes.get("image_latent")
    if image is not None and image[1:] != shapes["latent"][1:]:
        return f"image_latent is {image[1:]} and latent {shapes['latent'][1:]}"
    return None


# ----------------------------------------------------------------------------------------------------------
# Writing


def write_sample(folder: Path, tensors: Mapping[str, Tensor], caption: str = "") -> Path:
    """Add a sample to the data set in `folder`, which is made where there is none; returns the sample's file.

    DistillError when the tensors are no sample, or its kind is not that of the samples there.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problem = _problem(shapes) or next(
        (f"{name} is not finite" for name, tensor in tensors.items() if not tensor.isfinite().all()), None
    )
    if problem:
        raise DistillError(f"This cannot be saved as a sample: {problem}.")
    folder.mkdir(parents=True, exist_ok=True)
    entries = _read_manifest(folder / MANIFEST) if (folder / MANIFEST).is_file() else ()
    check_alike((*entries, Entry("the new sample", 0, "", shapes)))
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"{digest[:16]}.safetensors"  # the same sample twice is one
    _write(path, content)
    kept = tuple(entry for entry in entries if entry.file != path.name)
    write_manifest(folder, (*kept, Entry(path.name, len(content), digest, shapes, caption)))
    return path


def write_manifest(folder: Path, entries: Sequence[Entry]) -> None:
    content = {"format": FORMAT, "version": VERSION, "samples": [entry.to_json() for entry in entries]}
    _write(folder / MANIFEST, json.dumps(content, indent=1).encode())


def index_folder(folder: Path) -> Dataset:
    """A new manifest for the samples in `folder`, in the order of their names; captions are kept."""
    manifest = folder / MANIFEST
    captions = {}
    if manifest.is_file():
        captions = {entry.file: entry.caption for entry in _read_manifest(manifest)}
    entries = []
    for path in sorted(folder.glob("*.safetensors")):
        size, shapes = _describe(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append(Entry(path.name, size, digest, shapes, captions.get(path.name, "")))
    if not entries:
        raise DistillError(f"{folder} holds no .safetensors samples.")
    check_alike(entries)
    write_manifest(folder, entries)
    return Dataset(folder, tuple(entries))


def check_alike(entries: Sequence[Entry]) -> None:
    """DistillError unless all samples are of one kind: the same tensors, channels and widths."""
    first = entries[0]
    for entry in entries[1:]:
        if entry.widths != first.widths:
            raise DistillError(
                f"{first.file} and {entry.file} are samples for different models: {first.widths} and "
                f"{entry.widths}. Keep each kind in a folder of its own."
            )


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing: a file half written never has the name."""
    fresh = path.with_name(path.name + ".partial")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
