"""The patched attention as one operator, which torch.compile takes as it is.

So the model stays one graph, and what is only known when it runs is decided then: dense or sparse at this
step, whether another node's override is there, what the report counts. A captured graph knows a layer by a
number that lies in a tensor, because the compiler would make a graph for each plain number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

NAMESPACE = "sparge_attention2_host"
SCHEMA = "(Tensor q, Tensor k, Tensor v, int heads, Tensor target) -> Tensor"


class Target:
    """What a number stands for. run(q, k, v, heads): of (B, L, H * D) tensors to one of their shape.

    number: an int64 scalar on the CPU, valid while this object lives.
    """

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> None:
        self.run = run
        number = next(_numbers)
        _targets[number] = self
        self.number = torch.tensor(number)


_numbers = itertools.count()
_targets: WeakValueDictionary[int, Target] = WeakValueDictionary()


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, target: Tensor) -> Tensor:
    return _targets[int(target)].run(q, k, v, heads).contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor, heads: int, target: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _register() -> tuple[torch.library.Library, str]:
    """Defines the operator, under a new name at each import of the pack; it lives as long as the result."""
    taken = getattr(torch.ops, NAMESPACE)
    name = next(
        name
        for name in (f"attention_{number}" for number in itertools.count())
        if not hasattr(taken, name)
    )
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    # Any strides are right, but some cost a copy; those that the host's own code makes never do.
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    tags = [torch.Tag.pt2_compliant_tag, strides]
    # A CUDA graph would for ever repeat what was decided when it was recorded. A torch without the tag
    # records none with a tensor on the CPU, such as `target`.
    if unsafe := getattr(torch.Tag, "cudagraph_unsafe", None):
        tags.append(unsafe)
    library.define(name + SCHEMA, tags=tags)
    library.impl(name, _attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _shape, lib=library)
    return library, name


_LIBRARY, _NAME = _register()
attend: Callable[[Tensor, Tensor, Tensor, int, Tensor], Tensor] = getattr(
    getattr(torch.ops, NAMESPACE), _NAME
)
