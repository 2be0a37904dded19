"""SpargeAttention2 without ComfyUI: hybrid Top-k and Top-p block-sparse attention (arXiv 2602.13515).

>>> config = SparseConfig(top_k=0.03, top_p=0.2)
>>> out = sparse_attention(q, k, v, config)    # q, k, v: (B, H, L, D)
>>> mask = block_mask(q, k, config)            # mask.sparsity, mask.dense()
"""

from .attention import Choice, block_mask, choose, sparse_attention
from .config import DensePolicy, SparseConfig, parse_layers
from .geometry import BLOCK_K, BLOCK_Q
from .mask import BlockMask

__all__ = [
    "BLOCK_K",
    "BLOCK_Q",
    "BlockMask",
    "Choice",
    "DensePolicy",
    "SparseConfig",
    "block_mask",
    "choose",
    "parse_layers",
    "sparse_attention",
]
