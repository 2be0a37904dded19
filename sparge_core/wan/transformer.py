"""Diffusers' WanTransformer3DModel with sparse self-attention, which can be switched to its own dense one.

Text and image cross-attention keep diffusers' processors, and the dense attention too, except where our own
kernel is faster at it. Diffusers itself is needed only to load a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import sparse_attention
from ..config import SparseConfig
from ..exact import attend as attend_densely
from ..exact import is_fastest
from .keys import SCHEMES

DIFFUSERS = next(scheme for scheme in SCHEMES if scheme.name == "diffusers")  # its parameters' names
CLASS = "WanTransformer3DModel"
# Of a model's config.json: what must be equal for two models to have the same parameters and inputs.
SHAPE_FIELDS = (
    "patch_size",
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "text_dim",
    "freq_dim",
    "ffn_dim",
    "num_layers",
    "cross_attn_norm",
    "image_dim",
    "added_kv_proj_dim",
    "pos_embed_seq_len",
)


class SparseSelfAttention:
    """What the self-attentions of one model share: the settings, and whether they are sparse just now.

    attend: what computes it, from q, k, v and the settings; replaced by who wants to see or reorder them.
    """

    def __init__(self, model: nn.Module, config: SparseConfig) -> None:
        """Put sparse self-attention into `model`, a WanTransformer3DModel; it is on from here on."""
        self.config = config
        self.active = True
        self.attend: Callable[[Tensor, Tensor, Tensor, SparseConfig], Tensor] = sparse_attention
        for block in model.blocks:  # type: ignore[union-attr]
            block.attn1.set_processor(_Processor(self, block.attn1.processor))

    @contextmanager
    def dense(self) -> Iterator[None]:
        """The model's own dense attention for as long as this is entered."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before


class _Processor:
    """Self-attention of one layer. own: the processor that diffusers gave it."""

    def __init__(self, shared: SparseSelfAttention, own: Callable[..., Tensor]) -> None:
        self.shared = shared
        self.own = own

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states (B, L, H * D) to the same shape; rotary_emb: cosines and sines, each (1, L, 1, D).

        The other two are None in self-attention; diffusers passes them all the same.
        """
        active = self.shared.active
        if not active and not is_fastest(hidden_states, attn.heads, hidden_states.shape[1]):
            return self.own(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        v = attn.to_v(hidden_states).unflatten(-1, (attn.heads, -1))
        q, k = (
            norm(project(hidden_states)).unflatten(-1, (attn.heads, -1))
            for norm, project in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
        )
        if rotary_emb is not None:
            cos, sin = (angles[..., 0::2] for angles in rotary_emb)  # each stands twice, for both of its pair
            turn = torch.complex(cos, sin)
            q, k = (_rotate(x, turn) for x in (q, k))
        q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
        out = self.shared.attend(q, k, v, self.shared.config) if active else attend_densely(q, k, v)
        projection, dropout = attn.to_out
        return dropout(projection(out.transpose(1, 2).flatten(2)))


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x (B, L, H, D), each pair of neighbouring values as a complex number, times turn (1, L, 1, D / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def transformer_folder(path: Path) -> Path:
    """The folder of the transformer: `path`, or `path`/transformer of a whole pipeline.

    ValueError with one sentence where there is no WanTransformer3DModel in diffusers' format.
    """
    wanted = f"expected a folder with a {CLASS} in diffusers' format, or a pipeline's folder that holds one"
    for folder in (path, path / "transformer"):
        config = folder / "config.json"
        if not config.is_file():
            continue
        try:
            found = json.loads(config.read_text(encoding="utf-8")).get("_class_name")
        except (ValueError, AttributeError):
            raise ValueError(f"{config} is damaged; {wanted}. Download it again.") from None
        if found == CLASS:
            return folder
        if folder is not path or not (path / "transformer").is_dir():
            raise ValueError(f"{config} describes a {found}; {wanted}.")
    if path.is_file():
        raise ValueError(f"{path} is a file; {wanted}. Files of ComfyUI train in the node Distill Student.")
    raise ValueError(f"{path} has no config.json; {wanted}.")


def read_config(path: Path) -> dict[str, Any]:
    """What decides a model's shape: SHAPE_FIELDS of the config.json at or below `path`."""
    config = json.loads((transformer_folder(path) / "config.json").read_text(encoding="utf-8"))
    return {name: config.get(name) for name in SHAPE_FIELDS}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Where two such descriptions differ, in words; "" where they do not."""
    return ", ".join(
        f"{name} {one.get(name)} against {other.get(name)}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    )


def load_transformer(path: Path, dtype: torch.dtype) -> nn.Module:
    """The transformer at `path` with frozen weights in `dtype`, on the CPU, without reaching for the network.

    Modules that diffusers keeps in fp32 stay so.
    """
    from diffusers import WanTransformer3DModel

    model: nn.Module = WanTransformer3DModel.from_pretrained(
        transformer_folder(path), torch_dtype=dtype, local_files_only=True
    )
    return model.requires_grad_(False)
