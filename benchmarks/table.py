"""README's speed tables, made from the committed results between its two markers.

python -m benchmarks.table            # writes them into README.md
python -m benchmarks.table --check    # says whether README.md is up to date
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cases import SHAPES
from .results import ATTENTION, FOLDER, START, WAN_STEP, read

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"

DENSE = {"sdpa-flash": "SDPA flash", "sdpa-cudnn": "SDPA cuDNN", "fa4": "flash-attn-4"}
BASELINE = "sdpa-cudnn"  # the fastest that torch brings
HEADLINE = 0.95
GRADIENT_PARTS = ("total", "backward", "fwd+bwd")
PEERS = {
    "ours": "**SpargeAttention2** 128×64",
    "ours-portable": "**SpargeAttention2**, portable kernel, 128×64",
    "fa4-128x128": "flash-attn-4 128×128",
    "fa4-128x64": "flash-attn-4 128×64",
    "cudnn-bsa-128x128": "cudnn-frontend 128×128",
    "cudnn-bsa-64x64": "cudnn-frontend 64×64",
    "flex-128x128": "FlexAttention 128×128",
}

Rows = Sequence[Mapping[str, Any]]


def attention_text(data: Mapping[str, Any]) -> str:
    """Dense against sparse by video and sparsity, then the sparse kernels side by side."""
    rows = [row for row in data["rows"] if row["status"] == "ok"]
    return f"{_head(data['machine'])}\n\n{_by_sparsity(rows)}\n\n{_by_method(rows)}\n\n{_gradients(rows)}"


def _head(machine: Mapping[str, str]) -> str:
    return (
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, "
        f"commit {machine['commit']}, {machine['date']}; "
        "bf16, batch 1, head dim 128, ComfyUI's memory layout, medians in milliseconds."
    )


def _made(machine: Mapping[str, str]) -> str:
    return f"{machine['gpu']}, torch {machine['torch']}, commit {machine['commit']}, {machine['date']}"


def _by_sparsity(rows: Rows) -> str:
    totals = [row for row in rows if row["part"] == "total" and row["pattern"] == "uniform"]
    ours = [row for row in totals if row["method"] == "ours" and row["sparsity"] > 0]
    sparsities = sorted({row["sparsity"] for row in ours})
    lines = []
    for shape in _shapes(ours):
        dense = {method: _find(totals, shape=shape, method=method) for method in DENSE}
        base = dense[BASELINE]
        cells = [_milliseconds(row) for row in dense.values()]
        for sparsity in sparsities:
            row = _find(ours, shape=shape, sparsity=sparsity)
            factor = f" ({base['ms'] / row['ms']:.1f}×)" if row and base else ""
            cells.append(_milliseconds(row) + factor)
        lines.append([f"{shape}, {SHAPES[shape].tokens:,} tokens", *cells])
    head = ["one layer's self-attention", *DENSE.values(), *(f"ours, {s:.0%} sparse" for s in sparsities)]
    return (
        f"Dense and sparse attention, mask included (in brackets: against {DENSE[BASELINE]}):\n\n"
        f"{_markdown(head, lines)}"
    )


def _by_method(rows: Rows) -> str:
    kernels = [row for row in rows if row["part"] == "kernel" and row["sparsity"] == HEADLINE]
    shapes = _shapes([row for row in kernels if row["method"] == "ours"])
    columns = [(shape, pattern) for shape in shapes for pattern in ("uniform", "ragged")]
    lines = []
    for method, name in PEERS.items():
        found = [_find(kernels, method=method, shape=shape, pattern=pattern) for shape, pattern in columns]
        if any(found):
            lines.append(
                [name, *(f"{_milliseconds(row)} / {row['tflops']:.0f}" if row else "–" for row in found)]
            )
    head = [
        f"attention alone, {HEADLINE:.0%} sparse",
        *(f"{shape}, {pattern} rows" for shape, pattern in columns),
    ]
    return f"The sparse kernels over given blocks, milliseconds / TFLOP/s:\n\n{_markdown(head, lines)}"


def step_text(data: Mapping[str, Any]) -> str:
    """Whole denoising steps."""
    lines = [
        [
            f"{row['shape']}, {row['mode']}",
            "dense" if row["method"] == "dense" else f"{row['sparsity']:.0%} sparse",
            *(f"{row[part]:,.0f}" for part in ("step_ms", "attention_ms", "linear_ms", "rest_ms")),
            f"{row['factor']:.2f}×",
        ]
        for row in data["rows"]
    ]
    head = ["one denoising step", "attention", "step", "self-attention", "linear layers", "rest", "faster"]
    return (
        "ComfyUI's own Wan2.1 code at full size with random weights, one step of batch 1, in milliseconds "
        f"({_made(data['machine'])}):\n\n{_markdown(head, lines)}"
    )


def _gradients(rows: Rows) -> str:
    """Forward and backward of one layer, dense and sparse."""
    rows = [row for row in rows if row["pattern"] == "uniform"]
    names = {**DENSE, "ours": PEERS["ours"], "ours-portable": PEERS["ours-portable"]}
    lines = []
    for shape in _shapes(rows):
        for method, name in names.items():
            of_method = [_find(rows, shape=shape, method=method, part=part) for part in GRADIENT_PARTS]
            if of_method[1] is None:
                continue
            sparsity = of_method[1]["sparsity"]
            of_method[0] = _find(rows, shape=shape, method=method, part="total", sparsity=sparsity)
            kind = f"{name}, {sparsity:.0%} sparse" if sparsity else name
            lines.append([shape, kind, *map(_milliseconds, of_method)])
    head = ["one layer's self-attention", "", "forward", "backward", "forward + backward"]
    return f"Training, mask included, in milliseconds:\n\n{_markdown(head, lines)}"


def start_text(data: Mapping[str, Any]) -> str:
    """The first call of a process."""
    seconds = {row["cache"]: row["start_s"] for row in data["rows"]}
    return (
        f"The first attention call of a process takes {seconds['empty']:.1f} s the first time, when the "
        f"kernels are compiled for the GPU, and {seconds['filled']:.2f} s from then on "
        f"({_made(data['machine'])})."
    )


def speed_text(folder: Path = FOLDER) -> str:
    """All tables of the results in `folder`; empty where there are none."""
    makers = {ATTENTION: attention_text, WAN_STEP: step_text, START: start_text}
    return "\n\n".join(
        make(read(folder / name)) for name, make in makers.items() if (folder / name).is_file()
    )


def updated(readme: str, text: str) -> str:
    """`readme` with `text` between the markers; ValueError if they are not there, once each and in order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"The README needs the markers {BEGIN} and {END}, once each and in this order.")
    body = f"\n{text}\n" if text else "\n"
    return f"{before}{begin}{body}{end}{after}"


def _shapes(rows: Rows) -> list[str]:
    present = {row["shape"] for row in rows}
    return [shape for shape in SHAPES if shape in present]


def _find(rows: Rows, **wanted: Any) -> Mapping[str, Any] | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


def _milliseconds(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None else f"{row['ms']:.1f}" if row["ms"] >= 10 else f"{row['ms']:.2f}"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.table", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if README.md is out of date"
    )
    args = parser.parse_args(arguments)
    readme = README.read_text(encoding="utf-8")
    new = updated(readme, speed_text())
    if args.check:
        print(
            "README.md is up to date" if new == readme else "README.md is out of date: run it without --check"
        )
        return int(new != readme)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
