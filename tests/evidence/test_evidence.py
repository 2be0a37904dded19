"""The evidence run: its plan, its measures and tables, and all of its phases at sizes that show nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import plan, sampling, students
from benchmarks.evidence.report import MEASURES, over_seeds
from benchmarks.evidence.run import Run
from benchmarks.evidence.vae import Vae
from sparge_core import BLOCK_K, BLOCK_Q, SparseConfig, block_mask, sparse_attention

PLAN = plan.load()


def test_the_lengths_are_those_at_which_sparsity_matters() -> None:
    assert PLAN.short.tokens >= 2000
    assert PLAN.long.tokens >= 8000
    assert PLAN.long.latent == (16, 12, 40, 72)
    assert PLAN.long.video == (45, 320, 576)
    assert len(PLAN.seeds) >= 3
    places = [place for seed in PLAN.seeds for place in PLAN.held_out(seed)]
    assert places == list(range(PLAN.clips["held_out"]))


@pytest.mark.parametrize("sparsity", PLAN.sparsities)
def test_every_arm_skips_as_much(sparsity: float) -> None:
    source = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, PLAN.long.tokens, 16, generator=source) for _ in range(2))
    for arm in PLAN.arms:
        assert block_mask(q, k, arm.config(sparsity)).sparsity == pytest.approx(sparsity, abs=0.005), arm.name


def test_the_papers_setting_is_the_unions_at_95_percent() -> None:
    (union,) = (arm for arm in PLAN.arms if arm.name == "union")
    assert union.config(0.95).top_k == pytest.approx(0.03)


def test_smoke_changes_sizes_and_nothing_else() -> None:
    smoke = plan.load(smoke=True)
    assert smoke.arms == PLAN.arms
    assert smoke.vae.kl == PLAN.vae.kl
    assert smoke.long.tokens < 300


def test_a_block_of_keys_in_tiles_is_a_cube() -> None:
    grid = plan.Grid(8, 8, 8)
    place = torch.cartesian_prod(*(torch.arange(side) for side in (8, 8, 8))).float()
    tiles = students.to_tiles(place[None, None], grid)[0, 0]
    for block, sides in ((BLOCK_K, [4, 4, 4]), (BLOCK_Q, [4, 4, 8])):
        for one in tiles.split(block):
            assert (one.amax(0) - one.amin(0) + 1).tolist() == sides
            assert len(one.unique(dim=0)) == block
    assert students.from_tiles(students.to_tiles(place[None, None], grid), grid)[0, 0].equal(place)
    with pytest.raises(ValueError, match="multiples of 4"):
        students.to_tiles(place[None, None], plan.Grid(8, 3, 16))


def test_attention_in_tiles_that_keeps_all_is_dense() -> None:
    q, k, v = torch.randn(3, 1, 2, 128, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    keep_all = SparseConfig(top_k=1.0, top_p=1.0)
    tiled = students.tiled(plan.Grid(4, 4, 8))(q, k, v, keep_all)
    torch.testing.assert_close(tiled, sparse_attention(q, k, v, keep_all))


def test_the_video_distance_grows_with_the_difference() -> None:
    video = torch.rand(2, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    distances = [sampling.video_distance(video, video + by, 64) for by in (0.0, 0.1, 0.2)]
    assert distances[0] == 0
    assert distances[2] == pytest.approx(2 * distances[1], rel=0.02)
    still = video[:, :, :1].expand_as(video)
    assert sampling.video_distance(video, still, 64) > 0.01  # the same pictures, in another motion
    assert sampling.video_distance(video, video.flip(0), 64) == pytest.approx(0, abs=1e-6)


def test_new_scales_of_the_latent_leave_the_videos_as_they_were() -> None:
    torch.manual_seed(0)
    vae = Vae(8)
    video, one = torch.rand(1, 3, 5, 16, 16) * 2 - 1, torch.ones(16)
    with torch.no_grad():
        latent, back = vae.encode(video), vae.decode(vae.encode(video))
        vae.rescale(0.1 * one, 0.5 * one, 2 * one, 3 * one)
        torch.testing.assert_close(vae.encode(video), (latent - 0.1) / 0.5 * 3 + 2, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(vae.decode(vae.encode(video)), back, atol=1e-4, rtol=1e-4)
    assert latent.shape == (1, 16, 2, 2, 2)


def test_a_table_holds_every_seeds_value_and_their_spread() -> None:
    table = over_seeds([{"error": 1.0}, {"error": 2.0}, {"error": 3.0}])
    assert table == {"error": {"mean": 2.0, "std": 1.0, "values": [1.0, 2.0, 3.0]}}


@pytest.mark.parametrize(
    ("statuses", "raised"), [((3, 1, 0), SystemExit), ((0, 3, 0), plan.OutOfTime)], ids=["failed", "stopped"]
)
def test_a_seed_that_fails_is_not_taken_for_one_out_of_time(
    statuses: tuple[int, ...], raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers", reason="needs the extra `distill`: pip install -e .[distill]")
    from benchmarks.evidence import __main__ as evidence

    left, ended = list(statuses), []

    class Process:
        def __init__(self, command: list[str]) -> None:
            assert command[-4:-1] == ["--commit", "c", "--seed"]
            self.wait = lambda: left.pop(0)
            self.terminate = lambda: ended.append(command[-1])

    monkeypatch.setattr(evidence.subprocess, "Popen", Process)
    run = Run(plan.load(), tmp_path, torch.device("cpu"), plan.Clock(), ("--commit", "c"))
    with pytest.raises(raised):
        evidence.every_seed(run)
    assert ended == [str(seed) for seed in run.seeds]


@pytest.mark.slow
def test_all_phases_run_and_go_on_where_they_were_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers", reason="needs the extra `distill`: pip install -e .[distill]")
    pytest.importorskip("peft", reason="needs the extra `distill`: pip install -e .[distill]")
    from benchmarks.evidence.__main__ import PHASES, STOPPED, main

    def stop(run: Run) -> None:
        raise plan.OutOfTime

    arguments = ["--smoke", "--out", str(tmp_path)]
    base, student = tmp_path / "evidence_wan.safetensors", tmp_path / "evidence_student.safetensors"
    with monkeypatch.context() as patch:
        patch.setitem(PHASES, "demo", stop)
        assert main(arguments) == STOPPED
    trained = base.stat().st_mtime_ns
    assert main(arguments) == 0
    assert base.stat().st_mtime_ns == trained

    (tmp_path / "seeds.done").unlink()  # as if it had stopped between a student and the maps
    (tmp_path / "maps-0.json").unlink()
    student.unlink()
    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("students/*/result.json")}
    assert main([*arguments, "--seed", "0", "--minutes", "0"]) == STOPPED
    assert main(arguments) == 0
    assert student.is_file()
    assert (tmp_path / "maps-0.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in results} == results

    tables = json.loads((tmp_path / "tables.json").read_text(encoding="utf-8"))
    assert set(tables["seconds"]) == set(PHASES)
    smoke = plan.load(smoke=True)
    arms = {(row["arm"], row["sparsity"]) for row in tables["ablation"]}
    assert arms == {("dense", 0.0), *((arm.name, s) for arm in smoke.arms for s in smoke.sparsities)}
    for row in tables["ablation"]:
        measures = ["distance_to_real"] if row["arm"] == sampling.DENSE else MEASURES
        for measure in measures:
            assert len(row[measure]["values"]) == len(smoke.seeds), (row["arm"], measure)
    for name in ("clips.png", "videos.png", "videos.webp", "demo.png", "demo.webp"):
        assert (tmp_path / name).stat().st_size > 1000
