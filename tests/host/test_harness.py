"""The harness that every other test of the real host stands on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import host as harness
from host import Server


def test_the_server_serves_the_pack(server: Server) -> None:
    assert server.get("/system_stats")["system"]["comfyui_version"]
    assert any(name.startswith("SpargeAttention2") for name in server.object_info())


def test_comfy_and_the_pack_load_in_this_process(
    comfy: ModuleType, pack: ModuleType, host: harness.Host
) -> None:
    import nodes

    assert Path(nodes.__file__).parent == host.tree
    assert callable(pack.comfy_entrypoint)


def test_a_snippet_runs_in_a_process_of_its_own(in_host: Callable[[str], str]) -> None:
    assert in_host("import comfy.model_management as m; print(m.get_torch_device())") == "cpu\n"
