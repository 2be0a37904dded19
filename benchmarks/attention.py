"""Attention benchmark: the product beside its peers in one run, as one table and one JSON file.

    python -m benchmarks.attention --out results.json    # everything: some minutes
    python -m benchmarks.attention --quick               # the headline cells only
    python -m benchmarks.attention --tiny                # needs no GPU: checks the benchmark itself

Every result is checked against float32 before it is timed, in memory that was filled with NaN. Peers that are
not installed, fail or are wrong get a row that says so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

import torch

from .cases import (
    HEAD_DIM,
    PATTERNS,
    SHAPES,
    TINY,
    Inputs,
    Shape,
    gradient_error,
    make_inputs,
    relative_error,
)
from .measure import Clock, machine
from .methods import METHODS, Call, Method, Problem, make_problem
from .results import Row, write

SPARSITIES = (0.95, 0.9, 0.97, 0.0, 0.75, 0.5)  # most wanted first
QUICK_METHODS = ("ours", "ours-portable", "sdpa-cudnn", "sdpa-flash", "fa4", "fa4-128x128", "fa4-128x64")
QUICK_SHAPES = ("14B-720p", "1.3B-480p")
TINY_SPARSITIES = (0.75, 0.0)
# Where the backward pass is measured too: the most wanted sparsity alone, in even rows.
GRADIENT_SHAPES = (*QUICK_SHAPES, TINY.name)
# Floating-point operations of a kept pair of tokens and channel: two products, and five in the backward pass.
OPERATIONS = {"kernel": 4, "total": 4, "backward": 10, "fwd+bwd": 14}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOTE_LENGTH = 200


class Benchmark:
    """One run. `rows` grows as it goes, so that a run that is cut short still has what it measured."""

    def __init__(self, device: torch.device, dtype: str, cell_ms: float, deadline: float) -> None:
        self.rows: list[Row] = []
        self._device = device
        self._dtype = dtype
        self._clock = Clock(device, cell_ms)
        self._deadline = deadline

    def run(
        self,
        shapes: Sequence[Shape],
        methods: Sequence[Method],
        sparsities: Sequence[float],
        patterns: Sequence[str],
    ) -> None:
        """Measures every cell. A CUDA error that ends the device's context ends the run with what there is.

        sparsities: most wanted first; a run that is cut short has the first of every shape.
        """
        usable = []
        for method in methods:
            no_gpu = method.needs_gpu and self._device.type != "cuda"
            reason = "needs an NVIDIA GPU" if no_gpu else method.missing()
            if reason is None:
                usable.append(method)
                continue
            status = "unsupported" if no_gpu else "not installed"
            self.rows += [self._empty(shape, method, status, reason[:NOTE_LENGTH]) for shape in shapes]
        for sparsity in sparsities:
            for shape in shapes:
                for cell in self._cells(shape, sparsity, patterns):
                    gradients = (
                        cell.pattern == "uniform"
                        and sparsity == sparsities[0]
                        and shape.name in GRADIENT_SHAPES
                    )
                    for method in usable:
                        self._measure(method, replace(cell, gradients=gradients))

    def _cells(self, shape: Shape, sparsity: float, patterns: Sequence[str]) -> Iterator[Problem]:
        dtype = DTYPES[self._dtype]
        inputs: dict[bool, Inputs] = {}
        for pattern in patterns:
            if sparsity == 0 and pattern != "uniform":
                continue  # all blocks are all blocks
            structured = pattern == "structured"
            if structured not in inputs:
                inputs[structured] = make_inputs(shape, structured, self._device, dtype)
            yield make_problem(inputs[structured], sparsity, pattern)

    def _measure(self, method: Method, problem: Problem) -> None:
        shape = problem.inputs.shape
        if problem.pattern not in method.patterns or (method.dense and self._has(shape, method)):
            return
        sparsity = 0.0 if method.dense else problem.sparsity
        if time.monotonic() > self._deadline:
            self.rows.append(self._empty(shape, method, "out of time", "", sparsity, problem.pattern))
            return
        try:
            with method.forced():
                for call in method.calls(problem):
                    row = self._row(method, call, problem, sparsity)
                    self.rows.append(row)
                    print(line(row), flush=True)
        except Exception as error:  # whatever a peer raises is its result
            note = f"{type(error).__name__}: {error}".splitlines()[0][:NOTE_LENGTH]
            self.rows.append(self._empty(shape, method, "failed", note, sparsity, problem.pattern))
            print(line(self.rows[-1]), flush=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # raises again if the device did not survive it

    def _row(self, method: Method, call: Call, problem: Problem, sparsity: float) -> Row:
        shape = problem.inputs.shape
        row = Row(
            shape.name, method.name, call.part, sparsity, problem.pattern, self._dtype, config=call.config
        )
        error = None
        if call.part != "mask":
            error = self._error(call)
            if not error <= method.error:
                return replace(row, status="wrong", note=f"relative error {error:.2g}")
        outputs = 0 if call.part == "mask" else 1 if call.d_out is None else 3
        output_bytes = outputs * problem.inputs.output_bytes
        extra = self._clock.extra_megabytes(call.run, output_bytes)
        ms = self._clock.milliseconds(call.run)
        all_pairs = float(shape.heads * call.inputs[0].shape[2] ** 2)
        pairs = call.blocks.pairs() if call.blocks else call.kept_pairs or all_pairs
        return replace(
            row,
            ms=ms,
            tflops=None if call.part == "mask" else OPERATIONS[call.part] * HEAD_DIM * pairs / ms / 1e9,
            peak_mb=extra,
            host_us=self._clock.host_microseconds(call.run, ms),
            rel_err=error if call.checked else None,
            achieved=1 - pairs / all_pairs,
        )

    def _error(self, call: Call) -> float:
        """Relative error, 0 where only NaN can be looked for."""
        q, k, v = call.inputs
        poison = [
            torch.full_like(x, nan) for x in call.inputs
        ]  # freed at once: the next outputs get this memory
        del poison
        if call.d_out is not None:
            return gradient_error(call.run(), call.d_out, q, k, v, call.blocks)
        out = call.output(call.run())
        if call.checked:
            return relative_error(out, q, k, v, call.blocks)
        return nan if bool(torch.isnan(out).any()) else 0.0

    def _has(self, shape: Shape, method: Method) -> bool:
        return any(row.shape == shape.name and row.method == method.name for row in self.rows)

    def _empty(
        self,
        shape: Shape,
        method: Method,
        status: str,
        note: str,
        sparsity: float | None = None,
        pattern: str | None = None,
    ) -> Row:
        return Row(shape.name, method.name, "total", sparsity, pattern, self._dtype, status=status, note=note)


def line(row: Row) -> str:
    """A row as one line of the table."""
    cell = f"{row.shape:15} {row.method:18} {row.part:8} {row.pattern or '-':10}"
    cell += "     - " if row.sparsity is None else f"{row.sparsity:6.2f} "
    if row.status != "ok":
        return f"{cell} {row.status}" + (f": {row.note}" if row.note else "")

    widths = (7, 9, 6, 8, 6, 8)
    values = (row.achieved, row.ms, row.tflops, row.peak_mb, row.host_us, row.rel_err)
    forms = (".4f", ".3f", ".0f", ".1f", ".0f", ".1e")
    numbers = (
        f"{_number(value, form):>{width}}" for value, form, width in zip(values, forms, widths, strict=True)
    )
    return cell + " ".join(numbers) + f"  {row.config}"


def table(rows: Sequence[Row]) -> str:
    """Milliseconds by sparsity, one line a shape, method, part and pattern; more of the most wanted one."""
    asked = sorted({row.sparsity for row in rows if row.sparsity is not None})
    if not asked:
        return "nothing was measured"
    wanted = next((sparsity for sparsity in SPARSITIES if sparsity in asked), asked[-1])
    lines: dict[tuple[str, ...], dict[float, Row]] = {}
    for row in rows:
        if row.sparsity is not None:
            pattern = f"{row.pattern}{', target' if 'sparsity=' in row.config else ''}"
            lines.setdefault((row.shape, row.method, row.part, pattern), {})[row.sparsity] = row
    head = f"{'shape':15} {'method':18} {'part':8} {'pattern':19}" + "".join(f"{s:>9.0%}" for s in asked)
    text = [f"{head} | at {wanted:.0%}: TFLOP/s, MB, host us, error"]
    for labels, cells in lines.items():
        times = "".join(f"{_time(cells.get(sparsity)):>9}" for sparsity in asked)
        row = cells.get(wanted, cells[min(cells)])
        more = (row.tflops, ".0f"), (row.peak_mb, ".0f"), (row.host_us, ".0f"), (row.rel_err, ".0e")
        label = f"{labels[0]:15} {labels[1]:18} {labels[2]:8} {labels[3]:19}"
        text.append(f"{label}{times} | " + " ".join(f"{_number(*each):>5}" for each in more))
    unmeasured = {(row.method, row.status, row.note) for row in rows if row.sparsity is None}
    text += [f"{method}: {status}: {note}" for method, status, note in sorted(unmeasured)]
    return "\n".join(text)


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    return _number(row.ms, ".3f") if row.status == "ok" else row.status[:8]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.attention", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="the headline cells only")
    parser.add_argument("--tiny", action="store_true", help="one tiny shape, on a CPU if there is no GPU")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--sparsities", nargs="+", type=float, metavar="S", help="shares to drop, in [0, 1)")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--cell-ms", type=float, default=60.0, help="device time of one measurement")
    parser.add_argument("--budget-s", type=float, default=600.0, help="begin no cell after this")
    parser.add_argument("--commit", help="commit to name in the results, where there is no git checkout")
    args = parser.parse_args(arguments)

    if not torch.cuda.is_available() and not args.tiny:
        parser.error("no NVIDIA GPU is visible to torch; --tiny runs a check of the benchmark without one")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    shapes = [SHAPES[name] for name in args.shapes or (QUICK_SHAPES if args.quick else SHAPES)]
    methods = [METHODS[name] for name in args.methods or (QUICK_METHODS if args.quick else METHODS)]
    sparsities = args.sparsities or (
        TINY_SPARSITIES if args.tiny else SPARSITIES[: 1 if args.quick else None]
    )
    benchmark = Benchmark(device, args.dtype, args.cell_ms, time.monotonic() + args.budget_s)
    facts = machine(device, args.commit)
    print(", ".join(facts.values()), flush=True)
    try:
        with torch.no_grad():
            benchmark.run([TINY] if args.tiny else shapes, methods, sparsities, args.patterns)
    finally:
        print(table(benchmark.rows))
        if args.out and benchmark.rows:
            write(args.out, facts, benchmark.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
