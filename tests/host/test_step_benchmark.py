"""The step benchmark runs the node's own patch in the host's own model code."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from host import ROOT, Host


@pytest.mark.slow
def test_the_step_benchmark_measures_a_patched_and_an_unpatched_step(host: Host, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    command = [
        host.python,
        "-m",
        "benchmarks.wan_step",
        "--tiny",
        "--modes",
        "eager",
        "--steps",
        "1",
        "--out",
        out,
    ]
    environment = {**os.environ, "COMFYUI_PATH": str(host.tree), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    dense, sparse = sorted(
        json.loads(out.read_text(encoding="utf-8"))["rows"], key=lambda row: row["sparsity"]
    )
    assert (dense["method"], dense["sparsity"], dense["factor"]) == ("dense", 0.0, 1.0)
    assert sparse["method"] == "ours"
    assert sparse["sparsity"] > 0.8
