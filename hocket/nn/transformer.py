"""The gated pre-norm transformer block with per-head QK norm and rotary positions.

Used by every stage whose backbone is a Qwen3-type decoder. Attention is passed in, because one
caller attends over a paged cache and another over a scratch of sixteen positions.
Source: Qwen3 technical report (arXiv 2505.09388); numerics of transformers 4.57.3
models/qwen3/modeling_qwen3.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hocket.kernels.linear import linear_add, norm_gated, norm_linear

Attend = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one block."""

    norm_in: Tensor  # [d]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, d]
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    out: Tensor  # [d, heads * head_dim]
    norm_mlp: Tensor  # [d]
    gate_up: Tensor  # [2 f, d]  gate rows first
    down: Tensor  # [d, f]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a block's weights do not say of themselves."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def decoder_layer(w: LayerWeights, s: Shape, x: Tensor, attend: Attend) -> Tensor:
    """x [m, d], one row a token -> [m, d].

    `attend(qkv)` takes [m, (heads + 2 kv_heads) * head_dim] as the projection gives it: it normalises and
    rotates heads, stores keys and values where it keeps them, and gives [m, heads * head_dim].
    """
    x = linear_add(attend(norm_linear(x, w.norm_in, w.qkv, s.eps)), w.out, x)
    return linear_add(norm_gated(x, w.norm_mlp, w.gate_up, s.eps), w.down, x)
