"""Workflows as ComfyUI's front end saves them: reading them into the API's format, and checking them on the
way.

The front end's format (version 0.4) lists nodes, links between their numbered slots, and widget values by
position only; the API's names every input. The names come from the server's /object_info, so a workflow that
no longer fits a node's schema is found here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTES = ("MarkdownNote", "Note")  # exist in the front end alone
MUTED, BYPASSED = 2, 4  # values of a node's "mode"
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"  # a combo whose options bring widgets of their own
# After these the front end keeps one value more, of a control that is no input of the node.
EXTRA_VALUE_AFTER = ("control_after_generate", "image_upload", "video_upload")


class WorkflowError(ValueError):
    """A workflow does not fit the server's nodes; the message lists every disagreement."""


def load(file: Path) -> dict[str, Any]:
    graph: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return graph


def inputs_of(schema: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, type and options of each input in the order of the node's face."""
    for group in ("required", "optional"):
        for name, (kind, *more) in schema.get(group, {}).items():
            options = more[0] if more else {}
            if isinstance(kind, list):  # an older way to say combo: its choices are in the place of the type
                kind, options = "COMBO", {**options, "options": kind}
            yield name, kind, options


def is_widget(kind: str, options: dict[str, Any]) -> bool:
    return kind in (*WIDGETS, DYNAMIC_COMBO) and not options.get("forceInput")


def to_api(graph: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """The prompt that the front end would queue for this graph; WorkflowError with all that does not fit."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    links = {link[0]: link for link in graph["links"]}
    problems: list[str] = []
    prompt = {}
    for node in nodes.values():
        if node["type"] in NOTES:
            continue
        where = f"node {node['id']} ({node['type']})"
        if node.get("mode") in (MUTED, BYPASSED):
            problems.append(f"{where} is muted or bypassed")
        elif node["type"] not in object_info:
            problems.append(f"{where}: the server has no such node")
        else:
            info = object_info[node["type"]]
            inputs = _widget_values(node, info, where, problems)
            inputs |= _connections(node, info, nodes, links, object_info, where, problems)
            prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    if problems:
        raise WorkflowError("The workflow does not fit the server's nodes:\n" + "\n".join(problems))
    return prompt


def _widget_values(
    node: dict[str, Any], info: dict[str, Any], where: str, problems: list[str]
) -> dict[str, Any]:
    values = list(node.get("widgets_values", []))
    given = {}

    def take(schema: dict[str, Any], prefix: str) -> None:
        for name, kind, options in inputs_of(schema):
            if not is_widget(kind, options):
                continue
            if not values:
                problems.append(f"{where} has no value for its widget {prefix + name!r}")
                return
            value = given[prefix + name] = values.pop(0)
            if any(options.get(extra) for extra in EXTRA_VALUE_AFTER) and values:
                values.pop(0)
            if kind == DYNAMIC_COMBO:
                chosen = [option for option in options["options"] if option["key"] == value]
                if not chosen:
                    problems.append(f"{where}: {value!r} is no option of {prefix + name!r}")
                    return
                take(chosen[0]["inputs"], f"{prefix}{name}.")

    take(info["input"], "")
    if values:
        problems.append(f"{where} has {len(values)} widget value(s) more than widgets: {values}")
    return given


def _connections(
    node: dict[str, Any],
    info: dict[str, Any],
    nodes: dict[int, Any],
    links: dict[int, Any],
    object_info: dict[str, Any],
    where: str,
    problems: list[str],
) -> dict[str, Any]:
    wanted = {name: kind for name, kind, _ in inputs_of(info["input"])}
    connected = {}
    for slot in node.get("inputs", []):
        name = slot["name"]
        if name not in wanted:
            problems.append(f"{where} has no input {name!r}")
            continue
        link = links.get(slot.get("link"))
        if link is None:
            if name in info["input"].get("required", {}):
                problems.append(f"{where}: its input {name!r} is not connected")
            continue
        _, source, source_slot, _, _, kind = link
        outputs = object_info.get(nodes[source]["type"], {}).get("output", [])
        if source_slot >= len(outputs):
            problems.append(
                f"{where}: {name!r} comes from output {source_slot} of node {source}, which has none such"
            )
        elif outputs[source_slot] != kind or not _fits(kind, wanted[name]):
            problems.append(
                f"{where}: {name!r} takes {wanted[name]}, the link says {kind}, and node {source} "
                f"gives {outputs[source_slot]}"
            )
        connected[name] = [str(source), source_slot]
    return connected


def _fits(given: str, wanted: str) -> bool:
    return wanted == "*" or given in wanted.split(",")
