"""Decode attention: per-head norm, rotation, storing the new key and value, and attending, in one kernel.

One program takes one key/value head of one row with the query heads that share it. The token of this step
is taken from registers, so nothing waits for it to be stored. Rows end where their own position says:
neither the launch nor its shape depends on how long contexts are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.norm import rms_norm_torch

_TOKENS = 64  # of a row's past a program takes at a time
_MULTIPROCESSORS = 132  # programs wanted; with fewer (row, head) pairs a row's past is split


def rotate_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, head_dim] by tables that broadcast as [..., 1, head_dim]; the dtype of x."""
    low, high = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-high, low], dim=-1) * sin.to(x.dtype)


def split_heads_torch(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [..., (heads + 2 kv_heads) * head_dim] -> q [..., heads, head_dim], k, v [..., kv_heads, head_dim],
    q and k normalised and rotated by cos, sin [..., 1, head_dim]."""
    qkv = qkv.unflatten(-1, (-1, cos.shape[-1]))
    q, k, v = qkv.split((qkv.shape[-2] - 2 * kv_heads, kv_heads, kv_heads), dim=-2)
    q = rotate_torch(rms_norm_torch(q, q_norm, eps), cos, sin)
    k = rotate_torch(rms_norm_torch(k, k_norm, eps), cos, sin)
    return q, k, v


def attend_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [b, n, heads, d], k v [b, kv_heads, m, d], mask bool broadcastable to [b, 1, n, m] -> as q."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=q.shape[2] != k.shape[1]
    )
    return out.transpose(1, 2)


# --- the cache in blocks -----------------------------------------------------------------------


def paged_decode_torch(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, blocks: Tensor, slots: Tensor, position: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """One token a row against a paged cache; see `hocket.core.PagedKV`.

    qkv [b, (heads + 2 kv_heads) * d]; cos, sin [b, d]; kv [2, blocks, block_tokens, kv_heads, d], written at
    the flat rows index int64 [b]; blocks int32 [slots, m], the first m blocks of every slot; slots int64 [b];
    position int32 [b], the token's own. -> [b, heads * d]. Grouped-query; scale d ** -0.5; softmax in fp32.
    """
    table = blocks[slots]
    b, m = table.shape
    block_tokens, kv_heads = kv.shape[2], kv.shape[3]
    q, k, v = split_heads_torch(qkv, q_norm, k_norm, eps, cos[:, None], sin[:, None], kv_heads)
    flat = kv.flatten(1, 2)  # [2, rows, kv_heads, d], a view
    flat[0].index_copy_(0, index, k)
    flat[1].index_copy_(0, index, v)
    past = kv[:, table.flatten().long()].unflatten(1, (b, m)).flatten(2, 3).transpose(2, 3)
    mask = torch.arange(m * block_tokens, device=qkv.device) <= position[:, None]
    return attend_torch(q[:, None], past[0], past[1], mask[:, None, None]).flatten(1)


def paged_decode_triton(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, blocks: Tensor, slots: Tensor, position: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """`paged_decode_torch` as a kernel: the same arguments, the same meaning."""
    b, d = cos.shape
    kv_heads = kv.shape[3]
    heads = qkv.shape[1] // d - 2 * kv_heads
    group = heads // kv_heads
    splits = max(1, min(16, next_power_of_2(_MULTIPROCESSORS // (b * kv_heads))))
    out = qkv.new_empty(b, heads * d)
    part = out
    if splits > 1:
        part = torch.empty((b, kv_heads, splits, group, d + 2), dtype=torch.float32, device=qkv.device)
    _paged_decode[(b, kv_heads, splits)](
        qkv, q_norm, k_norm, cos, sin, kv, blocks, slots, position, index, out, part,
        eps, d**-0.5, kv.stride(0), blocks.stride(0), kv.shape[2],
        HEADS=heads, KV=kv_heads, D=d, GROUP=group, TOKENS=_TOKENS if splits == 1 else 32, SPLITS=splits,
        num_warps=4, num_stages=3, **overlap(qkv),
    )  # fmt: skip
    if splits > 1:
        _combine[(b, heads)](
            part, out, KV=kv_heads, D=d, GROUP=group, SPLITS=splits, num_warps=1, **overlap(qkv)
        )
    return out


def paged_decode(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, blocks: Tensor, slots: Tensor, position: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """`paged_decode_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = paged_decode_triton if use_triton(qkv) else paged_decode_torch
    return call(qkv, q_norm, k_norm, eps, cos, sin, kv, blocks, slots, position, index)


# --- a short scratch ---------------------------------------------------------------------------


def scratch_decode_torch(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    scratch: Tensor,
    start: int,
) -> Tensor:
    """n tokens a row against a scratch that all rows have filled equally far.

    qkv [b, n, (heads + 2 kv_heads) * d]; cos, sin [t, d], the tables of all positions; scratch
    [2, b, kv_heads, t, d], filled up to `start`, is written at start … start + n. Token i sees all up to
    itself. -> [b, n, heads * d]
    """
    n = qkv.shape[1]
    stop = start + n
    q, k, v = split_heads_torch(
        qkv, q_norm, k_norm, eps, cos[start:stop, None], sin[start:stop, None], scratch.shape[2]
    )
    scratch[0, :, :, start:stop] = k.transpose(1, 2)
    scratch[1, :, :, start:stop] = v.transpose(1, 2)
    mask = None
    if n > 1:
        mask = torch.ones(n, stop, dtype=torch.bool, device=qkv.device).tril(start)
    return attend_torch(q, scratch[0, :, :, :stop], scratch[1, :, :, :stop], mask).flatten(2)


def scratch_decode_triton(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    scratch: Tensor,
    start: int,
) -> Tensor:
    """`scratch_decode_torch` as a kernel: the same arguments, the same meaning."""
    _, b, kv_heads, tokens, d = scratch.shape
    n = qkv.shape[1]
    heads = qkv.shape[2] // d - 2 * kv_heads
    assert n * heads // kv_heads <= 16, "query rows of one program"
    out = qkv.new_empty(b, n, heads * d)
    _scratch_decode[(b, kv_heads)](
        qkv, q_norm, k_norm, cos, sin, scratch, out, start, tokens, eps, d**-0.5, scratch.stride(0),
        HEADS=heads, KV=kv_heads, D=d, GROUP=heads // kv_heads, N=n, TOKENS=max(16, next_power_of_2(tokens)),
        num_warps=2, **overlap(qkv),
    )  # fmt: skip
    return out


def scratch_decode(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    scratch: Tensor,
    start: int,
) -> Tensor:
    """`scratch_decode_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = scratch_decode_triton if use_triton(qkv) else scratch_decode_torch
    return call(qkv, q_norm, k_norm, eps, cos, sin, scratch, start)


# --- kernels -----------------------------------------------------------------------------------


@triton.jit
def _heads(at, norm, cos_at, sin_at, eps, D: tl.constexpr, mask):
    """Normalise and rotate heads that start at the pointers at [r, 1]; cos_at, sin_at [r, 1] -> [r, D].

    Every product is rounded to the model's dtype, as the twin's are.
    """
    column = tl.arange(0, D)[None, :]
    other = (column + D // 2) % D
    type = norm.dtype.element_ty
    x = tl.load(at + column, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    y = tl.load(at + other, mask, 0.0).to(tl.float32)
    x = (tl.load(norm + column).to(tl.float32) * (x * scale).to(type).to(tl.float32)).to(type).to(tl.float32)
    y = (tl.load(norm + other).to(tl.float32) * (y * scale).to(type).to(tl.float32)).to(type).to(tl.float32)
    y = tl.where(column < D // 2, -y, y)
    cos = tl.load(cos_at + column, mask, 0.0).to(tl.float32)
    sin = tl.load(sin_at + column, mask, 0.0).to(tl.float32)
    return ((x * cos).to(type).to(tl.float32) + (y * sin).to(type).to(tl.float32)).to(type)


@triton.jit
def _paged_decode(
    qkv, q_norm, k_norm, cos, sin, kv, blocks, slots, position, index, out, part,
    eps, scale, kv_stride, blocks_stride, block_tokens,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, D)
    one = tl.arange(0, 1)[:, None]
    member = tl.arange(0, 16)[:, None]  # query heads of the group, padded to a tile of the matrix unit
    base = qkv + row.to(tl.int64) * (HEADS + 2 * KV) * D
    type = kv.dtype.element_ty
    k_now = _heads(
        base + (HEADS + head) * D + one, k_norm, cos + row * D + one, sin + row * D + one, eps, D, one < 1
    )
    v_now = tl.load(base + (HEADS + KV + head) * D + column)[None, :]
    if split == 0:
        at = (tl.load(index + row) * KV + head) * D
        tl.store(kv + at + column[None, :], k_now)
        tl.store(kv + kv_stride.to(tl.int64) + at + column[None, :], v_now)
    table_at = member * 0 + row * D
    q = _heads(
        base + (head * GROUP + member) * D, q_norm, cos + table_at, sin + table_at, eps, D, member < GROUP
    )

    past = tl.load(position + row)
    table = blocks + tl.load(slots + row) * blocks_stride
    whole = past + 1
    share = tl.cdiv(tl.cdiv(whole, SPLITS), TOKENS) * TOKENS
    begin = split * share
    end = tl.minimum(begin + share, whole)
    best = tl.full([16], float("-inf"), tl.float32)
    weight = tl.zeros([16], tl.float32)
    total = tl.zeros([16, D], tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        block = tl.load(table + token // block_tokens, token < past, 0)
        at = ((block.to(tl.int64) * block_tokens + token % block_tokens) * KV + head) * D
        k = tl.load(kv + at[:, None] + column[None, :], token[:, None] < past, 0.0)
        v = tl.load(kv + kv_stride.to(tl.int64) + at[:, None] + column[None, :], token[:, None] < past, 0.0)
        k = tl.where(token[:, None] == past, k_now, k)
        v = tl.where(token[:, None] == past, v_now, v)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(token[None, :] < end, score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp(best - peak)
        p = tl.exp(score - peak[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(type), v, input_precision="ieee")
        best = peak
    inside = member < GROUP
    if SPLITS == 1:
        at = out + row.to(tl.int64) * HEADS * D + (head * GROUP + member) * D + column[None, :]
        tl.store(at, (total / weight[:, None]).to(type), inside)
    else:
        at = part + (((row.to(tl.int64) * KV + head) * SPLITS + split) * GROUP + member) * (D + 2)
        tl.store(at + column[None, :], total, inside)
        tl.store(at + D, best[:, None], inside)
        tl.store(at + D + 1, weight[:, None], inside)


@triton.jit
def _combine(
    part, out, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, D)
    at = part + (((row * KV + head // GROUP) * SPLITS + split) * GROUP + head % GROUP) * (D + 2)
    best = tl.load(at + D)
    shrink = tl.exp(best - tl.max(best, 0))  # 0 for a split that had no token
    weight = tl.sum(tl.load(at + D + 1) * shrink, 0)
    total = tl.sum(tl.load(at[:, None] + column[None, :]) * shrink[:, None], 0)
    tl.store(out + (row * KV * GROUP + head) * D + column, (total / weight).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["start"])
def _scratch_decode(
    qkv, q_norm, k_norm, cos, sin, scratch, out, start, tokens, eps, scale, v_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, D)[None, :]
    one = tl.arange(0, 1)[:, None]
    token = tl.arange(0, TOKENS)[:, None]
    type = scratch.dtype.element_ty
    base = qkv + row * N * (HEADS + 2 * KV) * D
    at = scratch + (row * KV + head) * tokens * D
    k = tl.load(at + token * D + column, token < start, 0.0)
    v = tl.load(at + v_stride.to(tl.int64) + token * D + column, token < start, 0.0)
    for i in tl.static_range(N):
        mine = base + i * (HEADS + 2 * KV) * D
        table = (start + i) * D + one
        k_now = _heads(mine + (HEADS + head) * D + one, k_norm, cos + table, sin + table, eps, D, one < 1)
        v_now = tl.load(mine + (HEADS + KV + head) * D + column)
        tl.store(at + (start + i) * D + column, k_now)
        tl.store(at + v_stride.to(tl.int64) + (start + i) * D + column, v_now)
        k = tl.where(token == start + i, k_now, k)
        v = tl.where(token == start + i, v_now, v)
    member = tl.arange(0, 16)[:, None]  # query heads of the group, token by token
    i = member // GROUP
    inside = i < N
    q_at = base + i * (HEADS + 2 * KV) * D + (head * GROUP + member % GROUP) * D
    q = _heads(q_at, q_norm, cos + (start + i) * D, sin + (start + i) * D, eps, D, inside)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [16, TOKENS]
    score = tl.where(tl.arange(0, TOKENS)[None, :] <= start + i, score, float("-inf"))
    p = tl.exp(score - tl.max(score, 1)[:, None])
    total = tl.dot(p.to(type), v, input_precision="ieee") / tl.sum(p, 1)[:, None]
    out_at = out + ((row * N + i) * HEADS + head * GROUP + member % GROUP) * D + column
    tl.store(out_at, total.to(type), inside)
