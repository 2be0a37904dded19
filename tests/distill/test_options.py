"""Options that cannot work are named, all of them, before anything is loaded or written."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparge_core.distill import DistillError
from sparge_core.distill.export import LowRankPair, write_low_rank
from sparge_core.distill.options import TrainOptions, options_from, read_toml

from .conftest import IMAGE, make_data, make_model, write_toml

Train = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("student", "dora"),
        ("parameters", "none"),
        ("rank", 0),
        ("alpha", 0.0),
        ("top_k", 1.5),
        ("top_p", -0.1),
        ("sparsity", 1.0),
        ("loss", "l1"),
        ("steps", 0),
        ("batch", 0),
        ("micro_batch", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
        ("weight_decay", -1.0),
        ("beta1", 1.0),
        ("beta2", math.nan),
        ("warmup", -1),
        ("clip", 0.0),
        ("ema", 1.0),
        ("timesteps", "cosine"),
        ("timestep_mean", math.nan),
        ("timestep_std", 0.0),
        ("shift", 0.0),
        ("dtype", "fp16"),
        ("device", "tpu"),
        ("seed", -1),
        ("held_out", -1),
        ("validate_every", 0),
        ("validation_timesteps", [0.5, 1.0]),
        ("save_every", 0),
        ("keep", 0),
    ],
)
def test_every_option_out_of_range_is_named(name: str, value: Any, values: dict[str, Any]) -> None:
    with pytest.raises(DistillError, match=rf"{name} is .*; it must be"):
        options_from({**values, name: value})


def test_all_problems_are_named_at_once(values: dict[str, Any]) -> None:
    with pytest.raises(DistillError, match=r"rank is 0.*; clip is -1"):
        options_from({**values, "rank": 0, "clip": -1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4.5}, "rank is 4.5; it must be a whole number"),
        ({"rank": True}, "rank is True; it must be a whole number"),
        ({"checkpointing": "yes"}, "checkpointing is 'yes'; it must be true or false"),
        ({"lr": 1e-4}, "no option lr"),
        ({"base": None}, "base is not given"),
        ({"batch": 3, "micro_batch": 2}, "batch is 3, which micro_batch, 2, does not divide"),
        ({"teacher": "elsewhere"}, "a low-rank student's teacher is its base"),
        ({"student": "full", "adapter": "a.safetensors"}, "student is full: set it to low_rank"),
        ({"validation_timesteps": []}, "validation_timesteps is empty"),
    ],
)
def test_options_that_contradict_or_are_of_another_type_are_named(
    change: dict[str, Any], message: str, values: dict[str, Any]
) -> None:
    with pytest.raises(DistillError, match=message):
        options_from({**values, **change})


def test_options_survive_their_own_json(values: dict[str, Any]) -> None:
    options = options_from(values)
    assert options_from(options.to_json()) == options
    assert isinstance(options, TrainOptions)


def test_paths_in_a_toml_start_at_its_folder_and_flags_win(tmp_path: Path, train: Train, values: Any) -> None:
    path = write_toml(tmp_path / "run.toml", {"base": "models/wan", "steps": 7})
    assert read_toml(path) == {"base": tmp_path / "models" / "wan", "steps": 7}
    code, said = train(values, "--rank", "0")
    assert code == 1
    assert "rank is 0" in said


@pytest.mark.parametrize(("text", "message"), [(None, "There is no file"), ("steps = ", "is no TOML file")])
def test_a_toml_that_cannot_be_read_is_named(
    text: str | None, message: str, tmp_path: Path, command: Train
) -> None:
    if text is not None:
        (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    code, said = command("train", "--config", tmp_path / "run.toml")
    assert code == 1
    assert message in said


# ----------------------------------------------------------------------------------------------------------
# Parts that do not belong together


@pytest.fixture
def refused(train: Train, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Starts a run that must be refused before any weights are read, and returns what it said."""
    from sparge_core.distill import pair

    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(pair, "load_transformer", read)

    def refused(change: dict[str, Any]) -> str:
        code, said = train({**values, **change})
        assert code == 1
        assert not values["out"].exists()
        return said

    return refused


def test_a_teacher_of_another_shape_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", num_layers=3)
    said = refused({"student": "full", "teacher": other})
    assert "are different models (num_layers 3 against 2)" in said


def test_an_adapter_for_another_model_is_named(
    refused: Callable[..., str], values: dict[str, Any], tmp_path: Path
) -> None:
    config = options_from(values).config
    target = "blocks.{}.self_attn.q.weight"
    pair = LowRankPair(torch.zeros(64, 4), torch.zeros(4, 64), 4.0)
    file = write_low_rank(tmp_path / "wide.safetensors", {target.format(0): pair}, config, {}, "bf16")
    assert "wide.safetensors is a low-rank file for Wan" in refused({"adapter": file})
    (tmp_path / "junk.safetensors").write_bytes(b"PK\x03\x04" + bytes(200))
    assert "looks like a PyTorch pickle" in refused({"adapter": tmp_path / "junk.safetensors"})
    assert "There is no adapter" in refused({"adapter": tmp_path / "absent.safetensors"})


def test_samples_of_mixed_sizes_need_a_micro_batch_of_one(
    refused: Callable[..., str], train: Train, values: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    mixed = make_data(tmp_path / "mixed", 3)
    make_data(mixed, 2, size=(1, 16, 16))
    said = refused({"data": mixed, "micro_batch": 2})
    assert "different sizes (3 of 2 × 16 × 32, 2 of 1 × 16 × 16)" in said
    monkeypatch.undo()
    code, said = train({**values, "data": mixed, "steps": 2})
    assert code == 0, said
    assert "Samples of different sizes, which take turns" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_dim": 20}, "does not fit the base: its channels and widths are {'latent': 16, 'text': 12}"),
        (IMAGE, "the model takes {'latent': 16, 'text': 12, 'image_latent': 20, 'image_embedding': 24}"),
        ({"pos_embed_seq_len": 257, **IMAGE}, "is a first-last-frame model"),
    ],
)
def test_samples_for_another_model_are_named(
    change: dict[str, Any], message: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    assert message in refused({"base": make_model(tmp_path / "other", **change)})


def test_a_latent_that_patches_do_not_divide_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    odd = make_data(tmp_path / "odd", 3, size=(1, 15, 16))
    assert "has a latent of 15 × 16" in refused({"data": odd})


def test_holding_out_every_sample_is_named(refused: Callable[..., str]) -> None:
    assert "held_out is 6" in refused({"held_out": 6})


def test_what_is_no_wan_transformer_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "has no config.json" in refused({"base": tmp_path})
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}', encoding="utf-8")
    assert "describes a FluxTransformer2DModel" in refused({"base": tmp_path})
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "is damaged" in refused({"base": tmp_path})


def test_missing_packages_are_named(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from sparge_core.distill import cli

    monkeypatch.setattr(cli, "PACKAGES", ("diffusers", "no_such_package"))
    assert (
        'no_such_package cannot be imported; in the pack\'s folder run: python -m pip install -e ".[distill]"'
        in (refused({}))
    )
