"""The harness that every other test of the real host stands on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from host import PACK_NAME, ROOT, Host, HostError, Server

from .graphs import PATCH, REPORT, latent_of, node_of, tiny_prompt

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")


@pytest.fixture(scope="module")
def prompt(server: Server) -> dict[str, Any]:
    """The tiny workflow without a video and its report, and with the smallest latent that fits."""
    graph = tiny_prompt(server, 64, 64, 9)
    del graph[node_of(graph, REPORT)]
    return graph


def with_inputs(prompt: dict[str, Any], class_type: str, **inputs: Any) -> dict[str, Any]:
    node = node_of(prompt, class_type)
    changed = {**prompt[node], "inputs": {**prompt[node]["inputs"], **inputs}}
    return {**prompt, node: changed}


def test_the_server_serves_the_pack_in_a_version_that_the_pack_asks_for(server: Server) -> None:
    version = server.get("/system_stats")["system"]["comfyui_version"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert version in SpecifierSet(project["tool"]["comfy"]["requires-comfyui"])
    ours = {name for name, node in server.object_info().items() if PACK_NAME in node["python_module"]}
    assert {PATCH, REPORT} <= ours


def test_comfy_and_the_pack_load_in_this_process(comfy: ModuleType, pack: ModuleType, host: Host) -> None:
    import nodes

    assert nodes.__file__ is not None
    assert Path(nodes.__file__).parent == host.tree
    assert callable(pack.comfy_entrypoint)


def test_a_snippet_runs_in_a_process_of_its_own(in_host: Callable[[str], str]) -> None:
    assert in_host("import comfy.model_management as m; print(m.get_torch_device())") == "cpu\n"


def test_what_the_validator_refuses_is_told_with_node_and_input(
    server: Server, prompt: dict[str, Any]
) -> None:
    with pytest.raises(HostError, match=r"refused the prompt.*\n.*KSampler.*sampler_name: 'none'"):
        server.queue(with_inputs(prompt, "KSampler", sampler_name="none"))


def test_a_node_that_fails_is_told_with_its_message(server: Server, prompt: dict[str, Any]) -> None:
    with pytest.raises(HostError, match=r"\(SpargeAttention2Patch\) failed: ValueError: .*layer"):
        server.run(with_inputs(prompt, "SpargeAttention2Patch", dense_layers="0-99"))


def test_an_interrupted_run_says_so_and_the_next_one_is_as_if_it_had_not_been(
    server: Server, prompt: dict[str, Any]
) -> None:
    before = server.run(with_inputs(prompt, "KSampler", seed=5))
    queued = server.queue(with_inputs(prompt, "KSampler", seed=6, steps=10_000))
    while server.get("/queue")["queue_running"] == []:
        time.sleep(0.05)
    server.interrupt()
    with pytest.raises(HostError, match=r"interrupted in node \d+ \(KSampler\)"):
        server.wait(queued)
    # Another number of steps first: else the result would come from ComfyUI's cache.
    server.run(with_inputs(prompt, "KSampler", seed=5, steps=1))
    after = server.run(with_inputs(prompt, "KSampler", seed=5))
    latents = [latent_of(server, prompt, outputs) for outputs in (before, after)]
    assert latents[0].equal(latents[1])
