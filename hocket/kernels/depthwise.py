"""Depthwise causal convolutions over streams, with the activation before and the one after them.

Such a layer does no more arithmetic than an activation does, so what counts is that its input is read
once and its output written once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.choice import tl, triton, use_triton
from hocket.kernels.conv import Activation, carry_torch
from hocket.kernels.snake import sine_squared, snake_torch

_ENOUGH = 264  # programs that give each multiprocessor two


def depthwise_torch(
    x: Tensor,
    past: Tensor,
    slots: Tensor,
    taps: Tensor,
    bias: Tensor,
    dilation: int = 1,
    before: Activation | None = None,
    after: Activation | None = None,
) -> Tensor:
    """Convolve each channel of one chunk with its own taps, going on from where the last chunk ended.

    x [t, b, c]; past [slots, (k - 1) * dilation, c] is written in place at `slots`: the last inputs, after
    the activation `before`; taps fp32 [k, c], oldest input first; bias fp32 [c]
    -> [t, b, c], after the activation `after`; the products are added up in fp32 at least
    """
    joined = carry_torch(past, slots, x, before)
    joined = joined.to(torch.promote_types(x.dtype, taps.dtype))
    t = x.shape[0]
    y = torch.addcmul(bias, joined[:t], taps[0])
    for i in range(1, taps.shape[0]):
        y.addcmul_(joined[i * dilation : i * dilation + t], taps[i])
    y = y.to(x.dtype)
    return y if after is None else snake_torch(y, *after)


def depthwise_triton(
    x: Tensor,
    past: Tensor,
    slots: Tensor,
    taps: Tensor,
    bias: Tensor,
    dilation: int = 1,
    before: Activation | None = None,
    after: Activation | None = None,
) -> Tensor:
    """`depthwise_torch` as a kernel for seven taps: the same arguments, the same meaning."""
    assert taps.shape[0] == 7, "the kernel holds a window of seven"
    x = x.contiguous()
    t, b, c = x.shape
    out, kept = torch.empty_like(x), x.new_empty(b, past.shape[1], c)
    block = 512 if b * c >= 512 else 64
    columns = -(-b * c // block)
    # A program walks along the steps of one phase, and reads six of them anew: long walks where there is
    # enough to do, short ones where multiprocessors would have none.
    walk = 32 if columns * -(-t // 32) >= _ENOUGH else 8
    (alpha_in, gain_in), (alpha_out, gain_out) = before or (bias, bias), after or (bias, bias)
    _depthwise[(columns, -(-t // (walk * dilation)) * dilation)](
        x, past, slots, taps, bias, alpha_in, gain_in, alpha_out, gain_out, kept, out,
        t, b * c, c, dilation, walk,
        BEFORE=before is not None, AFTER=after is not None, BLOCK=block, num_warps=max(1, block // 128),
    )  # fmt: skip
    # In a launch of its own: a row's new past may lie where another's old one is still to be read.
    past.index_copy_(0, slots, kept)
    return out


def depthwise(
    x: Tensor,
    past: Tensor,
    slots: Tensor,
    taps: Tensor,
    bias: Tensor,
    dilation: int = 1,
    before: Activation | None = None,
    after: Activation | None = None,
) -> Tensor:
    """`depthwise_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = depthwise_triton if use_triton(x) else depthwise_torch
    return call(x, past, slots, taps, bias, dilation, before, after)


@triton.jit
def _read(x, step, t, row, inside):
    return tl.load(x + step.to(tl.int64) * row, inside & (step >= 0) & (step < t), 0.0)


@triton.jit
def _activated(value, alpha, gain, SNAKE: tl.constexpr):
    """SnakeBeta of `value`, rounded to its type; fp32."""
    wide = value.to(tl.float32)
    if SNAKE:
        wide = (wide + sine_squared(wide * alpha) * gain).to(value.dtype).to(tl.float32)
    return wide


@triton.jit
def _old(past, step, reach, c, inside):
    return tl.load(past + (reach + step) * c, inside & (step < 0), 0.0)


@triton.jit
def _earlier(old, read, kept, step, t, reach, c, alpha, gain, inside, SNAKE: tl.constexpr):
    """An input before a program's first: of this chunk, or of the past and then kept while it is needed."""
    tl.store(kept + (reach + step - t) * c, old, inside & (step < 0) & (reach + step >= t))
    return tl.where(step < 0, old.to(tl.float32), _activated(read, alpha, gain, SNAKE))


@triton.jit
def _step(
    out, kept, step, t, reach, row, c, inside,
    v0, v1, v2, v3, v4, v5, v6, w0, w1, w2, w3, w4, w5, w6, bias, alpha, gain, SNAKE: tl.constexpr,
):  # fmt: skip
    """Store the output of one step, and its input v6 where the next chunk needs it."""
    inside = inside & (step < t)
    tl.store(kept + (reach + step - t) * c, v6, inside & (reach + step >= t))
    y = bias + v0 * w0
    y += v1 * w1
    y += v2 * w2
    y += v3 * w3
    y += v4 * w4
    y += v5 * w5
    y += v6 * w6
    # Rounded where the twin rounds: before the activation, and after it.
    y = _activated(y.to(out.dtype.element_ty), alpha, gain, SNAKE)
    tl.store(out + step.to(tl.int64) * row, y, inside)


@triton.jit(do_not_specialize=["t", "dilation", "walk"])
def _depthwise(
    x, past, slots, taps, bias, alpha_in, gain_in, alpha_out, gain_out, kept, out, t, row, c, dilation, walk,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A step is one run of memory: `row` values, all channels of all streams. A program takes BLOCK of them
    # and walks over `walk` steps that lie `dilation` apart, with the last six inputs in registers.
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < row
    stream = place // c
    channel = place - stream * c
    reach = 6 * dilation
    number = tl.program_id(1) // dilation
    # 0 * place: the interpreter cannot join a mask of one value with one of many.
    step = number * walk * dilation + tl.program_id(1) - number * dilation + 0 * place
    x += place
    out += place
    past += tl.load(slots + stream, inside, 0) * reach * c + channel  # where its oldest value lies
    kept += stream.to(tl.int64) * reach * c + channel
    taps += channel
    w0 = tl.load(taps, inside, 0.0)
    w1 = tl.load(taps + c, inside, 0.0)
    w2 = tl.load(taps + 2 * c, inside, 0.0)
    w3 = tl.load(taps + 3 * c, inside, 0.0)
    w4 = tl.load(taps + 4 * c, inside, 0.0)
    w5 = tl.load(taps + 5 * c, inside, 0.0)
    w6 = tl.load(taps + 6 * c, inside, 0.0)
    bias = tl.load(bias + channel, inside, 0.0)
    a = tl.load(alpha_in + channel, inside, 0.0)
    g = tl.load(gain_in + channel, inside, 0.0)
    a_out = tl.load(alpha_out + channel, inside, 0.0)
    g_out = tl.load(gain_out + channel, inside, 0.0)
    # All reads before the first use of one.
    s0, s1, s2 = step - 6 * dilation, step - 5 * dilation, step - 4 * dilation
    s3, s4, s5 = step - 3 * dilation, step - 2 * dilation, step - dilation
    p0 = _old(past, s0, reach, c, inside)
    p1 = _old(past, s1, reach, c, inside)
    p2 = _old(past, s2, reach, c, inside)
    p3 = _old(past, s3, reach, c, inside)
    p4 = _old(past, s4, reach, c, inside)
    p5 = _old(past, s5, reach, c, inside)
    r0 = _read(x, s0, t, row, inside)
    r1 = _read(x, s1, t, row, inside)
    r2 = _read(x, s2, t, row, inside)
    r3 = _read(x, s3, t, row, inside)
    r4 = _read(x, s4, t, row, inside)
    r5 = _read(x, s5, t, row, inside)
    v0 = _earlier(p0, r0, kept, s0, t, reach, c, a, g, inside, BEFORE)
    v1 = _earlier(p1, r1, kept, s1, t, reach, c, a, g, inside, BEFORE)
    v2 = _earlier(p2, r2, kept, s2, t, reach, c, a, g, inside, BEFORE)
    v3 = _earlier(p3, r3, kept, s3, t, reach, c, a, g, inside, BEFORE)
    v4 = _earlier(p4, r4, kept, s4, t, reach, c, a, g, inside, BEFORE)
    v5 = _earlier(p5, r5, kept, s5, t, reach, c, a, g, inside, BEFORE)
    for _ in range(0, walk, 4):
        # Four reads are under way at a time: none can pass the stores between them.
        one, two, three = step + dilation, step + 2 * dilation, step + 3 * dilation
        r0 = _read(x, step, t, row, inside)
        r1 = _read(x, one, t, row, inside)
        r2 = _read(x, two, t, row, inside)
        r3 = _read(x, three, t, row, inside)
        n0 = _activated(r0, a, g, BEFORE)
        _step(out, kept, step, t, reach, row, c, inside,
              v0, v1, v2, v3, v4, v5, n0, w0, w1, w2, w3, w4, w5, w6, bias, a_out, g_out, AFTER)  # fmt: skip
        n1 = _activated(r1, a, g, BEFORE)
        _step(out, kept, one, t, reach, row, c, inside,
              v1, v2, v3, v4, v5, n0, n1, w0, w1, w2, w3, w4, w5, w6, bias, a_out, g_out, AFTER)  # fmt: skip
        n2 = _activated(r2, a, g, BEFORE)
        _step(out, kept, two, t, reach, row, c, inside,
              v2, v3, v4, v5, n0, n1, n2, w0, w1, w2, w3, w4, w5, w6, bias, a_out, g_out, AFTER)  # fmt: skip
        n3 = _activated(r3, a, g, BEFORE)
        _step(out, kept, three, t, reach, row, c, inside,
              v3, v4, v5, n0, n1, n2, n3, w0, w1, w2, w3, w4, w5, w6, bias, a_out, g_out, AFTER)  # fmt: skip
        v0, v1, v2, v3, v4, v5 = v4, v5, n0, n1, n2, n3
        step += 4 * dilation
