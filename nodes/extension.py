"""The list of this pack's nodes, as ComfyUI asks for it."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .patch import SpargeAttention2Patch
from .report import SpargeSparsityReport
from .student import SpargeLoadStudent


class SpargeAttention2Extension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [SpargeAttention2Patch, SpargeSparsityReport, SpargeLoadStudent]


async def comfy_entrypoint() -> SpargeAttention2Extension:
    return SpargeAttention2Extension()
