"""Settings: ranges, the sentence of each error, and the round trip through a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from sparge_core import DensePolicy, SparseConfig, parse_layers
from sparge_core.config import METADATA_PREFIX

shares = st.floats(0.0, 1.0)


@pytest.mark.parametrize("name", ["top_k", "top_p", "sparsity", "start_percent", "end_percent"])
@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan"), float("inf"), "0.5", None, True])
def test_a_value_out_of_range_is_named_with_what_is_allowed(name: str, value: Any) -> None:
    settings = SparseConfig if name in ("top_k", "top_p", "sparsity") else DensePolicy
    with pytest.raises(ValueError, match=rf"{name} is .*; it must be a number from 0") as error:
        settings(**{name: value})
    assert str(value) in str(error.value)


def test_everything_between_the_ends_is_valid_and_a_sparsity_of_one_is_not() -> None:
    assert SparseConfig(0, 1, 0.0) == SparseConfig(0.0, 1.0, 0.0)
    assert SparseConfig(sparsity=np.float32(0.5)).sparsity == 0.5
    with pytest.raises(ValueError, match="not including, 1"):
        SparseConfig(sparsity=1.0)


def test_settings_cannot_be_changed_after_they_were_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparseConfig().top_k = 2.0  # type: ignore[misc]


def test_the_part_of_the_sampling_must_not_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match=r"start_percent is 0\.6 and end_percent is 0\.4"):
        DensePolicy(start_percent=0.6, end_percent=0.4)


@pytest.mark.parametrize(
    "settings", [{"min_tokens": -1}, {"min_tokens": 0.5}, {"dense_layers": (-1,)}, {"dense_layers": ("0",)}]
)
def test_tokens_and_layers_are_whole_numbers(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        DensePolicy(**settings)


def test_policy_gives_a_reason_for_dense_layers_and_short_sequences_only() -> None:
    policy = DensePolicy(dense_layers=(3, 1, 3), min_tokens=100)
    assert policy.dense_layers == (1, 3)
    assert policy.why_dense(layer=1, tokens=1000) == "layer set to dense"
    assert policy.why_dense(layer=0, tokens=99) == "fewer than 100 tokens"
    assert policy.why_dense(layer=0, tokens=100) is None


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0, 1, 38-39", (0, 1, 38, 39)),
        ("", ()),
        (" , ", ()),
        ("5", (5,)),
        ("3-5,4, 0", (0, 3, 4, 5)),
        ("7 - 8", (7, 8)),
    ],
)
def test_layers_are_read_from_lists_and_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layers(text, total=40) == layers


@pytest.mark.parametrize("text", ["a", "1;2", "-1", "5-3", "1-2-3", "1.5", "1 2"])
def test_text_that_names_no_layers_is_quoted_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match='write for example "0, 1, 28-29"') as error:
        parse_layers(text)
    assert f'"{text}"' in str(error.value)


def test_a_layer_that_the_model_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(ValueError, match=r'"0-99" names layer 99, but this model has 30 layers \(0 to 29\)'):
        parse_layers("0-99", total=30)
    with pytest.raises(ValueError, match="names layer 30"):
        parse_layers("30", total=30)


@given(top_k=shares, top_p=shares, sparsity=st.floats(0.0, 1.0, exclude_max=True))
def test_metadata_gives_back_the_very_same_settings(top_k: float, top_p: float, sparsity: float) -> None:
    config = SparseConfig(top_k, top_p, sparsity)
    assert SparseConfig.from_metadata(config.to_metadata()) == config


def test_settings_travel_in_a_safetensors_file(tmp_path: Path) -> None:
    config = SparseConfig(0.03, 0.16)
    save_file(
        {"x": torch.zeros(1)}, tmp_path / "student.safetensors", {"format": "pt", **config.to_metadata()}
    )
    with safe_open(tmp_path / "student.safetensors", "pt") as file:
        assert SparseConfig.from_metadata(file.metadata()) == config


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "top_k": "0.5"}])
def test_a_file_without_our_keys_carries_no_settings(metadata: dict[str, str] | None) -> None:
    assert SparseConfig.from_metadata(metadata) is None


def changed(key: str, value: str) -> Callable[[dict[str, str]], None]:
    return lambda metadata: metadata.update({METADATA_PREFIX + key: value})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (changed("block_q", "64"), "block_q is '64', but this version works with '128'"),
        (changed("block_k", "128"), "block_k is '128', but this version works with '64'"),
        (changed("method_version", "9"), "method_version is '9', but this version works with '1'"),
        (changed("top_k", "much"), "top_k is 'much'; it must be a number"),
        (changed("top_p", "nan"), "top_p is nan; it must be a number from 0 to 1"),
        (lambda metadata: metadata.pop(METADATA_PREFIX + "sparsity"), "sparsity is None"),
    ],
)
def test_a_file_made_for_something_else_is_refused(
    change: Callable[[dict[str, str]], None], sentence: str
) -> None:
    metadata = SparseConfig().to_metadata()
    change(metadata)
    with pytest.raises(ValueError, match=sentence):
        SparseConfig.from_metadata(metadata)
