"""The pack's modules that know no ComfyUI, without ComfyUI."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from host import ROOT


@pytest.fixture(scope="session")
def attention() -> ModuleType:
    """`nodes.attention`, under a package that stands for the pack: its own `__init__` needs ComfyUI."""
    pack = ModuleType("pack_without_comfyui")
    pack.__path__ = [str(ROOT)]
    sys.modules[pack.__name__] = pack
    return importlib.import_module(f"{pack.__name__}.nodes.attention")
