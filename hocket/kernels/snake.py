"""The periodic activation SnakeBeta."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, tl, triton, use_triton


def snake_torch(x: Tensor, alpha: Tensor, gain: Tensor) -> Tensor:
    """x + sin(alpha x)^2 * gain, elementwise over x [..., c]; the dtype of x. alpha, gain fp32 [c].

    The sine's argument is fp32: half precision loses the phase where alpha x is large.
    Source: arXiv 2006.08195.
    """
    wave = (x * alpha).sin_()
    return wave.square_().mul_(gain).add_(x).to(x.dtype)


def snake_triton(x: Tensor, alpha: Tensor, gain: Tensor) -> Tensor:
    """`snake_torch` as a kernel: the same arguments, the same meaning."""
    x = x.contiguous()
    out = torch.empty_like(x)
    c = x.shape[-1]
    columns = next_power_of_2(c)
    rows = max(1, 4096 // columns)
    count = x.numel() // c
    _snake[(-(-count // rows),)](x, alpha, gain, out, count, c, ROWS=rows, COLUMNS=columns, num_warps=4)
    return out


def snake(x: Tensor, alpha: Tensor, gain: Tensor) -> Tensor:
    """`snake_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (snake_triton if use_triton(x) else snake_torch)(x, alpha, gain)


@triton.jit
def sine_squared(x):
    """sin(x)^2 of fp32, to 2e-7 where |x| < 1e4. The library's sine is good far beyond, and dearer.

    Squared, the sine has period pi: x less the nearest multiple of pi (in two parts, so that the difference
    is exact) lies within pi / 2, where Taylor's series to the eleventh power is good to 6e-8.
    """
    turns = tl.floor(x * 0.3183098861837907 + 0.5)
    x = x - turns * 3.140625
    x = x - turns * 9.67502593994140625e-4
    x = x - turns * 1.509957990978376432e-7
    s = x * x
    y = -2.505210838544172e-8 * s + 2.7557319223985893e-6
    y = y * s - 1.984126984126984e-4
    y = y * s + 8.333333333333333e-3
    y = y * s - 0.16666666666666666
    y = x + x * s * y
    return y * y


@triton.jit(do_not_specialize=["count"])
def _snake(x, alpha, gain, out, count, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < c)
    value = tl.load(x + row * c + column, inside, 0.0).to(tl.float32)
    wave = sine_squared(value * tl.load(alpha + column, column < c, 0.0))
    value += wave * tl.load(gain + column, column < c, 0.0)
    tl.store(out + row * c + column, value.to(out.dtype.element_ty), inside)
