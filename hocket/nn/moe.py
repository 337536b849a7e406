"""Decoder layers whose MLP is a mixture of experts, with or without a shared one.

Source: Qwen3 technical report (arXiv 2505.09388); numerics of transformers 5.17.0:
models/qwen3_omni_moe/modeling_qwen3_omni_moe.py, Thinker and Talker.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.linear import linear_add, norm_linear
from hocket.kernels.moe import experts, route
from hocket.nn.checkpoint import Reader
from hocket.nn.parallel import WHOLE, Shard
from hocket.nn.transformer import Attend, Shape


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A mixture of e experts, and of `shared` more that every row visits."""

    router: Tensor  # [e, d]; with a shared expert [e + 1, d], its gate last
    gate_up: Tensor  # [e + shared, 2 f, d]  gate rows first
    down: Tensor  # [e + shared, d, f]
    top_k: int
    shared: int
    gate_up_scale: Tensor | None = None  # fp32 [e + shared, 2 f]  where matrices are float8
    down_scale: Tensor | None = None  # fp32 [e + shared, d]


@dataclass(frozen=True, slots=True)
class MoeLayerWeights:
    """Weights of one block; see `hocket.nn.transformer.LayerWeights`."""

    norm_in: Tensor  # [d]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, d]
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    out: Tensor  # [d, heads * head_dim]
    norm_mlp: Tensor  # [d]
    moe: MoeWeights


def moe_layer(w: MoeLayerWeights, s: Shape, x: Tensor, attend: Attend, shard: Shard = WHOLE) -> Tensor:
    """x [m, d], one row a token -> [m, d]; as `hocket.nn.transformer.decoder_layer`. x may be overwritten.

    shard: the part of the layer that w holds; s is of that part. x and the result are whole.
    """
    x = shard.total(linear_add(attend(norm_linear(x, w.norm_in, w.qkv, s.eps)), w.out, shard.once(x)))
    return moe(w.moe, x, w.norm_mlp, s.eps, shard)


def moe(w: MoeWeights, x: Tensor, norm: Tensor, eps: float, shard: Shard = WHOLE) -> Tensor:
    """x + the mixture's output for x, normalised by norm [d] first: x [m, d] -> [m, d]."""
    y, weight, expert = route(x, norm, eps, w.router, w.top_k, w.shared)
    rest = shard.once(x)
    return shard.total(experts(y, weight, expert, w.gate_up, w.down, rest, w.gate_up_scale, w.down_scale))


def in_float8(w: MoeWeights) -> MoeWeights:
    """The same experts in float8_e4m3fn: half the bytes that a step reads.

    Each output channel is scaled so that its largest weight is the format's. The router stays as it is.
    """
    made = []
    for matrix in (w.gate_up, w.down):
        most = torch.finfo(torch.float8_e4m3fn).max
        scale = torch.empty(matrix.shape[:2], dtype=torch.float32, device=matrix.device)
        small = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
        for i, expert in enumerate(matrix):  # one by one: in fp32 all of them would not fit
            wide = expert.float()
            scale[i] = wide.abs().amax(1).clamp(min=1e-12) / most
            small[i] = (wide / scale[i, :, None]).to(torch.float8_e4m3fn)
        made.append((small, scale))
    (gate_up, gate_up_scale), (down, down_scale) = made
    return MoeWeights(w.router, gate_up, down, w.top_k, w.shared, gate_up_scale, down_scale)


def read_layer(
    r: Reader, count: int, top_k: int, *, float8: bool = False, shard: Shard = WHOLE
) -> MoeLayerWeights:
    """One layer of a published Qwen3 mixture with `count` experts, or a part, read from under its prefix.

    Raises StartupError when heads or inner channels do not split.
    """
    norms = {x: r(f"self_attn.{x}_norm.weight") for x in "qk"}
    d = norms["q"].shape[0]

    def heads(x: str) -> Tensor:
        whole = r(f"self_attn.{x}_proj.weight")
        part = shard.part(whole.shape[0] // d, "query heads" if x == "q" else "key/value heads")
        return whole[part.start * d : part.stop * d]

    out = r("self_attn.o_proj.weight")
    columns = shard.part(out.shape[1] // d, "query heads")
    moe = read_experts(r.under("mlp"), count, top_k, shard)
    return MoeLayerWeights(
        norm_in=r("input_layernorm.weight"),
        qkv=torch.cat([heads(x) for x in "qkv"]),
        q_norm=norms["q"],
        k_norm=norms["k"],
        out=out[:, columns.start * d : columns.stop * d].contiguous(),
        norm_mlp=r("post_attention_layernorm.weight"),
        moe=in_float8(moe) if float8 else moe,
    )


def read_experts(r: Reader, count: int, top_k: int, shard: Shard = WHOLE) -> MoeWeights:
    """The experts under `r`, and the shared one if there is one; of each, the part that `shard` says.

    A shared expert of another width than the others becomes as many experts of their width as hold it: the
    sum over its inner channels may be taken in parts, and channels added to fill the last part give zero.
    """
    router = r("gate.weight")
    first = r("experts.0.down_proj.weight")
    d, f = first.shape
    part = shard.part(f, "inner channels of an expert")
    n = part.stop - part.start
    shared, total = 0, 0
    if "shared_expert.down_proj.weight" in r:
        total = r("shared_expert.down_proj.weight").shape[1]
        shared = -(-total // f)
        router = torch.cat([router, r("shared_expert_gate.weight")])
    gate_up, down = first.new_empty(count + shared, 2 * n, d), first.new_empty(count + shared, d, n)
    for i in range(count):  # copied one by one: twice the experts would not fit beside each other
        gate_up[i, :n] = r(f"experts.{i}.gate_proj.weight")[part]
        gate_up[i, n:] = r(f"experts.{i}.up_proj.weight")[part]
        down[i] = r(f"experts.{i}.down_proj.weight")[:, part]
    if shared:
        room = shared * f - total
        for x, rows in (("gate", slice(0, n)), ("up", slice(n, 2 * n))):
            wide = F.pad(r(f"shared_expert.{x}_proj.weight"), (0, 0, 0, room))
            gate_up[count:, rows] = wide.unflatten(0, (-1, f))[:, part]
        wide = F.pad(r("shared_expert.down_proj.weight"), (0, room))
        down[count:] = wide.unflatten(1, (-1, f)).transpose(0, 1)[..., part]
    return MoeWeights(router, gate_up, down, top_k, shared)
