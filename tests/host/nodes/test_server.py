"""The nodes in prompts to the real server."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import pytest
import torch

from host import PACK_NAME, ROOT, HostError, Server

from ..graphs import PATCH, REPORT, Prompt, latent_of, node_of, tiny_prompt, without_patch

SAMPLER = "KSamplerAdvanced"
START_SECONDS = 60


@pytest.fixture(scope="module")
def tiny(server: Server) -> Prompt:
    """The tiny workflow at 128 × 128 × 9 in two steps; its sampler has an input of no effect, for `again`."""
    prompt = tiny_prompt(server, 128, 128, 9)
    sampler = prompt[node_of(prompt, "KSampler")]
    links = {name: sampler["inputs"][name] for name in ("model", "positive", "negative", "latent_image")}
    sampler["class_type"] = SAMPLER
    sampler["inputs"] = {
        **links,
        "add_noise": "enable",
        "noise_seed": 5,
        "steps": 2,
        "cfg": 6.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "start_at_step": 0,
        "end_at_step": 1000,
        "return_with_leftover_noise": "disable",
    }
    return prompt


def changed(prompt: Prompt, class_type: str, **inputs: Any) -> Prompt:
    prompt = copy.deepcopy(prompt)
    prompt[node_of(prompt, class_type)]["inputs"].update(inputs)
    return prompt


def again(prompt: Prompt) -> Prompt:
    """The same for the sampler, but not for the server, which would hand out what it has cached."""
    end = prompt[node_of(prompt, SAMPLER)]["inputs"]["end_at_step"]
    return changed(prompt, SAMPLER, end_at_step=end + 1)


def sampled(server: Server, prompt: Prompt) -> torch.Tensor:
    return latent_of(server, prompt, server.run(prompt))


def test_a_graph_without_the_node_is_what_it_was_after_one_with_it(server: Server, tiny: Prompt) -> None:
    dense, sparse = without_patch(tiny), tiny
    before, patched = sampled(server, dense), sampled(server, sparse)
    assert not torch.allclose(before, patched, atol=1e-3)
    assert torch.equal(sampled(server, again(dense)), before)
    assert torch.equal(sampled(server, again(sparse)), patched)


def test_a_run_after_an_interrupt_is_as_without(server: Server, tiny: Prompt) -> None:
    truth = sampled(server, tiny)
    long = server.queue(changed(tiny, SAMPLER, steps=1000))
    deadline = time.monotonic() + START_SECONDS
    while "2/1000" not in server.log_text():
        assert time.monotonic() < deadline, "the long run did not start"
        time.sleep(0.1)
    server.interrupt()
    with pytest.raises(HostError, match=f"was interrupted in node .* \\({SAMPLER}\\)"):
        server.wait(long)
    prompt = again(again(tiny))
    outputs = server.run(prompt)
    assert torch.equal(latent_of(server, prompt, outputs), truth)
    assert "Sparse calls: 4" in outputs[node_of(prompt, REPORT)]["text"][0]


def test_the_report_shows_text_and_a_picture(server: Server, tiny: Prompt) -> None:
    shown = server.run(again(again(again(tiny))))[node_of(tiny, REPORT)]
    (text,) = shown["text"]
    assert "Settings (manual)" in text
    (picture,) = shown["images"]
    assert server.fetch(picture).startswith(b"\x89PNG")


def test_two_samplers_of_one_model_have_reports_of_their_own(server: Server, tiny: Prompt) -> None:
    prompt = changed(tiny, SAMPLER, noise_seed=6)
    short, report = node_of(prompt, SAMPLER), node_of(prompt, REPORT)
    prompt["large latent"] = copy.deepcopy(prompt[node_of(prompt, "EmptyHunyuanLatentVideo")])
    prompt["large latent"]["inputs"]["width"] = 192
    prompt["long"], prompt["long report"] = copy.deepcopy(prompt[short]), copy.deepcopy(prompt[report])
    prompt["long"]["inputs"].update(steps=3, latent_image=["large latent", 0])
    prompt["long report"]["inputs"]["latent"] = ["long", 0]
    outputs = server.run(prompt)
    assert [outputs[node]["text"][0].splitlines()[0][:15] for node in (report, "long report")] == [
        "Sparse calls: 4",
        "Sparse calls: 6",
    ]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"dense_layers": "0-99"}, '"0-99" names layer 99, but this model has 2 layers'),
        ({"sparsity": float("nan")}, "sparsity"),
        ({"top_k": 1.5}, "top_k"),
        ({"backend": "magic"}, "backend"),
    ],
)
def test_bad_input_is_one_sentence_in_the_nodes_error(
    inputs: dict[str, Any], sentence: str, server: Server, tiny: Prompt
) -> None:
    with pytest.raises(HostError, match=f"\\({PATCH}\\).*{sentence}"):
        server.run(changed(tiny, PATCH, **inputs))


def test_help_and_translations_are_served(server: Server) -> None:
    zh = server.get("/i18n")["zh"]["nodeDefs"]
    for node in (PATCH, REPORT):
        assert zh[node] == json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))[node]
        for page in (f"docs/{node}.md", f"docs/{node}/zh.md"):
            assert server._request(f"/extensions/{PACK_NAME}/{page}") == (ROOT / "web" / page).read_bytes()
