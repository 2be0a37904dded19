"""How long the first attention call of a process takes, with an empty and with a filled cache of kernels.

    python -m benchmarks.start --out results.json

Each call is the first of a process of its own, on a GPU that torch has already initialised. It covers
importing `sparge_core`, finding or compiling the kernels, loading them, and running mask and attention once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from .measure import machine
from .results import StartRow, write

RUNS = 3  # with a filled cache
FIRST_CALL = """
import time
import torch
q = torch.randn(1, 4, 4096, 128, device="cuda:0", dtype=torch.bfloat16)
torch.cuda.synchronize()
start = time.perf_counter()
from sparge_core import SparseConfig, choose, sparse_attention
assert choose(q, q, q).name == "cuda", choose(q, q, q).why
sparse_attention(q, q, q, SparseConfig())
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call(cache: str) -> float:
    """Seconds of the first call of a new process."""
    environment = {**os.environ, "SPARGE_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the measured process failed: {done.stderr.strip()}")
    return float(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.start", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="commit to name in the results, where there is no git checkout")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU is visible to torch")
    with tempfile.TemporaryDirectory() as cache:
        compiled = first_call(cache)
        cached = statistics.median(first_call(cache) for _ in range(RUNS))
    rows = [StartRow("empty", compiled), StartRow("filled", cached)]
    facts = machine(torch.device("cuda:0"), args.commit)
    print(", ".join(facts.values()))
    for row in rows:
        print(f"first call of a process, {row.cache} cache: {row.start_s:.2f} s")
    if args.out:
        write(args.out, facts, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
