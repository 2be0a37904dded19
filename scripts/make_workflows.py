"""Writes workflows/: the shipped graphs, in the front end's format, laid out to be read, and a picture of
each.

    python scripts/host.py run scripts/make_workflows.py

Asks a running server for the nodes' schemas, so that slots, widgets and their order are the host's own; a
test compares what it makes with what is shipped."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import thumbnail
from host import ROOT, Server, cache_folder, setup
from workflow import DYNAMIC_COMBO, inputs_of, is_widget

HUB = "https://huggingface.co/"
SOURCE = f"{HUB}Comfy-Org/Wan_2.1_ComfyUI_repackaged"
SOURCE_22 = f"{HUB}Comfy-Org/Wan_2.2_ComfyUI_Repackaged"  # of the files whose names begin with wan2.2
FOLDERS = {
    "UNETLoader": "diffusion_models",
    "CLIPLoader": "text_encoders",
    "VAELoader": "vae",
    "CLIPVisionLoader": "clip_vision",
}

PROMPT = (
    "A red fox trots through fresh snow at the edge of a pine forest, breath steaming in the low sun; "
    "the camera tracks alongside, shallow depth of field."
)
MOTION = "The scene comes alive: gentle, natural motion, the camera moves slowly forward."
NEGATIVE = (
    "blurry, low quality, static picture, overexposed, subtitles, watermark, deformed limbs, extra fingers"
)

# Wan2.1's usual sampling in ComfyUI
SHIFT, CFG, SAMPLER, SCHEDULER = 8.0, 6.0, "uni_pc", "simple"
# and Wan2.2's
STEPS_22, CFG_22 = 20, 3.5
FRAMES, FPS = 81, 16.0
SIZES = {"480p": (832, 480), "720p": (1280, 720)}

# What the tiny trained model and its student were trained for (benchmarks/evidence/evidence.toml).
TRAINED_SIZE, TRAINED_FRAMES = (384, 192), 29
TRAINED_SHIFT, TRAINED_CFG, TRAINED_STEPS = 5.0, 3.0, 20
TRAINED_SPARSITY = {"top_k": 0.03, "sparsity": 0.95}
RUNS = ("dense", "training-free", "student")  # end the titles of their nodes

NO_URL = ("tiny_", "evidence_")  # begin the files that are not downloaded but made

TITLE_HEIGHT, SLOT_HEIGHT, WIDGET_HEIGHT = 40, 22, 28  # of the front end's node boxes, in its pixels
COLUMN, GAP = 400, 50
# Room for what shows below a node's widgets: a text to write, or what a run leaves there.
ROOM = {
    "CLIPTextEncode": 112,
    "SpargeAttention2Patch": 50,
    "SpargeLoadStudent": 90,
    "SaveVideo": 420,
    "SpargeSparsityReport": 860,
    "SpargeTune": 620,
}
REPORT_WIDTH = 640

# What the pictures say. The template browser shows what lies beside a pack's graph as .jpg.
PICTURES = {
    "wan21_t2v_1.3B_480p": ("Text to video", "Wan2.1 · 1.3B · 480p"),
    "wan21_t2v_14B_480p": ("Text to video", "Wan2.1 · 14B · 480p"),
    "wan21_t2v_14B_720p": ("Text to video", "Wan2.1 · 14B · 720p"),
    "wan21_t2v_1.3B_480p_compare": ("Dense beside sparse", "Wan2.1 · 1.3B · 480p"),
    "wan21_i2v_14B_480p": ("Image to video", "Wan2.1 · 14B · 480p"),
    "wan21_i2v_14B_720p": ("Image to video", "Wan2.1 · 14B · 720p"),
    "wan22_t2v_14B_480p": ("Text to video", "Wan2.2 · 14B, two experts · 480p"),
    "wan21_tiny": ("Tiny video", "Random weights · seconds on a CPU"),
    "wan21_tiny_compare": ("Tiny, dense beside sparse", "Random weights · seconds on a CPU"),
    "wan21_tiny_tune": ("Tiny, tuned by layer", "Random weights · seconds on a CPU"),
    "wan21_tiny_student": ("Tiny, dense beside a student", "Three runs of one seed · minutes on a CPU"),
}


@dataclass(frozen=True)
class Output:
    """An output slot of a node in the making."""

    node: dict[str, Any]
    slot: int


class Graph:
    """A workflow in the making: nodes stand in columns from left to right, each filled from top to bottom."""

    def __init__(self, object_info: dict[str, Any]) -> None:
        self._info = object_info
        self._nodes: list[dict[str, Any]] = []
        self._links: list[list[Any]] = []
        self._next_y: dict[int, int] = {}

    def add(self, kind: str, column: int, *, title: str | None = None, **inputs: Any) -> list[Output]:
        """Add a node; an input is an Output (a link) or a widget's value, by default the widget's own."""
        info = self._info[kind]
        node = self._place(kind, column, title)
        widgets: list[Any] = []
        for name, wanted, options in inputs_of(info["input"]):
            given = inputs.pop(name, None)
            if is_widget(wanted, options):
                widgets += _widget(wanted, options, given)
                continue
            link = None
            if given is not None:
                link = self._link(given, node, len(node["inputs"]))
            elif name in info["input"].get("required", {}):
                raise ValueError(f"{kind} needs its input {name!r}")
            node["inputs"].append({"name": name, "type": wanted, "link": link})
        if inputs:
            raise ValueError(f"{kind} has no inputs {', '.join(inputs)}")
        if widgets:
            node["widgets_values"] = widgets
        if kind in FOLDERS:
            folder, file = FOLDERS[kind], widgets[0]
            if not file.startswith(NO_URL):
                url = f"{_source(file)}/resolve/main/split_files/{folder}/{file}"
                node["properties"]["models"] = [{"name": file, "url": url, "directory": folder}]
        for slot, (label, produced) in enumerate(zip(info["output_name"], info["output"], strict=True)):
            node["outputs"].append({"name": label, "type": produced, "links": [], "slot_index": slot})
        if kind == "SpargeSparsityReport":
            node["size"][0] = REPORT_WIDTH
        self._settle(
            node,
            column,
            TITLE_HEIGHT
            + SLOT_HEIGHT * max(len(node["inputs"]), len(node["outputs"]))
            + WIDGET_HEIGHT * len(widgets)
            + ROOM.get(kind, 0),
        )
        return [Output(node, slot) for slot in range(len(node["outputs"]))]

    def note(self, column: int, title: str, text: str, *, lines: int) -> None:
        node = self._place("MarkdownNote", column, title)
        node["widgets_values"] = [text]
        self._settle(node, column, TITLE_HEIGHT + SLOT_HEIGHT * lines)

    def finished(self) -> dict[str, Any]:
        return {
            "last_node_id": len(self._nodes),
            "last_link_id": len(self._links),
            "nodes": self._nodes,
            "links": self._links,
            "groups": [],
            "config": {},
            "extra": {},
            "version": 0.4,
        }

    def _place(self, kind: str, column: int, title: str | None) -> dict[str, Any]:
        order = len(self._nodes)
        node: dict[str, Any] = {
            "id": order + 1,
            "type": kind,
            "pos": [column * (COLUMN + GAP), self._next_y.get(column, 0)],
            "size": [COLUMN, 0],
            "flags": {},
            "order": order,
            "mode": 0,
            "inputs": [],
            "outputs": [],
            "properties": {"Node name for S&R": kind},
        }
        if title:
            node["title"] = title
        self._nodes.append(node)
        return node

    def _settle(self, node: dict[str, Any], column: int, height: int) -> None:
        node["size"][1] = height
        self._next_y[column] = node["pos"][1] + height + GAP

    def _link(self, source: Output, target: dict[str, Any], slot: int) -> int:
        number = len(self._links) + 1
        output = source.node["outputs"][source.slot]
        output["links"].append(number)
        self._links.append([number, source.node["id"], source.slot, target["id"], slot, output["type"]])
        return number


def _widget(kind: str, options: dict[str, Any], given: Any) -> list[Any]:
    """The values that the front end keeps for a widget: its own, and those of controls that come with it."""
    if given is None:
        choices = options.get("options") or [None]
        given = options.get("default", choices[0]["key"] if kind == DYNAMIC_COMBO else choices[0])
    values = [given]
    if options.get("control_after_generate"):
        values.append("fixed")
    if options.get("image_upload"):
        values.append("image")
    return values


def _source(file: str) -> str:
    return SOURCE_22 if file.startswith("wan2.2") else SOURCE


def _files_note(graph: Graph, column: int, files: list[tuple[str, str]], tokens: str) -> None:
    groups: dict[str, list[str]] = {}
    for name, folder in files:
        groups.setdefault(_source(name), []).append(f"- `{name}` → `models/{folder}/`")
    paragraphs = []
    for source, lines in groups.items():
        paragraphs += [
            f"{'Every file is' if len(groups) == 1 else 'These files are'} in "
            f"[{source.removeprefix(HUB)}]({source}) on Hugging Face, in "
            "`split_files/` and a folder of the same name as in ComfyUI:",
            "\n".join(lines),
        ]
    paragraphs.append(f"The video has {tokens} tokens.")
    graph.note(column, "Models", "\n\n".join(paragraphs), lines=2 + 2 * len(groups) + 2 * len(files))


def _sparse_note(graph: Graph, column: int) -> None:
    paragraphs = (
        "**SpargeAttention2** sits between the model loader and the sampler. With settings on *auto* a "
        "distilled student uses the settings it was trained for; any other model skips about half of its "
        "attention and keeps the first steps dense.",
        "For more speed set settings to *manual* and raise *sparsity*; how far it can go without a student's "
        "weights is for your eyes to say. **Sparsity Report** shows what the run did.",
        "To use a distilled student, put **Load Distilled Student** in place of *Load Diffusion Model*, or "
        "behind it, connected to *base*, for a diff or a low-rank file.",
    )
    graph.note(column, "SpargeAttention2", "\n\n".join(paragraphs), lines=17)


def _tokens(width: int, height: int, frames: int) -> str:
    """Tokens of Wan's transformer: the VAE makes 4 × 8 × 8 pixels a cell, the transformer 1 × 2 × 2 cells."""
    return f"{((frames - 1) // 4 + 1) * (height // 16) * (width // 16):,}"


def _finish(
    graph: Graph, column: int, latent: Output, model: Output, vae: Output, name: str, fps: float
) -> None:
    """Decode and save the video; show the report of what the model's attention did in the next column."""
    (frames,) = graph.add("VAEDecode", column, samples=latent, vae=vae)
    (video,) = graph.add("CreateVideo", column, images=frames, fps=fps)
    graph.add("SaveVideo", column, video=video, filename_prefix=f"video/{name}")
    graph.add("SpargeSparsityReport", column + 1, model=model, latent=latent)


def text_to_video(object_info: dict[str, Any], name: str, model_file: str, size: str) -> dict[str, Any]:
    graph, (width, height) = Graph(object_info), SIZES[size]
    encoder, vae_file = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
    files = [(model_file, "diffusion_models"), (encoder, "text_encoders"), (vae_file, "vae")]
    _files_note(graph, 0, files, _tokens(width, height, FRAMES))
    _sparse_note(graph, 0)
    (model,) = graph.add("UNETLoader", 1, unet_name=model_file)
    (clip,) = graph.add("CLIPLoader", 1, clip_name=encoder, type="wan")
    (vae,) = graph.add("VAELoader", 1, vae_name=vae_file)
    (latent,) = graph.add("EmptyHunyuanLatentVideo", 1, width=width, height=height, length=FRAMES)
    (sparse,) = graph.add("SpargeAttention2Patch", 2, model=model)
    (shifted,) = graph.add("ModelSamplingSD3", 2, model=sparse, shift=SHIFT)
    (positive,) = graph.add("CLIPTextEncode", 2, title="Prompt", clip=clip, text=PROMPT)
    (negative,) = graph.add("CLIPTextEncode", 2, title="Negative prompt", clip=clip, text=NEGATIVE)
    (sampled,) = graph.add(
        "KSampler",
        3,
        model=shifted,
        positive=positive,
        negative=negative,
        latent_image=latent,
        steps=30,
        cfg=CFG,
        sampler_name=SAMPLER,
        scheduler=SCHEDULER,
    )
    _finish(graph, 4, sampled, shifted, vae, name, FPS)
    return graph.finished()


@dataclass(frozen=True)
class Start:
    """What a run starts from; the model is as it was loaded."""

    model: Output
    vae: Output
    latent: Output
    positive: Output
    negative: Output


def _compare(graph: Graph, column: int, start: Start, steps: int, name: str, **settings: Any) -> None:
    """Sample without and with the patch from one seed; show both in one video, and the report under it."""
    (dense,) = graph.add("ModelSamplingSD3", column, model=start.model, shift=SHIFT)
    (sparse,) = graph.add("SpargeAttention2Patch", column, model=dense, **settings)
    samples = [
        graph.add(
            "KSampler",
            column + 1,
            title=f"KSampler, {title}",
            model=model,
            positive=start.positive,
            negative=start.negative,
            latent_image=start.latent,
            steps=steps,
            cfg=CFG,
            sampler_name=SAMPLER,
            scheduler=SCHEDULER,
        )[0]
        for title, model in (("dense", dense), ("sparse", sparse))
    ]
    left, right = (graph.add("VAEDecode", column + 1, samples=latent, vae=start.vae)[0] for latent in samples)
    (both,) = graph.add("ImageStitch", column + 2, image1=left, image2=right, direction="right")
    (video,) = graph.add("CreateVideo", column + 2, images=both, fps=FPS)
    graph.add("SaveVideo", column + 2, video=video, filename_prefix=f"video/{name}")
    graph.add("SpargeSparsityReport", column + 2, model=sparse, latent=samples[1])


def _compare_note(graph: Graph, column: int) -> None:
    paragraphs = (
        "One model, prompt and seed, twice: **dense on the left, sparse on the right** in one video, and "
        "under it the report of the sparse run.",
        "To try another setting, change it on **SpargeAttention2** and run again: ComfyUI keeps the dense "
        "half, so only the sparse half is computed. Give a new seed to both samplers.",
    )
    graph.note(column, "Dense beside sparse", "\n\n".join(paragraphs), lines=12)


def compare_text_to_video(
    object_info: dict[str, Any], name: str, model_file: str, size: str
) -> dict[str, Any]:
    graph, (width, height) = Graph(object_info), SIZES[size]
    encoder, vae_file = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
    files = [(model_file, "diffusion_models"), (encoder, "text_encoders"), (vae_file, "vae")]
    _compare_note(graph, 0)
    _files_note(graph, 0, files, _tokens(width, height, FRAMES))
    (model,) = graph.add("UNETLoader", 1, unet_name=model_file)
    (clip,) = graph.add("CLIPLoader", 1, clip_name=encoder, type="wan")
    (vae,) = graph.add("VAELoader", 1, vae_name=vae_file)
    (latent,) = graph.add("EmptyHunyuanLatentVideo", 1, width=width, height=height, length=FRAMES)
    (positive,) = graph.add("CLIPTextEncode", 2, title="Prompt", clip=clip, text=PROMPT)
    (negative,) = graph.add("CLIPTextEncode", 2, title="Negative prompt", clip=clip, text=NEGATIVE)
    _compare(graph, 2, Start(model, vae, latent, positive, negative), 30, name)
    return graph.finished()


def image_to_video(object_info: dict[str, Any], name: str, model_file: str, size: str) -> dict[str, Any]:
    graph, (width, height) = Graph(object_info), SIZES[size]
    encoder, vae_file = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
    vision_file = "clip_vision_h.safetensors"
    files = [
        (model_file, "diffusion_models"),
        (encoder, "text_encoders"),
        (vae_file, "vae"),
        (vision_file, "clip_vision"),
    ]
    _files_note(graph, 0, files, _tokens(width, height, FRAMES))
    _sparse_note(graph, 0)
    (model,) = graph.add("UNETLoader", 1, unet_name=model_file)
    (clip,) = graph.add("CLIPLoader", 1, clip_name=encoder, type="wan")
    (vae,) = graph.add("VAELoader", 1, vae_name=vae_file)
    (vision,) = graph.add("CLIPVisionLoader", 1, clip_name=vision_file)
    image, _ = graph.add("LoadImage", 1, title="First frame", image="example.png")
    (sparse,) = graph.add("SpargeAttention2Patch", 2, model=model)
    (shifted,) = graph.add("ModelSamplingSD3", 2, model=sparse, shift=SHIFT)
    (positive,) = graph.add("CLIPTextEncode", 2, title="Prompt", clip=clip, text=MOTION)
    (negative,) = graph.add("CLIPTextEncode", 2, title="Negative prompt", clip=clip, text=NEGATIVE)
    (seen,) = graph.add("CLIPVisionEncode", 2, clip_vision=vision, image=image, crop="none")
    positive, negative, latent = graph.add(
        "WanImageToVideo",
        3,
        positive=positive,
        negative=negative,
        vae=vae,
        width=width,
        height=height,
        length=FRAMES,
        clip_vision_output=seen,
        start_image=image,
    )
    (sampled,) = graph.add(
        "KSampler",
        3,
        model=shifted,
        positive=positive,
        negative=negative,
        latent_image=latent,
        steps=20,
        cfg=CFG,
        sampler_name=SAMPLER,
        scheduler=SCHEDULER,
    )
    _finish(graph, 4, sampled, shifted, vae, name, FPS)
    return graph.finished()


def two_experts(object_info: dict[str, Any], name: str, model_file: str, size: str) -> dict[str, Any]:
    """Wan2.2 text-to-video: one model for the noisy first half of the steps, another for the second half."""
    graph, (width, height) = Graph(object_info), SIZES[size]
    encoder, vae_file = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
    experts = [model_file.format(noise) for noise in ("high_noise", "low_noise")]
    files = [*((file, "diffusion_models") for file in experts), (encoder, "text_encoders"), (vae_file, "vae")]
    _files_note(graph, 0, files, _tokens(width, height, FRAMES))
    _sparse_note(graph, 0)
    models = [graph.add("UNETLoader", 1, unet_name=file)[0] for file in experts]
    (clip,) = graph.add("CLIPLoader", 1, clip_name=encoder, type="wan")
    (vae,) = graph.add("VAELoader", 1, vae_name=vae_file)
    (latent,) = graph.add("EmptyHunyuanLatentVideo", 1, width=width, height=height, length=FRAMES)
    shifted = []
    for model, when in zip(models, ("first half", "second half"), strict=True):
        (sparse,) = graph.add("SpargeAttention2Patch", 2, title=f"SpargeAttention2, {when}", model=model)
        shifted += graph.add("ModelSamplingSD3", 2, model=sparse, shift=SHIFT)
    (positive,) = graph.add("CLIPTextEncode", 2, title="Prompt", clip=clip, text=PROMPT)
    (negative,) = graph.add("CLIPTextEncode", 2, title="Negative prompt", clip=clip, text=NEGATIVE)
    for model, first in zip(shifted, (True, False), strict=True):
        (latent,) = graph.add(
            "KSamplerAdvanced",
            3,
            title=f"KSampler, {'first' if first else 'second'} half",
            model=model,
            positive=positive,
            negative=negative,
            latent_image=latent,
            add_noise="enable" if first else "disable",
            steps=STEPS_22,
            cfg=CFG_22,
            sampler_name="euler",
            scheduler=SCHEDULER,
            start_at_step=0 if first else STEPS_22 // 2,
            end_at_step=STEPS_22 // 2 if first else STEPS_22,
            return_with_leftover_noise="enable" if first else "disable",
        )
        graph.add("SpargeSparsityReport", 5, model=model, latent=latent)
    (frames,) = graph.add("VAEDecode", 4, samples=latent, vae=vae)
    (video,) = graph.add("CreateVideo", 4, images=frames, fps=FPS)
    graph.add("SaveVideo", 4, video=video, filename_prefix=f"video/{name}")
    return graph.finished()


def _tiny_start(graph: Graph) -> Start:
    """The note and loaders of the graphs that run on a CPU, in the first three columns."""
    width, height, frames = 272, 272, 17
    paragraphs = (
        "Runs anywhere, in seconds, on a CPU too. The weights are random, so the video is noise; the graph, "
        f"the shapes and the attention are the real ones ({_tokens(width, height, frames)} tokens).",
        "- `tiny_wan21_t2v.safetensors` → `models/diffusion_models/`\n"
        "- `tiny_wan21_vae.safetensors` → `models/vae/`\n"
        "- `tiny_wan21/` → `datasets/`: a text embedding, in place of a text encoder of 7 GB",
        "In the pack's folder, `python scripts/host.py run scripts/tiny_models.py FOLDER` writes them into "
        "the ComfyUI in FOLDER.",
    )
    graph.note(0, "Tiny Wan2.1", "\n\n".join(paragraphs), lines=18)
    (model,) = graph.add("UNETLoader", 1, unet_name="tiny_wan21_t2v.safetensors")
    (vae,) = graph.add("VAELoader", 1, vae_name="tiny_wan21_vae.safetensors")
    _, positive = graph.add("LoadTrainingDataset", 1, title="Text embedding", folder_name="tiny_wan21")
    (latent,) = graph.add("EmptyHunyuanLatentVideo", 1, width=width, height=height, length=frames)
    (negative,) = graph.add("ConditioningZeroOut", 2, conditioning=positive)
    return Start(model, vae, latent, positive, negative)


def tiny(object_info: dict[str, Any], name: str) -> dict[str, Any]:
    """Seconds on a CPU, no text encoder, and the latent saved for comparison."""
    graph = Graph(object_info)
    start = _tiny_start(graph)
    (sparse,) = graph.add(
        "SpargeAttention2Patch", 2, model=start.model, settings="manual", sparsity=0.5, min_tokens=0
    )
    (shifted,) = graph.add("ModelSamplingSD3", 2, model=sparse, shift=SHIFT)
    (sampled,) = graph.add(
        "KSampler",
        3,
        model=shifted,
        positive=start.positive,
        negative=start.negative,
        latent_image=start.latent,
        steps=4,
        cfg=CFG,
        sampler_name=SAMPLER,
        scheduler=SCHEDULER,
    )
    graph.add("SaveLatent", 4, samples=sampled, filename_prefix=f"latents/{name}")
    _finish(graph, 4, sampled, shifted, start.vae, name, FPS)
    return graph.finished()


def compare_tiny(object_info: dict[str, Any], name: str) -> dict[str, Any]:
    graph = Graph(object_info)
    _compare_note(graph, 0)
    start = _tiny_start(graph)
    _compare(graph, 2, start, 4, name, settings="manual", sparsity=0.5, min_tokens=0)
    return graph.finished()


def tune_tiny(object_info: dict[str, Any], name: str) -> dict[str, Any]:
    """Calibrate, tune to an error budget, and sample with the tuning."""
    graph = Graph(object_info)
    paragraphs = (
        "The sampler on the left runs dense and measures how sparse each layer can be. **Tune Sparse "
        "Attention** gives each the sparsest setting within its error budget and saves them; the sampler on "
        "the right uses them.",
        "Later, **Load Sparse Tuning** takes the place of all that is left of the second SpargeAttention2. "
        "The same nodes tune any Wan model.",
    )
    graph.note(0, "Tuned by layer", "\n\n".join(paragraphs), lines=12)
    start = _tiny_start(graph)
    (shifted,) = graph.add("ModelSamplingSD3", 2, model=start.model, shift=SHIFT)
    given: dict[str, Any] = {"model": shifted, "min_tokens": 0}
    (patched,) = graph.add("SpargeAttention2Patch", 2, settings="manual", **given)
    (calibrated,) = graph.add("SpargeCalibrate", 2, model=patched, steps=2)

    def sample(column: int, title: str, model: Output) -> Output:
        (sampled,) = graph.add(
            "KSampler",
            column,
            title=title,
            model=model,
            positive=start.positive,
            negative=start.negative,
            latent_image=start.latent,
            steps=4,
            cfg=CFG,
            sampler_name=SAMPLER,
            scheduler=SCHEDULER,
        )
        return sampled

    measured = sample(3, "KSampler, to calibrate", calibrated)
    tuning, *_ = graph.add("SpargeTune", 3, model=calibrated, latent=measured, budget=0.2, name="wan21_tiny")
    (tuned,) = graph.add("SpargeAttention2Patch", 4, settings="auto", tuning=tuning, **given)
    sampled = sample(4, "KSampler, tuned", tuned)
    _finish(graph, 5, sampled, tuned, start.vae, name, FPS)
    return graph.finished()


def student_tiny(object_info: dict[str, Any], name: str) -> dict[str, Any]:
    """The graph of `make demo`: a model dense, sparse without training, and as its student, beside each
    other."""
    graph, (width, height) = Graph(object_info), TRAINED_SIZE
    paragraphs = (
        "A tiny Wan2.1, from one seed three times: **dense on the left, 95 % sparse without training in the "
        "middle, and on the right its student**, as sparse but distilled "
        f"for it. Minutes on a CPU ({_tokens(width, height, TRAINED_FRAMES)} tokens).",
        "- `evidence_wan.safetensors` → `models/diffusion_models/`\n"
        "- `evidence_vae.safetensors` → `models/vae/`\n"
        "- `evidence_student_short.safetensors` → `models/loras/`\n"
        "- `evidence_caption/` → `datasets/`: the embedding of a caption, in place of a text encoder",
        "In a git clone of this pack, `python scripts/host.py run scripts/tiny_models.py FOLDER` writes them "
        "into the ComfyUI in FOLDER; `make demo` does so in one of its own, and runs this graph. Their "
        "weights are random, and the videos noise, until `make evidence` has trained some.",
        "The three latents are decoded as one batch, which is several times as fast on a CPU.",
    )
    graph.note(0, "Dense beside a student", "\n\n".join(paragraphs), lines=24)
    (model,) = graph.add("UNETLoader", 1, unet_name="evidence_wan.safetensors")
    (vae,) = graph.add("VAELoader", 1, vae_name="evidence_vae.safetensors")
    _, positive = graph.add("LoadTrainingDataset", 1, title="Caption", folder_name="evidence_caption")
    (latent,) = graph.add("EmptyHunyuanLatentVideo", 1, width=width, height=height, length=TRAINED_FRAMES)
    (dense,) = graph.add("ModelSamplingSD3", 2, model=model, shift=TRAINED_SHIFT)
    (student,) = graph.add(
        "SpargeLoadStudent", 2, file="loras/evidence_student_short.safetensors", base=dense
    )
    (negative,) = graph.add("ConditioningZeroOut", 2, conditioning=positive)
    models = [dense]
    for run, weights, settings in (
        ("training-free", dense, {"settings": "manual", **TRAINED_SPARSITY}),
        ("student", student, {"settings": "auto"}),
    ):
        title = f"SpargeAttention2, {run}"
        models += graph.add(
            "SpargeAttention2Patch", 3, title=title, model=weights, min_tokens=2048, **settings
        )
    samples = [
        graph.add(
            "KSampler",
            4,
            title=f"KSampler, {run}",
            model=one,
            positive=positive,
            negative=negative,
            latent_image=latent,
            steps=TRAINED_STEPS,
            cfg=TRAINED_CFG,
            sampler_name="euler",
            scheduler=SCHEDULER,
        )[0]
        for run, one in zip(RUNS, models, strict=True)
    ]
    batch = samples[0]
    for other in samples[1:]:
        (batch,) = graph.add("LatentBatch", 5, samples1=batch, samples2=other)
    (frames,) = graph.add("VAEDecode", 5, samples=batch, vae=vae)
    row, *others = (
        graph.add(
            "ImageFromBatch",
            5,
            title=f"Frames, {run}",
            image=frames,
            batch_index=place * TRAINED_FRAMES,
            length=TRAINED_FRAMES,
        )[0]
        for place, run in enumerate(RUNS)
    )
    for other in others:
        (row,) = graph.add("ImageStitch", 6, image1=row, image2=other, direction="right")
    (video,) = graph.add("CreateVideo", 6, images=row, fps=FPS)
    graph.add("SaveVideo", 6, video=video, filename_prefix=f"video/{name}")
    graph.add("SpargeSparsityReport", 7, model=models[-1], latent=samples[-1])
    return graph.finished()


def all_workflows(object_info: dict[str, Any]) -> dict[str, str]:
    """Every shipped workflow: file name to content."""
    graphs = {}
    for name, model in (
        ("wan21_t2v_1.3B_480p", "wan2.1_t2v_1.3B_fp16.safetensors"),
        ("wan21_t2v_14B_480p", "wan2.1_t2v_14B_fp8_scaled.safetensors"),
        ("wan21_t2v_14B_720p", "wan2.1_t2v_14B_fp8_scaled.safetensors"),
    ):
        graphs[name] = text_to_video(object_info, name, model, name.split("_")[-1])
    name = "wan21_t2v_1.3B_480p_compare"
    graphs[name] = compare_text_to_video(object_info, name, "wan2.1_t2v_1.3B_fp16.safetensors", "480p")
    for size in SIZES:
        name = f"wan21_i2v_14B_{size}"
        graphs[name] = image_to_video(
            object_info, name, f"wan2.1_i2v_{size}_14B_fp8_scaled.safetensors", size
        )
    graphs["wan22_t2v_14B_480p"] = two_experts(
        object_info, "wan22_t2v_14B_480p", "wan2.2_t2v_{}_14B_fp8_scaled.safetensors", "480p"
    )
    graphs["wan21_tiny"] = tiny(object_info, "wan21_tiny")
    graphs["wan21_tiny_compare"] = compare_tiny(object_info, "wan21_tiny_compare")
    graphs["wan21_tiny_tune"] = tune_tiny(object_info, "wan21_tiny_tune")
    graphs["wan21_tiny_student"] = student_tiny(object_info, "wan21_tiny_student")
    return {
        f"{name}.json": json.dumps(graph, indent=1, ensure_ascii=False) + "\n"
        for name, graph in graphs.items()
    }


def main(folder: Path) -> None:
    with Server(setup(), cache_folder() / "base") as server:
        workflows = all_workflows(server.object_info())
    for name, content in workflows.items():
        file = folder / name
        file.write_text(content, encoding="utf-8", newline="\n")
        thumbnail.draw(json.loads(content), *PICTURES[file.stem]).save(file.with_suffix(".jpg"), quality=85)
        print(file)


if __name__ == "__main__":
    if len(sys.argv) != 1:
        sys.exit(__doc__)
    main(ROOT / "workflows")
