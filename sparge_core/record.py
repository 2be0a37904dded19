"""What is remembered of a run while it goes on: sparsity, masks, kept mass, errors, dense calls, time.

Recording never waits for the device. What a call leaves lies there in a journal, which follows to the CPU
once a step; times come from events.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .config import SparseConfig
from .geometry import BLOCK_K, BLOCK_Q, num_blocks, target_blocks, top_k_blocks
from .mask import BlockMask, kept_pairs, unpack_bits

Grid = tuple[int, int, int]  # frames, rows and columns of tokens

# int32 values of a journal: more than a step of the largest Wan leaves, and half a megabyte.
JOURNAL_VALUES = 1 << 17
# Pooling queries and keys once more takes about a hundredth of a call: it is done at every so many steps.
MASS_STEPS = 8
# Values of an output compared at a time: float32 copies of all of it would not fit beside a model that fits.
COMPARED_VALUES = 1 << 25


class Timer:
    """Time of the work that `device` is given between construction and `stop`, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._mark()
        self._end = self._start

    def stop(self) -> None:
        self._end = self._mark()

    def finished(self) -> bool:
        """Whether `milliseconds` would not wait."""
        return isinstance(self._end, float) or self._end.query()

    def milliseconds(self) -> float:
        """The time; waits for the device."""
        if isinstance(self._start, float) or isinstance(self._end, float):
            return (self._end - self._start) * 1e3  # type: ignore[operator]
        self._end.synchronize()
        return self._start.elapsed_time(self._end)

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class Journal:
    """Small results on one device, and what is to be done with each once it has come to the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.zeros(JOURNAL_VALUES, dtype=torch.int32, device=device)
        self._readers: list[tuple[int, Callable[[np.ndarray], None]]] = []
        self._used = 0
        self._sent: deque[tuple[torch.cuda.Event | None, Tensor, list[Any]]] = deque()

    def room(self, values: int, read: Callable[[np.ndarray], None]) -> Tensor:
        """int32 (values,), on the device, to be written before the next call; `read` gets it on the CPU."""
        if self._used + values > self._buffer.numel():
            self.send()
        if values > self._buffer.numel():
            self._buffer = self._buffer.new_zeros(values)
        slot = self._buffer[self._used : self._used + values]
        self._readers.append((values, read))
        self._used += values
        return slot

    def send(self) -> None:
        """Start what was written on its way. The device's stream orders this before its room is used anew."""
        if not self._used:
            return
        written, cuda = self._buffer[: self._used], self._device.type == "cuda"
        arrived = torch.empty(self._used, dtype=torch.int32, pin_memory=cuda)
        arrived.copy_(written, non_blocking=cuda)
        event = None
        if cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        self._sent.append((event, arrived, self._readers))
        self._readers, self._used = [], 0

    def read(self, wait: bool = False) -> None:
        """Hand out what has arrived, or with `wait` all that was sent."""
        while self._sent and (wait or self._sent[0][0] is None or self._sent[0][0].query()):
            event, arrived, readers = self._sent.popleft()
            if event is not None:
                event.synchronize()
            values, start = arrived.numpy(), 0
            for count, read in readers:
                read(values[start : start + count])
                start += count


@dataclass(frozen=True, eq=False)
class Example:
    """Where one query block of a layer looked at a step.

    bits: int32 (H, ceil(n_k / 32)), as in `BlockMask`. tokens: of the keys. queries: first token of the query
    block and the one behind its last. grid: frames, rows and columns that the tokens are, None if unknown.
    """

    layer: str
    step: int
    bits: np.ndarray
    tokens: int
    queries: tuple[int, int]
    grid: Grid | None

    def kept(self) -> np.ndarray:
        """bool (H, n_k): the key blocks that each head looks at."""
        return unpack_bits(torch.from_numpy(self.bits), num_blocks(self.tokens, BLOCK_K)).numpy()

    def token_shares(self, head: int | None = None) -> np.ndarray:
        """float (tokens,): share of the heads that look at each token; of one head, 0 or 1."""
        kept = self.kept()
        share = kept.mean(0) if head is None else kept[head].astype(float)
        return share.repeat(BLOCK_K)[: self.tokens]


def grid_of(grid: Grid | None, tokens: int) -> Grid | None:
    """The grid of a video in a sequence of `tokens`: whole frames before or behind it count as its own."""
    if grid is None or tokens % (grid[1] * grid[2]):
        return None
    return tokens // (grid[1] * grid[2]), grid[1], grid[2]


def centre_block(tokens: int, grid: Grid | None) -> int:
    """Query block at the centre of the middle frame, or of the sequence if the grid is unknown."""
    if grid is None:
        return tokens // 2 // BLOCK_Q
    frames, rows, columns = grid
    return ((frames // 2 * rows + rows // 2) * columns + columns // 2) // BLOCK_Q


@dataclass
class _Times:
    """Milliseconds and calls of one kind and size."""

    ms: float = 0.0
    calls: int = 0


class RunStatistics:
    """Statistics of one run of a model with these attention `layers` (names) over `steps` sampling steps."""

    def __init__(self, layers: Sequence[str], steps: int) -> None:
        self.layers = tuple(layers)
        self.steps = steps
        shape = (len(self.layers), steps)
        self._rows = {name: row for row, name in enumerate(self.layers)}
        self._journals: dict[torch.device, Journal] = {}
        self._pairs = np.zeros(shape, dtype=np.int64)  # token pairs of the sparse calls
        self._kept = np.zeros(shape, dtype=np.int64)  # those of them that were kept
        self._head_pairs: list[dict[int, int]] = [{} for _ in self.layers]  # the same by layer and head
        self._head_kept: list[dict[int, int]] = [{} for _ in self.layers]
        self._dense_map = np.zeros(shape, dtype=int)
        self._dense_calls: Counter[str] = Counter()
        self._sparse_calls = 0
        self._floor_calls = 0
        self._mask_bytes = 0
        self._running: deque[tuple[str, Any, Timer]] = deque()
        self._times: dict[tuple[str, Any], _Times] = {}
        self._exampled: set[tuple[int, int]] = set()
        self._examples: dict[tuple[int, int], Example] = {}
        self._mass_asked: set[tuple[int, int]] = set()
        self._mass = np.full(shape, np.nan)
        self._error = np.zeros(shape)  # sums of |sparse - dense| and of |dense| of the calls compared
        self._size = np.zeros(shape)

    def prepare(self, device: torch.device) -> None:
        """Allocate what recording on `device` needs, so that no call has to."""
        self._journal(device)

    def _journal(self, device: torch.device) -> Journal:
        if device not in self._journals:
            self._journals[device] = Journal(device)
        return self._journals[device]

    def record_sparse(
        self,
        layer: str,
        step: int,
        mask: BlockMask,
        config: SparseConfig,
        timer: Timer | None = None,
        grid: Grid | None = None,
    ) -> None:
        """A sparse call: its mask, the settings that made it, the timer started before it (stopped here).

        grid: frames, rows and columns of the video's tokens, if they are known.
        """
        batch, heads, n_q = mask.counts.shape
        self._time("sparse", (batch, heads, mask.q_len, mask.k_len), timer)
        cell = (self._rows[layer], step)
        pairs = batch * mask.q_len * mask.k_len

        def read(values: np.ndarray) -> None:
            kept = kept_pairs(values.reshape(2, 2, heads).astype(np.int64), mask_size[0], mask_size[1])
            self._pairs[cell] += pairs * heads
            self._kept[cell] += kept.sum()
            for head, value in enumerate(kept.tolist()):
                row = cell[0]
                self._head_pairs[row][head] = self._head_pairs[row].get(head, 0) + pairs
                self._head_kept[row][head] = self._head_kept[row].get(head, 0) + value

        mask_size = (mask.q_len, mask.k_len)
        journal = self._journal(mask.counts.device)
        mask.tally(journal.room(4 * heads, read).view(2, 2, heads))
        if cell not in self._exampled:
            self._exampled.add(cell)
            self._record_example(journal, cell, mask, grid_of(grid, mask.k_len))
        self._sparse_calls += 1
        stored = [mask.bits, mask.counts, *([] if mask.order is None else [mask.order])]
        self._mask_bytes = max(self._mask_bytes, sum(x.numel() * x.element_size() for x in stored))
        if config.sparsity > 0.0:
            floor = heads * n_q * top_k_blocks(config.top_k, mask.n_k)
            self._floor_calls += floor > target_blocks(config.sparsity, heads * n_q * mask.n_k)

    def _record_example(
        self, journal: Journal, cell: tuple[int, int], mask: BlockMask, grid: Grid | None
    ) -> None:
        block = centre_block(mask.q_len, grid)
        queries = (block * BLOCK_Q, min((block + 1) * BLOCK_Q, mask.q_len))
        row, tokens = mask.bits[0, :, block], mask.k_len
        shape = tuple(row.shape)

        def read(values: np.ndarray) -> None:
            bits = values.reshape(shape).copy()
            self._examples[cell] = Example(self.layers[cell[0]], cell[1], bits, tokens, queries, grid)

        journal.room(row.numel(), read).view(shape).copy_(row)

    def wants_mass(self, layer: str, step: int) -> bool:
        """Whether this sparse call is one of those whose kept mass `record_mass` is to be told."""
        cell = (self._rows[layer], step)
        first = all(row != cell[0] for row, _ in self._mass_asked)
        return cell not in self._mass_asked and (first or step % MASS_STEPS == 0)

    def record_mass(self, layer: str, step: int, mass: Tensor) -> None:
        """Share of the pooled scores' softmax that a sparse call kept, float32 () on its device."""
        cell = (self._rows[layer], step)
        self._mass_asked.add(cell)

        def read(values: np.ndarray) -> None:
            self._mass[cell] = values.view(np.float32)[0]

        self._journal(mass.device).room(1, read).view(torch.float32).copy_(mass)

    def record_error(
        self,
        layer: str,
        step: int,
        sparse: Tensor,
        dense: Tensor,
        timer: Timer | None = None,
        size: Any = None,
    ) -> None:
        """A sparse call's output beside the dense one of the same inputs, of one shape.

        timer: of the dense call, already stopped. size: batch, heads, query and key tokens of the call.
        """
        if timer is not None:
            self._running.append(("probe", size, timer))
        cell = (self._rows[layer], step)

        def read(values: np.ndarray) -> None:
            error, norm = values.view(np.float32).tolist()
            self._error[cell] += error
            self._size[cell] += norm

        slot = self._journal(dense.device).room(2, read).view(torch.float32)
        slot.copy_(absolute_sums(sparse, dense))

    def record_dense(
        self, layer: str, step: int, reason: str, timer: Timer | None = None, size: Any = None
    ) -> None:
        """A dense call, why it was dense, and the timer started before it (stopped here).

        size: batch, heads, query and key tokens, if it could have been sparse.
        """
        self._time("dense", size, timer)
        self._dense_calls[reason] += 1
        self._dense_map[self._rows[layer], step] += 1

    def _time(self, kind: str, size: Any, timer: Timer | None) -> None:
        if timer is not None:
            timer.stop()
            self._running.append((kind, size, timer))
        while self._running and self._running[0][2].finished():
            self._collect()

    def _collect(self) -> None:
        kind, size, timer = self._running.popleft()
        times = self._times.setdefault((kind, size), _Times())
        times.ms += timer.milliseconds()
        times.calls += 1

    def send(self) -> None:
        """Start what the calls so far left on its way to the CPU; to be called once a step."""
        for journal in self._journals.values():
            journal.send()

    def release(self) -> None:
        """Give back what `prepare` allocated; for a run that is over, after `summary`."""
        self._journals.clear()

    def progress(self) -> tuple[float | None, int, int]:
        """Sparsity as far as it is known without waiting (None: not yet), sparse and dense calls so far."""
        for journal in self._journals.values():
            journal.read()
        return self._sparsity(), self._sparse_calls, sum(self._dense_calls.values())

    def example(self, layer: str, step: int) -> Example | None:
        """Where the centre of the video looked, if the layer was sparse at that step; after `summary`."""
        return self._examples.get((self._rows[layer], step))

    def examples(self) -> list[Example]:
        """All that there are, by layer and step."""
        return [self._examples[cell] for cell in sorted(self._examples)]

    def summary(self) -> dict[str, Any]:
        """JSON-able account of the run so far; waits for the device.

        sparsity: share of token pairs that the sparse calls skipped, None without any.
        sparsity_map: the same by layer and step, None where no call was sparse; dense_map: dense calls there.
        sparsity_by_head: the same by layer and head, of all steps; an empty row where no call was sparse.
        kept_mass: share of the pooled scores' softmax that was kept, mean of the calls measured;
        kept_mass_map: by layer and step, None where it was not measured.
        sparse_calls, dense_calls (by reason), floor_calls (whose Top-k floor alone exceeds the target
        sparsity's budget), attention_ms (all timed calls), sparse_ms, dense_ms, layers (names), steps.
        speedup: time of dense calls over that of sparse calls of the same size, None unless both occurred.
        memory: mask_bytes of the largest mask; peak_bytes, the most that torch has held on the GPUs since
        the process began (None without a GPU).
        probe: None, or steps compared, ms it took, error (relative L1 of sparse against dense attention by
        layer, None where not compared), error_map (by layer and step), ranking (layers, largest error first).
        """
        while self._running:
            self._collect()
        self.send()
        for journal in self._journals.values():
            journal.read(wait=True)
        sparse_ms, dense_ms, probe_ms = (self._milliseconds(kind) for kind in ("sparse", "dense", "probe"))
        measured = self._mass[np.isfinite(self._mass)]
        return {
            "sparsity": self._sparsity(),
            "sparse_calls": self._sparse_calls,
            "dense_calls": dict(self._dense_calls),
            "floor_calls": self._floor_calls,
            "attention_ms": sparse_ms + dense_ms,
            "sparse_ms": sparse_ms,
            "dense_ms": dense_ms,
            "speedup": self._speedup(),
            "layers": list(self.layers),
            "steps": self.steps,
            "sparsity_map": _ratios(self._pairs - self._kept, self._pairs),
            "sparsity_by_head": [
                [(pairs[head] - kept[head]) / pairs[head] for head in sorted(pairs)]
                for pairs, kept in zip(self._head_pairs, self._head_kept, strict=True)
            ],
            "dense_map": self._dense_map.tolist(),
            "kept_mass": float(measured.mean()) if measured.size else None,
            "kept_mass_map": _finite(self._mass),
            "memory": {"mask_bytes": self._mask_bytes, "peak_bytes": self._peak_bytes()},
            "probe": self._probe(probe_ms) if self._size.any() else None,
        }

    def _sparsity(self) -> float | None:
        pairs = int(self._pairs.sum())
        return (pairs - int(self._kept.sum())) / pairs if pairs else None

    def _milliseconds(self, kind: str) -> float:
        return sum(times.ms for (of, _), times in self._times.items() if of == kind)

    def _speedup(self) -> float | None:
        sparse_ms = dense_ms = 0.0
        for (kind, size), sparse in self._times.items():
            dense = [self._times[other, size] for other in ("dense", "probe") if (other, size) in self._times]
            if kind == "sparse" and size is not None and dense:
                sparse_ms += sparse.ms
                dense_ms += sparse.calls * sum(x.ms for x in dense) / sum(x.calls for x in dense)
        return dense_ms / sparse_ms if sparse_ms > 0.0 and dense_ms > 0.0 else None

    def _peak_bytes(self) -> int | None:
        gpus = [device for device in self._journals if device.type == "cuda"]
        return max((torch.cuda.max_memory_allocated(device) for device in gpus), default=None)

    def _probe(self, ms: float) -> dict[str, Any]:
        by_layer = _ratios(self._error.sum(1), self._size.sum(1))
        compared = [row for row, error in enumerate(by_layer) if error is not None]
        return {
            "steps": np.flatnonzero(self._size.any(0)).tolist(),
            "ms": ms,
            "error": by_layer,
            "error_map": _ratios(self._error, self._size),
            "ranking": [self.layers[row] for row in sorted(compared, key=lambda row: -by_layer[row])],
        }


def absolute_sums(sparse: Tensor, dense: Tensor) -> Tensor:
    """float32 (2,): sums of |sparse - dense| and of |dense|."""
    rows = max(1, COMPARED_VALUES // max(1, dense.numel() // dense.shape[1]))
    sums = torch.zeros(2, device=dense.device)
    for ours, theirs in zip(sparse.split(rows, 1), dense.split(rows, 1), strict=True):
        theirs = theirs.float()
        sums += torch.stack(((ours.float() - theirs).abs().sum(), theirs.abs().sum()))
    return sums


def _ratios(parts: np.ndarray, wholes: np.ndarray) -> list[Any]:
    """parts / wholes as lists, None where the whole is 0."""
    return _finite(np.divide(parts, wholes, out=np.full(parts.shape, np.nan), where=wholes != 0))


def _finite(values: np.ndarray) -> list[Any]:
    """As lists, with None in place of what is no number."""
    objects = values.astype(object)
    objects[~np.isfinite(values)] = None
    return list(objects.tolist())
