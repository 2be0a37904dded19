"""The benchmarks of training run from end to end, at a size that shows nothing but that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import distill_run, train_step


@pytest.mark.slow
def test_a_training_step_is_timed_for_sparse_and_dense_students(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    assert train_step.main(["--tiny", "--steps", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    kinds = {(row["student"], row["loss"], row["method"]) for row in rows}
    assert len(kinds) == len(rows) == 8
    assert all(row["step_ms"] > 0 for row in rows)
    assert all(row["factor"] == 1.0 for row in rows if row["method"] == "dense")


@pytest.mark.slow
def test_a_small_wan_is_pretrained_and_distilled_with_both_losses(tmp_path: Path) -> None:
    assert distill_run.main(["--tiny", "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["records"]
    for loss in ("velocity", "diffusion"):
        assert [record["step"] for record in records[loss]] == [0, 1, 2]
        assert "validation" in records[loss][0]
        assert "validation" in records[loss][-1]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_clips_follow_their_captions() -> None:
    size = (4, 16, 16)
    one, other = (distill_run.moving_blobs(seed, size, 64) for seed in (0, 1))
    assert one["latent"].shape == (16, *size)
    assert not one["text"].equal(other["text"])
    assert not one["latent"].equal(other["latent"])
    assert one["latent"].equal(distill_run.moving_blobs(0, size, 64)["latent"])
