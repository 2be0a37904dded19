"""What the tests of student files share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .files import write

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a safetensors file into the test's own folder."""

    def save_named(
        content: Mapping[str, Tensor | Sequence[int]],
        name: str = "student.safetensors",
        metadata: dict[str, str] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Path:
        return write(tmp_path / name, content, metadata, dtype)

    return save_named
