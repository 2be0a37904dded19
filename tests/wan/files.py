"""Files to try the loading of students with. Names and shapes stand here once more, apart from the code."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def attention(prefix: str, dim: int) -> Shapes:
    linear = {
        f"{prefix}.{name}.{leaf}": (dim,) * axes
        for name in "qkvo"
        for leaf, axes in (("weight", 2), ("bias", 1))
    }
    return {**linear, f"{prefix}.norm_q.weight": (dim,), f"{prefix}.norm_k.weight": (dim,)}


def block(prefix: str, dim: int, ffn: int) -> Shapes:
    return {
        **attention(f"{prefix}.self_attn", dim),
        **attention(f"{prefix}.cross_attn", dim),
        f"{prefix}.norm3.weight": (dim,),
        f"{prefix}.norm3.bias": (dim,),
        f"{prefix}.ffn.0.weight": (ffn, dim),
        f"{prefix}.ffn.0.bias": (ffn,),
        f"{prefix}.ffn.2.weight": (dim, ffn),
        f"{prefix}.ffn.2.bias": (dim,),
        f"{prefix}.modulation": (1, 6, dim),
    }


def wan_model(
    dim: int = 64,
    ffn: int = 128,
    layers: int = 2,
    in_dim: int = 16,
    out_dim: int = 16,
    text: int = 48,
    freq: int = 32,
) -> Shapes:
    """Parameters of a text-to-video model, by Wan's names."""
    shapes: Shapes = {
        "patch_embedding.weight": (dim, in_dim, 1, 2, 2),
        "patch_embedding.bias": (dim,),
        "text_embedding.0.weight": (dim, text),
        "text_embedding.0.bias": (dim,),
        "text_embedding.2.weight": (dim, dim),
        "text_embedding.2.bias": (dim,),
        "time_embedding.0.weight": (dim, freq),
        "time_embedding.0.bias": (dim,),
        "time_embedding.2.weight": (dim, dim),
        "time_embedding.2.bias": (dim,),
        "time_projection.1.weight": (6 * dim, dim),
        "time_projection.1.bias": (6 * dim,),
        "head.head.weight": (4 * out_dim, dim),
        "head.head.bias": (4 * out_dim,),
        "head.modulation": (1, 2, dim),
    }
    for i in range(layers):
        shapes.update(block(f"blocks.{i}", dim, ffn))
    return shapes


def image_model(flf: bool = False, dim: int = 64, clip: int = 24, **kwargs: int) -> Shapes:
    """Parameters of an image-to-video model of Wan2.1, or of a first-last-frame model."""
    shapes = wan_model(dim=dim, in_dim=36, **kwargs)
    for i, (out, into) in {1: (clip, clip), 3: (dim, clip)}.items():
        shapes |= {f"img_emb.proj.{i}.weight": (out, into), f"img_emb.proj.{i}.bias": (out,)}
    for i, width in {0: clip, 4: dim}.items():
        shapes |= {f"img_emb.proj.{i}.weight": (width,), f"img_emb.proj.{i}.bias": (width,)}
    for key in [key for key in shapes if key.endswith(".self_attn.q.bias")]:
        cross = key.replace("self_attn.q.bias", "cross_attn")
        shapes |= {f"{cross}.{name}_img.weight": (dim, dim) for name in "kv"}
        shapes |= {f"{cross}.{name}_img.bias": (dim,) for name in "kv"}
        shapes[f"{cross}.norm_k_img.weight"] = (dim,)
    return shapes | ({"img_emb.emb_pos": (1, 514, clip)} if flf else {})


def vace_model(dim: int = 64, ffn: int = 128) -> Shapes:
    """Parameters of a VACE model with one control block."""
    linear = {f"vace_blocks.0.{name}_proj": (dim, dim) for name in ("before", "after")}
    return {
        **wan_model(dim=dim, ffn=ffn),
        **block("vace_blocks.0", dim, ffn),
        **{f"{name}.weight": shape for name, shape in linear.items()},
        **{f"{name}.bias": shape[:1] for name, shape in linear.items()},
        "vace_patch_embedding.weight": (dim, 96, 1, 2, 2),
        "vace_patch_embedding.bias": (dim,),
    }


# In this order, as diffusers' own conversion does it.
TO_DIFFUSERS = (
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("head.modulation", "scale_shift_table"),
    ("head.head", "proj_out"),
    ("modulation", "scale_shift_table"),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
    ("norm3", "norm2"),
    ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
    ("self_attn", "attn1"),
    ("cross_attn.norm_k_img", "attn2.norm_added_k"),
    ("cross_attn.k_img", "attn2.add_k_proj"),
    ("cross_attn.v_img", "attn2.add_v_proj"),
    ("cross_attn", "attn2"),
    (".q.", ".to_q."),
    (".k.", ".to_k."),
    (".v.", ".to_v."),
    (".o.", ".to_out.0."),
    ("before_proj", "proj_in"),
    ("after_proj", "proj_out"),
)


def diffusers_name(name: str) -> str:
    for wan, diffusers in TO_DIFFUSERS:
        name = name.replace(wan, diffusers)
    return name


def low_rank(modules: Mapping[str, tuple[int, int]], up: str, down: str, rank: int = 4) -> Shapes:
    """Pairs for modules of (outputs, inputs) under the endings `up` and `down`."""
    pairs = {f"{module}{up}": (out, rank) for module, (out, _) in modules.items()}
    return {**pairs, **{f"{module}{down}": (rank, into) for module, (_, into) in modules.items()}}


def random_tensors(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(tuple(shape), generator=generator).to(dtype) for key, shape in shapes.items()}


def write(
    path: Path,
    content: Mapping[str, Tensor | Sequence[int]],
    metadata: dict[str, str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """A safetensors file of the tensors in `content`, and of random ones for the shapes in it."""
    shapes = {key: value for key, value in content.items() if not isinstance(value, Tensor)}
    given = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    save_file({**random_tensors(shapes, dtype), **given}, path, metadata)
    return path


def write_hollow(path: Path, shapes: Mapping[str, Sequence[int]], dtype: str, item_size: int) -> Path:
    """A safetensors file whose tensors, all zero, take no room on the disk."""
    header, at = {}, 0
    for key, shape in shapes.items():
        end = at + math.prod(shape) * item_size
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path
