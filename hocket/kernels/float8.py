"""Products whose factors are float8_e4m3fn: rows rounded, each with a scale, and multiplied.

A GPU with the type multiplies it twice as fast as bfloat16. Three bits of mantissa are left of every value,
so each rounded factor errs by some 2.6 % of its norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.norm import unit_scale

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LEAST = 1e-12  # of a row's largest value: rows of zeros have a scale, too


class Rounded(NamedTuple):
    """Rows in eight bits, and what each is to be multiplied by."""

    values: Tensor  # float8_e4m3fn [m, k]
    scale: Tensor  # fp32 [m, 1]

    def wide(self) -> Tensor:
        """fp32 [m, k]"""
        return self.values.float() * self.scale


def round_rows_torch(x: Tensor, added: Tensor | None = None, eps: float | None = None) -> Rounded:
    """Round rows x [m, k] so that the largest value of each becomes the largest there is.

    added [m, k] is added to x first, in place; eps: rows are scaled to unit root mean square, too.
    """
    if added is not None:
        x.add_(added)
    wide = x.float()
    size = wide.abs().amax(1, keepdim=True).clamp(min=LEAST) / LARGEST
    values = (wide / size).to(torch.float8_e4m3fn)
    return Rounded(values, size if eps is None else size * unit_scale(x, eps))


def round_rows_triton(x: Tensor, added: Tensor | None = None, eps: float | None = None) -> Rounded:
    """`round_rows_torch` as a kernel: the same arguments, the same meaning."""
    assert x.is_contiguous(), "rows are read without strides"
    m, k = x.shape
    out = _empty(m, k, x)
    _round_rows[(m,)](
        x, x if added is None else added, *out, k, eps or 0.0, LARGEST, LEAST, ADD=added is not None,
        NORM=eps is not None, BLOCK=next_power_of_2(k), num_warps=4, **overlap(x),
    )  # fmt: skip
    return out


def round_rows(x: Tensor, added: Tensor | None = None, eps: float | None = None) -> Rounded:
    """`round_rows_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (round_rows_triton if use_triton(x) else round_rows_torch)(x, added, eps)


def silu_mul_round_torch(gate_up: Tensor) -> Rounded:
    """gate_up [m, 2 f], gates first -> silu(gate) * up [m, f], rounded."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return round_rows_torch(F.silu(gate) * up)


def silu_mul_round_triton(gate_up: Tensor) -> Rounded:
    """`silu_mul_round_torch` as a kernel: the same arguments, the same meaning."""
    assert gate_up.is_contiguous(), "rows are read without strides"
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = _empty(m, f, gate_up)
    _silu_mul_round[(m,)](
        gate_up, *out, f, LARGEST, LEAST, BLOCK=next_power_of_2(f), num_warps=8, **overlap(gate_up)
    )
    return out


def silu_mul_round(gate_up: Tensor) -> Rounded:
    """`silu_mul_round_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (silu_mul_round_triton if use_triton(gate_up) else silu_mul_round_torch)(gate_up)


def multiply(a: Rounded, w: Rounded, dtype: torch.dtype) -> Tensor:
    """a [m, k] by w [n, k] -> [m, n] in dtype, summed in fp32.

    On a GPU by the library, which wants k and n to be multiples of 16 and the result in bfloat16.
    """
    if not use_triton(a.values) or not a.values.is_cuda:
        return F.linear(a.wide(), w.wide()).to(dtype)
    product: Tensor = torch._scaled_mm(
        a.values, w.values.t(), scale_a=a.scale, scale_b=w.scale.t(), out_dtype=dtype, use_fast_accum=True
    )
    return product


def _empty(m: int, k: int, like: Tensor) -> Rounded:
    values = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=like.device)
    return Rounded(values, torch.empty(m, 1, device=like.device))


@triton.jit
def _round_rows(
    x, added, values, scale, k, eps, largest, least,
    ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < k
    value = tl.load(x + row * k + column, inside, 0.0)
    type = value.dtype
    value = value.to(tl.float32)
    if ADD:
        value += tl.load(added + row * k + column, inside, 0.0).to(tl.float32)
        tl.store(x + row * k + column, value.to(type), inside)
        value = value.to(type).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(value), 0), least) / largest
    tl.store(values + row * k + column, (value / size).to(values.dtype.element_ty), inside)
    if NORM:
        size *= tl.rsqrt(tl.sum(value * value, 0) / k + eps)
    tl.store(scale + row, size)


@triton.jit
def _silu_mul_round(gate_up, values, scale, f, largest, least, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(gate_up + row * 2 * f + column, inside, 0.0).to(tl.float32)
    value = tl.load(gate_up + row * 2 * f + f + column, inside, 0.0).to(tl.float32)
    value *= gate / (1 + tl.exp(-gate))
    size = tl.maximum(tl.max(tl.abs(value), 0), least) / largest
    tl.store(values + row * f + column, (value / size).to(values.dtype.element_ty), inside)
    tl.store(scale + row, size)
