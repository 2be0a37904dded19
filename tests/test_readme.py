"""What README.md tells a reader to do works, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert re.fullmatch(r"\d+\.\d% of the attention was skipped\n", capsys.readouterr().out)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"\bmake ([a-z][a-z-]*)", README))
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test", "browser", "pictures", "test-gpu", "bench", "build"} <= targets
    assert targets <= rules


def test_every_file_it_names_exists() -> None:
    named = set(re.findall(r"`?\b((?:scripts|nodes|sparge_core|csrc|workflows)/[\w./]*)", README))
    named |= set(re.findall(r"\]\(([\w./]+)\)", README))
    assert named
    assert all((ROOT / path).exists() for path in named), named


def test_every_widget_of_the_table_exists() -> None:
    table = README.split("## Nodes")[1].split("## Students")[0]
    schema = (ROOT / "nodes" / "patch.py").read_text(encoding="utf-8")
    widgets = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert len(widgets) >= 8
    assert all(f'"{widget}"' in schema for widget in widgets)


def test_its_pictures_are_small() -> None:
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", README)
    assert {"docs/graph.jpg", "docs/report.jpg", "docs/help.jpg"} <= set(pictures)
    assert all((ROOT / picture).stat().st_size < 200_000 for picture in pictures)
