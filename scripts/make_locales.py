"""Writes locales/en/: the nodes' English names and tooltips, as the nodes themselves give them.

    python scripts/host.py run scripts/make_locales.py

Other languages are translated from it by hand. A test compares it with the nodes."""

from __future__ import annotations

import json
from typing import Any

from host import PACK_NAME, ROOT, Server, cache_folder, setup
from workflow import inputs_of

ENGLISH = ROOT / "locales" / "en" / "nodeDefs.json"


def english(object_info: dict[str, Any]) -> str:
    """The file's content. object_info: the pack's nodes, as the server tells the front end of them."""
    translated = {}
    for node, about in object_info.items():
        outputs = zip(about["output_name"], about["output_tooltips"] or (), strict=True)
        translated[node] = {
            "display_name": about["display_name"],
            "description": about["description"],
            "inputs": {
                name: {"name": name, "tooltip": options["tooltip"]}
                for name, _, options in inputs_of(about["input"])
            },
            "outputs": {
                str(place): {"name": name, "tooltip": tooltip}
                for place, (name, tooltip) in enumerate(outputs)
            },
        }
    return json.dumps(translated, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    with Server(setup(), cache_folder() / "base") as server:
        info = server.object_info()
    ours = {node: about for node, about in info.items() if about["python_module"].endswith(PACK_NAME)}
    ENGLISH.parent.mkdir(parents=True, exist_ok=True)
    ENGLISH.write_text(english(ours), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
