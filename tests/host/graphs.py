"""The tiny workflow as a prompt for the server, and what tests change of it."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

import demo
from host import ROOT, Server
from workflow import load, to_api

WORKFLOW = "workflows/wan21_tiny.json"
PATCH, REPORT = "SpargeAttention2Patch", "SpargeSparsityReport"

Prompt = dict[str, Any]


def node_of(prompt: Prompt, class_type: str) -> str:
    """The id of the prompt's one node of this type."""
    (node,) = (key for key, node in prompt.items() if node["class_type"] == class_type)
    return node


def tiny_prompt(server: Server, width: int, height: int, length: int) -> Prompt:
    """The tiny workflow at a size in pixels and frames, without its video."""
    prompt = {
        key: node
        for key, node in to_api(load(ROOT / WORKFLOW), server.object_info()).items()
        if node["class_type"] not in ("VAEDecode", "VAELoader", "CreateVideo", "SaveVideo")
    }
    size = {"width": width, "height": height, "length": length}
    prompt[node_of(prompt, "EmptyHunyuanLatentVideo")]["inputs"].update(size)
    return prompt


def without_patch(prompt: Prompt) -> Prompt:
    """The graph without this pack's nodes: the model goes past the patch, and nothing is reported."""
    bare = copy.deepcopy(prompt)
    patch = node_of(bare, PATCH)
    model = bare.pop(patch)["inputs"]["model"]
    del bare[node_of(bare, REPORT)]
    for node in bare.values():
        for name, value in node["inputs"].items():
            if value == [patch, 0]:
                node["inputs"][name] = model
    return bare


def latent_of(server: Server, prompt: Prompt, outputs: dict[str, Any]) -> Tensor:
    return demo.latent_of(server, outputs, node_of(prompt, "SaveLatent"))
