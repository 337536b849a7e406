"""The gated pre-norm transformer block with rotary positions, and QK norm per head where a model has it.

Used by every stage whose backbone is a Qwen3-type decoder. Attention is passed in, because one
caller attends over a paged cache and another over a scratch of sixteen positions.
Source: Qwen3 technical report (arXiv 2505.09388); numerics of transformers 4.57.3
models/qwen3/modeling_qwen3.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from hocket.kernels.linear import linear_add, norm_gated, norm_linear
from hocket.kernels.resident import folded
from hocket.nn.checkpoint import Reader

Attend = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights of one block whose heads are not normalised."""

    norm_in: Tensor  # [d]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, d]
    out: Tensor  # [d, heads * head_dim]
    norm_mlp: Tensor | None  # [d]; None: in gate_up, see `fold`
    gate_up: Tensor  # [2 f, d]  gate rows first
    down: Tensor  # [d, f]


@dataclass(frozen=True, slots=True)
class LayerWeights(BlockWeights):
    """Weights of one block."""

    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a block's weights do not say of themselves."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def decoder_layer(w: BlockWeights, s: Shape, x: Tensor, attend: Attend) -> Tensor:
    """x [m, d], one row a token -> [m, d].

    `attend(qkv)` takes [m, (heads + 2 kv_heads) * head_dim] as the projection gives it: it normalises and
    rotates heads, stores keys and values where it keeps them, and gives [m, heads * head_dim].
    """
    x = linear_add(attend(norm_linear(x, w.norm_in, w.qkv, s.eps)), w.out, x)
    return linear_add(norm_gated(x, w.norm_mlp, w.gate_up, s.eps), w.down, x)


def fold(w: LayerWeights) -> LayerWeights:
    """The same with the weight of the norm before the MLP multiplied into its product, rounded once: a launch
    a layer less. Half precision errs no more for it than by rounding normalised rows."""
    if w.norm_mlp is None:
        return w
    return replace(w, norm_mlp=None, gate_up=folded(w.gate_up, w.norm_mlp))


def read_layer(r: Reader) -> LayerWeights:
    """One layer of a published Qwen3 decoder, read from under its prefix."""
    return LayerWeights(
        norm_in=r("input_layernorm.weight"),
        qkv=r.stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=r("self_attn.q_norm.weight"),
        k_norm=r("self_attn.k_norm.weight"),
        out=r("self_attn.o_proj.weight"),
        norm_mlp=r("post_attention_layernorm.weight"),
        gate_up=r.stacked("mlp.gate_proj", "mlp.up_proj"),
        down=r("mlp.down_proj.weight"),
    )
