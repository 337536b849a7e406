"""Attention of many new tokens a row over a paged cache: norm, rotation and storing, then attending.

Keys are read block by block through the row's table and scores never leave the program, so that a long prompt
costs no memory beside its cache. A program takes some tokens of one row with all query heads of one key/value
head, which makes the tile of the matrix unit full where a few heads share a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.attention import _heads, attend_torch, split_heads_torch
from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton


def paged_prefill_torch(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, table: Tensor, position: Tensor, count: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """n tokens a row against a paged cache; see `hocket.core.PagedKV`.

    qkv [b, n, (heads + 2 kv_heads) * d], of which count int64 [b] tokens a row are valid; cos, sin
    [b, n, 1, d]; kv [2, blocks, block_tokens, kv_heads, d], written at the flat rows index int64 [b, n] (of
    tokens that are not valid: anything in block 0); table int32 [b, m], the first m blocks of each row, which
    hold all its tokens; position int32 [b], of the first token. Each sees all up to itself.
    -> [b, n, heads * d], finite but meaningless where not valid. Grouped-query; scale d ** -0.5.
    """
    b, m = table.shape
    n, block_tokens, kv_heads = qkv.shape[1], kv.shape[2], kv.shape[3]
    q, k, v = split_heads_torch(qkv, q_norm, k_norm, eps, cos, sin, kv_heads)
    flat = kv.flatten(1, 2)  # [2, rows, kv_heads, d], a view
    flat[0].index_copy_(0, index.flatten(), k.flatten(0, 1))
    flat[1].index_copy_(0, index.flatten(), v.flatten(0, 1))
    past = kv[:, table.flatten().long()].unflatten(1, (b, m)).flatten(2, 3).transpose(2, 3)
    step = torch.arange(n, device=qkv.device)
    place = torch.where(step < count[:, None], position[:, None] + step, 0)  # [b, n]
    mask = torch.arange(m * block_tokens, device=qkv.device) <= place[..., None]
    return attend_torch(q, past[0], past[1], mask[:, None]).flatten(2)


def paged_prefill_triton(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, table: Tensor, position: Tensor, count: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """`paged_prefill_torch` as a kernel: the same arguments, the same meaning."""
    b, n, width = qkv.shape
    d, kv_heads = kv.shape[4], kv.shape[3]
    heads = width // d - 2 * kv_heads
    group = heads // kv_heads
    assert qkv.is_contiguous(), "rows are read without strides"
    q, out = qkv.new_empty(b * n, heads * d), qkv.new_empty(b, n, heads * d)
    _place[(b * n,)](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, kv, index, q,
        eps, kv.stride(0), HEADS=heads, KV=kv_heads, D=d, Q_ROWS=next_power_of_2(heads),
        K_ROWS=next_power_of_2(kv_heads), NORM=q_norm is not None, num_warps=4, **overlap(qkv),
    )  # fmt: skip
    rows = max(1, (128 if d <= 128 else 64) // group)  # tokens a program
    rows = min(rows, max(-(-16 // group), next_power_of_2(n)))
    _prefill[(-(-n // rows), b * kv_heads)](
        q, kv, table, position, count, out, n, d**-0.5 * 1.4426950408889634, kv.stride(0), table.stride(0),
        BLOCK=kv.shape[2], HEADS=heads, KV=kv_heads, D=d, GROUP=group,
        ROWS=rows, TILE=max(16, next_power_of_2(rows * group)), TOKENS=64,
        num_warps=8 if rows * group >= 128 else 4, num_stages=2, **overlap(qkv),
    )  # fmt: skip
    return out


def paged_prefill(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, table: Tensor, position: Tensor, count: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """`paged_prefill_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = paged_prefill_triton if use_triton(qkv) else paged_prefill_torch
    return call(qkv, q_norm, k_norm, eps, cos, sin, kv, table, position, count, index)


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


@triton.jit(do_not_specialize=["n"])
def _prefill(
    q, kv, table, position, count, out, n, scale, kv_stride, table_stride,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The last tokens of a row see most: they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    row, head = tl.program_id(1) // KV, tl.program_id(1) % KV
    column = tl.arange(0, D)[None, :]
    member = tl.arange(0, TILE)[:, None]  # query heads of the group, token by token
    token = first + member // GROUP
    valid = tl.load(count + row).to(tl.int32)
    inside = (member < ROWS * GROUP) & (token < n)
    at = ((row * n + token).to(tl.int64) * HEADS + head * GROUP + member % GROUP) * D + column
    x = tl.load(q + at, inside & (token < valid), 0.0)
    type = x.dtype
    start = tl.load(position + row).to(tl.int32)
    place = start + token
    end = tl.where(first < valid, start + tl.minimum(first + ROWS, valid), 0)  # keys that some of them see
    blocks = table + row.to(tl.int64) * table_stride
    best = tl.full([TILE, 1], float("-inf"), tl.float32)
    weight = tl.zeros([TILE, 1], tl.float32)
    total = tl.zeros([TILE, D], tl.float32)
    for begin in range(0, end, TOKENS):
        key = begin + tl.arange(0, TOKENS)
        block = tl.load(blocks + key // BLOCK, key < end, 0)
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
    tl.store(out + at, total.to(type), inside)
