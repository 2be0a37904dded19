"""ComfyUI's own front end in a headless Chromium: for the tests, and for the pictures in docs/ and web/docs/.

    python scripts/host.py run scripts/browser.py install     # playwright, and a Chromium where there is none
    python scripts/host.py run scripts/browser.py pictures    # runs the tiny workflow and takes them anew

`install` puts playwright into the Python that runs it. A Chromium of the system serves; where there is none,
root gets it from apt-get and everybody else playwright's own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from host import PACK_NAME, ROOT, HostError, Server, cache_folder, ready_host

PLAYWRIGHT = "playwright>=1.50,<2"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")  # what systems call it, Debian's first
INSTALL = "make browser (python scripts/host.py run scripts/browser.py install)"
# As root Chromium has no sandbox; the rest keeps it from calling home.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

WINDOW = {"width": 1600, "height": 800}
PATCH, REPORT = "SpargeAttention2Patch", "SpargeSparsityReport"
TINY = ROOT / "workflows" / "wan21_tiny.json"
DOCS, HELP_PICTURES = ROOT / "docs", ROOT / "web" / "docs" / "pictures"
RUN_SECONDS = 240.0  # the tiny workflow takes ten on an idle machine
PATIENCE = 120_000  # milliseconds, for what takes one or two on an idle machine
DRAWN = 300  # milliseconds, in which the canvas is drawn anew
# A user's settings: without the templates that greet a new one, the map and the panel at the side.
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "Comfy.RightSidePanel.IsOpen": False,
}
READY = f"() => !!window.app?.graph && !!window.LiteGraph?.registered_node_types['{PATCH}']"


class BrowserError(RuntimeError):
    """There is no browser to test in; the message says what to do."""


# ---------------------------------------------------------------------------------------------------------
# Installing


def find_chromium() -> str | None:
    """The system's Chromium; None where there is none but, perhaps, playwright's own."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


def install() -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", PLAYWRIGHT], check=True)
    if find_chromium() is not None:
        return
    if shutil.which("apt-get") and os.name == "posix" and os.geteuid() == 0:
        get = ["apt-get", "-q", "-o", "Acquire::Retries=3"]
        subprocess.run([*get, "update"], check=True)
        subprocess.run([*get, "install", "-y", "--no-install-recommends", CHROMIUM[0]], check=True)
    else:
        subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)


# ---------------------------------------------------------------------------------------------------------
# Driving


class FrontEnd:
    """A tab with ComfyUI's front end."""

    def __init__(self, page: Any, server: Server) -> None:
        self.page = page
        self.server = server

    def start(self, language: str = "en") -> None:
        """Load the front end anew, with every text drawn, and nothing that hides the nodes."""
        self.server.post("/settings", {**SETTINGS, "Comfy.Locale": language})
        self.page.goto(self.server.url)
        self.page.wait_for_function(READY)
        self.page.evaluate("() => { app.canvas.min_font_size_for_lod = 0 }")

    def command(self, name: str) -> None:
        self.page.evaluate("name => app.extensionManager.command.execute(name)", name)

    def open(self, file: Path) -> dict[str, Any]:
        """Hand over a file as dropping it does; returns the graph as the front end would save it."""
        self.page.evaluate(
            "([text, name]) => app.handleFile(new File([text], name, { type: 'application/json' }))",
            [file.read_text(encoding="utf-8"), file.name],
        )
        saved: dict[str, Any] = self.page.evaluate("() => app.graph.serialize()")
        return saved

    def run(self) -> dict[str, Any]:
        """Press Run and wait for its end; returns the outputs by node id, HostError if a node failed."""
        with self.page.expect_response(lambda answer: answer.url.endswith("/prompt")) as sent:
            self.page.get_by_test_id("queue-button").click()
        answer = sent.value.json()
        if answer.get("error") or answer.get("node_errors"):
            raise HostError(f"ComfyUI refused the graph: {answer}")
        return self.server.wait(answer["prompt_id"], RUN_SECONDS)

    def wait_for_picture(self, node: str) -> None:
        self.page.wait_for_function(
            "type => app.graph.nodes.some(node => node.type == type && node.imgs?.[0]?.complete)", arg=node
        )

    def fit(self) -> None:
        """Show the whole graph, below the buttons at the top."""
        self.page.evaluate(_FIT)
        self.page.wait_for_timeout(DRAWN)

    def look_at(self, node: str, scale: float, left: int, top: int) -> dict[str, float]:
        """Put a node's upper left corner at these pixels of the canvas; returns its rectangle on the page."""
        box: dict[str, float] = self.page.evaluate(_LOOK_AT, [node, scale, left, top])
        self.page.wait_for_timeout(DRAWN)
        return box

    def help(self, node: str) -> Any:
        """Open a node's help page in the panel at the side; returns its element."""
        self.look_at(node, 1, 360, 220)  # the button is above it
        self.page.evaluate(_SELECT, node)
        shown = self.page.locator(".node-help-content")
        if not shown.count():
            self.page.get_by_test_id("info-button").click()
        shown.locator("table").first.wait_for()
        return shown

    def templates(self) -> Any:
        """Open the template browser on this pack; returns the dialog's element."""
        self.command("Comfy.BrowseTemplates")
        dialog = self.page.get_by_role("dialog").first
        # The side bar cuts the name short, but not in the page.
        dialog.get_by_text(PACK_NAME).first.click()
        dialog.locator("img").first.wait_for()
        return dialog

    def screenshot(self, place: Path, clip: dict[str, float] | None = None) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=place, type="jpeg", quality=80, clip=clip)


_FIT = """() => {
    app.canvas.deselectAll()
    const boxes = app.graph.nodes.map(node => node.boundingRect)
    const [left, top] = [0, 1].map(i => Math.min(...boxes.map(box => box[i])))
    const [right, bottom] = [0, 1].map(i => Math.max(...boxes.map(box => box[i] + box[i + 2])))
    // The canvas lies under the bar at its left and the buttons at its top.
    const room = app.canvas.canvas.getBoundingClientRect(), [bar, buttons, margin] = [84, 120, 24]
    const space = app.canvas.ds
    space.scale = Math.min(
        (room.width - bar - margin) / (right - left), (room.height - buttons - margin) / (bottom - top))
    space.offset = [bar / space.scale - left, buttons / space.scale - top]
    app.canvas.setDirty(true, true)
}"""
_SELECT = "type => app.canvas.selectNode(app.graph.nodes.find(node => node.type == type))"
_LOOK_AT = """([type, scale, left, top]) => {
    const node = app.graph.nodes.find(node => node.type == type)
    const space = app.canvas.ds, title = LiteGraph.NODE_TITLE_HEIGHT
    space.scale = scale
    space.offset = [left / scale - node.pos[0], top / scale - node.pos[1] + title]
    app.canvas.setDirty(true, true)
    const canvas = app.canvas.canvas.getBoundingClientRect()
    const [width, height] = [node.size[0] * scale, (node.size[1] + title) * scale]
    return { x: canvas.x + left, y: canvas.y + top, width, height }
}"""


@contextlib.contextmanager
def front_end(server: Server) -> Iterator[FrontEnd]:
    """The front end of a running server; BrowserError where there is no browser."""
    with _api().sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        except _api().Error as error:
            reason = str(error).strip().splitlines()[0]
            raise BrowserError(f"Chromium does not start ({reason}). Install one: {INSTALL}") from None
        try:
            page = browser.new_page(viewport=WINDOW)
            page.set_default_timeout(PATIENCE)
            shown = FrontEnd(page, server)
            shown.start()
            yield shown
        finally:
            browser.close()


def _api() -> Any:
    try:
        return importlib.import_module("playwright.sync_api")
    except ImportError:
        raise BrowserError(f"playwright is not installed. Install it and Chromium: {INSTALL}") from None


# ---------------------------------------------------------------------------------------------------------
# Pictures


def take_graph(shown: FrontEnd, place: Path) -> None:
    """Of the whole graph after a run."""
    shown.fit()
    shown.screenshot(place)


def take_report(shown: FrontEnd, place: Path, width: int = 900) -> None:
    """Of the report's picture after a run, in a tab of its own, where the node's menu opens it."""
    address = shown.page.evaluate(_PICTURE, REPORT)
    tab = shown.page.context.browser.new_page()
    tab.set_viewport_size({"width": width, "height": 2 * width})  # it is shown as wide as the tab
    tab.goto(address)
    tab.locator("img").screenshot(path=place, type="jpeg", quality=80)
    tab.close()


_PICTURE = "type => app.graph.nodes.find(node => node.type == type).imgs[0].src"


def take_help(shown: FrontEnd, place: Path) -> None:
    """Of the page of the patch node, beside it."""
    shown.help(PATCH)
    shown.look_at(PATCH, 1.4, 360, 220)
    shown.screenshot(place)


def take_node(shown: FrontEnd, node: str, place: Path) -> None:
    """Of one node, as it is added to a graph."""
    shown.page.evaluate(_ADD_ALONE, node)
    box = shown.look_at(node, 1.5, 300, 150)
    margin = 2  # pixels, of the canvas around the node
    clip = {"x": box["x"] - margin, "y": box["y"] - margin}
    clip |= {"width": box["width"] + 2 * margin, "height": box["height"] + 2 * margin}
    shown.screenshot(place, clip)


# Not with graph.clear(), after which a node of the same number shows the values of the one before.
_ADD_ALONE = """type => {
    for (const node of [...app.graph.nodes]) app.graph.remove(node)
    app.graph.add(LiteGraph.createNode(type))
}"""


def take_all(shown: FrontEnd) -> None:
    info = shown.server.object_info()
    for node in sorted(name for name, about in info.items() if about["python_module"].endswith(PACK_NAME)):
        take_node(shown, node, HELP_PICTURES / f"{node}.jpg")
    shown.open(TINY)
    shown.page.evaluate(_SET_WIDGETS, [PATCH, {"sparsity": 0.7}])
    shown.run()
    shown.wait_for_picture(REPORT)
    take_report(shown, DOCS / "report.jpg")
    take_report(shown, HELP_PICTURES / "report.jpg", 600)
    shown.page.get_by_text("Job completed").wait_for(state="hidden")
    take_graph(shown, DOCS / "graph.jpg")
    take_help(shown, DOCS / "help.jpg")
    shown.templates()
    shown.page.wait_for_timeout(1000)  # milliseconds: the pictures fade in
    shown.screenshot(DOCS / "templates.jpg")


_SET_WIDGETS = """([type, values]) => {
    for (const widget of app.graph.nodes.find(node => node.type == type).widgets)
        widget.value = values[widget.name] ?? widget.value
}"""


def main(arguments: list[str]) -> None:
    if arguments == ["install"]:
        install()
    elif arguments == ["pictures"]:
        import tiny_models

        host = ready_host()
        if host is None:
            raise HostError(
                "ComfyUI is not set up. Run: python scripts/host.py run scripts/browser.py pictures"
            )
        base = cache_folder() / "base"
        tiny_models.make(base)
        with Server(host, base) as server, front_end(server) as shown:
            take_all(shown)
        print(f"the pictures are in {DOCS} and {HELP_PICTURES}")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (HostError, BrowserError, subprocess.CalledProcessError) as error:
        sys.exit(f"[browser] {error}")
