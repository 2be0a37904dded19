"""What the patch does in a model, as operators, which torch.compile takes as they are.

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
ATTENTION = "(Tensor q, Tensor k, Tensor v, int heads, Tensor target) -> Tensor"
ROTATION = "(Tensor ids, int pairs, Tensor target) -> Tensor"
LINEAR_GELU = "(Tensor x, Tensor weight, Tensor bias) -> Tensor"


class Target:
    """What a number stands for: run(q, k, v, heads), of (B, L, H * D) tensors to one of the shape of q, or
    run(ids), of positions (B, L, axes) to rotations (B, 1, L, pairs, 2, 2).

    number: an int64 scalar on the CPU, valid while this object lives.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        number = next(_numbers)
        _targets[number] = self
        self.number = torch.tensor(number)


_numbers = itertools.count()
_targets: WeakValueDictionary[int, Target] = WeakValueDictionary()


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, target: Tensor) -> Tensor:
    return _targets[int(target)].run(q, k, v, heads).contiguous()


def _attended(q: Tensor, k: Tensor, v: Tensor, heads: int, target: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def _rotate(ids: Tensor, pairs: int, target: Tensor) -> Tensor:
    return _targets[int(target)].run(ids).contiguous()


def _rotations(ids: Tensor, pairs: int, target: Tensor) -> Tensor:
    samples, tokens, _ = ids.shape
    return ids.new_empty((samples, 1, tokens, pairs, 2, 2), dtype=torch.float32)


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU, in its tanh form, of x weight^T + bias, (..., C) to (..., F). The compiler would split it."""
    flat = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return flat.unflatten(0, x.shape[:-1])


def _widened(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _register(
    kind: str, schema: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]
) -> tuple[torch.library.Library, Callable[..., Tensor]]:
    """Defines an operator, under a new name at each import of the pack; it lives as long as the result."""
    taken = getattr(torch.ops, NAMESPACE)
    name = next(
        name for name in (f"{kind}_{number}" for number in itertools.count()) if not hasattr(taken, name)
    )
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    # Any strides are right, but some cost a copy; those that the host's own code makes never do.
    strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    tags = [torch.Tag.pt2_compliant_tag, strides]
    # A CUDA graph would for ever repeat what was decided when it was recorded. A torch without the tag
    # records none with a tensor on the CPU, such as `target`.
    if unsafe := getattr(torch.Tag, "cudagraph_unsafe", None):
        tags.append(unsafe)
    library.define(name + schema, tags=tags)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=library)
    operator: Callable[..., Tensor] = getattr(taken, name)
    return library, operator


_ATTENTION, attend = _register("attention", ATTENTION, _attend, _attended)
_ROTATION, rotate = _register("rotation", ROTATION, _rotate, _rotations)
_LINEAR_GELU, linear_gelu = _register("linear_gelu", LINEAR_GELU, _linear_gelu, _widened)
