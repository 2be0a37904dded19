"""Result files and README's tables: numbers are complete, and README shows those that are committed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results, table
from benchmarks.results import Row, StartRow, StepRow

MACHINE = dict.fromkeys(results.MACHINE, "x")
DENSE = Row("14B-720p", "sdpa-cudnn", "total", 0.0, "uniform", "bf16", ms=200.0, tflops=570.0)
OURS = Row("14B-720p", "ours", "total", 0.95, "uniform", "bf16", ms=10.0, tflops=560.0)
KERNEL = Row("14B-720p", "ours", "kernel", 0.95, "ragged", "bf16", ms=9.5, tflops=610.0)
ABSENT = Row("14B-720p", "fa4", "total", None, None, "bf16", status="not installed", note="no such module")
STEP = StepRow("14B-720p", "ours", "eager", 0.95, "bf16", 3500.0, 430.0, 2580.0, 490.0, 4.71)


def content(*rows: Row | StepRow) -> dict[str, Any]:
    return {"machine": dict(MACHINE), "rows": [dict(row.__dict__) for row in rows]}


def test_readme_shows_the_committed_results() -> None:
    readme = table.README.read_text(encoding="utf-8")
    assert table.updated(readme, table.speed_text()) == readme, "run: python -m benchmarks.table"


def test_committed_results_are_sound() -> None:
    for path in results.FOLDER.glob("*.json"):
        results.read(path)


def test_sound_results_are_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "results.json"
    results.write(path, MACHINE, [DENSE, OURS, ABSENT])
    assert results.read(path) == content(DENSE, OURS, ABSENT)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data["rows"].clear(), "no rows"),
        (lambda data: data["machine"].pop("commit"), "machine.commit"),
        (lambda data: data["rows"][0].pop("tflops"), "tflops is missing"),
        (lambda data: data["rows"][0].update(speed=1.0), "speed is not a known field"),
        (lambda data: data["rows"][0].update(part="kernels"), "part is 'kernels'"),
        (lambda data: data["rows"][0].update(ms=float("nan")), "ms is nan"),
        (lambda data: data["rows"][0].update(ms="9"), "ms is '9'"),
        (lambda data: data["rows"][0].update(ms=None), "a measured row needs ms"),
        (lambda data: data["rows"][0].update(pattern=None), "a measured row needs ms"),
    ],
)
def test_unsound_results_are_refused_with_what_is_wrong(change: Any, problem: str, tmp_path: Path) -> None:
    data = copy.deepcopy(content(OURS))
    assert results.problems(data) == []
    change(data)
    assert any(problem in found for found in results.problems(data))


def test_unsound_results_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(ValueError, match="not sound"):
        results.write(path, {**MACHINE, "gpu": ""}, [OURS])
    assert not path.exists()


def test_the_table_compares_with_the_baseline_of_the_same_video() -> None:
    other = Row("1.3B-480p", "sdpa-cudnn", "total", 0.0, "uniform", "bf16", ms=11.0)
    text = table.attention_text(content(other, DENSE, OURS, KERNEL, ABSENT))
    assert "| 14B-720p, 75,600 tokens | – | 200.0 | – | 10.0 (20.0×) |" in text
    assert "| **SpargeAttention2** 128×64 | – | 9.50 / 610 |" in text


def test_the_step_table_shows_where_the_time_goes() -> None:
    text = table.step_text(content(STEP))
    assert "| 14B-720p, eager | 95% sparse | 3,500 | 430 | 2,580 | 490 | 4.71× |" in text


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    readme = f"a\n{table.BEGIN}\nold\n{table.END}\nb\n"
    assert table.updated(readme, "new") == f"a\n{table.BEGIN}\nnew\n{table.END}\nb\n"
    assert table.updated(table.updated(readme, "new"), "") == f"a\n{table.BEGIN}\n{table.END}\nb\n"


@pytest.mark.parametrize(
    "readme", ["", table.BEGIN, f"{table.END}{table.BEGIN}", f"{table.BEGIN * 2}{table.END}"]
)
def test_missing_markers_are_an_error(readme: str) -> None:
    with pytest.raises(ValueError, match="needs the markers"):
        table.updated(readme, "new")


def test_the_start_table_tells_compiling_from_loading(tmp_path: Path) -> None:
    results.write(tmp_path / results.START, MACHINE, [StartRow("empty", 4.61), StartRow("filled", 0.213)])
    assert "takes 4.6 s the first time" in table.speed_text(tmp_path)
    assert "0.21 s from then on" in table.speed_text(tmp_path)
