"""Drawing codes with counter-based noise.

Noise is a hash of (request seed, frame, codebook, token), so what a request draws does not depend
on who shares its batch, on capture, preemption, replica or restart. Drawing is by Gumbel-max:
argmax of logits / temperature + Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison,
Tarlow and Minka 2014, arXiv 1411.0030). The hash is the 32-bit finaliser "lowbias32" of Chris
Wellons (nullprogram.com, "Prospecting for hash functions", 2018), which torch carries in int64 because it
has no unsigned arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton

WIDE = 1  # step variant: some row may draw from more than `NARROW` candidates
NUCLEUS = 2  # step variant: some row has top_p < 1
NARROW = 64  # candidates looked at when every row's top_k allows it

_U32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads consecutive counters


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit values held in int64; any shape."""
    x = x & _U32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _U32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _U32
    return x ^ (x >> 16)


def noise_key(seed: Tensor, frame: Tensor, codebooks: int) -> Tensor:
    """Keys of one frame: seed int64 [b], frame int [b] -> int64 [b, codebooks]."""
    key = mix(mix(seed) ^ (seed >> 32))
    key = mix(key + frame.long() * _GOLDEN)
    book = torch.arange(1, codebooks + 1, device=seed.device) * _GOLDEN
    return mix(key[:, None] + book)


def gumbel(key: Tensor, token: Tensor) -> Tensor:
    """key int64 [b], token int64 [b, n] -> fp32 Gumbel noise [b, n]."""
    bits = mix(key[:, None] ^ mix(token + 1)) >> 9  # 23 bits: (bits + .5) / 2**23 is exact and never 1
    uniform = (bits.float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def frame_normal_torch(seed: Tensor, frame: Tensor, n: int) -> Tensor:
    """n standard normal values for one frame: seed int64 [b], frame int32 [b] -> fp32 [b, n].

    By the transform of Box and Muller (1958), with the key of the frame's first codebook.
    """
    key = noise_key(seed, frame, 1)
    place = torch.arange(1, 2 * n + 1, device=seed.device)
    bits = mix(key ^ mix(place)) >> 9
    radius, angle = ((bits.float() + 0.5) * 2.0**-23).chunk(2, dim=1)
    return torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)


def frame_normal_triton(seed: Tensor, frame: Tensor, n: int) -> Tensor:
    """`frame_normal_torch` as a kernel: the same arguments, the same meaning."""
    b = seed.shape[0]
    out = torch.empty(b, n, dtype=torch.float32, device=seed.device)
    _frame_normal[(b,)](seed, frame, out, n, BLOCK=next_power_of_2(n), num_warps=1, **overlap(out))
    return out


def frame_normal(seed: Tensor, frame: Tensor, n: int) -> Tensor:
    """`frame_normal_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (frame_normal_triton if use_triton(seed) else frame_normal_torch)(seed, frame, n)


@dataclass(slots=True)
class DrawOptions:
    """Sampling options, one a row or one a slot."""

    temperature: Tensor  # fp32 [n]  0: greedy
    top_k: Tensor  # int32 [n]  0: no limit
    top_p: Tensor  # fp32 [n]


@dataclass(slots=True)
class Repetition:
    """What codebook 0 adds to drawing: a penalty on codes drawn before, and no end at first."""

    seen: Tensor  # bool [slots, v]
    penalty: Tensor  # fp32 [slots]
    frame: Tensor  # int32 [b]  frames made
    end_from: int  # the last token, which ends a request, is drawn from this frame on only


def draw(logits: Tensor, o: DrawOptions, key: Tensor, variant: int) -> Tensor:
    """Draw one token a row: logits fp32 [b, v], key int64 [b] -> int64 [b].

    Order as in transformers' generate: temperature, top-k, top-p; ties with the last candidate are kept.
    """
    width = logits.shape[1] if variant & WIDE else min(NARROW, logits.shape[1])
    scores, token = logits.topk(width, dim=1)  # [b, width], best first
    greedy = o.temperature == 0
    scores = scores / torch.where(greedy, 1.0, o.temperature)[:, None]
    k = torch.where((o.top_k <= 0) | (o.top_k > width), width, o.top_k).long()
    keep = scores >= scores.gather(1, k[:, None] - 1)
    if variant & NUCLEUS:
        p = torch.softmax(scores.masked_fill(~keep, -torch.inf), dim=1)
        new = scores != torch.nn.functional.pad(scores[:, :-1], (1, 0), value=torch.inf)
        before = torch.where(new, p.cumsum(1) - p, 0.0).cummax(1).values  # equal scores stay together
        keep = keep & ((before < o.top_p[:, None]) | (o.top_p[:, None] >= 1))
        keep[:, 0] = True
    noise = gumbel(key, token).masked_fill(greedy[:, None], 0.0)
    best = (scores + noise).masked_fill(~keep, -torch.inf).argmax(1, keepdim=True)
    return token.gather(1, best).squeeze(1)


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty over seen tokens (Keskar et al. 2019, arXiv 1909.05858).

    logits fp32 [b, v], seen bool [b, v], penalty fp32 [b] -> fp32 [b, v].
    """
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


# --- one codebook, from logits to the next input ---------------------------------------------------


def draw_code_torch(
    logits: Tensor,
    o: DrawOptions,
    slots: Tensor,
    key: Tensor,
    variant: int,
    out: Tensor,
    table: Tensor | None = None,
    repetition: Repetition | None = None,
) -> Tensor | None:
    """Draw a row's code, and look up what the next pass reads.

    logits [b, v], of any row stride; options of all slots [slots]; slots, key int64 [b]; out int64 [b] takes
    the codes.
    table [v, d], or with `repetition` [v - 1, d], where the last token looks up row 0.
    -> table rows [b, d] if there is a table.

    The kernel keeps every tie with the last candidate; here those beyond `NARROW` candidates are lost when
    the variant is not WIDE.
    """
    logits = logits.float()
    if repetition is not None:
        logits = penalise(logits, repetition.seen[slots], repetition.penalty[slots])
        logits[:, -1].masked_fill_(repetition.frame < repetition.end_from, -torch.inf)
    row = DrawOptions(o.temperature[slots], o.top_k[slots], o.top_p[slots])
    out.copy_(draw(logits, row, key, variant))
    if table is None:
        return None
    return table[out if repetition is None else torch.where(out == logits.shape[1] - 1, 0, out)]


def draw_code_triton(
    logits: Tensor,
    o: DrawOptions,
    slots: Tensor,
    key: Tensor,
    variant: int,
    out: Tensor,
    table: Tensor | None = None,
    repetition: Repetition | None = None,
) -> Tensor | None:
    """`draw_code_torch` as a kernel: the same arguments, the same meaning."""
    b, v = logits.shape
    d = 0 if table is None else table.shape[1]
    x = None if table is None else table.new_empty(b, d)
    r = Repetition(slots, slots, slots, 0) if repetition is None else repetition
    _draw_code[(b,)](
        logits, o.temperature, o.top_k, o.top_p, slots, key, r.seen, r.penalty, r.frame, out,
        logits if table is None else table, logits if x is None else x,
        v, logits.stride(0), d, r.end_from, o.temperature.stride(0), o.top_k.stride(0), o.top_p.stride(0),
        key.stride(0),
        out.stride(0), FIRST=repetition is not None, TOP_P=variant & NUCLEUS != 0,
        PAIRS=8 if logits.dtype.itemsize == 2 and repetition is None else 16,
        BLOCK=next_power_of_2(v), D=next_power_of_2(d) if d else 0,
        num_warps=4, **overlap(logits),
    )  # fmt: skip
    return x


def draw_code(
    logits: Tensor,
    o: DrawOptions,
    slots: Tensor,
    key: Tensor,
    variant: int,
    out: Tensor,
    table: Tensor | None = None,
    repetition: Repetition | None = None,
) -> Tensor | None:
    """`draw_code_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = draw_code_triton if use_triton(logits) else draw_code_torch
    return call(logits, o, slots, key, variant, out, table, repetition)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _frame_normal(seed, frame, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    whole = tl.load(seed + row)
    key = _mix(_mix(whole.to(tl.uint32)) ^ (whole >> 32).to(tl.uint32))
    key = _mix(_mix(key + tl.load(frame + row).to(tl.uint32) * golden) + golden)
    place = tl.arange(0, BLOCK)
    radius = (_mix(key ^ _mix((place + 1).to(tl.uint32))) >> 9).to(tl.float32)
    angle = (_mix(key ^ _mix((place + n + 1).to(tl.uint32))) >> 9).to(tl.float32)
    radius, angle = (radius + 0.5) * 1.1920928955078125e-07, (angle + 0.5) * 1.1920928955078125e-07  # 2**-23
    value = tl.sqrt(-2 * tl.log(radius)) * tl.cos(6.283185307179586 * angle)
    tl.store(out + row.to(tl.int64) * n + place, value, place < n)


@triton.jit
def _draw_code(
    logits, temperature, top_k, top_p, slots, key, seen, penalty, frame, out, table, x,
    v, logits_stride, d, end_from, temperature_stride, top_k_stride, top_p_stride, key_stride, out_stride,
    FIRST: tl.constexpr, TOP_P: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    inside = token < v
    slot = tl.load(slots + row)
    score = tl.load(logits + row * logits_stride + token, inside, float("-inf")).to(tl.float32)
    if FIRST:
        factor = tl.load(penalty + slot)
        old = tl.load(seen + slot * v + token, inside, 0) != 0
        score = tl.where(old, tl.where(score > 0, tl.div_rn(score, factor), score * factor), score)
        score = tl.where((token == v - 1) & (tl.load(frame + row) < end_from), float("-inf"), score)
    heat = tl.load(temperature + slot * temperature_stride)

    # The k-th largest score, two bits at a time, over integers that are ordered as the scores are; -0 counts
    # as 0. Half-precision logits fill the upper 16 bits only, until a penalty has changed them. Dividing by a
    # positive temperature changes no order, so it can wait.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, ~bits, bits | (-2147483648)).to(tl.uint32, bitcast=True)
    k = tl.load(top_k + slot * top_k_stride)
    k = tl.where((k <= 0) | (k > v), v, k)
    least = tl.full((), 0, tl.uint32)
    for i in tl.static_range(PAIRS):
        bit = tl.full((), 1, tl.uint32) << (30 - 2 * i)
        low, middle, high = least + bit, least + bit * 2, least + bit * 3
        at_low = tl.sum((inside & (order >= low)).to(tl.int32), 0)
        at_middle = tl.sum((inside & (order >= middle)).to(tl.int32), 0)
        at_high = tl.sum((inside & (order >= high)).to(tl.int32), 0)
        found = tl.where(at_middle >= k, middle, tl.where(at_low >= k, low, least))
        least = tl.where(at_high >= k, high, found)
    keep = inside & (order >= least)
    score = tl.div_rn(score, tl.where(heat == 0, 1.0, heat))
    if TOP_P:
        # A token stays while those before it hold less than top_p: the same search, over probability.
        mass = tl.where(keep, tl.exp(score - tl.max(score, 0)), 0.0)
        mass = mass / tl.sum(mass, 0)
        p = tl.load(top_p + slot * top_p_stride)
        least = tl.full((), 0, tl.uint32)
        for i in tl.static_range(PAIRS):
            bit = tl.full((), 1, tl.uint32) << (30 - 2 * i)
            low, middle, high = least + bit, least + bit * 2, least + bit * 3
            of_low = tl.sum(tl.where(order >= low, mass, 0.0), 0)
            of_middle = tl.sum(tl.where(order >= middle, mass, 0.0), 0)
            of_high = tl.sum(tl.where(order >= high, mass, 0.0), 0)
            found = tl.where(of_middle >= p, middle, tl.where(of_low >= p, low, least))
            least = tl.where(of_high >= p, high, found)
        keep = keep & (order >= tl.where(p >= 1, tl.full((), 0, tl.uint32), least))

    noise_bits = _mix(tl.load(key + row * key_stride).to(tl.uint32) ^ _mix((token + 1).to(tl.uint32))) >> 9
    uniform = (noise_bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    noise = -tl.log(-tl.log(uniform))
    score = tl.where(keep, score + tl.where(heat == 0, 0.0, noise), float("-inf"))
    drawn = tl.argmax(score, 0)
    tl.store(out + row * out_stride, drawn.to(tl.int64))
    if D > 0:
        column = tl.arange(0, D)
        if FIRST:
            drawn = tl.where(drawn == v - 1, 0, drawn)
        value = tl.load(table + drawn.to(tl.int64) * d + column, column < d, 0.0)
        tl.store(x + row * d + column, value, column < d)
