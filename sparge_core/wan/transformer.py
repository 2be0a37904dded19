"""Diffusers' WanTransformer3DModel with sparse self-attention, which can be switched to dense attention.

Text and image cross-attention keep diffusers' processors. The dense attention is torch's, except where our
own kernel is faster at it. Diffusers itself is needed only to load a model.
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
from ..backends import dense_attention
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
        self._processor = _Processor(self._attention)
        blocks: Any = model.blocks
        self._blocks = list(blocks)
        for block in self._blocks:
            block.attn1.set_processor(self._processor)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Dense attention for as long as this is entered."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def compile(self, backend: str) -> None:
        """Let torch compile the model's blocks, each as it is first run; before FSDP2 shards them.

        What is decided anew at each call stays outside of the graphs, and all blocks share them.
        """
        self._processor.attention = torch.compiler.disable(self._attention)
        for block in self._blocks:
            # Not the block as such: FSDP2's hooks are to run around what is compiled.
            block.forward = torch.compile(block.forward, backend=backend)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """From q, k and v, each (B, L, H, D), to (B, L, H * D)."""
        fastest = is_fastest(q.flatten(2), q.shape[2], k.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.active:
            out = self.attend(q, k, v, self.config)
        elif fastest:
            out = attend_densely(q, k, v)
        else:
            out = dense_attention(q, k, v, q.shape[-1] ** -0.5)
        return out.transpose(1, 2).flatten(2)


class _Processor:
    """Self-attention of a layer, as diffusers calls it. attention: between the projections."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.attention = attention

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
        v = attn.to_v(hidden_states).unflatten(-1, (attn.heads, -1))
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(-1, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(hidden_states)).unflatten(-1, (attn.heads, -1))
        if rotary_emb is not None:
            q, k = _rotate(q, *rotary_emb), _rotate(k, *rotary_emb)
        q, k = q.to(v.dtype), k.to(v.dtype)
        out = self.attention(q, k, v)  # called plainly: around it torch's compiler breaks the graph
        projection, dropout = attn.to_out
        return dropout(projection(out))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, L, H, D), each pair of neighbouring values turned; cos, sin (1, L, 1, D) hold each angle twice.

    In fp32, and not by complex numbers, which torch's compiler leaves to eager kernels.
    """
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    ahead = torch.stack((-imaginary, real), -1).flatten(-2)  # by a quarter of a turn
    return torch.addcmul(x * cos, ahead, sin).to(x.dtype)


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
