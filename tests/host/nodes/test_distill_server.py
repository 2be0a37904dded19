"""From a user's own results to a student and back into a sampler, in prompts to the real server."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from host import Server

from ..graphs import PATCH, REPORT, node_of, tiny_prompt, without_patch

SETTINGS = {
    **{"samples": "clips", "name": "mine", "steps": 2, "batch": 1, "learning_rate": 1e-3, "rank": 4},
    **{"top_k": 0.0, "top_p": 0.2, "sparsity": 0.5, "held_out": 1, "save_every": 1, "checkpointing": True},
}


@pytest.mark.slow
def test_a_users_own_results_distil_a_student_that_samples(server: Server, base: Path) -> None:
    prompt = tiny_prompt(server, 128, 128, 9)
    sampler, patch = node_of(prompt, "KSampler"), node_of(prompt, PATCH)
    loader = prompt[patch]["inputs"]["model"]

    making = without_patch(copy.deepcopy(prompt))
    making["save"] = {
        "class_type": "SpargeSaveSample",
        "inputs": {
            "model": loader,
            "positive": making[sampler]["inputs"]["positive"],
            "latent": [sampler, 0],
            **{"folder": "clips", "caption": ""},
        },
    }
    for seed in range(3):
        making[sampler]["inputs"].update(seed=seed, steps=2)
        said = server.run(making)["save"]["text"][0]
    assert said == "clips: 3 samples."

    prompt["distil"] = {
        "class_type": "SpargeDistillStudent",
        "inputs": {"model": loader, **SETTINGS, "seed": 0},
    }
    prompt[patch]["inputs"].update(model=["distil", 0], settings="auto", min_tokens=0)
    prompt[sampler]["inputs"].update(steps=2)
    outputs = server.run(prompt)
    (picture,) = outputs["distil"]["images"]
    assert server.fetch(picture).startswith(b"\x89PNG")
    text = outputs[node_of(prompt, REPORT)]["text"][0]
    assert "Settings (auto: the student's own): top_k 0, sparsity 0.5" in text
    assert (base / "output" / "loras" / "mine.safetensors").is_file()
    files = server.object_info()["SpargeLoadStudent"]["input"]["required"]["file"]
    assert "loras/mine.safetensors" in str(files)
