"""The two experts of Wan2.2 in one graph on the running server, each with its own student."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from host import Server
from sparge_core import SparseConfig

from ..wan.files import diffusers_name, random_tensors, wan_model, write
from .graphs import PATCH, REPORT, node_of, tiny_prompt

CONFIGS = {"high": SparseConfig(top_k=0.3, top_p=0.4), "low": SparseConfig(top_k=0.1, top_p=0.2)}
STEPS, SWITCH = 4, 2


@pytest.fixture
def students(server: Server) -> dict[str, str]:
    """A file for each expert, as the loader calls it."""
    files = {}
    for seed, (expert, config) in enumerate(CONFIGS.items()):
        path = Path(server.base) / "models" / "diffusion_models" / f"{expert}_noise.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        shapes = wan_model(dim=256, text=4096, freq=256)
        tensors = {diffusers_name(key): value / (16 + seed) for key, value in random_tensors(shapes).items()}
        write(path, tensors, config.to_metadata())
        files[expert] = f"diffusion_models/{path.name}"
    return files


def graph(server: Server, students: dict[str, str]) -> dict[str, Any]:
    """The tiny workflow with a loader, a patch, a sampler and a report for each expert."""
    prompt = tiny_prompt(server, 128, 128, 9)
    chain = {
        name: node_of(prompt, name) for name in ("UNETLoader", PATCH, "ModelSamplingSD3", "KSampler", REPORT)
    }
    parts = {name: prompt.pop(node) for name, node in chain.items()}
    del prompt[node_of(prompt, "SaveLatent")]

    sampling = {"add_noise": "disable", "return_with_leftover_noise": "disable", "noise_seed": 5, "cfg": 3.0}
    ends = {
        "high": {
            "add_noise": "enable",
            "start_at_step": 0,
            "end_at_step": SWITCH,
            "return_with_leftover_noise": "enable",
        },
        "low": {"start_at_step": SWITCH, "end_at_step": STEPS, "latent_image": ["high sampler", 0]},
    }
    for expert, file in students.items():
        patch = copy.deepcopy(parts[PATCH])
        patch["inputs"].update(model=[f"{expert} loader", 0], settings="auto", min_tokens=0)
        given = {name: parts["KSampler"]["inputs"][name] for name in ("positive", "negative", "latent_image")}
        inputs = {
            "model": [f"{expert} shift", 0],
            "steps": STEPS,
            "sampler_name": "euler",
            "scheduler": "simple",
            **given,
            **sampling,
            **ends[expert],
        }
        prompt |= {
            f"{expert} loader": {"class_type": "SpargeLoadStudent", "inputs": {"file": file}},
            f"{expert} patch": patch,
            f"{expert} shift": {
                "class_type": "ModelSamplingSD3",
                "inputs": {"model": [f"{expert} patch", 0], "shift": 8.0},
            },
            f"{expert} sampler": {"class_type": "KSamplerAdvanced", "inputs": inputs},
            f"{expert} report": {
                "class_type": REPORT,
                "inputs": {"model": [f"{expert} shift", 0], "latent": [f"{expert} sampler", 0]},
            },
        }
    return prompt


def test_each_expert_of_a_graph_reports_its_own_students_settings(
    server: Server, students: dict[str, str]
) -> None:
    outputs = server.run(graph(server, students))
    for expert, config in CONFIGS.items():
        (text,) = outputs[f"{expert} report"]["text"]
        assert "Sparse calls: 4," in text  # of two layers in two steps
        assert f"Settings (auto: the student's own): top_k {config.top_k:g}, top_p {config.top_p:g}" in text
        assert "Note" not in text
