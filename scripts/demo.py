"""The main job, end to end: the tiny Wan2.1 in a real ComfyUI, three times from one seed.

    python scripts/host.py run scripts/demo.py [--steps 20] [--seed 0] [--caption TEXT] [--pack FOLDER]

runs the shipped workflow wan21_tiny_student: "dense"; "training-free", 95 % sparse with the same weights; and
"student", as sparse with the weights that were distilled for it. Minutes on a CPU. It writes into out/demo/

    side_by_side.png, side_by_side.webp   all three, as frames in rows and as one video
    dense, training-free, student .mp4    each alone
    report.png                            the picture of Sparsity Report, of the student
    report.json                           the numbers:

    trained                        false where the trained files are missing and the weights are random
    caption, seed, steps, tokens   what was run
    sparsity, target_sparsity      share of attention that the student skipped, and what it was distilled for
    sparse_calls, dense_calls      its attention calls; the dense ones by reason
    attention_ms                   time in its attention
    rel_l1_vs_dense                of its latent: sum |student - dense| / sum |dense|
    rel_l1_training_free_vs_dense  the same of the training-free run
    rel_l1_keep_all_vs_dense       the same of two steps with every block kept, which must be rounding alone
    psnr_vs_dense, psnr_training_free_vs_dense    of the student's and the training-free frames, in dB
    seconds                        of each run; the first one's include loading
    video, dense_video, training_free_video, side_by_side, side_by_side_video, picture    the files' names
    machine                        what it was run on
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load
from torch import Tensor

import tiny_models
from host import ROOT, HostError, Server, cache_folder, ready_host
from make_workflows import FPS, RUNS
from workflow import load as load_workflow
from workflow import to_api

WORKFLOW = "workflows/wan21_tiny_student.json"  # in the pack
OUT = ROOT / "out" / "demo"
REPORT = "SpargeSparsityReport"
DENSE, FREE, STUDENT = RUNS
STEPS = 20  # a divisor of 1000, at which ComfyUI's simple schedule is the one that the evidence is sampled by
CHECK_STEPS = 2  # of the run that keeps every block
PATIENCE = 3600.0  # seconds for each run

Prompt = dict[str, Any]


def upstream(prompt: Prompt, ends: Iterable[str]) -> Prompt:
    """The part of a prompt that these nodes need, and they themselves."""
    kept: Prompt = {}
    waiting = list(ends)
    while waiting:
        key = waiting.pop()
        if key not in kept:
            kept[key] = prompt[key]
            waiting += [value[0] for value in prompt[key]["inputs"].values() if isinstance(value, list)]
    return kept


def titled(graph: dict[str, Any]) -> dict[str, str]:
    """The prompt's ids of the nodes that have a title, by it."""
    return {node["title"]: str(node["id"]) for node in graph["nodes"] if "title" in node}


def with_outputs(prompt: Prompt, titles: dict[str, str], report: str) -> Prompt:
    """The prompt with all that is to be had saved: "latent …", "video …" of each run, "frames", "picture" and
    "numbers" of the node `report`."""
    full = copy.deepcopy(prompt)

    def add(name: str, kind: str, **inputs: Any) -> None:
        full[name] = {"class_type": kind, "inputs": inputs}

    for run in RUNS:
        frames = titles[f"Frames, {run}"]
        sampler = titles[f"KSampler, {run}"]
        add(f"latent {run}", "SaveLatent", samples=[sampler, 0], filename_prefix="demo/latent")
        add(f"frames {run}", "SaveImage", images=[frames, 0], filename_prefix="demo/frame")
        add(f"made {run}", "CreateVideo", images=[frames, 0], fps=FPS)
        saved = {"filename_prefix": "demo/video", "format": "auto", "codec": "auto"}
        add(f"video {run}", "SaveVideo", video=[f"made {run}", 0], **saved)
    add("picture", "SaveImage", images=[report, 0], filename_prefix="demo/report")
    add("numbers", "PreviewAny", source=[report, 2])
    return full


def latent_of(server: Server, outputs: dict[str, Any], node: str) -> Tensor:
    (file,) = outputs[node]["latents"]
    return load(server.fetch(file))["latent_tensor"].float()


def frames_of(server: Server, outputs: dict[str, Any], node: str) -> np.ndarray:
    """(T, H, W, 3), uint8."""
    pictures = [Image.open(io.BytesIO(server.fetch(file))) for file in outputs[node]["images"]]
    return np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])


def relative_l1(result: Tensor, truth: Tensor) -> float:
    return float((result - truth).abs().sum() / truth.abs().sum())


def psnr(result: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal-to-noise ratio of pictures of 8 bits, in dB."""
    error = np.square(result.astype(np.float64) - truth).mean()
    return float(10 * np.log10(255**2 / max(error, 1e-6)))


def save(server: Server, out: Path, outputs: dict[str, Any], node: str, name: str) -> str:
    """Copy the picture or video of an output node into `out`, under `name`; returns the file's name there."""
    (file,) = outputs[node]["images"]  # ComfyUI says so of videos too
    place = out / (name + Path(file["filename"]).suffix)
    place.write_bytes(server.fetch(file))
    return place.name


def show(out: Path, videos: dict[str, np.ndarray], caption: str, sparsity: float) -> dict[str, str]:
    """All videos beside each other as a picture and as a video, each under its name; the files' names."""
    from benchmarks.evidence import report  # after main has said what is missing where it cannot be imported

    named = [
        (run if run == DENSE else f"{run}, {sparsity:.0%} sparse", video) for run, video in videos.items()
    ]
    (first, video), *others = named
    names = {"side_by_side": "side_by_side.png", "side_by_side_video": "side_by_side.webp"}
    report.strips([(f"{caption}: {first}", video), *others]).save(out / names["side_by_side"])
    report.save_webp(out / names["side_by_side_video"], named, columns=len(named))
    return names


def keep_all_error(server: Server, prompt: Prompt, titles: dict[str, str]) -> float:
    """How far a few steps with the patch, and every block kept, are from as many without it."""
    short = copy.deepcopy(prompt)
    short[titles[f"SpargeAttention2, {FREE}"]]["inputs"].update(top_k=1.0, top_p=1.0, sparsity=0.0)
    for run in (DENSE, FREE):
        short[titles[f"KSampler, {run}"]]["inputs"]["steps"] = CHECK_STEPS
    ends = [f"latent {run}" for run in (DENSE, FREE)]
    outputs = server.run(upstream(short, ends), PATIENCE)
    truth, kept = (latent_of(server, outputs, end) for end in ends)
    return relative_l1(kept, truth)


def demo(server: Server, out: Path, caption: str, trained: bool, steps: int, seed: int) -> dict[str, Any]:
    """Run the workflow, write `out` and return the report. caption, trained: of the files that are there."""
    graph = load_workflow(server.pack / WORKFLOW)
    titles, prompt = titled(graph), to_api(graph, server.object_info())
    for run in RUNS:
        prompt[titles[f"KSampler, {run}"]]["inputs"].update(seed=seed, steps=steps)
    (report,) = (key for key, node in prompt.items() if node["class_type"] == REPORT)
    prompt = with_outputs(prompt, titles, report)

    seconds: dict[str, float] = {}
    for place, run in enumerate(RUNS):
        # Each prompt is the one before it and a sampler more: ComfyUI keeps what it has computed.
        started = time.monotonic()
        server.run(upstream(prompt, [f"latent {name}" for name in RUNS[: place + 1]]), PATIENCE)
        seconds[run] = time.monotonic() - started
        say(f"{run}: {seconds[run]:.0f} s")
    started = time.monotonic()
    outputs = server.run(prompt, PATIENCE)
    say(f"videos of all three: {time.monotonic() - started:.0f} s")

    numbers = json.loads(outputs["numbers"]["text"][0])
    latents = {run: latent_of(server, outputs, f"latent {run}") for run in RUNS}
    videos = {run: frames_of(server, outputs, f"frames {run}") for run in RUNS}
    frames, height, width = latents[DENSE].shape[-3:]
    content = {
        "trained": trained,
        "caption": caption,
        "seed": seed,
        "steps": steps,
        "tokens": frames * (height // 2) * (width // 2),
        "sparsity": numbers["sparsity"],
        "target_sparsity": numbers["settings"]["config"]["sparsity"],
        "sparse_calls": numbers["sparse_calls"],
        "dense_calls": numbers["dense_calls"],
        "attention_ms": numbers["attention_ms"],
        "rel_l1_vs_dense": relative_l1(latents[STUDENT], latents[DENSE]),
        "rel_l1_training_free_vs_dense": relative_l1(latents[FREE], latents[DENSE]),
        "rel_l1_keep_all_vs_dense": keep_all_error(server, prompt, titles),
        "psnr_vs_dense": psnr(videos[STUDENT], videos[DENSE]),
        "psnr_training_free_vs_dense": psnr(videos[FREE], videos[DENSE]),
        "seconds": seconds,
        "video": save(server, out, outputs, f"video {STUDENT}", STUDENT),
        "dense_video": save(server, out, outputs, f"video {DENSE}", DENSE),
        "training_free_video": save(server, out, outputs, f"video {FREE}", FREE),
        **show(out, videos, caption, numbers["sparsity"]),
        "picture": save(server, out, outputs, "picture", "report"),
        "machine": {
            "device": server.get("/system_stats")["devices"][0]["name"],
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return content


def say(line: str) -> None:
    print(f"[demo] {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each sampling (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument(
        "--caption",
        default=tiny_models.CAPTION,
        help=f'in the words of benchmarks/evidence/clips.py (default "{tiny_models.CAPTION}")',
    )
    parser.add_argument(
        "--pack", type=Path, default=ROOT, help="folder of an unpacked release (default: this repository)"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; give 1 or more")

    host = ready_host()
    if host is None:
        raise HostError("ComfyUI is not set up. Run: python scripts/host.py run scripts/demo.py")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    pack = options.pack.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        # A base directory holds one pack of this name, so that another gets a base of its own.
        base = cache_folder() / "base" if pack == ROOT else Path(temporary)
        try:
            trained = tiny_models.make_trained(base, options.caption)
        except ValueError as error:
            parser.error(f"--caption: {error}")
        if not trained:
            say(
                f"the trained model is not in {tiny_models.TRAINED}; `make evidence` makes it on an NVIDIA "
                "GPU. Until then the weights are random and the videos noise"
            )
        say(f"starting ComfyUI with the pack in {pack}")
        with Server(host, base, pack=pack) as server:
            report = demo(server, OUT, options.caption, trained, options.steps, options.seed)
    say(
        f"the student's sparsity: {report['sparsity']:.1%} of {report['tokens']} tokens, "
        f"{report['sparse_calls']} sparse calls, dense: {report['dense_calls'] or 'none'}"
    )
    say(
        f"relative L1 of the latent against dense: student {report['rel_l1_vs_dense']:.3g}, training-free "
        f"{report['rel_l1_training_free_vs_dense']:.3g}; with every block kept "
        f"{report['rel_l1_keep_all_vs_dense']:.2g}"
    )
    say(f"videos, pictures and report.json are in {OUT}")


if __name__ == "__main__":
    try:
        main()
    except HostError as error:
        sys.exit(f"[demo] {error}")
