"""The shipped workflows in the real server: nodes, inputs, widgets, links exist; only models are missing."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from host import PACK_NAME, ROOT, Server
from make_workflows import FOLDERS, SOURCE, all_workflows
from workflow import load, to_api

WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
FULL_SIZE = [file for file in WORKFLOWS if "tiny" not in file.name]
# Inputs that name a file which a user downloads or brings.
FILES = {"unet_name", "clip_name", "vae_name", "image"}


@pytest.fixture(scope="module")
def object_info(server: Server) -> dict[str, Any]:
    return server.object_info()


def test_the_shipped_files_are_what_the_script_makes(object_info: dict[str, Any]) -> None:
    shipped = {file.name: file.read_text(encoding="utf-8") for file in WORKFLOWS}
    assert shipped == all_workflows(object_info)


@pytest.mark.parametrize("file", FULL_SIZE, ids=lambda file: file.stem)
def test_the_validator_misses_nothing_but_model_files(
    server: Server, object_info: dict[str, Any], file: Path
) -> None:
    prompt = to_api(load(file), object_info)
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/prompt", {"prompt": prompt})
    answer = json.loads(refused.value.read())
    errors = [error for node in answer["node_errors"].values() for error in node["errors"]]
    assert {error["extra_info"]["input_name"] for error in errors} <= FILES, errors
    assert {error["type"] for error in errors} <= {"value_not_in_list", "custom_validation_failed"}, errors


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_the_notes_name_every_model_file_and_its_folder(file: Path) -> None:
    nodes = load(file)["nodes"]
    notes = "\n".join(node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote")
    loaders = [node for node in nodes if node["type"] in FOLDERS]
    assert loaders
    for node in loaders:
        assert f"`{node['widgets_values'][0]}` → `models/{FOLDERS[node['type']]}/`" in notes
    if file in FULL_SIZE:
        assert SOURCE in notes


def test_the_template_browser_lists_and_serves_them(server: Server) -> None:
    assert sorted(server.get("/workflow_templates")[PACK_NAME]) == [file.stem for file in WORKFLOWS]
    for file in WORKFLOWS:
        assert server.get(f"/api/workflow_templates/{PACK_NAME}/{file.name}") == load(file)
