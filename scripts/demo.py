"""The main job, end to end: the shipped tiny workflow in a real ComfyUI, dense and sparse with one seed.

    python scripts/host.py run scripts/demo.py [--sparsity 0.5] [--seed 0] [--pack FOLDER]

writes into out/demo/ the two videos, the picture of Sparsity Report, and report.json:

    sparsity, target_sparsity      share of attention skipped, and what the slider asked for
    sparse_calls, dense_calls      attention calls; the dense ones by reason
    attention_ms                   time in the attention of the sparse run
    rel_l1_vs_dense                of the sparse run's latent: sum |sparse - dense| / sum |dense|
    rel_l1_keep_all_vs_dense       the same with every block kept, which must be rounding alone
    video, dense_video, picture    files beside report.json
    seed, tokens, machine          what was run, and on what
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

import tiny_models
from host import ROOT, HostError, Server, cache_folder, ready_host
from workflow import load as load_workflow
from workflow import to_api

WORKFLOW = "workflows/wan21_tiny.json"  # in the pack
OUT = ROOT / "out" / "demo"
PATCH, REPORT = "SpargeAttention2Patch", "SpargeSparsityReport"
# Nodes that are added to the shipped graph, to get at the report's picture and numbers.
PICTURE, NUMBERS = "report picture", "report numbers"

Prompt = dict[str, Any]


def node_of(prompt: Prompt, class_type: str) -> str:
    """The id of the prompt's one node of this type."""
    (node,) = (key for key, node in prompt.items() if node["class_type"] == class_type)
    return node


def without_patch(prompt: Prompt) -> Prompt:
    """The graph without this pack's nodes: the model goes past the patch, and nothing is reported."""
    bare = copy.deepcopy(prompt)
    patch = node_of(bare, PATCH)
    model = bare.pop(patch)["inputs"]["model"]
    del bare[node_of(bare, REPORT)]
    for node in bare.values():
        for name, value in node["inputs"].items():
            if value == [patch, 0]:
                node["inputs"][name] = model
    return bare


def with_settings(prompt: Prompt, **settings: float) -> Prompt:
    """The graph with other settings on the patch, and with its report's outputs saved."""
    sparse = copy.deepcopy(prompt)
    sparse[node_of(sparse, PATCH)]["inputs"].update(settings)
    report = node_of(sparse, REPORT)
    sparse[PICTURE] = {
        "class_type": "SaveImage",
        "inputs": {"images": [report, 0], "filename_prefix": "report/tiny"},
    }
    sparse[NUMBERS] = {"class_type": "PreviewAny", "inputs": {"source": [report, 2]}}
    return sparse


def without_video(prompt: Prompt) -> Prompt:
    return {
        key: node
        for key, node in prompt.items()
        if node["class_type"] not in ("VAEDecode", "VAELoader", "CreateVideo", "SaveVideo")
    }


def latent_of(server: Server, prompt: Prompt, outputs: dict[str, Any]) -> Tensor:
    (file,) = outputs[node_of(prompt, "SaveLatent")]["latents"]
    return load(server.fetch(file))["latent_tensor"].float()


def relative_l1(result: Tensor, truth: Tensor) -> float:
    return float((result - truth).abs().sum() / truth.abs().sum())


def save(server: Server, out: Path, outputs: dict[str, Any], node: str, name: str) -> str:
    """Copy the picture or video of an output node into `out`, under `name`; returns the file's name there."""
    (file,) = outputs[node]["images"]  # ComfyUI says so of videos too
    place = out / (name + Path(file["filename"]).suffix)
    place.write_bytes(server.fetch(file))
    return place.name


def demo(server: Server, out: Path, sparsity: float, seed: int) -> dict[str, Any]:
    """Run the tiny workflow dense, sparse and with all blocks kept; write `out`; return the report."""
    prompt = to_api(load_workflow(server.pack / WORKFLOW), server.object_info())
    prompt[node_of(prompt, "KSampler")]["inputs"]["seed"] = seed
    dense = without_patch(prompt)
    sparse = with_settings(prompt, sparsity=sparsity)
    keep_all = without_video(with_settings(prompt, top_k=1.0, top_p=1.0, sparsity=0.0))

    outputs = {}
    for name, graph in (("dense", dense), ("sparse", sparse), ("keep-all", keep_all)):
        started = time.monotonic()
        outputs[name] = server.run(graph)
        say(f"{name}: {time.monotonic() - started:.1f} s")

    run = json.loads(outputs["sparse"][NUMBERS]["text"][0])
    truth = latent_of(server, dense, outputs["dense"])
    latent = latent_of(server, sparse, outputs["sparse"])
    frames, height, width = truth.shape[-3:]
    report = {
        "sparsity": run["sparsity"],
        "target_sparsity": sparsity,
        "sparse_calls": run["sparse_calls"],
        "dense_calls": run["dense_calls"],
        "attention_ms": run["attention_ms"],
        "rel_l1_vs_dense": relative_l1(latent, truth),
        "rel_l1_keep_all_vs_dense": relative_l1(latent_of(server, keep_all, outputs["keep-all"]), truth),
        "video": save(server, out, outputs["sparse"], node_of(sparse, "SaveVideo"), "sparse"),
        "dense_video": save(server, out, outputs["dense"], node_of(dense, "SaveVideo"), "dense"),
        "picture": save(server, out, outputs["sparse"], PICTURE, "report"),
        "seed": seed,
        "tokens": frames * (height // 2) * (width // 2),
        "machine": {
            "device": server.get("/system_stats")["devices"][0]["name"],
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def say(line: str) -> None:
    print(f"[demo] {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sparsity", type=float, default=0.5, help="target sparsity, 0.01 to 0.99 (default 0.5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument(
        "--pack", type=Path, default=ROOT, help="folder of an unpacked release (default: this repository)"
    )
    options = parser.parse_args()
    if not 0.01 <= options.sparsity <= 0.99:
        parser.error(f"--sparsity is {options.sparsity}; give a number from 0.01 to 0.99")

    host = ready_host()
    if host is None:
        raise HostError("ComfyUI is not set up. Run: python scripts/host.py run scripts/demo.py")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    pack = options.pack.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        # A base directory holds one pack of this name, so that another gets a base of its own.
        base = cache_folder() / "base" if pack == ROOT else Path(temporary)
        tiny_models.make(base)
        say(f"starting ComfyUI with the pack in {pack}")
        with Server(host, base, pack=pack) as server:
            report = demo(server, OUT, options.sparsity, options.seed)
    say(
        f"sparsity {report['sparsity']:.1%} (asked for {options.sparsity:.1%}), "
        f"{report['sparse_calls']} sparse calls, "
        f"dense: {report['dense_calls'] or 'none'}"
    )
    say(
        f"relative L1 against dense: {report['rel_l1_vs_dense']:.3g}; with every block kept: "
        f"{report['rel_l1_keep_all_vs_dense']:.2g}"
    )
    say(f"videos, picture and report.json are in {OUT}")


if __name__ == "__main__":
    try:
        main()
    except HostError as error:
        sys.exit(f"[demo] {error}")
