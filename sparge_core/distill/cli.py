"""The command `sparge-distill`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import DistillError, checkpoint
from .data import index_folder, open_dataset
from .export import DIFF_FILE, DTYPES, FULL_FILE, LOW_RANK_FILE, export
from .log import JsonLines, TensorBoard, describe, write_curve
from .loop import Distillation
from .options import HINTS, TrainOptions, kind_name, options_from, read_toml
from .pair import WanPair, check_fit

ABOUT = """Fine-tune a Wan model for sparse attention, so that 95 % of it can be skipped (arXiv 2602.13515).

  1. samples    the node Save Distillation Sample in ComfyUI, or sparge-distill prepare DATA --videos ...
  2. train      sparge-distill train --base WAN --data DATA --out RUN
                on several GPUs: torchrun --nproc-per-node 8 -m sparge_core.distill train ...
  3. export     sparge-distill export RUN student.safetensors
  4. in ComfyUI Load Distilled Student, then SpargeAttention2 on auto
"""
PACKAGES = ("diffusers", "peft", "tqdm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 1 with one sentence on the error output."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except DistillError as error:
        print(f"sparge-distill: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("sparge-distill: stopped.", file=sys.stderr)
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def run() -> None:
    """The command as an installed script starts it."""
    sys.exit(main())


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("sparge-distill", description=ABOUT, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="prepare | train | export | eval")

    prepare = commands.add_parser(
        "prepare",
        help="make samples of videos, or check a folder of samples",
        description="With --videos: makes a sample of every video that has a caption beside it (clip.mp4, "
        "clip.txt) and adds it to DATA. Always: checks every sample in DATA and writes manifest.json anew, "
        "as is needed after samples were added or taken out by hand.",
    )
    prepare.add_argument("data", type=Path, metavar="DATA", help="folder of .safetensors samples")
    prepare.add_argument("--videos", type=Path, metavar="PATH", help="folder of videos and captions")
    prepare.add_argument("--model", type=Path, metavar="PATH", help="folder of a whole Wan pipeline")
    prepare.add_argument("--frames", type=int, default=81, metavar="N", help="4 n + 1, 16 a second [81]")
    prepare.add_argument("--height", type=int, default=480, metavar="N", help="of a frame [480]")
    prepare.add_argument("--width", type=int, default=832, metavar="N", help="of a frame [832]")
    prepare.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    prepare.set_defaults(run=_prepare)

    train = commands.add_parser(
        "train",
        help="distil a student",
        description="Distils a student. Options stand in a TOML file, under the names below with _ for -, or "
        "are flags, which win. The same options and samples give the same result up to rounding, resumed or "
        "not, on any number of GPUs; the same bits on a CPU, or with --deterministic on the same GPUs.",
    )
    train.add_argument("--config", type=Path, metavar="TOML", help="file of options")
    train.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --out")
    for one in fields(TrainOptions):
        _add_flag(train, one.name, one.default, one.metadata)
    train.set_defaults(run=_train)

    exporting = commands.add_parser(
        "export",
        help="write a student's file for ComfyUI",
        description="Writes the student of a run as a file for ComfyUI's models/diffusion_models (full) or "
        "models/loras (diff, low_rank).",
    )
    exporting.add_argument("out", type=Path, metavar="RUN", help="the run's folder")
    exporting.add_argument("file", type=Path, metavar="FILE", help="the .safetensors file to write")
    kinds = (FULL_FILE, DIFF_FILE, LOW_RANK_FILE)
    exporting.add_argument(
        "--kind", choices=kinds, help="[low_rank; diff of a run that trained full weights]"
    )
    exporting.add_argument("--step", type=int, help="of the checkpoint [the latest]")
    exporting.add_argument("--base", type=Path, help="where the base is, if it has moved")
    exporting.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the file [bf16]")
    exporting.set_defaults(run=_export)

    evaluate = commands.add_parser(
        "eval",
        help="velocity error of a run's student",
        description="Compares the student's velocity with the teacher's on the run's held-out samples and "
        "prints the relative error as JSON.",
    )
    evaluate.add_argument("out", type=Path, metavar="RUN", help="the run's folder")
    evaluate.add_argument("--step", type=int, help="of the checkpoint [the latest]; 0: before any training")
    evaluate.add_argument("--data", type=Path, help="other samples, all of which are compared")
    evaluate.add_argument("--base", type=Path, help="where the base is, if it has moved")
    evaluate.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    evaluate.set_defaults(run=_evaluate)
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, default: Any, limits: Any) -> None:
    wanted, flag = HINTS[name], "--" + name.replace("_", "-")
    text = limits["help"].replace("%", "%%")
    if default is not None and default is not MISSING:
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        text += f" [{shown}]"
    given: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if wanted is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **given)
    elif wanted == tuple[float, ...]:
        parser.add_argument(flag, type=float, nargs="*", metavar="T", **given)
    elif "choices" in limits:
        parser.add_argument(flag, choices=limits["choices"], **given)
    elif wanted is int:
        parser.add_argument(flag, type=int, metavar="N", **given)
    else:
        path = kind_name(wanted) in ("a folder", "a path")
        parser.add_argument(flag, type=Path if path else float, metavar="PATH" if path else "X", **given)


# ----------------------------------------------------------------------------------------------------------
# Commands


def _prepare(arguments: argparse.Namespace) -> None:
    if arguments.videos is not None:
        _encode(arguments)
    data = index_folder(arguments.data)
    sizes = ", ".join(f"{count} of {size}" for size, count in data.resolutions.items())
    print(f"{data.folder}: {len(data)} samples, latents {sizes}.")


def _encode(arguments: argparse.Namespace) -> None:
    if arguments.model is None:
        raise DistillError("--videos needs --model, the folder of a whole Wan pipeline in diffusers' format.")
    need_packages("diffusers", "transformers", "av")
    from .encode import encode_folder

    done = encode_folder(
        arguments.videos,
        arguments.model,
        arguments.data,
        frames=arguments.frames,
        height=arguments.height,
        width=arguments.width,
        device=_device(arguments.device),
    )
    for file, problem in done:
        print(f"{file.name}: {'left out, ' + problem if problem else 'done'}.", flush=True)


def _train(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name in HINTS}
    options = options_from({**(read_toml(arguments.config) if arguments.config else {}), **given})
    need_packages(*PACKAGES, *(["tensorboard"] if options.tensorboard else []))
    found = checkpoint.checkpoints(options.out)
    if found and not arguments.resume:
        raise DistillError(
            f"{options.out} holds a run at step {found[-1][0]}: give --resume to go on with it, or another "
            "folder as --out."
        )
    data = open_dataset(options.data)
    check_fit(options, data)
    if options.deterministic:
        _be_deterministic()
    device, rank = start_processes(options.device)
    run = Distillation(options, WanPair(options, device), data)
    if found:
        run.resume(found[-1][1])
    options.out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        _train_and_log(run, data.resolutions)
    else:
        for _ in run.records():
            pass


def _train_and_log(run: Distillation, resolutions: dict[str, int]) -> None:
    from tqdm import tqdm

    options = run.options
    if len(resolutions) > 1:
        print(f"Samples of different sizes, which take turns: {', '.join(resolutions)}.", file=sys.stderr)
    with ExitStack() as stack:
        lines = JsonLines(options.out, run.step)
        writers: list[Any] = [lines]
        if options.tensorboard:
            board = TensorBoard(options.out, run.step)
            stack.callback(board.close)
            writers.append(board)
        title = f"{options.base.name}: {options.student}, {options.loss} loss"
        stack.callback(write_curve, options.out, title)
        bar = stack.enter_context(tqdm(total=options.steps, initial=run.step, unit="step", disable=None))
        for record in run.records():
            for writer in writers:
                writer.write(record)
            bar.update(run.step - bar.n)
            bar.set_postfix_str(describe(record))


def _export(arguments: argparse.Namespace) -> None:
    kind = arguments.kind
    if kind is None:
        run = checkpoint.read_run(checkpoint.find(arguments.out, arguments.step))
        kind = LOW_RANK_FILE if run["options"]["student"] == LOW_RANK_FILE else DIFF_FILE
    file = export(
        arguments.out, arguments.file, kind, step=arguments.step, base=arguments.base, dtype=arguments.dtype
    )
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB. Load it with the node Load Distilled Student.")


def _evaluate(arguments: argparse.Namespace) -> None:
    path = checkpoint.find(arguments.out, arguments.step or None)
    saved = checkpoint.read_run(path)
    values = {**saved["options"], "device": arguments.device}
    if arguments.base:
        values["base"] = arguments.base
    if arguments.data:
        values["data"] = arguments.data
    options = options_from(values)
    need_packages(*PACKAGES)
    data = open_dataset(options.data)
    check_fit(options, data)
    device, _ = start_processes(options.device)
    run = Distillation(options, WanPair(options, device), data)
    if arguments.data:
        run.held_out = data
    if arguments.step != 0:
        run.restore(path)
    result = {"step": run.step, "samples": len(run.held_out), **run.validate()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(result))


def need_packages(*names: str) -> None:
    """DistillError that names what is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise DistillError(
            f"{', '.join(missing)} cannot be imported; in the pack's folder run: "
            'python -m pip install -e ".[distill]"'
        )


def start_processes(device: str) -> tuple[torch.device, int]:
    """This process's device and rank; joins the others where torchrun started them."""
    place = _device(device)
    if "WORLD_SIZE" not in os.environ:
        return place, 0
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")
    return place, dist.get_rank()


def _be_deterministic() -> None:
    """Before anything runs on a GPU: cuBLAS reads its variable when it starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It costs time and changes nothing: no memory is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined,unused-ignore]


def _device(wanted: str) -> torch.device:
    cuda = torch.cuda.is_available()
    if wanted == "cuda" and not cuda:
        raise DistillError("device is cuda, and torch sees no GPU; set it to auto or cpu.")
    return torch.device("cuda" if cuda and wanted != "cpu" else "cpu")
