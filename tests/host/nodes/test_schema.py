"""What saved graphs depend on, and what the interface shows: frozen once shipped."""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType
from typing import Any

import pytest

FILES = "COMBO of files"  # options that differ from machine to machine

# Widgets are stored by position and nodes by id, so a change here breaks graphs that people have saved.
FROZEN: dict[str, dict[str, Any]] = {
    "SpargeAttention2Patch": {
        "inputs": [
            ("model", "MODEL", None),
            ("settings", ["auto", "manual"], "auto"),
            ("top_k", "FLOAT", 0.03),
            ("top_p", "FLOAT", 0.2),
            ("sparsity", "FLOAT", 0.5),
            ("start_percent", "FLOAT", 0.0),
            ("end_percent", "FLOAT", 1.0),
            ("dense_layers", "STRING", ""),
            ("min_tokens", "INT", 4096),
            ("backend", ["auto", "cuda", "flex", "reference", "dense"], "auto"),
            ("tuning", "SPARGE_TUNING", None),
        ],
        "outputs": [("MODEL", "MODEL")],
        "sliders": ["top_k", "top_p", "sparsity"],
    },
    "SpargeSparsityReport": {
        "inputs": [
            ("model", "MODEL", None),
            ("latent", "LATENT", None),
            ("layer", "INT", -1),
            ("step", "INT", 0),
            ("head", "INT", -1),
        ],
        "outputs": [("image", "IMAGE"), ("text", "STRING"), ("json", "STRING")],
        "sliders": [],
    },
    "SpargeSparsityProbe": {
        "inputs": [("model", "MODEL", None), ("steps", "INT", 2)],
        "outputs": [("MODEL", "MODEL")],
        "sliders": [],
    },
    "SpargeCalibrate": {
        "inputs": [("model", "MODEL", None), ("steps", "INT", 8)],
        "outputs": [("MODEL", "MODEL")],
        "sliders": [],
    },
    "SpargeTune": {
        "inputs": [
            ("model", "MODEL", None),
            ("latent", "LATENT", None),
            ("budget", "FLOAT", 0.05),
            ("name", "STRING", "tuning"),
        ],
        "outputs": [("tuning", "SPARGE_TUNING"), ("image", "IMAGE"), ("text", "STRING")],
        "sliders": [],
    },
    "SpargeLoadTuning": {
        "inputs": [("file", FILES, None)],
        "outputs": [("tuning", "SPARGE_TUNING")],
        "sliders": [],
    },
    "SpargeLoadStudent": {
        "inputs": [("file", FILES, None), ("base", "MODEL", None)],
        "outputs": [("MODEL", "MODEL")],
        "sliders": [],
    },
    "SpargeSaveSample": {
        "inputs": [
            ("model", "MODEL", None),
            ("positive", "CONDITIONING", None),
            ("latent", "LATENT", None),
            ("folder", "STRING", "distillation/samples"),
            ("caption", "STRING", ""),
        ],
        "outputs": [],
        "sliders": [],
    },
    "SpargeDistillStudent": {
        "inputs": [
            ("model", "MODEL", None),
            ("samples", "STRING", "distillation/samples"),
            ("name", "STRING", "student"),
            ("steps", "INT", 500),
            ("batch", "INT", 16),
            ("learning_rate", "FLOAT", 1e-4),
            ("rank", "INT", 64),
            ("top_k", "FLOAT", 0.03),
            ("top_p", "FLOAT", 0.2),
            ("sparsity", "FLOAT", 0.0),
            ("held_out", "INT", 4),
            ("save_every", "INT", 25),
            ("checkpointing", "BOOLEAN", True),
            ("seed", "INT", 0),
        ],
        "outputs": [("MODEL", "MODEL"), ("file", "STRING"), ("image", "IMAGE")],
        "sliders": ["top_k", "top_p", "sparsity"],
    },
}


@pytest.fixture(scope="session")
def info(pack: ModuleType) -> dict[str, dict[str, Any]]:
    """What the server tells the interface about each node, by node id."""
    nodes = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    return {node.GET_SCHEMA().node_id: node.GET_NODE_INFO_V1() for node in nodes}


def inputs_of(about: dict[str, Any]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Type (a combo's options in its place) and settings of each input, in their order."""
    listed = {}
    for kind in ("required", "optional"):
        for name in about["input_order"].get(kind, []):
            type_, *rest = about["input"][kind][name]
            settings = rest[0] if rest else {}
            if type_ == "COMBO":
                type_ = FILES if name == "file" else settings.get("options", type_)
            listed[name] = (type_, settings)
    return listed


@pytest.mark.parametrize("node", FROZEN)
def test_ids_widgets_their_order_and_defaults_do_not_change(
    node: str, info: dict[str, dict[str, Any]]
) -> None:
    inputs, frozen = inputs_of(info[node]), FROZEN[node]
    assert [(name, type_, settings.get("default")) for name, (type_, settings) in inputs.items()] == frozen[
        "inputs"
    ]
    assert list(zip(info[node]["output_name"], info[node]["output"], strict=True)) == frozen["outputs"]
    sliders = [name for name, (_, settings) in inputs.items() if settings.get("display") == "slider"]
    assert sliders == frozen["sliders"]


def test_the_back_ends_offered_are_those_there_are(pack: ModuleType, info: dict[str, dict[str, Any]]) -> None:
    backends = importlib.import_module(f"{pack.__name__}.sparge_core.backends")
    assert sorted(inputs_of(info["SpargeAttention2Patch"])["backend"][0]) == sorted(backends.NAMES)


@pytest.mark.parametrize("node", FROZEN)
def test_every_input_and_output_says_what_it_is_for(node: str, info: dict[str, dict[str, Any]]) -> None:
    about = info[node]
    assert about["display_name"]
    assert about["description"]
    assert [name for name, (_, settings) in inputs_of(about).items() if not settings.get("tooltip")] == []
    assert all(about["output_tooltips"])
