"""Attention of many new tokens over a paged cache: norm, rotation and storing, then attending.

Tokens of all slots lie packed, one behind the other, and tiles say which of them attend together: a launch
depends on how many tokens and tiles there are, not on how long any prompt is. Keys are read block by block
through the slot's table and scores never leave the program, so that a long prompt costs no memory beside its
cache. A program takes some tokens of one tile with all query heads of one key/value head, which fills the
matrix unit where a few heads share a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.core import TILE
from hocket.kernels.attention import _heads, attend_torch, split_heads_torch
from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton


def paged_prefill_torch(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, blocks: Tensor, slot: Tensor, position: Tensor, tile: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """m tokens of any slots against a paged cache; see `hocket.core.PagedKV` and `hocket.core.Places`.

    qkv [m, (heads + 2 kv_heads) * d]; cos, sin [m, 1, d]; kv [2, blocks, block_tokens, kv_heads, d], written
    at the flat rows index int64 [m] (of padding: anything in block 0); blocks int32 [slots, n], the first n
    blocks of every slot, which hold all its tokens; slot, position int32 [m]; tile int32 [tiles, 2]. Each
    token sees all of its slot up to itself. -> [m, heads * d]; where no tile is, finite but meaningless.
    Grouped-query; scale d ** -0.5.
    """
    m, block_tokens, kv_heads = qkv.shape[0], kv.shape[2], kv.shape[3]
    q, k, v = split_heads_torch(qkv, q_norm, k_norm, eps, cos, sin, kv_heads)
    flat = kv.flatten(1, 2)  # [2, rows, kv_heads, d], a view
    flat[0].index_copy_(0, index, k)
    flat[1].index_copy_(0, index, v)
    first, count = tile.long().unbind(1)
    step = torch.arange(TILE, device=qkv.device)
    inside = step < count[:, None]  # [tiles, TILE]
    row = torch.where(inside, first[:, None] + step, m)
    table = blocks[slot[first].long()]  # [tiles, n]
    past = kv[:, table.flatten().long()].unflatten(1, table.shape).flatten(2, 3).transpose(2, 3)
    at = row.clamp(max=m - 1)
    place = torch.where(inside, position[at], 0)
    mask = torch.arange(table.shape[1] * block_tokens, device=qkv.device) <= place[..., None]
    attended = attend_torch(q[at], past[0], past[1], mask[:, None])  # [tiles, TILE, heads, d]
    out = q.new_zeros(m + 1, q.shape[1] * q.shape[2])  # the last row takes what nobody wants
    return out.index_put_((row,), attended.flatten(2))[:m]


def paged_prefill_triton(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, blocks: Tensor, slot: Tensor, position: Tensor, tile: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """`paged_prefill_torch` as a kernel: the same arguments, the same meaning."""
    m, width = qkv.shape
    d, kv_heads = kv.shape[4], kv.shape[3]
    heads = width // d - 2 * kv_heads
    group = heads // kv_heads
    assert qkv.is_contiguous(), "rows are read without strides"
    assert tile.is_contiguous()
    q = qkv.new_empty(m, heads * d)
    _place[(m,)](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, kv, index, q,
        eps, kv.stride(0), HEADS=heads, KV=kv_heads, D=d, Q_ROWS=next_power_of_2(heads),
        K_ROWS=next_power_of_2(kv_heads), NORM=q_norm is not None, num_warps=4, **overlap(qkv),
    )  # fmt: skip
    most = max(1, (128 if d <= 128 else 64) // group)  # tokens a program
    rows = min(TILE, next_power_of_2(most + 1) // 2)  # a power of two, so that it divides a tile
    _prefill[(tile.shape[0] * (TILE // rows), kv_heads)](
        q, kv, blocks, slot, position, tile, d**-0.5 * 1.4426950408889634, kv.stride(0), blocks.stride(0),
        BLOCK=kv.shape[2], HEADS=heads, KV=kv_heads, D=d, GROUP=group,
        ROWS=rows, PARTS=TILE // rows, LINES=max(16, next_power_of_2(rows * group)), TOKENS=64,
        num_warps=8 if rows * group >= 128 else 4, num_stages=2, **overlap(qkv),
    )  # fmt: skip
    return q  # a program puts what it attended to where its queries were


def paged_prefill(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, blocks: Tensor, slot: Tensor, position: Tensor, tile: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """`paged_prefill_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = paged_prefill_triton if use_triton(qkv) else paged_prefill_torch
    return call(qkv, q_norm, k_norm, eps, cos, sin, kv, blocks, slot, position, tile, index)


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _place(
    qkv, q_norm, k_norm, cos, sin, kv, index, q, eps, kv_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, Q_ROWS: tl.constexpr, K_ROWS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: its queries normalised and rotated, its keys and values into the cache."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    base = qkv + row * (HEADS + 2 * KV) * D
    head = tl.arange(0, Q_ROWS)[:, None]
    angle = row * D + head * 0
    x = _heads(base + head * D, q_norm, cos + angle, sin + angle, eps, D, NORM, head < HEADS)
    tl.store(q + row * HEADS * D + head * D + column, x, head < HEADS)
    head = tl.arange(0, K_ROWS)[:, None]
    angle = row * D + head * 0
    at = base + (HEADS + head) * D
    k = _heads(at, k_norm, cos + angle, sin + angle, eps, D, NORM, head < KV)
    v = tl.load(at + KV * D + column, head < KV, 0.0)
    to = kv + (tl.load(index + row) * KV + head) * D + column
    tl.store(to, k, head < KV)
    tl.store(to + kv_stride.to(tl.int64), v, head < KV)


@triton.jit
def _prefill(
    q, kv, blocks, slot, position, tile, scale, kv_stride, blocks_stride,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    which, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    head = tl.program_id(1)
    begins = tl.load(tile + 2 * which)
    count = tl.minimum(tl.load(tile + 2 * which + 1) - part * ROWS, ROWS)  # of this program; perhaps none
    first = begins + part * ROWS
    column = tl.arange(0, D)[None, :]
    member = tl.arange(0, LINES)[:, None]  # query heads of the group, token by token
    token = member // GROUP
    inside = token < count
    at = ((first + token).to(tl.int64) * HEADS + head * GROUP + member % GROUP) * D + column
    x = tl.load(q + at, inside, 0.0)
    type = x.dtype
    start = tl.load(position + begins) + part * ROWS
    place = start + token
    end = tl.where(count > 0, start + count, 0)  # keys that some of them see
    table = blocks + tl.load(slot + begins).to(tl.int64) * blocks_stride
    best = tl.full([LINES, 1], float("-inf"), tl.float32)
    weight = tl.zeros([LINES, 1], tl.float32)
    total = tl.zeros([LINES, D], tl.float32)
    for begin in range(0, end, TOKENS):
        key = begin + tl.arange(0, TOKENS)
        block = tl.load(table + key // BLOCK, key < end, 0)
        k_at = ((block.to(tl.int64) * BLOCK + key % BLOCK) * KV + head) * D
        k = tl.load(kv + k_at[:, None] + column, key[:, None] < end, 0.0)
        v = tl.load(kv + kv_stride.to(tl.int64) + k_at[:, None] + column, key[:, None] < end, 0.0)
        score = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(key[None, :] <= place, score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1)[:, None])
        shrink = tl.exp2(best - peak)
        p = tl.exp2(score - peak)
        weight = weight * shrink + tl.sum(p, 1)[:, None]
        total = total * shrink + tl.dot(p.to(type), v, input_precision="ieee")
        best = peak
    total = total / tl.where(weight == 0, 1.0, weight)
    tl.store(q + at, total.to(type), inside)
