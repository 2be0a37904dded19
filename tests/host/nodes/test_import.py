"""Importing the pack: without a GPU, and beside itself."""

from __future__ import annotations

from collections.abc import Callable

from host import ROOT

LOAD = f"""
import asyncio, importlib.util, torch

def load(name):
    init, rooms = r"{ROOT / "__init__.py"}", [r"{ROOT}"]
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=rooms)
    pack = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    nodes = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    return [node.GET_SCHEMA().node_id for node in nodes]
"""
FORBID_CUDA = """
import comfy.ldm.wan.model, comfy.sd, comfy_api.latest, torch

def forbidden(*_):
    raise AssertionError("CUDA was asked for")

for name in ("_lazy_init", "is_available", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, forbidden)
"""


def test_nothing_asks_for_a_gpu_while_the_pack_loads(in_host: Callable[[str], str]) -> None:
    assert "SpargeAttention2Patch" in in_host(FORBID_CUDA + LOAD + "print(load('pack'))")


def test_the_pack_loads_twice_and_beside_the_headless_core(in_host: Callable[[str], str]) -> None:
    out = in_host(
        LOAD
        + f"""
sys.path.append(r"{ROOT}")  # as an editable install does, behind ComfyUI's own
import sparge_core.cuda.operators
first = load("pack")
import importlib
importlib.import_module("pack.sparge_core.cuda.operators")
second = load("other_pack")
importlib.import_module("other_pack.sparge_core.cuda.operators")
q = torch.randn(1, 1, 200, 64)
config = sparge_core.SparseConfig(sparsity=0.3)
here = sparge_core.sparse_attention(q, q, q, config)
there = sys.modules["other_pack.sparge_core"]
same = there.sparse_attention(q, q, q, there.SparseConfig(sparsity=0.3))
print(first == second, torch.equal(here, same))
"""
    )
    assert out.split()[-2:] == ["True", "True"]
