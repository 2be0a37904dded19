"""`make demo`: the main job in the real server, with random weights in place of the trained ones."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

import tiny_models as makers
from benchmarks.evidence import sampling
from demo import demo, psnr, titled, upstream
from host import Server
from make_workflows import TRAINED_FRAMES
from sparge_core.wan import DIFF, FULL, read_student


@pytest.mark.slow
def test_the_demo_writes_videos_and_a_report_that_agree_with_what_was_asked(
    server: Server, tmp_path: Path
) -> None:
    assert not makers.make_trained(server.base, "a small plain red disc falling", tmp_path / "nothing")
    report = demo(server, tmp_path, "a caption", trained=False, steps=1, seed=3)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report
    assert not report["trained"]
    assert report["tokens"] >= 2000
    assert report["target_sparsity"] == 0.95
    assert report["sparsity"] == pytest.approx(0.95, abs=0.01)
    assert report["sparse_calls"] > 0
    assert report["dense_calls"] == {}
    assert report["attention_ms"] > 0
    assert report["rel_l1_keep_all_vs_dense"] < 1e-5
    assert 0 < report["rel_l1_vs_dense"] < 1
    assert 0 < report["rel_l1_training_free_vs_dense"] < 1
    assert report["rel_l1_vs_dense"] != report["rel_l1_training_free_vs_dense"]
    assert 10 < report["psnr_vs_dense"] < 100
    for name in (report["video"], report["dense_video"], report["training_free_video"]):
        with av.open(str(tmp_path / name)) as video:
            assert sum(1 for _ in video.decode(video=0)) == TRAINED_FRAMES
    with Image.open(tmp_path / report["side_by_side_video"]) as animation:
        assert animation.n_frames == TRAINED_FRAMES
        assert animation.width > 5 * animation.height
    with Image.open(tmp_path / report["side_by_side"]) as picture:
        assert picture.width > 1000
    assert (tmp_path / report["picture"]).stat().st_size > 0


def test_a_part_of_a_prompt_has_what_it_needs_and_no_more() -> None:
    prompt = {
        "a": {"inputs": {"file": "x"}},
        "b": {"inputs": {"model": ["a", 0], "steps": 2}},
        "c": {"inputs": {"samples": ["b", 0]}},
        "d": {"inputs": {"samples": ["b", 0]}},
    }
    assert set(upstream(prompt, ["c"])) == {"a", "b", "c"}
    assert upstream(prompt, ["c", "d"]) == prompt


def test_nodes_are_found_by_their_titles() -> None:
    assert titled({"nodes": [{"id": 1}, {"id": 2, "title": "two"}]}) == {"two": "2"}


def test_psnr_is_that_of_the_evidence() -> None:
    source = np.random.default_rng(0)
    one, other = (source.integers(0, 256, (3, 8, 8, 3), np.uint8) for _ in range(2))
    videos = [torch.from_numpy(video / 127.5 - 1)[None] for video in (one, other)]
    assert psnr(one, other) == pytest.approx(sampling.psnr(*videos))
    assert psnr(one, one) > 100


@pytest.mark.skipif(not makers.TRAINED.is_dir(), reason="no trained model in this checkout")
def test_the_trained_files_are_a_model_and_its_students() -> None:
    sizes = [(makers.TRAINED / name).stat().st_size for name in makers.TRAINED_FILES]
    assert sum(sizes) < 40e6
    model = read_student(makers.TRAINED / makers.TRAINED_DIT)
    assert (model.kind, model.type) == (FULL, "T2V")
    for name in (makers.STUDENT, makers.SHORT_STUDENT):
        student = read_student(makers.TRAINED / name)
        assert student.kind == DIFF
        assert (student.dim, student.layers) == (model.dim, model.layers)
        assert student.config is not None
        assert student.config.sparsity == 0.95
