"""Checkpoints by torch.distributed.checkpoint: whole or not there, the same for one process and for many.

A checkpoint is a folder `step-000500` with the tensors and a `run.json`. It is written under another name and
renamed when it is complete and on the disk, so that neither a kill nor a full disk can damage an earlier one.
torch keeps a pickled table of contents in it: resume only from folders that you wrote yourself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from . import DistillError

RUN = "run.json"
NAME = re.compile(r"step-(\d{6,})")
PARTIAL = ".partial"


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints in `out`, with their steps, the latest last."""
    found = ((NAME.fullmatch(path.name), path) for path in out.glob("step-*") if (path / RUN).is_file())
    return sorted((int(match[1]), path) for match, path in found if match)


def find(out: Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, or the latest; DistillError when there is none."""
    found = dict(checkpoints(out))
    if not found:
        raise DistillError(f"{out} holds no checkpoint; train first, or name the run's own folder.")
    if step is not None and step not in found:
        raise DistillError(f"{out} has no checkpoint of step {step}; it has {', '.join(map(str, found))}.")
    return found[max(found) if step is None else step]


def save(out: Path, step: int, tensors: Mapping[str, Tensor], run: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint of `tensors` and the JSON-able `run`, then delete all but the latest `keep`.

    Every process calls it. DistillError when it could not be written; what was there before is still there.
    """
    path = out / f"step-{step:06d}"
    partial = path.with_name(path.name + PARTIAL)
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        _wait()
        with _alone() as alone:
            dcp.save(dict(tensors), checkpoint_id=partial, no_dist=alone)
        if first:
            with (partial / RUN).open("w", encoding="utf-8") as file:
                json.dump({**run, "step": step}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():  # of an earlier run of the same step
                shutil.rmtree(path)
            os.replace(partial, path)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        earlier = checkpoints(out)
        safe = f"the one of step {earlier[-1][0]} is intact" if earlier else "there is no earlier one"
        raise DistillError(
            f"The checkpoint of step {step} could not be written to {out} ({_reason(error)}); {safe}. "
            "Make room, then go on with --resume."
        ) from error
    if first:
        for _, old in checkpoints(out)[:-keep]:
            shutil.rmtree(old)
    _wait()
    return path


def _reason(error: BaseException) -> str:
    """The first plain cause inside what torch raised."""
    failures = getattr(error, "failures", {})
    for failure in failures.values():
        cause = failure[0] if isinstance(failure, tuple) else failure
        return _reason(cause)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextmanager
def _alone() -> Iterator[bool]:
    """Whether this process is the only one, of which torch need not warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield not dist.is_initialized()


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def read_run(checkpoint: Path) -> dict[str, Any]:
    """What `save` was told of the run, with its "step"; DistillError when it is damaged."""
    try:
        run: dict[str, Any] = json.loads((checkpoint / RUN).read_text(encoding="utf-8"))
        int(run["step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DistillError(
            f"{checkpoint / RUN} is damaged; delete {checkpoint} and resume from the one before it."
        ) from None
    return run


def load_into(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors`, sharded or not, with those of the checkpoint; DistillError when it is damaged."""
    try:
        with _alone() as alone:
            dcp.load(dict(tensors), checkpoint_id=checkpoint, no_dist=alone)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, dcp.CheckpointException) as error:
        raise DistillError(
            f"{checkpoint} cannot be read ({_reason(error)}); delete it and resume from the one before it."
        ) from error


def load_all(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors whose names start with `prefix`, by the rest of their names, on the CPU."""
    try:
        contents = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    except (OSError, EOFError) as error:
        raise DistillError(f"{checkpoint} cannot be read ({error}); take another checkpoint.") from None
    tensors = {
        name: torch.empty(info.size, dtype=info.properties.dtype)
        for name, info in contents.items()
        if name.startswith(prefix) and isinstance(info, TensorStorageMetadata)
    }
    load_into(checkpoint, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
