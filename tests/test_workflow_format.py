"""Reading the front end's format: every kind of disagreement with the server's nodes is found and named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from workflow import WorkflowError, to_api

INFO: dict[str, Any] = {
    "Loader": {"input": {"required": {"file": [["a", "b"]]}}, "output": ["MODEL"]},
    "Sampler": {
        "input": {
            "required": {
                "model": ["MODEL"],
                "seed": ["INT", {"control_after_generate": True}],
                "codec": [
                    "COMFY_DYNAMICCOMBO_V3",
                    {
                        "options": [
                            {"key": "plain", "inputs": {"required": {}}},
                            {"key": "rich", "inputs": {"required": {"rate": ["FLOAT", {}]}}},
                        ]
                    },
                ],
            },
            "optional": {"text": ["STRING", {"forceInput": True}], "name": ["COMBO", {"options": ["x"]}]},
        },
        "output": ["LATENT"],
    },
}
GRAPH: dict[str, Any] = {
    "nodes": [
        {"id": 1, "type": "Loader", "widgets_values": ["a"], "outputs": [{"name": "MODEL", "links": [1]}]},
        {
            "id": 2,
            "type": "Sampler",
            "inputs": [{"name": "model", "type": "MODEL", "link": 1}],
            "widgets_values": [7, "fixed", "rich", 2.5, "x"],
        },
        {"id": 3, "type": "MarkdownNote", "widgets_values": ["words"]},
    ],
    "links": [[1, 1, 0, 2, 0, "MODEL"]],
}


def test_widgets_get_their_names_and_links_their_sources() -> None:
    assert to_api(GRAPH, INFO) == {
        "1": {"class_type": "Loader", "inputs": {"file": "a"}},
        "2": {
            "class_type": "Sampler",
            "inputs": {"model": ["1", 0], "seed": 7, "codec": "rich", "codec.rate": 2.5, "name": "x"},
        },
    }


def _changed(path: list[Any], value: Any) -> dict[str, Any]:
    graph = copy.deepcopy(GRAPH)
    place: Any = graph
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return graph


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (["nodes", 0, "type"], "Gone", "no such node"),
        (["nodes", 0, "mode"], 4, "muted or bypassed"),
        (
            ["nodes", 1, "widgets_values"],
            [7, "fixed", "plain", "x", 1],
            r"1 widget value\(s\) more than widgets",
        ),
        (["nodes", 1, "widgets_values"], [7, "fixed"], "no value for its widget 'codec'"),
        (["nodes", 1, "widgets_values"], [7, "fixed", "odd", "x"], "'odd' is no option of 'codec'"),
        (["nodes", 1, "inputs", 0, "name"], "modle", "no input 'modle'"),
        (["nodes", 1, "inputs", 0, "link"], None, "'model' is not connected"),
        (["links", 0, 2], 1, "output 1 of node 1, which has none such"),
        (["links", 0, 5], "CLIP", "takes MODEL, the link says CLIP"),
    ],
)
def test_what_does_not_fit_is_named(path: list[Any], value: Any, complaint: str) -> None:
    with pytest.raises(WorkflowError, match=complaint):
        to_api(_changed(path, value), INFO)
