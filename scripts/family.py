"""Wan's family: which of its kinds the tests run in ComfyUI, and what their self-attention does there.

    python scripts/host.py run scripts/family.py

writes docs/models.md from these tables. The tests run every line of them, and that the file is up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from host import ROOT
from tiny_models import CHANNELS_5B, CLIP_TOKENS, LATENT_CHANNELS

DOCS = ROOT / "docs" / "models.md"

# The tiny video of the tests, as a latent. A token is 1 × 2 × 2 of its cells.
FRAMES, HEIGHT, WIDTH = SIZE = (3, 16, 16)
FRAME_TOKENS = (HEIGHT // 2) * (WIDTH // 2)
TOKENS = FRAMES * FRAME_TOKENS
PIXELS = 8  # of a latent cell, in each direction

LENGTHS = "queries, keys and values of different shapes"

# What ComfyUI's nodes put into a conditioning, and into the latent: "samples" and "noise_mask".
Values = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """A kind of Wan video.

    name, node: as the docs call it, and ComfyUI's node that prepares its inputs.
    kind: the tiny model (scripts/tiny_models.py); config: of the transformer, in the file's metadata.
    given: names in INPUTS.
    tokens: lengths of its self-attention calls in the tests, in ascending order.
    sampler, options: where it has one of its own.
    dense: why some of its calls stay dense; None when all are sparse.
    note: what is special about its self-attention.
    """

    name: str
    node: str
    kind: str
    given: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (TOKENS,)
    config: tuple[tuple[str, Any], ...] = ()
    sampler: str = "euler"
    options: tuple[tuple[str, Any], ...] = ()
    dense: str | None = None
    note: str = ""


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _latent(frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH, channels: int = 16) -> Tensor:
    return _random(1, channels, frames, height, width)


def _seen(pictures: int) -> SimpleNamespace:
    """What CLIP makes of pictures."""
    return SimpleNamespace(penultimate_hidden_states=_random(1, pictures * CLIP_TOKENS, 1280))


def _mask(given_frames: int, channels: int = 1) -> Tensor:
    """0 where frames are given, 1 elsewhere."""
    mask = torch.ones(1, channels, *SIZE)
    mask[:, :, :given_frames] = 0
    return mask


INPUTS: dict[str, Callable[[], Values]] = {
    "picture": lambda: {"clip_vision_output": _seen(1)},
    "two pictures": lambda: {"clip_vision_output": _seen(2)},
    "first frame": lambda: {"concat_latent_image": _latent(), "concat_mask": _mask(1)},
    "control": lambda: {"concat_latent_image": _latent(channels=2 * LATENT_CHANNELS)},
    "control and mask": lambda: {
        "concat_latent_image": _latent(channels=2 * LATENT_CHANNELS),
        "concat_mask": _mask(1, channels=4),
        "concat_mask_index": LATENT_CHANNELS,
    },
    "frames": lambda: {"concat_latent_image": _latent()},
    "VACE": lambda: {
        "vace_frames": [_latent(channels=2 * LATENT_CHANNELS)],
        "vace_mask": [torch.ones(1, 64, *SIZE)],
        "vace_strength": [1.0],
    },
    # Plücker coordinates of four frames to a latent frame
    "camera": lambda: {"camera_conditions": _random(1, 24, FRAMES, PIXELS * HEIGHT, PIXELS * WIDTH)},
    "subject": lambda: {"time_dim_concat": _latent(frames=1)},
    "reference": lambda: {"reference_latents": [_latent(frames=1)]},
    "context": lambda: {"context_latents": [_latent(), _latent(1, 10, 14)]},
    "video": lambda: {"samples": _latent()},
    "first frame kept": lambda: {"samples": _latent(channels=CHANNELS_5B), "noise_mask": _mask(1)},
    # wav2vec's 25 layers, four frames to a latent frame
    "speech": lambda: {"audio_embed": _random(1, 25, 1024, 4 * FRAMES)},
    "speech windows": lambda: {"audio_embed": _random(1, FRAMES, 8, 5, 1280)},
    "motion": lambda: {"reference_motion": _latent(frames=19), "control_video": _latent()},
    "pose": lambda: {"pose_video_latent": _latent(frames=FRAMES - 1)},
    "half pose": lambda: {"pose_video_latent": _latent(FRAMES, HEIGHT // 2, WIDTH // 2)},
    "face": lambda: {"face_video_pixels": _random(1, 3, 1, 512, 512)},
    "identities": lambda: {
        "driving_mask_28ch": _random(1, FRAMES, 28, HEIGHT // 2, WIDTH // 2),
        "ref_mask_28ch": _random(1, 1 + FRAMES, 28, HEIGHT, WIDTH),
        "ref_mask_flag": True,
    },
    "music": lambda: {"audio_embed": _random(1, 40, 35), "fps": 30.0},
}


FAMILY = (
    Member("Wan2.1 text to video", "EmptyHunyuanLatentVideo", "t2v"),
    Member("Wan2.1 image to video", "WanImageToVideo", "i2v", ("picture", "first frame")),
    Member(
        "Wan2.1 first and last frame",
        "WanFirstLastFrameToVideo",
        "flf2v",
        ("two pictures", "first frame"),
    ),
    Member("Wan2.1 VACE", "WanVaceToVideo", "vace", ("VACE",), note="The control blocks are sparse too."),
    Member("Wan2.1 Fun control", "WanFunControlToVideo", "control", ("picture", "control")),
    Member("Wan2.1 Fun inpaint", "WanFunInpaintToVideo", "i2v", ("picture", "first frame")),
    Member("Wan2.1 Fun camera", "WanCameraImageToVideo", "camera", ("picture", "frames", "camera")),
    Member(
        "Wan2.1 Phantom",
        "WanPhantomSubjectToVideo",
        "t2v",
        ("subject",),
        (TOKENS + FRAME_TOKENS,),
        note="With the subjects' tokens.",
    ),
    Member(
        "HuMo 1.7B",
        "WanHuMoImageToVideo",
        "humo_1.7B",
        ("reference", "speech windows"),
        (TOKENS + FRAME_TOKENS,),
        note="With the reference's tokens.",
    ),
    Member(
        "HuMo 17B",
        "WanHuMoImageToVideo",
        "humo_17B",
        ("reference", "speech windows"),
        (TOKENS + FRAME_TOKENS,),
        note="With the reference's tokens.",
    ),
    Member(
        "Wan2.1 SCAIL",
        "WanSCAILToVideo",
        "scail",
        ("picture", "reference", "half pose"),
        (TOKENS + FRAME_TOKENS + TOKENS // 4,),
        note="With the tokens of the reference and the pose.",
    ),
    Member(
        "Wan2.1 SCAIL-2",
        "WanSCAILToVideo",
        "scail2",
        ("picture", "reference", "half pose", "identities"),
        (TOKENS + FRAME_TOKENS + TOKENS // 4,),
        note="With the tokens of the reference and the pose.",
    ),
    Member("FlowRVS", "—", "t2v", ("video",), config=(("model_type", "flow_rvs"),)),
    Member(
        "Self Forcing, Causal Forcing",
        "SamplerARVideo",
        "t2v",
        (),
        (FRAME_TOKENS, 2 * FRAME_TOKENS),
        config=(("causal_ar", True),),
        sampler="ar_video",
        options=(("num_frame_per_block", 2),),
        dense=LENGTHS,
        note="Made block by block: the first block is sparse; a later one attends to all before it, which is "
        "more keys than queries.",
    ),
    Member("Wan2.2 14B text to video, each expert", "EmptyHunyuanLatentVideo", "t2v"),
    Member("Wan2.2 14B image to video, each expert", "WanImageToVideo", "i2v_2.2", ("first frame",)),
    Member("Wan2.2 5B text to video", "Wan22ImageToVideoLatent", "ti2v"),
    Member("Wan2.2 5B image to video", "Wan22ImageToVideoLatent", "ti2v", ("first frame kept",)),
    Member(
        "Wan2.2 Fun control",
        "Wan22FunControlToVideo",
        "control_2.2",
        ("control and mask", "reference"),
        (TOKENS + FRAME_TOKENS,),
        note="With the reference's tokens.",
    ),
    Member("Wan2.2 Fun camera", "WanCameraImageToVideo", "camera_2.2", ("first frame", "camera")),
    Member(
        "Wan2.2 S2V",
        "WanSoundImageToVideo",
        "s2v",
        ("speech", "reference", "motion"),
        # The motion before the clip in three resolutions: 64 + 16 + 16 tokens.
        (TOKENS + FRAME_TOKENS + FRAME_TOKENS * 3 // 2,),
        note="With the tokens of the reference and the motion before.",
    ),
    Member("Wan2.2 Animate", "WanAnimateToVideo", "animate", ("picture", "first frame", "pose", "face")),
    Member("WanDancer", "WanDancerVideo", "wandancer", ("picture", "first frame", "music")),
    Member(
        "Reference pictures in models that take one",
        "WanFunControlToVideo and others",
        "reference",
        ("reference",),
        (TOKENS + FRAME_TOKENS,),
        note="With the reference's tokens.",
    ),
    Member(
        "Videos and pictures in the context (Bernini)",
        "BerniniConditioning",
        "t2v",
        ("context",),
        (2 * TOKENS + 5 * 7,),
        note="With the tokens of the context.",
    ),
)


def conditioning(member: Member) -> Values:
    """What the nodes that prepare this kind leave for the model, with random numbers."""
    values: Values = {}
    for name in member.given:
        values |= INPUTS[name]()
    return values


def channels(member: Member) -> int:
    """Channels of its latents."""
    return CHANNELS_5B if member.kind == "ti2v" else LATENT_CHANNELS


# ----------------------------------------------------------------------------------------------------------
# Other nodes


@dataclass(frozen=True)
class Companion:
    """Nodes that may stand before or behind ours. name: in the tests; nodes, effect: in the docs."""

    name: str
    nodes: str
    effect: str = "the same in either order"


COMPANIONS = (
    Companion("lora", "LoRA (*Load LoRA*)"),
    Companion("bypass_lora", "LoRA without changed weights (*Load LoRA (Bypass)*)"),
    Companion("shift", "*ModelSamplingSD3* and other schedules"),
    Companion("merge", "*ModelMergeSimple* and other merging"),
    Companion(
        "easy_cache", "*EasyCache*", "the same in either order; skipped steps have no attention at all"
    ),
    Companion(
        "lazy_cache", "*LazyCache*", "the same in either order; skipped steps have no attention at all"
    ),
    Companion(
        "skip_layer", "*SkipLayerGuidanceDiT*", "the same in either order; its extra pass is sparse too"
    ),
    Companion("skip_layer_simple", "*SkipLayerGuidanceDiTSimple*"),
    Companion("cfg_zero", "*CFGZeroStar* and other guidance on the model's outputs"),
    Companion("nag", "NAG and other patches of cross-attention"),
    Companion("context_windows", "*Wan Context Windows*", "the same in either order; each window by itself"),
    Companion("rope", "*ScaleROPE*"),
    Companion(
        "attention_switch",
        "SageAttention, FlashAttention and other choices of an attention",
        "the same in either order; what stays dense uses the one you chose",
    ),
    Companion("attention_patch", "patches that change the result of self-attention"),
    Companion("block_patch", "patches behind each block (Uni3C, InfiniteTalk)"),
    Companion("wrapped_forward", "nodes that wrap a layer's attention and call what was there"),
)


# ----------------------------------------------------------------------------------------------------------
# The docs


PAGE = """\
# Models and nodes that it works with

Written by `scripts/family.py` from the tables that the tests run, in the real ComfyUI with tiny random
weights: with every block kept, each line gives what dense attention gives; with half of them skipped,
something else.

## Models

| model | prepared by | self-attention | |
|---|---|---|---|
{models}

Wan2.2 14B is two models, one for the first steps and one for the last: each gets a *SpargeAttention2* of its
own, with settings of its own. Attention to text, pictures, sound and faces always stays dense.

## Other nodes

| before or behind *SpargeAttention2* | result |
|---|---|
{companions}

Nodes that compile (*TorchCompileModel* and those that compile blocks) can stand on either side too. A node
behind *SpargeAttention2* that *replaces* the attention of a layer, or the layer, takes it away there: the
console and *Sparsity Report* say so, and for how many layers; put *SpargeAttention2* behind that node.
"""


def page() -> str:
    """docs/models.md."""
    models = []
    for member in FAMILY:
        node = f"`{member.node}`" if member.node.isalnum() else member.node
        how = "sparse" if member.dense is None else f"in part dense: *{member.dense}*"
        models.append(f"| {member.name} | {node} | {how} | {member.note} |")
    companions = [f"| {companion.nodes} | {companion.effect} |" for companion in COMPANIONS]
    return PAGE.format(models="\n".join(models), companions="\n".join(companions))


def main() -> None:
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(page(), encoding="utf-8", newline="\n")
    print(DOCS)


if __name__ == "__main__":
    if len(sys.argv) != 1:
        sys.exit(__doc__)
    main()
