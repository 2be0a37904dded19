"""The product and its peers behind one interface: what to call for a given sparsity and pattern.

Every method works on the same inputs in the host's layout, as views, as far as it can take them. What a peer
needs beyond that (its own block lists, whole blocks) is made beforehand and not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparge_core import BLOCK_K, BLOCK_Q, BlockMask, SparseConfig, block_mask, choose, sparse_attention

from .cases import LARGEST_BLOCK, Blocks, Inputs, random_blocks

BF16_ERROR = 1e-2  # a right bf16 result is 2e-3 to 3e-3 from float32; a wrong block or key is far beyond this
INT8_ERROR = 1e-1
WIDEST_FLOOR = 0.03  # top_k of the structured cases, as in the paper
TOP_P_STEPS = 12  # of the bisection for the top_p that gives a sparsity


@dataclass(frozen=True)
class Problem:
    """One cell: inputs, how much to drop, and how rows differ."""

    inputs: Inputs
    sparsity: float
    pattern: str
    config: SparseConfig | None = None  # the product's settings for this sparsity; ragged rows come from none
    chosen: Blocks | None = None  # structured: what the product's mask keeps, for peers that take a mask
    gradients: bool = False  # whether the backward pass is measured too

    @property
    def device(self) -> torch.device:
        return self.inputs.q.device

    def blocks(self, block_q: int, block_k: int, tokens: int | None = None) -> Blocks:
        """The kept blocks of this cell in a method's own block size."""
        if self.chosen is not None:
            return self.chosen.coarsened(block_q, block_k)
        tokens = tokens or self.inputs.shape.tokens
        density, ragged = 1 - self.sparsity, self.pattern == "ragged"
        return random_blocks(self.inputs.shape.heads, tokens, block_q, block_k, density, ragged, self.device)


def make_problem(inputs: Inputs, sparsity: float, pattern: str) -> Problem:
    """The cell with the product's settings, and for structured inputs the blocks that these choose."""
    if pattern == "structured":
        config = _nearest_config(inputs, sparsity)
        return Problem(inputs, sparsity, pattern, config, _as_blocks(block_mask(inputs.q, inputs.k, config)))
    if pattern == "uniform":
        return Problem(inputs, sparsity, pattern, SparseConfig(top_k=1 - sparsity, top_p=0.0))
    return Problem(inputs, sparsity, pattern)


def _nearest_config(inputs: Inputs, sparsity: float) -> SparseConfig:
    """The paper's Top-k floor united with the top_p, found by bisection, that drops at most `sparsity`."""
    floor = min(WIDEST_FLOOR, 1 - sparsity)
    low, high = 0.0, 1.0
    for _ in range(TOP_P_STEPS):
        middle = (low + high) / 2
        sparser = float(block_mask(inputs.q, inputs.k, SparseConfig(floor, middle)).sparsity) > sparsity
        low, high = (middle, high) if sparser else (low, middle)
    return SparseConfig(floor, high)


@dataclass(frozen=True)
class Call:
    """One thing to run, check and time.

    run: returns the attention output, or anything for part "mask". output: its (1, H, L, D) view.
    d_out: parts "backward" and "fwd+bwd": the gradient of the output, and `run` returns those of q, k and v.
    blocks: what it keeps, for the check and the count of operations; None = dense. inputs: of the check.
    checked: False where the method chooses its own blocks, so that only NaN can be looked for.
    """

    part: str
    run: Callable[[], Any]
    blocks: Blocks | None
    inputs: tuple[Tensor, Tensor, Tensor]
    config: str = ""
    checked: bool = True
    kept_pairs: float | None = None  # where `blocks` is unknown
    output: Callable[[Any], Tensor] = field(default=lambda result: result)
    d_out: Tensor | None = None


def gradient_calls(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    blocks: Blocks | None,
    config: str = "",
) -> Iterator[Call]:
    """Both passes together, then the backward pass alone, of what autograd can differentiate."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    d_out = torch.randn_like(inputs[0])

    def forward() -> Tensor:
        with torch.enable_grad():
            return attention(q, k, v)

    together = lambda: torch.autograd.grad(forward(), (q, k, v), d_out)  # noqa: E731
    yield Call("fwd+bwd", together, blocks, inputs, config, d_out=d_out)
    out = forward()
    alone = lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)  # noqa: E731
    yield Call("backward", alone, blocks, inputs, config, d_out=d_out)


class Method:
    """name: as in the results. error: largest relative error of a right result."""

    name = ""
    error = BF16_ERROR
    requires = ""  # module that must be importable
    needs_gpu = True
    patterns: tuple[str, ...] = ("uniform", "ragged", "structured")
    dense = False  # does not depend on sparsity: measured once a shape

    def missing(self) -> str | None:
        """Why it cannot be used at all, or None."""
        if not self.requires:
            return None
        try:
            importlib.import_module(self.requires)
        except Exception as error:  # a peer's own import can fail in any way; the row says how
            return f"{self.requires}: {type(error).__name__}: {error}"
        return None

    def forced(self) -> AbstractContextManager[object]:
        """Entered around all that this method does."""
        return nullcontext()

    def calls(self, problem: Problem) -> Iterator[Call]:
        raise NotImplementedError


class Ours(Method):
    """The product through its public functions. kernel: the forward kernel to force, None = the GPU's own."""

    def __init__(self, name: str = "ours", kernel: str | None = None) -> None:
        self.name = name
        self._kernel = kernel
        self.needs_gpu = kernel is not None

    def forced(self) -> AbstractContextManager[object]:
        if self._kernel is None:
            return super().forced()
        cuda = importlib.import_module("sparge_core.cuda")
        context: AbstractContextManager[object] = cuda.force(self._kernel)
        return context

    def calls(self, problem: Problem) -> Iterator[Call]:
        q, k, v = inputs = self.qkv(problem)
        backend = self._backend(problem)
        blocks = problem.blocks(BLOCK_Q, BLOCK_K)
        mask = _as_mask(blocks, q)
        unused = SparseConfig()
        run = lambda: sparse_attention(q, k, v, unused, backend=backend, mask=mask)  # noqa: E731
        yield Call("kernel", run, blocks, inputs)
        configs = [problem.config] if problem.config else []
        if problem.pattern == "structured":
            configs.append(SparseConfig(top_k=configs[0].top_k, sparsity=problem.sparsity))
        for config in configs:
            yield from self._with_mask(problem, config, backend)

    def _with_mask(self, problem: Problem, config: SparseConfig, backend: str) -> Iterator[Call]:
        q, k, v = inputs = self.qkv(problem)
        blocks = _as_blocks(block_mask(q, k, config))
        words = _words(config)
        if self._kernel is None:  # the mask kernels are the same for every forward kernel
            yield Call("mask", lambda: block_mask(q, k, config), blocks, inputs, words)
        attention = lambda q, k, v: sparse_attention(q, k, v, config, backend=backend)  # noqa: E731
        yield Call("total", lambda: attention(q, k, v), blocks, inputs, words)
        if problem.gradients:
            yield from gradient_calls(attention, inputs, blocks, words)

    @staticmethod
    def qkv(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        return problem.inputs.q, problem.inputs.k, problem.inputs.v

    def _backend(self, problem: Problem) -> str:
        """The product's back end for the device; RuntimeError, with the reason, if it would not run."""
        wanted = "cuda" if problem.device.type == "cuda" else "reference"
        choice = choose(*self.qkv(problem), wanted)
        if choice.name != wanted:
            raise RuntimeError(f"{wanted} does not serve: {choice.why}")
        return wanted


def _words(config: SparseConfig) -> str:
    if config.sparsity:
        return f"top_k={config.top_k:.3g}, sparsity={config.sparsity:.3g}"
    return f"top_k={config.top_k:.3g}, top_p={config.top_p:.3g}"


def _as_blocks(mask: BlockMask) -> Blocks:
    return Blocks(mask.dense(), BLOCK_Q, BLOCK_K, mask.q_len)


def _as_mask(blocks: Blocks, q: Tensor) -> BlockMask:
    """The product's mask of given blocks, with the schedule that its own mask kernels make."""
    mask = BlockMask.from_dense(blocks.kept, blocks.tokens, blocks.tokens)
    if q.device.type != "cuda":
        return mask
    mask_kernels = importlib.import_module("sparge_core.cuda.mask_kernels")
    return replace(mask, order=mask_kernels.row_order(mask.counts, q.dtype, q.shape[-1]))


class Sdpa(Method):
    """torch's dense attention, one of its implementations."""

    patterns = ("uniform",)
    dense = True

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self._backend = backend
        self.needs_gpu = backend is not SDPBackend.MATH

    def calls(self, problem: Problem) -> Iterator[Call]:
        inputs = Ours.qkv(problem)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(self._backend):
                return F.scaled_dot_product_attention(q, k, v)

        yield Call("total", lambda: attention(*inputs), None, inputs)
        if problem.gradients:
            yield from gradient_calls(attention, inputs, None)


def _tokens_first(problem: Problem) -> list[Tensor]:
    """q, k, v as (1, L, H, D)."""
    return [x.transpose(1, 2) for x in (problem.inputs.q, problem.inputs.k, problem.inputs.v)]


def _first(result: Any) -> Tensor:
    """(1, H, L, D) of what is, or begins with, (1, L, H, D)."""
    out: Tensor = result[0] if isinstance(result, tuple | list) else result
    return out.transpose(1, 2)


class FlashAttention4(Method):
    """flash-attn-4 (CuTe DSL): dense, or block-sparse over full blocks of `blocks` tokens."""

    requires = "flash_attn.cute.interface"

    def __init__(self, name: str, blocks: tuple[int, int] | None = None) -> None:
        self.name = name
        self._blocks = blocks
        self.dense = blocks is None
        if self.dense:
            self.patterns = ("uniform",)

    def calls(self, problem: Problem) -> Iterator[Call]:
        interface = importlib.import_module(self.requires)
        q, k, v = _tokens_first(problem)
        arguments: dict[str, Any] = {}
        blocks = None
        if self._blocks:
            sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
            blocks = problem.blocks(*self._blocks)
            counts, indices = blocks.counts, blocks.indices
            arguments["block_sparse_tensors"] = sparsity.BlockSparseTensorsTorch(
                mask_block_cnt=torch.zeros_like(counts),
                mask_block_idx=torch.zeros_like(indices),
                full_block_cnt=counts,
                full_block_idx=indices,
                block_size=self._blocks,
            )
        run = lambda: interface.flash_attn_func(q, k, v, **arguments)  # noqa: E731
        part = "total" if self.dense else "kernel"
        yield Call(part, run, blocks, Ours.qkv(problem), output=_first)
        if self.dense and problem.gradients:
            attention = lambda *qkv: _first(  # noqa: E731
                interface.flash_attn_func(*(x.transpose(1, 2) for x in qkv))
            )
            yield from gradient_calls(attention, Ours.qkv(problem), None)


class Flex(Method):
    """torch's FlexAttention, compiled, block-sparse over full blocks of 128 x 128."""

    name = "flex-128x128"
    requires = "torch.nn.attention.flex_attention"
    size = 128

    @cached_property
    def _compiled(self) -> Callable[..., Tensor]:
        flex = importlib.import_module(self.requires).flex_attention
        compiled: Callable[..., Tensor] = torch.compile(flex, dynamic=False)
        return compiled

    def calls(self, problem: Problem) -> Iterator[Call]:
        q, k, v = Ours.qkv(problem)
        blocks = problem.blocks(self.size, self.size)
        counts, indices = blocks.counts, blocks.indices
        mask = importlib.import_module(self.requires).BlockMask.from_kv_blocks(
            torch.zeros_like(counts),
            torch.zeros_like(indices),
            counts,
            indices,
            BLOCK_SIZE=self.size,
            seq_lengths=(q.shape[2], k.shape[2]),
        )
        compiled = self._compiled
        yield Call("kernel", lambda: compiled(q, k, v, block_mask=mask), blocks, (q, k, v))


class SolAttention(Method):
    """comfy-kitchen's sol_attn: 64 x 64 blocks, INT8, its own Top-k routing included in every call."""

    name = "comfy-kitchen-sol"
    requires = "comfy_kitchen"
    error = INT8_ERROR
    patterns = ("uniform", "structured")

    def missing(self) -> str | None:
        reason = super().missing()
        if reason is None and not hasattr(importlib.import_module(self.requires), "sol_attn"):
            return "this version of comfy_kitchen has no sol_attn"
        return reason

    def calls(self, problem: Problem) -> Iterator[Call]:
        kitchen = importlib.import_module(self.requires)
        q, k, v = _tokens_first(problem)
        kept = 1 - problem.sparsity
        yield Call(
            "total",
            lambda: kitchen.sol_attn(q, k, v, topk_ratio=kept, tail=False),
            None,
            Ours.qkv(problem),
            config=f"topk_ratio={kept:.3g}, INT8",
            checked=problem.sparsity == 0,
            kept_pairs=kept * _all_pairs(problem),
            output=_first,
        )


class Sparge(Method):
    """SpargeAttn (version 1): INT8 and FP8, its own Top-k included in every call."""

    name = "spargeattn-sage2"
    requires = "spas_sage_attn"
    error = INT8_ERROR
    patterns = ("uniform", "structured")

    def calls(self, problem: Problem) -> Iterator[Call]:
        sparge = importlib.import_module(self.requires)
        q, k, v = (x.contiguous() for x in Ours.qkv(problem))
        kept = 1 - problem.sparsity
        yield Call(
            "total",
            lambda: sparge.spas_sage2_attn_meansim_topk_cuda(q, k, v, topk=kept, is_causal=False),
            None,
            (q, k, v),
            config=f"topk={kept:.3g}, INT8/FP8",
            checked=problem.sparsity == 0,
            kept_pairs=kept * _all_pairs(problem),
        )


class CudnnBlockSparse(Method):
    """cudnn-frontend's block-sparse attention (CuTe DSL). It wants whole blocks: the length is rounded up."""

    requires = "cudnn.block_sparse_attention"
    patterns = ("uniform", "ragged")

    def __init__(self, size: int) -> None:
        self.name = f"cudnn-bsa-{size}x{size}"
        self._size = size

    def calls(self, problem: Problem) -> Iterator[Call]:
        forward = importlib.import_module(self.requires).block_sparse_attention_forward
        q, k, v = (x.contiguous() for x in problem.inputs.padded)
        blocks = problem.blocks(self._size, self._size, tokens=q.shape[2])
        indices = blocks.indices
        rows = (
            {"block_sparse_num": int(blocks.counts[0, 0, 0])}
            if problem.pattern == "uniform"
            else {"q2k_block_nums": blocks.counts}
        )
        yield Call(
            "kernel",
            lambda: forward(q, k, v, indices, sparse_block_size=self._size, **rows),
            blocks,
            (q, k, v),
            config=f"length rounded up to {LARGEST_BLOCK}",
            output=lambda result: result["o_tensor"],
        )


def _all_pairs(problem: Problem) -> float:
    return float(problem.inputs.shape.heads * problem.inputs.shape.tokens**2)


# In the order of a table: the product, what a user has today, then the peers.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Ours(),
        Ours("ours-portable", "mma"),
        Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION),
        FlashAttention4("fa4"),
        FlashAttention4("fa4-128x128", (128, 128)),
        FlashAttention4("fa4-128x64", (128, 64)),
        CudnnBlockSparse(128),
        CudnnBlockSparse(64),
        Flex(),
        SolAttention(),
        Sparge(),
    )
}
