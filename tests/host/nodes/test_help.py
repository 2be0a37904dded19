"""Every node has help pages, pictures and names, English and Chinese, that say what it is today."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from host import ROOT
from make_locales import ENGLISH, english
from workflow import inputs_of

DOCS = ROOT / "web" / "docs"
CHINESE = ROOT / "locales" / "zh" / "nodeDefs.json"
NODES = sorted(
    re.findall(
        r'node_id="(\w+)"', "\n".join(file.read_text("utf-8") for file in (ROOT / "nodes").glob("*.py"))
    )
)
HEADINGS = {
    "{}.md": ("## Inputs", "## Recipes", "## Troubleshooting"),
    "{}/zh.md": ("## 输入", "## 三个配方", "## 故障排除"),
}


@pytest.fixture(scope="session")
def schemas(pack: ModuleType) -> dict[str, Any]:
    nodes = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    return {node.GET_SCHEMA().node_id: node for node in nodes}


@pytest.fixture(scope="session")
def info(schemas: dict[str, Any]) -> dict[str, Any]:
    return {name: node.GET_NODE_INFO_V1() for name, node in schemas.items()}


def names(about: dict[str, Any]) -> list[str]:
    return [name for name, _, _ in inputs_of(about["input"])]


def section(text: str, heading: str) -> str:
    assert text.count(f"\n{heading}\n") == 1, f"one section {heading!r} is needed"
    return re.split(r"\n## ", text.split(f"\n{heading}\n")[1])[0]


def page_of(node: str, page: str) -> Path:
    return DOCS / page.format(node)


def test_no_node_is_left_out(info: dict[str, Any]) -> None:
    assert sorted(info) == NODES


@pytest.mark.parametrize("page", HEADINGS)
@pytest.mark.parametrize("node", NODES)
def test_a_page_explains_exactly_the_inputs_that_there_are(
    node: str, page: str, info: dict[str, Any]
) -> None:
    """By the names that the front end shows, in their order; and by their ids where those differ."""
    labels = {name: name for name in names(info[node])}
    if page.endswith("zh.md"):
        translated = json.loads(CHINESE.read_text("utf-8"))[node]["inputs"]
        labels = {name: translated[name]["name"] for name in labels}
    shown = [f"`{name}`" if label == name else f"{label} `{name}`" for name, label in labels.items()]
    table = section(page_of(node, page).read_text("utf-8"), HEADINGS[page][0])
    cells = re.findall(r"^\| *(.*?) *\| *(.+?) *\|$", table, re.MULTILINE)[2:]  # the head and its rule
    assert [name for name, _ in cells] == shown
    assert all(meaning for _, meaning in cells)


@pytest.mark.parametrize("page", HEADINGS)
@pytest.mark.parametrize("node", NODES)
def test_a_page_has_three_recipes_and_ways_out_of_trouble(node: str, page: str) -> None:
    text = page_of(node, page).read_text("utf-8")
    recipes = re.findall(r"^(\d)\. \*\*", section(text, HEADINGS[page][1]), re.MULTILINE)
    assert recipes == ["1", "2", "3"]
    assert len(re.findall(r"^- ", section(text, HEADINGS[page][2]), re.MULTILINE)) >= 3


@pytest.mark.parametrize("page", HEADINGS)
@pytest.mark.parametrize("node", NODES)
def test_a_page_shows_the_node(node: str, page: str) -> None:
    """ComfyUI looks for pictures from the folder of all pages, in every language."""
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", page_of(node, page).read_text("utf-8"))
    assert f"pictures/{node}.jpg" in pictures
    assert [picture for picture in pictures if not (DOCS / picture).is_file()] == []


@pytest.mark.parametrize("node", NODES)
def test_a_node_is_found_by_other_words_than_its_name(node: str, schemas: dict[str, Any]) -> None:
    assert len(set(schemas[node].GET_SCHEMA().search_aliases)) >= 2


def test_the_english_names_are_those_of_the_nodes(info: dict[str, Any]) -> None:
    """If not: python scripts/host.py run scripts/make_locales.py."""
    assert json.loads(ENGLISH.read_text("utf-8")) == json.loads(english(info))


@pytest.mark.parametrize("node", NODES)
def test_the_chinese_names_and_tooltips_are_complete(node: str, info: dict[str, Any]) -> None:
    translated = json.loads(CHINESE.read_text("utf-8"))[node]
    assert translated["display_name"]
    assert translated["description"]
    assert list(translated["inputs"]) == names(info[node])
    assert list(translated["outputs"]) == [str(place) for place in range(len(info[node]["output"]))]
    both = [*translated["inputs"].values(), *translated["outputs"].values()]
    assert all(text["name"] and text["tooltip"] for text in both)
