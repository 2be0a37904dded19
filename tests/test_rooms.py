"""The rules of the house that only a look at the sources can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "sparge_core").rglob("*.py"))
NODES = sorted((ROOT / "nodes").rglob("*.py"))
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "nodes", "server"}
NETWORK = {"aiohttp", "ftplib", "http", "httpx", "huggingface_hub", "requests", "socket", "urllib"}


def _id(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _imported(file: Path) -> Iterator[str]:
    """The top-level packages that a file imports absolutely."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("file", CORE, ids=_id)
def test_the_core_knows_nothing_of_comfyui(file: Path) -> None:
    assert not COMFYUI & set(_imported(file))


@pytest.mark.parametrize("file", CORE + NODES, ids=_id)
def test_the_pack_imports_itself_relatively_since_comfyui_gives_it_another_name(file: Path) -> None:
    assert "sparge_core" not in set(_imported(file))


@pytest.mark.parametrize("file", CORE + NODES, ids=_id)
def test_nothing_that_runs_opens_a_pickle_or_a_connection(file: Path) -> None:
    assert not (NETWORK | {"pickle", "dill"}) & set(_imported(file))
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    }
    assert "torch.load" not in calls
