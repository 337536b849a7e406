"""Attention of a few tokens: per-head norm, rotation, storing keys and values, and attending, in one kernel.

One program takes one key/value head of one row with the query heads that share it. In decode the token of
this step is taken from registers, so nothing waits for it to be stored, and rows end where their own position
says: neither the launch nor its shape depends on how long contexts are.

Where a model has no per-head norm, `q_norm` and `k_norm` are None. Rotation rounds as its tables do: tables
in fp32 rotate in fp32, tables in the model's dtype round every product to it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.norm import rms_norm_torch, unit_scale

_PLANS = ((32, (16, 16, 1, 2)), (128, (4, 64, 4, 1)), (256, (2, 64, 4, 2)), (1023, (1, 64, 4, 2)))
_MANY = (1, 32, 1, 4)  # pairs enough to fill the machine many times over


def rotate_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, head_dim] by tables that broadcast as [..., 1, head_dim]; the dtype of x.

    Computed in the dtype of the tables.
    """
    low, high = x.chunk(2, dim=-1)
    return (x.to(cos.dtype) * cos + torch.cat([-high, low], dim=-1).to(sin.dtype) * sin).to(x.dtype)


def split_heads_torch(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [..., (heads + 2 kv_heads) * head_dim] -> q [..., heads, head_dim], k, v [..., kv_heads, head_dim],
    q and k normalised and rotated by cos, sin [..., 1, head_dim]."""
    qkv = qkv.unflatten(-1, (-1, cos.shape[-1]))
    q, k, v = qkv.split((qkv.shape[-2] - 2 * kv_heads, kv_heads, kv_heads), dim=-2)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_torch(q, q_norm, eps), rms_norm_torch(k, k_norm, eps)
    return rotate_torch(q, cos, sin), rotate_torch(k, cos, sin), v


def attend_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [b, n, heads, d], k v [b, kv_heads, m, d], mask bool broadcastable to [b, 1, n, m] -> as q."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=q.shape[2] != k.shape[1]
    )
    return out.transpose(1, 2)


# --- the cache in blocks -----------------------------------------------------------------------


def paged_decode_torch(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
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
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    kv: Tensor, blocks: Tensor, slots: Tensor, position: Tensor, index: Tensor,
) -> Tensor:  # fmt: skip
    """`paged_decode_torch` as a kernel: the same arguments, the same meaning."""
    b, d = cos.shape
    kv_heads = kv.shape[3]
    heads = qkv.shape[1] // d - 2 * kv_heads
    group = heads // kv_heads
    splits, tokens, warps, stages = plan(b * kv_heads)
    out = qkv.new_empty(b, heads * d)
    part = out
    if splits > 1:
        part = torch.empty((b, kv_heads, splits, group, d + 2), dtype=torch.float32, device=qkv.device)
    _paged_decode[(b, kv_heads, splits)](
        qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin,
        kv, blocks, slots, position, index, out, part,
        eps, d**-0.5, kv.stride(0), blocks.stride(0), BLOCK=kv.shape[2],
        HEADS=heads, KV=kv_heads, D=d, GROUP=group, TOKENS=tokens, SPLITS=splits,
        NORM=q_norm is not None, num_warps=warps, num_stages=stages, **overlap(qkv),
    )  # fmt: skip
    if splits > 1:
        _combine[(b, heads)](
            part, out, KV=kv_heads, D=d, GROUP=group, SPLITS=splits, num_warps=1, **overlap(qkv)
        )
    return out


def plan(pairs: int) -> tuple[int, int, int, int]:
    """Splits of a row's past, tokens a program takes at a time, warps, stages, for so many (row, head) pairs.

    Of the batch alone, so that a graph holds for every context. Measured on an H200 at contexts of 200 and
    1,000 (benches/gpu/attention.py).
    """
    for most, cut in _PLANS:
        if pairs <= most:
            return cut
    return _MANY


def paged_decode(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
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


# --- short sequences, whole ----------------------------------------------------------------------


def whole_attention_torch(
    q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, first: int, x: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Attention of short sequences in which every token sees every other.

    q [s, m, heads * d], of the tokens from `first` on; kv [s, n, 2 kv_heads * d], keys before values, of all;
    both may be parts of one tensor. cos, sin [n, d], of equal halves. No per-head norm; grouped-query; scale
    d ** -0.5. x [s, n, width]: q and kv were made of these rows, which are still to be scaled to unit root
    mean square. -> [s, m, heads * d]
    """
    d, m = cos.shape[1], q.shape[1]
    if x is not None:
        scale = unit_scale(x, eps)
        q, kv = (q * scale[:, first : first + m]).to(q.dtype), (kv * scale).to(kv.dtype)
    k, v = kv.unflatten(-1, (-1, d)).chunk(2, dim=-2)
    q = rotate_torch(q.unflatten(-1, (-1, d)), cos[first : first + m, None], sin[first : first + m, None])
    k = rotate_torch(k, cos[:, None], sin[:, None])
    return attend_torch(q, k.transpose(1, 2), v.transpose(1, 2), None).flatten(2)


def whole_attention_triton(
    q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, first: int, x: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """`whole_attention_torch` as a kernel: the same arguments, the same meaning."""
    (s, m, width), n, d = q.shape, kv.shape[1], cos.shape[1]
    heads, kv_heads = width // d, kv.shape[2] // d // 2
    group = heads // kv_heads
    assert q.stride(2) == kv.stride(2) == 1, "a token's heads are read without strides"
    assert x is None or x.is_contiguous(), "rows are read without strides"
    out = q.new_empty(s, m, width)
    rows = min(32, max(16, next_power_of_2(m * group)))
    _whole_attention[(s, kv_heads, -(-m * group // rows))](
        q, kv, cos, sin, q if x is None else x, out, m, n, first, 1 if x is None else x.shape[2], eps,
        d**-0.5, q.stride(0), q.stride(1), kv.stride(0), kv.stride(1),
        HEADS=heads, KV=kv_heads, D=d, GROUP=group, ROWS=rows, KEYS=max(16, next_power_of_2(n)),
        NORM=x is not None, num_warps=2, **overlap(q),
    )  # fmt: skip
    return out


def whole_attention(
    q: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, first: int, x: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """`whole_attention_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = whole_attention_triton if use_triton(q) else whole_attention_torch
    return call(q, kv, cos, sin, first, x, eps)


# --- kernels -----------------------------------------------------------------------------------


@triton.jit
def _heads(at, norm, cos_at, sin_at, eps, D: tl.constexpr, NORM: tl.constexpr, mask):
    """Normalise and rotate heads that start at the pointers at [r, 1]; cos_at, sin_at [r, 1] -> [r, D].

    Products are rounded as the twin's are: of the norm to the model's dtype, of the rotation to its tables'.
    """
    column = tl.arange(0, D)[None, :]
    other = (column + D // 2) % D
    type = norm.dtype.element_ty
    fine = cos_at.dtype.element_ty
    x = tl.load(at + column, mask, 0.0).to(tl.float32)
    y = tl.load(at + other, mask, 0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = tl.load(norm + column).to(tl.float32) * (x * scale).to(type).to(tl.float32)
        y = tl.load(norm + other).to(tl.float32) * (y * scale).to(type).to(tl.float32)
        x, y = x.to(type).to(tl.float32), y.to(type).to(tl.float32)
    y = tl.where(column < D // 2, -y, y)
    cos = tl.load(cos_at + column, mask, 0.0).to(tl.float32)
    sin = tl.load(sin_at + column, mask, 0.0).to(tl.float32)
    return ((x * cos).to(fine).to(tl.float32) + (y * sin).to(fine).to(tl.float32)).to(type)


@triton.jit
def _paged_decode(
    qkv, q_norm, k_norm, cos, sin, kv, blocks, slots, position, index, out, part,
    eps, scale, kv_stride, blocks_stride,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
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
        base + (HEADS + head) * D + one,
        k_norm,
        cos + row * D + one,
        sin + row * D + one,
        eps,
        D,
        NORM,
        one < 1,
    )
    v_now = tl.load(base + (HEADS + KV + head) * D + column)[None, :]
    if split == 0:
        at = (tl.load(index + row) * KV + head) * D
        tl.store(kv + at + column[None, :], k_now)
        tl.store(kv + kv_stride.to(tl.int64) + at + column[None, :], v_now)
    table_at = member * 0 + row * D
    q = _heads(
        base + (head * GROUP + member) * D,
        q_norm,
        cos + table_at,
        sin + table_at,
        eps,
        D,
        NORM,
        member < GROUP,
    )

    past = tl.load(position + row)
    table = blocks + tl.load(slots + row) * blocks_stride
    share = tl.cdiv(tl.cdiv(past, SPLITS), TOKENS) * TOKENS
    begin = split * share
    end = tl.minimum(begin + share, past)
    best = tl.full([16], float("-inf"), tl.float32)
    weight = tl.zeros([16], tl.float32)
    total = tl.zeros([16, D], tl.float32)
    if split == 0:  # the token of this step: keys and values of the loop then come from memory as they are
        best = tl.sum(q.to(tl.float32) * k_now.to(tl.float32), 1) * scale
        weight = tl.full([16], 1.0, tl.float32)
        total += v_now.to(tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        there = token < end
        block = tl.load(table + token // BLOCK, there, 0)
        at = ((block.to(tl.int64) * BLOCK + token % BLOCK) * KV + head) * D
        k = tl.load(kv + at[:, None] + column[None, :], there[:, None], 0.0)
        v = tl.load(kv + kv_stride.to(tl.int64) + at[:, None] + column[None, :], there[:, None], 0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(there[None, :], score, float("-inf"))
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
        k_now = _heads(
            mine + (HEADS + head) * D + one, k_norm, cos + table, sin + table, eps, D, True, one < 1
        )
        v_now = tl.load(mine + (HEADS + KV + head) * D + column)
        tl.store(at + (start + i) * D + column, k_now)
        tl.store(at + v_stride.to(tl.int64) + (start + i) * D + column, v_now)
        k = tl.where(token == start + i, k_now, k)
        v = tl.where(token == start + i, v_now, v)
    member = tl.arange(0, 16)[:, None]  # query heads of the group, token by token
    i = member // GROUP
    inside = i < N
    q_at = base + i * (HEADS + 2 * KV) * D + (head * GROUP + member % GROUP) * D
    q = _heads(q_at, q_norm, cos + (start + i) * D, sin + (start + i) * D, eps, D, True, inside)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [16, TOKENS]
    score = tl.where(tl.arange(0, TOKENS)[None, :] <= start + i, score, float("-inf"))
    p = tl.exp(score - tl.max(score, 1)[:, None])
    total = tl.dot(p.to(type), v, input_precision="ieee") / tl.sum(p, 1)[:, None]
    out_at = out + ((row * N + i) * HEADS + head * GROUP + member % GROUP) * D + column
    tl.store(out_at, total.to(type), inside)


@triton.jit
def _whole_attention(
    q, kv, cos, sin, x, out, m, n, first, width, eps, scale, q_sequence, q_token, kv_sequence, kv_token,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    type = out.dtype.element_ty
    column = tl.arange(0, D)[None, :]
    key = tl.arange(0, KEYS)[:, None]
    keys_at = kv + sequence * kv_sequence + key * kv_token + head * D
    v = tl.load(keys_at + KV * D + column, key < n, 0.0)
    member = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]  # query heads of the group, token by token
    token = member // GROUP
    inside = token < m
    place = (head * GROUP + member % GROUP) * D
    table = (first + token) * D
    at = q + sequence * q_sequence + token * q_token + place
    if D >= 32:
        low, high = _halves(at, cos + table, sin + table, D, inside, type)
        k_low, k_high = _halves(keys_at, cos + key * D, sin + key * D, D, key < n, type)
        score = tl.dot(low, tl.trans(k_low), input_precision="ieee")
        score = tl.dot(high, tl.trans(k_high), score, input_precision="ieee") * scale  # [ROWS, KEYS]
    else:  # a half is smaller than a tile of the matrix unit
        rows = _heads(at, q, cos + table, sin + table, 0.0, D, False, inside)
        k = _heads(keys_at, kv, cos + key * D, sin + key * D, 0.0, D, False, key < n)
        score = tl.dot(rows, tl.trans(k), input_precision="ieee") * scale
    keys = tl.arange(0, KEYS)[None, :]
    norm = tl.full([1, KEYS], 1.0, tl.float32)
    if NORM:  # what a row is scaled by may follow its products
        squares = tl.zeros([KEYS, 256], tl.float32)
        for start in range(0, width, 256):
            deep = start + tl.arange(0, 256)[None, :]
            value = tl.load(x + (sequence * n + key) * width + deep, (key < n) & (deep < width), 0.0)
            squares += value.to(tl.float32) * value.to(tl.float32)
        norm = tl.rsqrt(tl.sum(squares, 1) / width + eps)[None, :]
        mine = tl.sum(tl.where(keys == first + token, norm, 0.0), 1)[:, None]
        score *= norm * mine
    score = tl.where(keys < n, score, float("-inf"))
    p = tl.exp(score - tl.max(score, 1)[:, None])
    total = tl.dot((p * norm).to(type), v, input_precision="ieee") / tl.sum(p, 1)[:, None]
    tl.store(out + (sequence * m + token) * HEADS * D + place + column, total.to(type), inside)


@triton.jit
def _halves(at, cos_at, sin_at, D: tl.constexpr, mask, type: tl.constexpr):
    """Rotate heads that start at the pointers at [r, 1]; cos_at, sin_at [r, 1] -> their halves, [r, D / 2].

    Both halves turn by the same tables, so each value is read once. Rounded as `_heads` does.
    """
    column = tl.arange(0, D // 2)[None, :]
    fine = cos_at.dtype.element_ty
    low = tl.load(at + column, mask, 0.0).to(tl.float32)
    high = tl.load(at + D // 2 + column, mask, 0.0).to(tl.float32)
    cos = tl.load(cos_at + column, mask, 0.0).to(tl.float32)
    sin = tl.load(sin_at + column, mask, 0.0).to(tl.float32)
    turned_low = (low * cos).to(fine).to(tl.float32) - (high * sin).to(fine).to(tl.float32)
    turned_high = (high * cos).to(fine).to(tl.float32) + (low * sin).to(fine).to(tl.float32)
    return turned_low.to(type), turned_high.to(type)
