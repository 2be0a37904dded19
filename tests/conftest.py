"""Settings that every test shares: which tests can run here, and how hypothesis searches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from host import child_environment

os.environ.update(child_environment())  # OpenMP reads it when torch is imported
import torch

ROOT = Path(__file__).resolve().parent.parent

# No deadline: the first example of a test may pay for an import or a compile. Derandomised: a red run can be
# repeated.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


class RootIsNoPackage:
    """Keeps pytest from importing the repository's `__init__.py`: only ComfyUI can, as a custom node."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    # Registered as a plug-in, since the hooks of a conftest.py are not asked about the folders above it.
    config.pluginmanager.register(RootIsNoPackage())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason=f"needs an NVIDIA GPU: torch {torch.__version__} sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
