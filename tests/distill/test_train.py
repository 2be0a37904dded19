"""Runs of `sparge-distill train`: what they reach, what they leave, and that they can be gone on with."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparge_core.distill import checkpoint, loop
from sparge_core.distill.log import read_records

from .conftest import errors, make_data, write_toml

Train = Callable[..., tuple[int, str]]
ROOT = Path(__file__).resolve().parents[2]


def final(out: Path) -> dict[str, Tensor]:
    """All tensors of the latest checkpoint."""
    return checkpoint.load_all(checkpoint.find(out), "")


def steps(out: Path) -> list[int]:
    return [step for step, _ in checkpoint.checkpoints(out)]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def numbers(out: Path) -> list[dict[str, Any]]:
    """The records without their times."""
    return [{**record, "seconds": 0} for record in read_records(out)]


# ----------------------------------------------------------------------------------------------------------
# What a run reaches


@pytest.mark.parametrize("student", ["low_rank", "full"])
def test_the_students_velocity_comes_closer_to_the_teachers(
    student: str, train: Train, values: dict[str, Any]
) -> None:
    values |= {"student": student, "steps": 12, "learning_rate": 4e-3}
    code, said = train(values)
    assert code == 0, said
    before, *_, after = errors(values["out"])
    assert after < 0.97 * before


def test_a_run_leaves_its_log_its_curve_and_tensorboards_files(train: Train, values: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train({**values, "tensorboard": True})[0] == 0
    records = read_records(values["out"])
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert set(records[-1]) == {"step", "loss", "norm", "rate", "seconds", "validation"}
    assert records[-1]["validation"]["at"].keys() == {"0.2", "0.8"}
    assert (values["out"] / "curve.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(values["out"] / "tensorboard")).Reload()
    written = [event.value for event in events.Scalars("train/loss")]
    assert written == pytest.approx([record["loss"] for record in records[1:]])


def test_the_learning_rate_rises_over_the_warm_up(train: Train, values: dict[str, Any]) -> None:
    assert train({**values, "learning_rate": 1e-3, "warmup": 3})[0] == 0
    rates = [record["rate"] for record in read_records(values["out"]) if "rate" in record]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])


def test_accumulated_micro_batches_make_the_same_step_as_one_batch(
    train: Train, values: dict[str, Any], tmp_path: Path
) -> None:
    for name, micro in (("one", 1), ("two", 2)):
        run = {**values, "out": tmp_path / name, "micro_batch": micro, "steps": 2}
        assert train(run)[0] == 0
    one, two = final(tmp_path / "one"), final(tmp_path / "two")
    for name in one:
        if name.startswith(loop.MOMENT):
            torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-7)


def test_gradients_are_clipped_to_the_norm_asked_for(train: Train, values: dict[str, Any]) -> None:
    """After one step AdamW's first moment is 0.1 times the clipped gradient."""
    assert train({**values, "clip": 1e-5, "steps": 1})[0] == 0
    moments = [tensor for name, tensor in final(values["out"]).items() if name.startswith(loop.MOMENT)]
    norm = torch.cat([moment.flatten() for moment in moments]).norm()
    assert float(norm) == pytest.approx(0.1 * 1e-5, rel=0.01)
    assert read_records(values["out"])[-1]["norm"] > 2e-5


def test_the_average_follows_the_weights_and_soon_forgets_the_first(
    train: Train, values: dict[str, Any]
) -> None:
    assert train({**values, "ema": 0.2, "save_every": 1, "keep": 9, "steps": 3})[0] == 0
    first, *later = [checkpoint.load_all(path, "") for _, path in checkpoint.checkpoints(values["out"])]
    name = "blocks.1.attn1.to_v.lora_B.default.weight"
    average = first[loop.AVERAGE + name]
    torch.testing.assert_close(average, 9 / 11 * first[loop.WEIGHT + name])  # it starts at 0
    assert average.any()
    for tensors, decay in zip(later, (0.2, 0.2), strict=True):
        average = decay * average + (1 - decay) * tensors[loop.WEIGHT + name]
        torch.testing.assert_close(tensors[loop.AVERAGE + name], average)


def test_the_diffusion_loss_is_that_to_the_data(
    train: Train, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Tensor] = []
    original = loop.squared_error

    def spy(velocity: Tensor, target: Tensor) -> Tensor:
        targets.append(target)
        return original(velocity, target)

    monkeypatch.setattr(loop, "squared_error", spy)
    assert train({**values, "loss": "diffusion", "steps": 1, "batch": 1})[0] == 0
    from sparge_core.distill import data, flow

    held, _ = data.open_dataset(values["data"]).split(values["held_out"], 0)
    latent = held.read(held.at(0, 0)).latent
    assert torch.equal(targets[0][0], flow.noise_like(latent, 0, 0) - latent)


# ----------------------------------------------------------------------------------------------------------
# Going on


@pytest.mark.parametrize("student", ["low_rank", "full"])
def test_a_resumed_run_ends_with_the_same_bits(
    student: str, train: Train, values: dict[str, Any], tmp_path: Path
) -> None:
    whole = {**values, "student": student, "ema": 0.9, "out": tmp_path / "whole"}
    parts = {**whole, "out": tmp_path / "parts"}
    assert train(whole)[0] == 0
    assert train({**parts, "steps": 2})[0] == 0
    code, said = train(parts, "--resume")
    assert code == 0, said
    assert same(final(whole["out"]), final(parts["out"]))
    kept = [record for record in numbers(parts["out"]) if record["step"] != 2]  # validated there: it ended
    assert kept == [record for record in numbers(whole["out"]) if record["step"] != 2]


KILLED_IN = {
    "while its tensors are written": "FileSystemWriter.finish",
    "before it gets its name": "checkpoint.os.replace",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLED_IN)
def test_a_kill_in_the_middle_of_a_checkpoint_loses_only_the_steps_since_the_last_one(
    moment: str, train: Train, values: dict[str, Any], tmp_path: Path
) -> None:
    name = KILLED_IN[moment]
    killed = f"""
        import os, sys
        from torch.distributed.checkpoint import FileSystemWriter
        from sparge_core.distill import checkpoint, cli
        original = {name}
        def deadly(*arguments, **keywords):
            if os.path.isdir({str(values["out"] / "step-000004.partial")!r}):
                os._exit(9)
            return original(*arguments, **keywords)
        {name} = deadly
        sys.exit(cli.main(sys.argv[1:]))
        """
    toml = write_toml(tmp_path / "killed.toml", values)
    arguments = ["train", "--config", str(toml)]
    done = run_python(["-c", textwrap.dedent(killed), *arguments])
    assert done.returncode == 9, done.stderr
    out = values["out"]
    assert steps(out) == [2]
    assert list(out.glob("*.partial"))
    code, said = train(values, "--resume")
    assert code == 0, said
    assert not list(out.glob("*.partial"))
    whole = {**values, "out": tmp_path / "whole"}
    assert train(whole)[0] == 0
    assert same(final(out), final(whole["out"]))


def run_python(arguments: list[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("student", "dtype", "close", "compile"),
    [("low_rank", "bf16", 0.05, False), ("full", "fp32", 1e-4, False), ("full", "fp32", 1e-4, True)],
)
def test_two_processes_make_the_steps_of_one_and_one_goes_on_from_theirs(
    student: str,
    dtype: str,
    close: float,
    compile: bool,
    train: Train,
    values: dict[str, Any],
    tmp_path: Path,
) -> None:
    one = {**values, "student": student, "dtype": dtype, "ema": 0.9, "out": tmp_path / "one"}
    two = {**one, "out": tmp_path / "two"}
    assert train(one)[0] == 0
    toml = write_toml(tmp_path / "two.toml", {**two, "steps": 2, "compile": compile})
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_python([*launch, "-m", "sparge_core.distill", "train", "--config", str(toml)])
    assert done.returncode == 0, done.stderr
    code, said = train(two, "--resume")
    assert code == 0, said
    for ours, theirs in zip(numbers(two["out"]), numbers(one["out"]), strict=True):
        for name in {"loss", "norm"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=close)
    if dtype == "fp32":
        one_tensors, two_tensors = final(one["out"]), final(two["out"])
        for name, tensor in one_tensors.items():
            torch.testing.assert_close(two_tensors[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-3}, "learning_rate was 0.003 and is 0.001"),
        ({"sparsity": 0.25}, "sparsity was 0.5 and is 0.25"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"data": None}, "the data set is not the same samples"),
        ({"base": None}, "the base is another model"),
    ],
)
def test_a_run_is_not_gone_on_with_as_another_one(
    change: dict[str, Any], message: str, train: Train, values: dict[str, Any], tmp_path: Path
) -> None:
    from .conftest import make_model

    assert train({**values, "steps": 2, "validate_every": 9})[0] == 0
    if "data" in change:
        change = {"data": make_data(tmp_path / "other", 5)}
    if "base" in change:
        change = {"base": make_model(tmp_path / "model", ffn_dim=64)}
    code, said = train({**values, **change}, "--resume")
    assert code == 1
    assert message in said
    assert steps(values["out"]) == [2]


def test_a_folder_that_holds_a_run_is_not_started_in_anew(train: Train, values: dict[str, Any]) -> None:
    assert train({**values, "steps": 2})[0] == 0
    code, said = train(values)
    assert code == 1
    assert "holds a run at step 2: give --resume" in said


# ----------------------------------------------------------------------------------------------------------
# Clear stops, with the last good checkpoint intact


@pytest.fixture
def good(train: Train, values: dict[str, Any]) -> dict[str, Tensor]:
    """A run stopped at step 2, and what its checkpoint holds."""
    assert train({**values, "steps": 2})[0] == 0
    return final(values["out"])


def check_stop(said: tuple[int, str], message: str, values: dict[str, Any], good: dict[str, Tensor]) -> None:
    assert said[0] == 1
    assert message in said[1]
    assert "Traceback" not in said[1]
    assert steps(values["out"]) == [2]
    assert same(final(values["out"]), good)
    assert not list(values["out"].glob("*.partial"))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The disk takes no file above `size` bytes, as when it is full."""
    resource = pytest.importorskip("resource", reason="only Unix limits the size of files")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_run(train: Train, values: dict[str, Any], good: dict[str, Tensor]) -> None:
    with largest_file(20_000):
        said = train(values, "--resume")
    assert os.strerror(errno.EFBIG) in said[1]
    check_stop(said, "could not be written", values, good)
    assert "the one of step 2 is intact" in said[1]


def test_a_loss_that_is_not_finite_stops_the_run(
    train: Train, values: dict[str, Any], good: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = loop.squared_error
    monkeypatch.setattr(loop, "squared_error", lambda *both: original(*both) * float("nan"))
    check_stop(train(values, "--resume"), "The loss of step 3 is nan", values, good)


def test_a_corrupt_sample_stops_the_run(
    train: Train, values: dict[str, Any], samples: Path, tmp_path: Path
) -> None:
    values["data"] = shutil.copytree(samples, tmp_path / "copy")
    assert train({**values, "steps": 2})[0] == 0
    good = final(values["out"])
    for path in values["data"].glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 0x40
        path.write_bytes(content)
    check_stop(train(values, "--resume"), "is not what the manifest lists", values, good)


def test_a_manifest_that_does_not_match_stops_before_any_work(
    train: Train, values: dict[str, Any], samples: Path, tmp_path: Path
) -> None:
    values["data"] = shutil.copytree(samples, tmp_path / "copy")
    next(values["data"].glob("*.safetensors")).unlink()
    code, said = train(values)
    assert code == 1
    assert "is missing" in said
    assert not values["out"].exists()


def test_velocities_that_are_not_finite_stop_before_any_step(
    train: Train, values: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    from .conftest import make_model

    broken = make_model(tmp_path / "broken")
    file = next(broken.glob("*.safetensors"))
    weights = load_file(file)
    weights["proj_out.bias"][0] = float("nan")
    save_file(weights, file, {"format": "pt"})
    code, said = train({**values, "base": broken})
    assert code == 1
    assert "are not finite" in said


def test_a_damaged_checkpoint_is_named(train: Train, values: dict[str, Any], good: dict[str, Tensor]) -> None:
    path = checkpoint.find(values["out"])
    for file in path.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    code, said = train(values, "--resume")
    assert code == 1
    assert f"{path} cannot be read" in said
    (path / checkpoint.RUN).write_text("{", encoding="utf-8")
    code, said = train(values, "--resume")
    assert code == 1
    assert "run.json is damaged" in said


def test_only_the_latest_checkpoints_are_kept(train: Train, values: dict[str, Any]) -> None:
    assert train({**values, "save_every": 1, "keep": 2})[0] == 0
    assert steps(values["out"]) == [3, 4]


def test_a_log_that_a_kill_cut_short_is_gone_on_with(train: Train, values: dict[str, Any]) -> None:
    assert train({**values, "steps": 2, "validate_every": 9})[0] == 0
    log = values["out"] / "log.jsonl"
    lost = '{"step": 3, "loss": 9.0}\n{"step": 4, "lo'  # made after the checkpoint that is gone on from
    log.write_text(log.read_text(encoding="utf-8") + lost, encoding="utf-8")
    assert train({**values, "validate_every": 9}, "--resume")[0] == 0
    assert [record["step"] for record in read_records(values["out"])] == [0, 1, 2, 3, 4]


def test_deterministic_asks_torch_for_the_same_bits_on_a_gpu_too(
    train: Train, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        assert train({**values, "deterministic": True, "steps": 1})[0] == 0
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
