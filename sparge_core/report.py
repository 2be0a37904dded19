"""What a run did, in a user's words. `record.py` gathers it, `picture.py` draws it."""

from __future__ import annotations

from typing import Any

WORST_LAYERS = 5  # named by the probe's line


def describe(summary: dict[str, Any]) -> str:
    """The summary of `RunStatistics` in a user's words, one line a fact."""
    sparse, skipped = summary["sparse_calls"], summary["sparsity"]
    lines = [
        f"Sparse calls: {sparse}, which skipped {skipped:.1%} of the work."
        if sparse
        else "Sparse calls: none."
    ]
    lines.append(f"Dense calls: {sum(summary['dense_calls'].values()) or 'none.'}")
    by_count = sorted(summary["dense_calls"].items(), key=lambda item: -item[1])
    lines += [f"  {count}: {reason}" for reason, count in by_count]
    if summary["floor_calls"]:
        lines.append(
            f"Calls whose top_k alone keeps more than the target sparsity allows: {summary['floor_calls']}."
        )
    if summary["kept_mass"] is not None:
        lines.append(
            f"Softmax mass kept, by the pooled scores that choose the blocks: {summary['kept_mass']:.1%}."
        )
    lines.append(
        f"Time in attention: {summary['attention_ms']:.0f} ms "
        f"({summary['sparse_ms']:.0f} sparse, {summary['dense_ms']:.0f} dense)."
    )
    if summary["speedup"] is not None:
        lines.append(
            f"A dense call takes {summary['speedup']:.2f} times as long as a sparse one of its size."
        )
    lines += _memory(summary["memory"])
    if summary["probe"] is not None:
        lines += _probe(summary["probe"], summary["layers"])
    return "\n".join(lines)


def status(step: int, steps: int, progress: tuple[float | None, int, int]) -> str:
    """One line on a run that goes on: steps done, of how many, and what `RunStatistics.progress` says.

    A node as wide as it comes has room for about 45 characters.
    """
    sparsity, sparse, dense = progress
    skipped = "" if sparsity is None else f"{sparsity:.1%} skipped; "
    return f"Step {step}/{steps}: {skipped}{sparse} sparse, {dense} dense"


def _memory(memory: dict[str, Any]) -> list[str]:
    lines = []
    if memory["mask_bytes"]:
        lines.append(f"Memory: {_bytes(memory['mask_bytes'])} for the largest mask")
        if memory["peak_bytes"] is not None:
            lines[0] += f"; at most {_bytes(memory['peak_bytes'])} held on a GPU since the start"
        lines[0] += "."
    return lines


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def _probe(probe: dict[str, Any], layers: list[str]) -> list[str]:
    errors = dict(zip(layers, probe["error"], strict=True))
    worst = ", ".join(f"{name} {errors[name]:.1%}" for name in probe["ranking"][:WORST_LAYERS])
    steps = ", ".join(str(step + 1) for step in probe["steps"])
    return [
        f"Probe at step {steps}: relative L1 of sparse against dense attention, largest first: {worst}. "
        "To keep those dense, put their numbers into dense_layers. "
        f"The probe took {probe['ms']:.0f} ms beside the time above."
    ]
