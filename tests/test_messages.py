"""Messages that README.md and the help pages quote, in “quotation marks”, are messages of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [*(ROOT / "nodes").glob("*.py"), *(ROOT / "sparge_core").rglob("*.py")]
PAGES = [ROOT / "README.md", *sorted((ROOT / "web" / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Every text of the code, with … where a value is filled in."""
    found = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\w", "…", node.value))
    return found


def quotes(page: Path) -> list[str]:
    text = re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
    return [quote for quote in re.findall("“(.+?)”", text) if re.search("[A-Za-z]", quote)]


def test_the_readme_quotes_messages() -> None:
    assert len(quotes(ROOT / "README.md")) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_quoted_message_exists(page: Path, messages: list[str]) -> None:
    """A … in a quote stands for a value, or for words that are left out."""
    for quote in quotes(page):
        pattern = ".*".join(map(re.escape, (part.strip() for part in quote.split("…"))))
        assert any(re.search(pattern, message, re.DOTALL) for message in messages), quote
