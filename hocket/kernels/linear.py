"""Matrix products of few rows, with what comes before and after them in the same kernel.

A step has one row per request, so a product reads its whole weight for little arithmetic, and time goes
into memory and into starting kernels. Up to `SKINNY` rows the kernel here, which leaves the matrix unit idle,
takes the norm before the product, and the gate or the residual after it, along; with more rows the library's
product is faster and the pieces run apart.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton
from hocket.kernels.norm import rms_norm, rms_norm_torch, unit_scale

SKINNY = 2  # rows up to which the fused kernel is used; why no more: docs/decisions, 2026-11-30


def norm_linear_torch(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows and multiply: x [m, k], norm [k], weight [n, k] -> [m, n]. See `rms_norm_torch`."""
    return F.linear(rms_norm_torch(x, norm, eps), weight)


def norm_linear_triton(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm_linear_torch` as a kernel: the same arguments, the same meaning."""
    if x.shape[0] > SKINNY:
        return F.linear(rms_norm(x, norm, eps), weight)
    return _launch(x, weight, norm=norm, eps=eps)


def norm_linear(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norm_linear_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (norm_linear_triton if use_triton(x) else norm_linear_torch)(x, norm, weight, eps)


def norm_gated_torch(x: Tensor, norm: Tensor | None, gate_up: Tensor, eps: float) -> Tensor:
    """The first half of a gated MLP: x [m, k], norm [k], gate_up [2 f, k], gate rows first -> [m, f].

    norm None: its weight is in gate_up's. What is left of it is one factor a row, which follows the product.
    """
    if norm is None:
        return silu_mul_torch(F.linear(x, gate_up), x, eps)
    return silu_mul_torch(F.linear(rms_norm_torch(x, norm, eps), gate_up))


def norm_gated_triton(x: Tensor, norm: Tensor | None, gate_up: Tensor, eps: float) -> Tensor:
    """`norm_gated_torch` as a kernel: the same arguments, the same meaning."""
    if x.shape[0] <= SKINNY:
        return _launch(x, gate_up, norm=norm, eps=eps, gated=True)
    if norm is None:
        return silu_mul_triton(F.linear(x, gate_up), x, eps)
    return silu_mul_triton(F.linear(rms_norm(x, norm, eps), gate_up))


def norm_gated(x: Tensor, norm: Tensor | None, gate_up: Tensor, eps: float) -> Tensor:
    """`norm_gated_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (norm_gated_triton if use_triton(x) else norm_gated_torch)(x, norm, gate_up, eps)


def linear_add_torch(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """A product added to the residual: a [m, k], weight [n, k], x [m, n] -> [m, n]. x may be overwritten."""
    return x + F.linear(a, weight)


def linear_add_triton(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """`linear_add_torch` as a kernel: the same arguments, the same meaning."""
    if a.shape[0] > SKINNY:
        return x.addmm_(
            a, weight.t()
        )  # rounds once where the twin rounds twice; out of place it would copy x
    return _launch(a, weight, residual=x)


def linear_add(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """`linear_add_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (linear_add_triton if use_triton(a) else linear_add_torch)(a, weight, x)


def silu_mul_torch(gate_up: Tensor, x: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """gate_up [m, 2 f], gates first -> silu(gate) * up [m, f].

    x [m, d]: gate_up was made of these rows, which are still to be scaled to unit root mean square.
    """
    if x is not None:
        gate_up = (gate_up * unit_scale(x, eps)).to(gate_up.dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_triton(gate_up: Tensor, x: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """`silu_mul_torch` as a kernel: the same arguments, the same meaning."""
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    d = 1 if x is None else x.shape[1]
    assert x is None or x.is_contiguous(), "rows are read without strides"
    out = gate_up.new_empty(m, f)
    _silu_mul[(m, -(-f // 2048))](
        gate_up, gate_up if x is None else x, out, f, d, eps, NORM=x is not None, BLOCK=2048,
        WHOLE=next_power_of_2(d), num_warps=8, **overlap(out),
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor, x: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """`silu_mul_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (silu_mul_triton if use_triton(gate_up) else silu_mul_torch)(gate_up, x, eps)


def _launch(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    assert x.is_contiguous(), "rows are read without strides"
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(m, n)
    depth, columns = min(2048 if k % 2048 == 0 else 1024, next_power_of_2(k)), 8
    _few[(-(-n // columns),)](
        x, weight, x if norm is None else norm, x if residual is None else residual, out, n, k, eps,
        M=m, SCALE=norm is not None or gated, NORM=norm is not None, GATED=gated, ADD=residual is not None,
        EVEN=k % depth == 0,
        COLUMNS=columns, DEPTH=depth, WHOLE=next_power_of_2(k),
        num_warps=max(1, depth // 256), **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _few(
    x, weight, norm, residual, out, n, k, eps,
    M: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    there = column < n
    w_at = weight + column[:, None].to(tl.int64) * k + deep[None, :]
    type = x.dtype.element_ty
    for row in tl.static_range(M):  # rows after the first find the weights in the cache
        total = tl.zeros([COLUMNS, DEPTH], tl.float32)
        second = tl.zeros([COLUMNS, DEPTH], tl.float32)
        scale = 1.0
        if SCALE:
            all = tl.arange(0, WHOLE)
            value = tl.load(x + row * k + all, all < k, 0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(value * value, 0) / k + eps)
        for start in range(0, k, DEPTH):
            inside = there[:, None] if EVEN else there[:, None] & (start + deep[None, :] < k)
            w = tl.load(w_at + start, inside, 0.0).to(tl.float32)
            a = tl.load(x + row * k + start + deep, start + deep < k, 0.0).to(tl.float32)
            if SCALE:
                a = (a * scale).to(type).to(tl.float32)
            if NORM:
                g = tl.load(norm + start + deep, start + deep < k, 0.0).to(tl.float32)
                a = (g * a).to(type).to(tl.float32)
            total += w * a[None, :]
            if GATED:
                w = tl.load(w_at + n.to(tl.int64) * k + start, inside, 0.0).to(tl.float32)
                second += w * a[None, :]
        result = tl.sum(total, 1).to(type).to(tl.float32)
        if GATED:
            up = tl.sum(second, 1).to(type).to(tl.float32)
            result = (result / (1 + tl.exp(-result))).to(type).to(tl.float32) * up
        if ADD:
            result += tl.load(residual + row * n + column, there, 0.0).to(tl.float32)
        tl.store(out + row * n + column, result.to(type), there)


@triton.jit
def _silu_mul(
    gate_up, x, out, f, d, eps, NORM: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    type = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * f + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * f + f + column, inside, 0.0).to(tl.float32)
    if NORM:
        all = tl.arange(0, WHOLE)
        value = tl.load(x + row * d + all, all < d, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / d + eps)
        gate = (gate * scale).to(type).to(tl.float32)
        up = (up * scale).to(type).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(type).to(tl.float32)
    tl.store(out + row * f + column, (gate * up).to(type), inside)
