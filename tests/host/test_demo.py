"""`make demo`: the main job in the real server."""

from __future__ import annotations

import json
from pathlib import Path

import av
import pytest

from demo import demo
from host import Server


@pytest.mark.slow
def test_the_demo_writes_videos_and_a_report_that_agree_with_what_was_asked(
    server: Server, tmp_path: Path
) -> None:
    report = demo(server, tmp_path, sparsity=0.7, seed=3)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report
    assert report["sparsity"] == pytest.approx(0.7, abs=0.01)
    assert report["sparse_calls"] > 0
    assert report["dense_calls"] == {}
    assert report["attention_ms"] > 0
    assert report["tokens"] >= 1280
    assert 0 < report["rel_l1_vs_dense"] < 1
    assert report["rel_l1_keep_all_vs_dense"] < 1e-5
    for name in (report["video"], report["dense_video"]):
        with av.open(str(tmp_path / name)) as video:
            assert sum(1 for _ in video.decode(video=0)) == 17
    assert (tmp_path / report["picture"]).stat().st_size > 0
