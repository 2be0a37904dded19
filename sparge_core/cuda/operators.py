"""The two operators of the namespace `sparge_attention2`: schemas, shapes for tracing, and the CUDA implementation.

`import` of this module registers them, once per process even when the package is imported under two names. They are
the door to the kernels: what does not belong together is refused here, before any launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..geometry import BLOCK_K, BLOCK_Q, WORD_BITS, num_blocks
from . import launch, modules

NAMESPACE = "sparge_attention2"
_SCHEMAS = (
    "block_mask(Tensor q, Tensor k, float top_k, float top_p, float sparsity, float scale)"
    " -> (Tensor bits, Tensor counts, Tensor order)",
    "forward(Tensor q, Tensor k, Tensor v, Tensor bits, Tensor counts, Tensor order, float scale)"
    " -> (Tensor out, Tensor lse)",
)
# A compiled graph must hand over q, k and v with the strides that it was traced with: the output has those of q.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

_forced: str | None = None


@contextlib.contextmanager
def force(module: str) -> Iterator[None]:
    """Within it every forward pass uses this module ("forward_mma" or "forward_sm90"), for tests and measurements."""
    if module not in modules.FORWARD:
        raise ValueError(f"{module!r} is no forward module; choose one of {', '.join(modules.FORWARD)}.")
    global _forced
    before, _forced = _forced, module
    try:
        yield
    finally:
        _forced = before
