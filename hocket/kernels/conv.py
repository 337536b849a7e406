"""Causal convolutions over streams, with the activation before and what comes after them.

Activations are time-major, x [t, b, c]: the input of each tap is then one run of rows, a constant number of
rows further on than the last tap's, and a convolution is a matrix product whose left side is read at
shifted rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.snake import sine_squared, snake_torch

Activation = tuple[Tensor, Tensor]  # SnakeBeta's alpha and gain, fp32 [c]


# --- history -----------------------------------------------------------------------------------


def carry_torch(
    past: Tensor, slots: Tensor, x: Tensor, activation: Activation | None = None, skip: Tensor | None = None
) -> Tensor:
    """Put each row's past before its chunk, and keep the end of both as the past of the next.

    past [slots, p, ...] is written in place at `slots`; x [t, b, ...], through the activation if there is one
    -> [p + t, b, ...]. skip int32 [b]: steps at the head of a row's x that count as zeros.
    """
    if activation is not None:
        x = snake_torch(x, *activation)
    if skip is not None:
        late = torch.arange(x.shape[0], device=x.device)[:, None] >= skip  # [t, b]
        x = torch.where(late.view(*late.shape, *[1] * (x.dim() - 2)), x, 0)
    joined = torch.cat([past.index_select(0, slots).transpose(0, 1), x])
    past.index_copy_(0, slots, joined[x.shape[0] :].transpose(0, 1))
    return joined


def carry_triton(
    past: Tensor, slots: Tensor, x: Tensor, activation: Activation | None = None, skip: Tensor | None = None
) -> Tensor:
    """`carry_torch` as a kernel: the same arguments, the same meaning."""
    x = x.contiguous()
    t, b = x.shape[:2]
    reach, c = past.shape[1], x[0, 0].numel()
    joined = x.new_empty(reach + t, *x.shape[1:])
    columns = min(1024, next_power_of_2(c))
    rows = max(1, 4096 // columns)
    kept = next_power_of_2(reach)
    aside = max(16, min(128, 4096 // kept, next_power_of_2(c)))
    pasts = b * -(-c // aside)
    alpha, gain = (x, x) if activation is None else activation
    _carry[(pasts + -(-t * b // rows) * -(-c // columns),)](
        x, past, slots, alpha, gain, slots if skip is None else skip, joined, t, reach, b, c, pasts,
        SNAKE=activation is not None, SKIP=skip is not None, ROWS=rows, COLUMNS=columns,
        KEPT=kept, ASIDE=aside, num_warps=4, **overlap(x),
    )  # fmt: skip
    return joined


def carry(
    past: Tensor, slots: Tensor, x: Tensor, activation: Activation | None = None, skip: Tensor | None = None
) -> Tensor:
    """`carry_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (carry_triton if use_triton(x) else carry_torch)(past, slots, x, activation, skip)


# --- convolution -------------------------------------------------------------------------------


def conv_torch(
    joined: Tensor,
    taps: Tensor,
    bias: Tensor,
    dilation: int = 1,
    rate: int = 1,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Convolve joined [reach + t, b, c_in] -> [rate * t, b, c_out], without padding.

    taps [k, c_in, rate * c_out], oldest input first; bias [rate * c_out]: `rate` phases a step, given in
    their order in time. Then the activation, then the residual [rate * t, b, c_out] added.
    """
    reach = (taps.shape[0] - 1) * dilation
    t, b = joined.shape[0] - reach, joined.shape[1]
    rows = [joined[start : start + t].flatten(0, 1) for start in range(0, reach + 1, dilation)]
    if joined.dtype.itemsize >= 4:
        y = torch.addmm(bias, rows[0], taps[0])
        for row, tap in zip(rows[1:], taps[1:], strict=True):
            y.addmm_(row, tap)
    else:  # one product over all taps: adding up in half precision would round k times
        y = torch.addmm(bias, torch.cat(rows, dim=1), taps.flatten(0, 1))
    y = y.unflatten(0, (t, b))
    if rate > 1:
        y = y.unflatten(-1, (rate, -1)).transpose(1, 2).flatten(0, 1)
    if activation is not None:
        y = snake_torch(y, *activation)
    return y if residual is None else residual + y


def conv_triton(
    joined: Tensor,
    taps: Tensor,
    bias: Tensor,
    dilation: int = 1,
    rate: int = 1,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`conv_torch` as a kernel: the same arguments, the same meaning."""
    joined = joined.contiguous()
    k, c_in, n = taps.shape
    b, t = joined.shape[1], joined.shape[0] - (k - 1) * dilation
    c_out = n // rate
    out = joined.new_empty(rate * t, b, c_out)
    alpha, gain = (bias, bias) if activation is None else activation
    m = t * b
    rows, columns, half_more, warps = tile(m, n, c_out, rate)
    depth = min(64, max(16, next_power_of_2(c_in) if c_in < 64 else 64 if c_in % 64 == 0 else 32))
    wide = columns + columns // 2 if half_more else columns
    _conv[(-(-m // rows), -(-n // wide))](
        joined, taps, bias, alpha, gain, out if residual is None else residual, out,
        m, n, c_in, b, dilation * b, c_out,
        TAPS=k, RATE=rate, SNAKE=activation is not None, ADD=residual is not None, EVEN=c_in % depth == 0,
        ASIDE=c_out % wide == 0,
        ROWS=rows, COLUMNS=columns, HALF_MORE=half_more, DEPTH=depth,
        num_warps=warps, num_stages=3, **overlap(joined),
    )  # fmt: skip
    return out


PROGRAMS = 132  # multiprocessors of an H100 or H200


def tile(m: int, n: int, c_out: int, rate: int) -> tuple[int, int, bool, int]:
    """How a product [m, k] x [k, n] is cut: rows, columns, whether half as many columns more, warps.

    Published widths are 96 times a power of two; with 64 + 32 or 128 + 64 columns nothing is computed in
    vain, and rows, which are read again for each tile of columns, are read less often. Measured in
    docs/performance.md.
    """
    rows, warps, half_more = 128, 8, False
    if n <= 32:
        columns = max(16, next_power_of_2(n))
    elif rate > 1:  # within one phase, so that outputs of a row lie side by side
        columns = next((size for size in (128, 64, 32) if c_out % size == 0), 16)
    else:
        columns = 128 if n % 128 == 0 or n < 128 else 64
    # Small products: smaller tiles, so that more multiprocessors have one.
    if -(-m // rows) * -(-n // columns) < PROGRAMS:
        rows = 16 if m <= 16 else 32
    elif c_out == 96:
        columns, half_more, warps = 64, True, 4
    elif c_out % 192 == 0:
        turns = -(-m // 256) * (n // 192) / PROGRAMS  # one program a multiprocessor at a time
        if turns / math.ceil(turns) > 0.9:
            rows, columns, half_more = 256, 128, True
    if rows * columns <= 4096:
        warps = 4
    return rows, columns, half_more, warps


def conv(
    joined: Tensor,
    taps: Tensor,
    bias: Tensor,
    dilation: int = 1,
    rate: int = 1,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`conv_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    # fp32 has no matrix unit that keeps its precision, and the library is better without one.
    half = joined.dtype.itemsize < 4 and use_triton(joined)
    return (conv_triton if half else conv_torch)(joined, taps, bias, dilation, rate, activation, residual)


# --- kernels -----------------------------------------------------------------------------------


@triton.jit
def _snake(value, alpha, gain, inside):
    """SnakeBeta of fp32 [r, c] with parameters at the pointers alpha, gain [1, c]."""
    return value + sine_squared(value * tl.load(alpha, inside, 0.0)) * tl.load(gain, inside, 0.0)


@triton.jit
def _arrived(
    x, alpha, gain, skip, step, stream, column, b, c, inside, SNAKE: tl.constexpr, SKIP: tl.constexpr
):
    """What a chunk gives at steps [r, 1] and streams [r, 1] or [1, 1]."""
    value = tl.load(x + (step.to(tl.int64) * b + stream) * c + column, inside, 0.0)
    if SNAKE:
        value = _snake(value.to(tl.float32), alpha + column, gain + column, column < c).to(value.dtype)
    if SKIP:
        value = tl.where(step >= tl.load(skip + stream, stream < b, 0), value, 0.0).to(value.dtype)
    return value


@triton.jit(do_not_specialize=["t", "reach", "b", "pasts"])
def _carry(
    x, past, slots, alpha, gain, skip, joined, t, reach, b, c, pasts,
    SNAKE: tl.constexpr, SKIP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEPT: tl.constexpr, ASIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    if program < pasts:  # some channels of one stream's past; no other program touches them
        stream = program % b
        column = (program // b) * ASIDE + tl.arange(0, ASIDE)[None, :]
        row = tl.arange(0, KEPT)[:, None]
        inside = (row < reach) & (column < c)
        at = past + (tl.load(slots + stream) * reach + row) * c + column
        old = tl.load(at, inside, 0.0)
        shifted = tl.load(at + t.to(tl.int64) * c, inside & (row + t < reach), 0.0)
        fresh = inside & (row + t >= reach)
        new = _arrived(
            x, alpha, gain, skip, row + t - reach, stream + 0 * row, column, b, c, fresh, SNAKE, SKIP
        )  # fmt: skip
        tl.store(joined + (row.to(tl.int64) * b + stream) * c + column, old, inside)
        tl.debug_barrier()  # the past is written over only when all of it has been read
        tl.store(at, tl.where(fresh, new, shifted), inside)
    else:
        lines = tl.cdiv(t * b, ROWS)
        line = (program - pasts) % lines * ROWS + tl.arange(0, ROWS)[:, None]  # int32, for its division
        channel = (program - pasts) // lines * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        here = (line < t * b) & (channel < c)
        step = line // b
        value = _arrived(x, alpha, gain, skip, step, line - step * b, channel, b, c, here, SNAKE, SKIP)
        tl.store(joined + (line + reach * b).to(tl.int64) * c + channel, value, here)


@triton.jit(do_not_specialize=["m", "b", "shift"])
def _conv(
    joined, taps, bias, alpha, gain, residual, out, m, n, c_in, b, shift, c_out,
    TAPS: tl.constexpr, RATE: tl.constexpr, SNAKE: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
    ASIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF_MORE: tl.constexpr,
    DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    MORE: tl.constexpr = COLUMNS // 2
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = line.to(tl.int64)
    first = tl.program_id(1) * (COLUMNS + MORE if HALF_MORE else COLUMNS)
    column = first + tl.arange(0, COLUMNS)
    further = first + COLUMNS + tl.arange(0, MORE)
    deep = tl.arange(0, DEPTH)
    here, there, yonder = row[:, None] < m, column[None, :] < n, further[None, :] < n
    blocks = tl.cdiv(c_in, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    more = tl.zeros([ROWS, MORE], tl.float32)
    for i in range(0, TAPS * blocks):
        tap = i // blocks
        channel = (i - tap * blocks) * DEPTH + deep
        a_at = joined + (row + tap.to(tl.int64) * shift)[:, None] * c_in + channel[None, :]
        w_at = taps + (tap * c_in + channel)[:, None] * n
        within = channel[:, None] < c_in
        a = tl.load(a_at, here if EVEN else here & (channel[None, :] < c_in), 0.0)
        w = tl.load(w_at + column[None, :], there if EVEN else there & within, 0.0)
        total = tl.dot(a, w, total, input_precision="ieee")
        if HALF_MORE:
            w = tl.load(w_at + further[None, :], yonder if EVEN else yonder & within, 0.0)
            more = tl.dot(a, w, more, input_precision="ieee")
    _put(
        total, column, bias, alpha, gain, residual, out, line, m, n, b, c_out,
        RATE, SNAKE, ADD, ASIDE, COLUMNS,
    )  # fmt: skip
    if HALF_MORE:
        _put(
            more, further, bias, alpha, gain, residual, out, line, m, n, b, c_out,
            RATE, SNAKE, ADD, ASIDE, MORE,
        )  # fmt: skip


@triton.jit
def _put(
    total, column, bias, alpha, gain, residual, out, line, m, n, b, c_out,
    RATE: tl.constexpr, SNAKE: tl.constexpr, ADD: tl.constexpr, ASIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What follows the sums [r, COLUMNS] of rows `line` and features `column`."""
    type = out.dtype.element_ty
    inside = (line[:, None] < m) & (column[None, :] < n)
    # Rounded where the twin rounds: after the bias, after the activation, after the residual.
    total = (total + tl.load(bias + column, column < n, 0.0).to(tl.float32)[None, :]).to(type)
    # Written so that the compiler sees neighbours and moves 16 bytes at a time.
    if RATE == 1:
        phase, channel = 0 * column, column
    elif ASIDE:
        phase = tl.min(column, 0) // c_out
        channel = column - phase * c_out
        phase += 0 * column
    else:
        phase, channel = column // c_out, column % c_out
    if SNAKE:
        total = _snake(
            total.to(tl.float32), (alpha + channel)[None, :], (gain + channel)[None, :], column[None, :] < n
        ).to(type)
    step = line // b  # int32, for its division
    place = (step[:, None] * RATE + phase[None, :]) * b + (line - step * b)[:, None]
    at = place.to(tl.int64) * c_out + channel[None, :]
    if ADD:
        total = (total.to(tl.float32) + tl.load(residual + at, inside, 0.0).to(tl.float32)).to(type)
    tl.store(out + at, total, inside)
