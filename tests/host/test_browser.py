"""The pack in ComfyUI's real front end, in a headless Chromium; screenshots are kept in out/browser/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import thumbnail
from browser import PATCH, REPORT, TINY, BrowserError, FrontEnd, front_end, take_graph, take_help, take_report
from host import ROOT, Server
from workflow import load

WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
SCREENSHOTS = ROOT / "out" / "browser"
_WIDGETS = """([type, key]) => app.graph.nodes.find(node => node.type == type).widgets
    .map(widget => [widget.name, widget[key]])"""


@pytest.fixture(scope="module")
def shown(server: Server) -> Iterator[FrontEnd]:
    opened = front_end(server)
    try:
        front = opened.__enter__()
    except BrowserError as error:
        pytest.skip(str(error))
    yield front
    opened.__exit__(None, None, None)
    server.post("/settings", {"Comfy.Locale": "en"})


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_opens_with_all_nodes_widgets_and_links(shown: FrontEnd, file: Path) -> None:
    saved, shipped = shown.open(file), load(file)
    known = set(shown.page.evaluate("() => Object.keys(LiteGraph.registered_node_types)"))
    assert {node["type"] for node in shipped["nodes"]} <= known
    values = {node["id"]: node.get("widgets_values", []) for node in shipped["nodes"]}
    assert {node["id"]: node.get("widgets_values", []) for node in saved["nodes"]} == values
    assert sorted(saved["links"]) == sorted(shipped["links"])
    count = "() => app.graph.nodes.map(node => [Number(node.id), node.widgets?.length ?? 0])"
    assert dict(shown.page.evaluate(count)) == {node: len(given) for node, given in values.items()}


def test_shares_are_set_with_sliders(shown: FrontEnd) -> None:
    shown.open(TINY)
    kinds = shown.page.evaluate(_WIDGETS, [PATCH, "type"])
    assert [name for name, kind in kinds if kind == "slider"] == ["top_k", "top_p", "sparsity"]


def test_the_tiny_workflow_runs_and_shows_its_report(shown: FrontEnd) -> None:
    shown.open(TINY)
    outputs = shown.run()
    shown.wait_for_picture(REPORT)
    report, status = (str(shown.page.evaluate(_WIDGETS, [node, "value"])) for node in (REPORT, PATCH))
    assert "8, which skipped 5" in report
    assert "Step 4/4: 5" in status
    (node,) = (node for node in load(TINY)["nodes"] if node["type"] == REPORT)
    assert outputs[str(node["id"])]["images"]
    take_graph(shown, SCREENSHOTS / "graph.jpg")
    take_report(shown, SCREENSHOTS / "report.jpg")


@pytest.mark.parametrize("node", [PATCH, REPORT])
def test_a_nodes_help_page_is_shown_with_its_pictures(shown: FrontEnd, node: str) -> None:
    shown.open(TINY)
    page = shown.help(node)
    shown.page.wait_for_function(_HELP_PICTURES)
    text = page.inner_text()
    (given,) = (found for found in load(TINY)["nodes"] if found["type"] == node)
    names = [name for name, _ in shown.page.evaluate(_WIDGETS, [node, "name"]) if not name.startswith("$$")]
    assert len(names) == len(given["widgets_values"])
    assert [name for name in names if name not in text] == []
    if node == PATCH:
        take_help(shown, SCREENSHOTS / "help.jpg")


_HELP_PICTURES = """() => {
    const pictures = [...document.querySelectorAll('.node-help-content img')]
    return pictures.length > 0 && pictures.every(picture => picture.naturalWidth > 0)
}"""


def test_the_template_browser_shows_every_workflow_with_a_picture(shown: FrontEnd) -> None:
    dialog = shown.templates()
    for file in WORKFLOWS:
        dialog.get_by_test_id(f"template-workflow-{file.stem}").scroll_into_view_if_needed()
        shown.page.wait_for_function(_HAS_PICTURE, arg=[file.stem, thumbnail.SIZE[0]])
    shown.screenshot(SCREENSHOTS / "templates.jpg")
    dialog.get_by_test_id(f"template-workflow-{TINY.stem}").click()
    dialog.wait_for(state="hidden")
    types = shown.page.evaluate("() => app.graph.nodes.map(node => node.type)")
    assert sorted(types) == sorted(node["type"] for node in load(TINY)["nodes"])


_HAS_PICTURE = """([name, width]) =>
    document.querySelector(`[data-testid="template-workflow-${name}"] img`)?.naturalWidth == width"""


def test_a_chinese_user_gets_chinese_names_and_pages(shown: FrontEnd) -> None:
    shown.start("zh")
    shown.open(TINY)
    labels = dict(shown.page.evaluate(_WIDGETS, [PATCH, "label"]))
    assert labels["sparsity"] == "稀疏度"
    text = shown.help(PATCH).inner_text()
    assert [label for label in labels.values() if label not in text] == []
