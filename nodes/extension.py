"""The list of this pack's nodes, as ComfyUI asks for it."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .calibrate import SpargeCalibrate
from .distill import SpargeDistillStudent
from .patch import SpargeAttention2Patch
from .probe import SpargeSparsityProbe
from .report import SpargeSparsityReport
from .samples import SpargeSaveSample
from .student import SpargeLoadStudent
from .tune import SpargeTune
from .tuning import SpargeLoadTuning


class SpargeAttention2Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            SpargeAttention2Patch,
            SpargeSparsityReport,
            SpargeSparsityProbe,
            SpargeCalibrate,
            SpargeTune,
            SpargeLoadTuning,
            SpargeLoadStudent,
            SpargeSaveSample,
            SpargeDistillStudent,
        ]


async def comfy_entrypoint() -> SpargeAttention2Extension:
    return SpargeAttention2Extension()
