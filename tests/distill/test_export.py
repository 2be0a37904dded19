"""Exported students: what they hold, and that the loader knows them. tests/host tries them in ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sparge_core import SparseConfig
from sparge_core.config import METADATA_PREFIX
from sparge_core.distill import checkpoint
from sparge_core.wan import DIFF, FULL, LOW_RANK, convert, read_student

Train = Callable[..., tuple[int, str]]
Command = Callable[..., tuple[int, str]]


@pytest.fixture(params=["low_rank", "full"])
def run(request: pytest.FixtureRequest, train: Train, values: dict[str, Any]) -> dict[str, Any]:
    """A finished run."""
    values |= {"student": request.param, "steps": 2, "ema": 0.5}
    assert train(values)[0] == 0
    return values


def exported(command: Command, run: dict[str, Any], file: Path, *flags: str) -> dict[str, Tensor]:
    code, said = command("export", run["out"], file, "--dtype", "fp32", *flags)
    assert code == 0, said
    return load_file(file)


def test_a_file_says_what_it_was_trained_for(run: dict[str, Any], command: Command, tmp_path: Path) -> None:
    file = tmp_path / "student.safetensors"
    exported(command, run, file)
    student = read_student(file)
    assert student.config == SparseConfig(0.0, 0.2, 0.5)
    assert student.kind == (LOW_RANK if run["student"] == "low_rank" else DIFF)
    assert student.metadata[METADATA_PREFIX + "base_model"] == run["base"].name
    assert student.metadata[METADATA_PREFIX + "steps"] == "2"
    assert student.metadata[METADATA_PREFIX + "method_version"] == "1"
    assert json.loads(student.metadata[METADATA_PREFIX + "run"])["learning_rate"] == run["learning_rate"]
    assert not any(str(tmp_path) in value for value in student.metadata.values())


def test_every_kind_of_file_is_the_same_change_of_the_base(
    run: dict[str, Any], command: Command, tmp_path: Path
) -> None:
    """A full model less the base is the diff, and the diff is the product of the factors."""
    base = exported_base(run)
    full = exported(command, run, tmp_path / "full.safetensors", "--kind", "full")
    diff = exported(command, run, tmp_path / "diff.safetensors", "--kind", "diff")
    assert read_student(tmp_path / "full.safetensors").kind == FULL
    assert full.keys() == base.keys()
    changes = {
        key.removeprefix("diffusion_model.").removesuffix(".diff"): value for key, value in diff.items()
    }
    assert any(change.any() for change in changes.values())
    for target, weight in full.items():
        change = changes.pop(target, changes.pop(target.removesuffix(".weight"), torch.zeros(())))
        torch.testing.assert_close(weight - base[target], change.expand_as(weight), rtol=1e-3, atol=1e-6)
    assert not changes
    if run["student"] == "low_rank":
        pairs = exported(command, run, tmp_path / "pairs.safetensors")
        for key in [key for key in pairs if key.endswith(".alpha")]:
            module = key.removesuffix(".alpha")
            up, down = pairs[f"{module}.lora_up.weight"], pairs[f"{module}.lora_down.weight"]
            product = up @ down * (pairs[key] / len(down))
            torch.testing.assert_close(product, diff[f"{module}.diff"], rtol=1e-3, atol=1e-7)


def exported_base(run: dict[str, Any]) -> dict[str, Tensor]:
    """The base's weights by Wan's names, through the loader of students."""
    (file,) = run["base"].glob("*.safetensors")
    return convert(read_student(file), load_file(file))


def test_a_runs_average_is_what_is_exported(
    train: Train, command: Command, values: dict[str, Any], tmp_path: Path
) -> None:
    run = {**values, "steps": 2, "ema": 0.5}
    assert train(run)[0] == 0
    pairs = exported(command, run, tmp_path / "pairs.safetensors")
    average, weight = (checkpoint.load_all(checkpoint.find(run["out"]), p) for p in ("average.", "weight."))
    name = "blocks.0.attn1.to_q.lora_B.default.weight"
    assert torch.equal(pairs["diffusion_model.blocks.0.self_attn.q.lora_up.weight"], average[name])
    assert not torch.equal(average[name], weight[name])


def test_the_dtype_asked_for_is_that_of_the_weights_but_not_of_alpha(
    train: Train, command: Command, values: dict[str, Any], tmp_path: Path
) -> None:
    assert train({**values, "alpha": 3.3, "steps": 1})[0] == 0
    assert command("export", values["out"], tmp_path / "s.safetensors")[0] == 0
    with safe_open(tmp_path / "s.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key, tensor in tensors.items():
        if key.endswith(".alpha"):
            assert float(tensor) == pytest.approx(3.3, rel=1e-6)
        else:
            assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "has no checkpoint of step 7; it has 2, 4"),
        (["--kind", "full", "--base", "{tmp}"], "The base is needed for this kind of file"),
        (["--kind", "full", "--base", "{other}"], "is not the base of this run (ffn_dim 64 against 48)"),
    ],
)
def test_what_cannot_be_exported_is_named(
    arguments: list[str], message: str, train: Train, command: Command, values: dict[str, Any], tmp_path: Path
) -> None:
    from .conftest import make_model

    assert train(values)[0] == 0
    other = make_model(tmp_path / "other", ffn_dim=64) if "{other}" in arguments else None
    given = [argument.format(tmp=tmp_path, other=other) for argument in arguments]
    code, said = command("export", values["out"], tmp_path / "s.safetensors", *given)
    assert code == 1
    assert message in said
    assert not (tmp_path / "s.safetensors").exists()


def test_a_full_weights_run_has_no_low_rank_file_and_a_folder_without_a_run_none_at_all(
    train: Train, command: Command, values: dict[str, Any], tmp_path: Path
) -> None:
    assert train({**values, "student": "full", "steps": 1})[0] == 0
    code, said = command("export", values["out"], tmp_path / "s.safetensors", "--kind", "low_rank")
    assert code == 1
    assert "export full or diff" in said
    code, said = command("export", tmp_path, tmp_path / "s.safetensors")
    assert code == 1
    assert "holds no checkpoint" in said
    code, said = command("export", values["out"], tmp_path / "s.ckpt")
    assert code == 1
    assert "must end in .safetensors" in said


def test_eval_gives_the_error_that_training_logged(
    train: Train, command: Command, values: dict[str, Any], samples: Path
) -> None:
    from .conftest import errors

    assert train(values)[0] == 0
    for flags, expected in (((), errors(values["out"])[-1]), (("--step", "0"), errors(values["out"])[0])):
        code, said = command("eval", values["out"], *flags)
        assert code == 0, said
        result = json.loads(said.splitlines()[-1])
        assert result["error"] == pytest.approx(expected, rel=1e-6)
        assert result["samples"] == 2
    code, said = command("eval", values["out"], "--data", samples)
    assert json.loads(said.splitlines()[-1])["samples"] == 6
