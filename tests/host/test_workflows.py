"""The shipped workflows in the real server: nodes, inputs, widgets, links exist; only models are missing."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import thumbnail
from host import PACK_NAME, ROOT, Server
from make_workflows import FOLDERS, PICTURES, SOURCE, all_workflows
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


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_the_template_browser_gets_a_picture_of_the_graph(server: Server, file: Path) -> None:
    address = f"{server.url}/api/workflow_templates/{PACK_NAME}/{file.stem}.jpg"
    with urllib.request.urlopen(address) as answer:
        served = np.asarray(Image.open(io.BytesIO(answer.read())), np.float32)
    drawn = np.asarray(thumbnail.draw(load(file), *PICTURES[file.stem]), np.float32)
    # Of 255 levels JPEG loses 1.2 at most; another node makes 2 or more, another word 1.7.
    assert np.abs(served - drawn).mean() < 1.5


@pytest.mark.slow
def test_the_comparison_shows_dense_beside_sparse_of_one_seed(
    server: Server, object_info: dict[str, Any]
) -> None:
    prompt = to_api(load(ROOT / "workflows" / "wan21_tiny_compare.json"), object_info)
    (stitch,) = (key for key, node in prompt.items() if node["class_type"] == "ImageStitch")
    (patch,) = (node for node in prompt.values() if node["class_type"] == "SpargeAttention2Patch")
    saved = {"images": [stitch, 0], "filename_prefix": "compare"}
    prompt["frames"] = {"class_type": "SaveImage", "inputs": saved}

    def halves(**settings: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        patch["inputs"].update(settings)
        file = server.run(prompt)["frames"]["images"][-1]
        frame = np.asarray(Image.open(io.BytesIO(server.fetch(file))), np.float32)
        assert frame.shape == (272, 2 * 272, 3)
        return frame[:, :272], frame[:, 272:]

    dense, sparse = halves(sparsity=0.9)
    again, keep_all = halves(sparsity=0.0, top_k=1.0, top_p=1.0)
    assert np.array_equal(dense, again)
    assert np.abs(dense - keep_all).max() <= 1
    assert np.abs(dense - sparse).mean() > 1


@pytest.mark.slow
def test_the_workflow_that_tunes_samples_with_what_it_found_and_saves_it(
    server: Server, object_info: dict[str, Any]
) -> None:
    prompt = to_api(load(ROOT / "workflows" / "wan21_tiny_tune.json"), object_info)
    kinds = {key: node["class_type"] for key, node in prompt.items()}
    outputs = {kinds[key]: output for key, output in server.run(prompt).items() if key in kinds}
    (tuned,) = outputs["SpargeTune"]["text"]
    (report,) = outputs["SpargeSparsityReport"]["text"]
    assert "File: tunings/wan21_tiny.json" in tuned
    assert "auto: tuned for a budget of 20" in report
    _, about = server.object_info()["SpargeLoadTuning"]["input"]["required"]["file"]
    assert "wan21_tiny" in about["options"]
