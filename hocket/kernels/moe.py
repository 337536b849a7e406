"""Mixtures of narrow experts: choosing them, and running every row through its own.

A decode step has few rows, and each expert it visits is read for one to a few of them, so time goes into
reading weights. Rows are gathered by expert, and a program takes some columns of one expert for all of its
rows, so that an expert is read once however many rows chose it. Launches follow from shapes alone: nothing
waits for the host, and experts that nobody chose cost a program that ends at once. Sums over a row's experts
are taken in the order of its choice: the result does not depend on which program ends first.

An expert that every row visits (a shared expert) is one or several more experts of the same width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.linear import SKINNY, norm_linear
from hocket.kernels.norm import rms_norm, rms_norm_torch

# --- choosing ------------------------------------------------------------------------------------


def route_torch(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, top_k: int, shared: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise rows x [m, d] by norm [d], and choose their experts.

    router [e, d], and with `shared` experts one row more, their gate. The e logits go through a softmax in
    fp32 and the largest top_k are scaled to sum 1; shared experts weigh the sigmoid of their gate's logit.
    -> rows [m, d]; weights [m, top_k + shared] in the dtype of x; experts int32 alike, the shared ones
    e, e + 1, …
    """
    e = router.shape[0] - (shared > 0)
    y = rms_norm_torch(x, norm, eps)
    logits = F.linear(y, router)
    chance, expert = torch.softmax(logits[:, :e].float(), dim=-1).topk(top_k, dim=-1)
    weight = (chance / chance.sum(-1, keepdim=True)).to(x.dtype)
    if shared:
        weight = torch.cat([weight, logits[:, e:].sigmoid().expand(-1, shared)], dim=1)
        last = torch.arange(e, e + shared, device=x.device).expand(x.shape[0], -1)
        expert = torch.cat([expert, last], dim=1)
    return y, weight, expert.int()


def route_triton(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, top_k: int, shared: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`route_torch` as a kernel: the same arguments, the same meaning."""
    m, d = x.shape
    few = m <= SKINNY  # then the norm runs along with the product, and again beside the choice
    y = torch.empty_like(x) if few else rms_norm(x, norm, eps)
    logits = norm_linear(x, norm, router, eps) if few else F.linear(y, router)
    width = router.shape[0]
    e = width - (shared > 0)
    weight = x.new_empty(m, top_k + shared)
    expert = torch.empty(m, top_k + shared, dtype=torch.int32, device=x.device)
    _choose[(m,)](
        x, norm, y, logits, weight, expert, d, eps, e, width, TOP=top_k, SHARED=shared, NORM=few,
        BLOCK=next_power_of_2(d), EXPERTS=next_power_of_2(e), PICKS=next_power_of_2(top_k),
        num_warps=4 if few else 1, **overlap(x),
    )  # fmt: skip
    return y, weight, expert


def route(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, top_k: int, shared: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`route_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (route_triton if use_triton(x) else route_torch)(x, norm, eps, router, top_k, shared)


# --- running -------------------------------------------------------------------------------------


def experts_torch(
    x: Tensor, weight: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor,
    gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run rows through their experts: residual + sum over k of weight[:, k] * expert[:, k](x).

    x, residual [m, d]; weight, expert [m, k] as `route_torch` gives them; gate_up [e, 2 f, d], gates first;
    down [e, d, f]. An expert is down(silu(gate x) * (up x)). Each result is rounded to the dtype of x before
    and after its weighting, as published code does; their sum is taken in fp32. -> [m, d].
    d and f must be multiples of 8 (fp32: 4).

    Matrices may be float8_e4m3fn; then output channel i of each is to be multiplied by its scale, fp32
    [e, 2 f] and [e, d].
    """
    if gate_up_scale is not None and down_scale is not None:
        gate_up = (gate_up.float() * gate_up_scale[..., None]).to(x.dtype)
        down = (down.float() * down_scale[..., None]).to(x.dtype)
    m, k = expert.shape
    flat = expert.flatten().long()
    order = flat.argsort(stable=True)  # pairs of (row, expert) by expert
    count = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    ends = count.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
    gate, up = F.grouped_mm(x[order // k], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)  # [m * k, d]
    y = y * weight.flatten()[order, None]
    pairs = torch.empty_like(y).index_copy_(0, order, y).unflatten(0, (m, k))
    return residual + pairs.float().sum(1).to(x.dtype)


def experts_triton(
    x: Tensor, weight: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor,
    gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`experts_torch` as a kernel: the same arguments, the same meaning."""
    m, k = expert.shape
    e, d, f = down.shape
    pairs = m * k
    groups = min(pairs, e)  # with few pairs, each stands for its expert if it is the first to name it
    one = m == 1  # then each pair is an expert's only row
    members = count = expert
    if not one:
        members = torch.empty(groups, m, dtype=torch.int32, device=x.device)
        count = torch.empty(2, groups, dtype=torch.int32, device=x.device)  # rows of a group; its expert
        _gather[(groups,)](
            expert, members, count, pairs, m, groups, FIRST=pairs <= e,
            PAIRS=min(1024, next_power_of_2(pairs)), num_warps=4, **overlap(x),
        )  # fmt: skip
    inner, y = x.new_empty(pairs, f), x.new_empty(pairs, d)
    scaled = gate_up_scale is not None
    rows, columns, depth, warps, stages = tile(f, d, pairs // e, groups, gated=True)
    _gate_up[(-(-f // columns), groups)](
        x, gate_up, gate_up_scale if scaled else x, members, count, inner, m, groups, d, f,
        K=k, ONE=one, SCALED=scaled, EVEN=d % depth == 0 and f % columns == 0,
        ROWS=rows, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages, **overlap(x),
    )  # fmt: skip
    rows, columns, depth, warps, stages = tile(d, f, pairs // e, groups, gated=False)
    _down[(-(-d // columns), groups)](
        inner, down, down_scale if scaled else x, weight, members, count, y, m, groups, d, f,
        ONE=one, SCALED=scaled, EVEN=f % depth == 0 and d % columns == 0,
        ROWS=rows, COLUMNS=columns, DEPTH=depth,
        num_warps=warps, num_stages=stages, **overlap(x),
    )  # fmt: skip
    out = torch.empty_like(residual)
    block = min(1024, next_power_of_2(d))
    _add_up[(m, -(-d // block))](y, residual, out, d, K=k, BLOCK=block, num_warps=4, **overlap(x))
    return out


def experts(
    x: Tensor, weight: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor,
    gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`experts_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = experts_triton if use_triton(x) else experts_torch
    return call(x, weight, expert, gate_up, down, residual, gate_up_scale, down_scale)


def tile(n: int, k: int, mean: int, groups: int, *, gated: bool) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a tile of an [n, k] expert that `mean` rows visit, warps, stages.

    With few rows a tile is a way to keep memory busy: enough bytes of weights under way in each program,
    and several programs a multiprocessor. With many it is a way to use the matrix unit.
    """
    rows = min(64, max(16, next_power_of_2(2 * mean)))  # twice the mean: few experts take two turns
    columns, depth, stages = 64, 64, 3
    if rows == 16:
        columns, depth, stages = 32 if gated else 64, 128, 4
        if groups * n < 512 * columns:
            columns //= 2
    columns = min(columns, max(16, next_power_of_2(n)))
    return rows, columns, min(depth, max(16, next_power_of_2(k))), 4, stages


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _choose(
    x, norm, y, logits, weight, expert, d, eps, e, width,
    TOP: tl.constexpr, SHARED: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, PICKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if NORM:
        at = tl.program_id(0).to(tl.int64) * d + tl.arange(0, BLOCK)
        inside = tl.arange(0, BLOCK) < d
        value = tl.load(x + at, inside, 0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, 0) / d + eps)
        scaled = tl.load(norm + tl.arange(0, BLOCK), inside, 0.0).to(tl.float32)
        scaled *= value.to(y.dtype.element_ty).to(tl.float32)
        tl.store(y + at, scaled.to(y.dtype.element_ty), inside)
    row = tl.program_id(0)
    column = tl.arange(0, EXPERTS)
    type = weight.dtype.element_ty
    logit = tl.load(logits + row * width + column, column < e, float("-inf")).to(tl.float32)
    chance = tl.exp(logit - tl.max(logit, 0))
    chance = chance / tl.sum(chance, 0)
    pick = tl.arange(0, PICKS)
    picked = tl.zeros([PICKS], tl.float32)
    at = row * (TOP + SHARED)
    for i in tl.static_range(TOP):
        best = tl.max(chance, 0)
        which = tl.argmax(chance, 0)
        tl.store(expert + at + i, which.to(tl.int32))
        picked = tl.where(pick == i, best, picked)
        chance = tl.where(column == which, -1.0, chance)
    tl.store(weight + at + pick, (picked / tl.sum(picked, 0)).to(type), pick < TOP)
    if SHARED > 0:
        gate = tl.load(logits + row * width + e).to(tl.float32)
        gate = (1 / (1 + tl.exp(-gate))).to(type)
        for i in tl.static_range(SHARED):
            tl.store(weight + at + TOP + i, gate)
            tl.store(expert + at + TOP + i, e + i)


@triton.jit(do_not_specialize=["pairs", "m", "groups"])
def _gather(
    expert, members, count, pairs, m, groups, FIRST: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr
):
    """Which pairs belong to group g, in their order. FIRST: g is a pair, and stands for its expert if no pair
    before names it; else g is an expert."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    g = tl.program_id(0)
    mine = g
    if FIRST:
        mine = tl.load(expert + g)
    total = g * 0
    before = g * 0
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        hit = (tl.load(expert + pair, pair < pairs, -1) == mine).to(tl.int32)
        rank = total + tl.cumsum(hit, 0) - 1
        tl.store(members + g.to(tl.int64) * m + rank, pair, hit > 0)
        total += tl.sum(hit, 0)
        before += tl.sum(tl.where(pair < g, hit, 0), 0)
    if FIRST:
        total = tl.where(before > 0, 0, total)
    tl.store(count + g, total)
    tl.store(count + groups + g, mine)


@triton.jit(do_not_specialize=["m", "groups"])
def _gate_up(
    x, weight, scale, members, count, out, m, groups, d, f,
    K: tl.constexpr, ONE: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    g = tl.program_id(1)
    whole = g * 0 + 1
    expert = tl.load(count + g).to(tl.int64)
    if not ONE:
        whole = tl.load(count + g)
        expert = tl.load(count + groups + g).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column[None, :] < f
    deep = tl.arange(0, DEPTH)
    type = x.dtype.element_ty
    w_at = weight + (expert * 2 * f + column[None, :]) * d + deep[:, None]  # [DEPTH, COLUMNS]
    for begin in range(0, whole, ROWS):
        member = begin + tl.arange(0, ROWS)
        here = member[:, None] < whole
        pair = member * 0 + g
        if not ONE:
            pair = tl.load(members + g.to(tl.int64) * m + member, member < whole, 0)
        x_at = x + (pair // K).to(tl.int64)[:, None] * d + deep[None, :]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, d, DEPTH):
            inside = here if EVEN else here & (start + deep[None, :] < d)
            a = tl.load(x_at + start, inside, 0.0)
            if EVEN:
                w = tl.load(w_at + start)
                v = tl.load(w_at + f.to(tl.int64) * d + start)
            else:
                below = there & (start + deep[:, None] < d)
                w = tl.load(w_at + start, below, 0.0)
                v = tl.load(w_at + f.to(tl.int64) * d + start, below, 0.0)
            gate = tl.dot(a, w.to(type), gate, input_precision="ieee")
            up = tl.dot(a, v.to(type), up, input_precision="ieee")
        if SCALED:
            at = scale + expert * 2 * f + column
            gate *= tl.load(at, column < f, 0.0)[None, :]
            up *= tl.load(at + f, column < f, 0.0)[None, :]
        gate = gate.to(type).to(tl.float32)
        gate = (gate / (1 + tl.exp(-gate))).to(type).to(tl.float32)
        inner = (gate * up.to(type).to(tl.float32)).to(type)
        tl.store(out + pair.to(tl.int64)[:, None] * f + column[None, :], inner, here & there)


@triton.jit(do_not_specialize=["m", "groups"])
def _down(
    inner, weight, scale, share, members, count, out, m, groups, d, f,
    ONE: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    g = tl.program_id(1)
    whole = g * 0 + 1
    expert = tl.load(count + g).to(tl.int64)
    if not ONE:
        whole = tl.load(count + g)
        expert = tl.load(count + groups + g).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = column[None, :] < d
    deep = tl.arange(0, DEPTH)
    type = inner.dtype.element_ty
    w_at = weight + (expert * d + column[None, :]) * f + deep[:, None]  # [DEPTH, COLUMNS]
    for begin in range(0, whole, ROWS):
        member = begin + tl.arange(0, ROWS)
        here = member[:, None] < whole
        pair = member * 0 + g
        if not ONE:
            pair = tl.load(members + g.to(tl.int64) * m + member, member < whole, 0)
        a_at = inner + pair.to(tl.int64)[:, None] * f + deep[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, f, DEPTH):
            inside = here if EVEN else here & (start + deep[None, :] < f)
            a = tl.load(a_at + start, inside, 0.0)
            if EVEN:
                w = tl.load(w_at + start)
            else:
                w = tl.load(w_at + start, there & (start + deep[:, None] < f), 0.0)
            total = tl.dot(a, w.to(type), total, input_precision="ieee")
        if SCALED:
            total *= tl.load(scale + expert * d + column, column < d, 0.0)[None, :]
        part = tl.load(share + pair, member < whole, 0.0).to(tl.float32)[:, None]
        total = total.to(type).to(tl.float32) * part
        tl.store(out + pair.to(tl.int64)[:, None] * d + column[None, :], total.to(type), here & there)


@triton.jit
def _add_up(y, residual, out, d, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < d
    type = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        total += tl.load(y + (row * K + k) * d + column, inside, 0.0).to(tl.float32)
    total = total.to(type).to(tl.float32)
    total += tl.load(residual + row * d + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * d + column, total.to(type), inside)
