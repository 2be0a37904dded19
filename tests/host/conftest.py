"""Fixtures that give a test the real ComfyUI: as a running server, in this process, or in one of its own."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import comfy_tree
import host as harness
import tiny_models as makers
from host import ROOT, Host, Server

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("host")


@pytest.fixture(scope="session")
def host() -> Host:
    """The ComfyUI that was set up. Tests install nothing, so without it they skip."""
    ready = harness.ready_host()
    if ready is None:
        pytest.skip("ComfyUI is not set up; run: python scripts/host.py setup")
    return ready


@pytest.fixture(scope="session")
def base(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory of ComfyUI with this pack in custom_nodes; `tiny_models` puts models into it."""
    return harness.make_base(tmp_path_factory.mktemp("comfy"))


@pytest.fixture(scope="session")
def in_host(host: Host, base: Path) -> Callable[[str], str]:
    """Runs a Python snippet in a fresh process that can import ComfyUI's modules; returns what it printed."""

    def run(snippet: str, timeout: float = 240) -> str:
        prelude = (
            f"import sys; from pathlib import Path; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
            f"import comfy_tree; comfy_tree.use_comfy(Path({str(host.tree)!r}), Path({str(base)!r}))\n"
        )
        done = subprocess.run(
            [host.python, "-c", prelude + textwrap.dedent(snippet)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def comfy(host: Host, base: Path) -> ModuleType:
    """ComfyUI's `comfy` package, importable in this process from here on, on the CPU."""
    if Path(sys.prefix) != host.python.parent.parent:
        pytest.skip(
            f"runs in the host's Python; run: python scripts/host.py run -m pytest {HERE.relative_to(ROOT)}"
        )
    comfy_tree.use_comfy(host.tree, base)
    return importlib.import_module("comfy")


@pytest.fixture(scope="session")
def pack(comfy: ModuleType) -> ModuleType:
    """This pack, loaded as ComfyUI loads a custom node: under a name of its own, its rooms as submodules.

    `importlib.import_module(f"{pack.__name__}.nodes.patch")` gives a module of it.
    """
    name = "custom_nodes_spargeattention2"
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_models(host: Host, base: Path) -> dict[str, Path]:
    """Files of tiny random Wan models: "t2v", "i2v", "flf2v", "vace", the "vae", and a "text" embedding."""
    subprocess.run([host.python, makers.__file__, base], check=True, capture_output=True)
    return makers.files_in(base)


@pytest.fixture(scope="session")
def server(host: Host, base: Path, tiny_models: dict[str, Path]) -> Iterator[Server]:
    """A running server with this pack and the tiny models."""
    with Server(host, base) as running:
        yield running
