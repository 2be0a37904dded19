"""Samples: what is written is read, in an order that the seed decides; what is damaged is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sparge_core.distill import DistillError, data

from .conftest import TEXT, make_data, tensors


def test_a_sample_is_read_as_it_was_written_with_its_text_padded(tmp_path: Path) -> None:
    written = tensors(0, image=True)
    data.write_sample(tmp_path, written, "a cat")
    held = data.open_dataset(tmp_path)
    read = held.read(0)
    assert held.entries[0].caption == "a cat"
    assert torch.equal(read.latent, written["latent"])
    assert read.text.shape[0] == data.TEXT_TOKENS
    assert torch.equal(read.text[:TEXT], written["text"])
    assert not read.text[TEXT:].any()
    assert read.image_latent is not None
    assert torch.equal(read.image_latent, written["image_latent"])
    assert read.image_embedding is not None
    assert torch.equal(read.image_embedding, written["image_embedding"])


def test_the_same_sample_twice_is_one(tmp_path: Path) -> None:
    for _ in range(2):
        data.write_sample(tmp_path, tensors(0))
    assert len(data.open_dataset(tmp_path)) == 1


def test_an_epoch_has_every_sample_once_and_the_next_another_order(samples: Path) -> None:
    held = data.open_dataset(samples)
    epochs = [[held.at(epoch * len(held) + i, seed=3) for i in range(len(held))] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(len(held))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert epochs[0] == [held.at(i, seed=3) for i in range(len(held))]
    assert epochs != [
        [held.at(epoch * len(held) + i, seed=4) for i in range(len(held))] for epoch in range(4)
    ]


def test_held_out_samples_are_never_trained_on(samples: Path) -> None:
    held = data.open_dataset(samples)
    train, validation = held.split(2, seed=1)
    names = [{entry.file for entry in part.entries} for part in (train, validation)]
    assert len(names[1]) == 2
    assert not names[0] & names[1]
    assert names[0] | names[1] == {entry.file for entry in held.entries}


def damage_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / data.MANIFEST
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def first(folder: Path) -> Path:
    return folder / data.open_dataset(folder).entries[0].file


def cut(folder: Path) -> str:
    path = first(folder)
    path.write_bytes(path.read_bytes()[:-5])
    return f"{path.name}.*cut off"


def remove(folder: Path) -> str:
    path = first(folder)
    path.unlink()
    return f"{path.name} is missing"


def other_shape(folder: Path) -> str:
    path = first(folder)
    save_file(tensors(0, size=(2, 16, 16)), path)
    return f"lists {path.name} with"


def outside(folder: Path) -> str:
    damage_manifest(folder, lambda content: content["samples"][0].update(file="../other.safetensors"))
    return "names ../other.safetensors"


def newer(folder: Path) -> str:
    damage_manifest(folder, lambda content: content.update(version=2))
    return "of version 2, and this version of the pack reads"


def no_manifest(folder: Path) -> str:
    (folder / data.MANIFEST).unlink()
    return "has no manifest.json"


def broken_manifest(folder: Path) -> str:
    (folder / data.MANIFEST).write_text('{"format": ', encoding="utf-8")
    return "manifest.json is damaged"


def empty(folder: Path) -> str:
    damage_manifest(folder, lambda content: content.update(samples=[]))
    return "lists no samples"


@pytest.mark.parametrize(
    "damage", [cut, remove, other_shape, outside, newer, no_manifest, broken_manifest, empty]
)
def test_a_folder_that_does_not_hold_together_is_named(damage: Callable[[Path], str], tmp_path: Path) -> None:
    make_data(tmp_path, 2)
    message = damage(tmp_path)
    with pytest.raises(DistillError, match=message):
        data.open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent": torch.full((16, 1, 4, 4), float("nan"))}, "latent is not finite"),
        ({"latent": torch.zeros(16, 4, 4)}, "latent has the shape"),
        ({"text": torch.zeros(513, 12)}, "513 tokens and Wan reads 512"),
        ({"image_latent": torch.zeros(20, 1, 4, 4)}, "image_latent is"),
        ({"mask": torch.zeros(1)}, "holds mask"),
    ],
)
def test_what_is_no_sample_is_not_written(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DistillError, match=message):
        data.write_sample(tmp_path, {**tensors(0), **change})
    assert not list(tmp_path.iterdir())


def test_samples_of_another_kind_of_model_do_not_join_a_folder(tmp_path: Path) -> None:
    make_data(tmp_path, 1)
    with pytest.raises(DistillError, match="samples for different models"):
        data.write_sample(tmp_path, tensors(5, image=True))
    assert len(data.open_dataset(tmp_path)) == 1


def test_a_sample_whose_bytes_changed_is_named_when_it_is_read(tmp_path: Path) -> None:
    make_data(tmp_path, 1)
    path = first(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DistillError, match=rf"{path.name} is not what the manifest lists"):
        data.open_dataset(tmp_path).read(0)


def test_prepare_takes_a_folder_as_it_is_now_and_keeps_captions(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    make_data(tmp_path, 3)
    first(tmp_path).unlink()
    save_file(tensors(9), tmp_path / "added.safetensors")
    code, said = command("prepare", tmp_path)
    assert (code, "3 samples, latents 3 of 2 × 16 × 32" in said) == (0, True)
    held = data.open_dataset(tmp_path)
    assert "added.safetensors" in {entry.file for entry in held.entries}
    assert sorted(entry.caption for entry in held.entries) == ["", "clip 1", "clip 2"]
