"""Root-mean-square normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale x [..., d] to unit root mean square, then by weight [d]; the dtype of x.

    Statistics are fp32 at least. The normalised value is rounded to the dtype of x before the multiply, as
    transformers 4.57.3 does (models/qwen3/modeling_qwen3.py `Qwen3RMSNorm`): rounding once at the end
    instead changes drawn codes in half precision.
    """
    return weight * (x * unit_scale(x, eps)).to(x.dtype)


def unit_scale(x: Tensor, eps: float) -> Tensor:
    """What scales rows x [..., d] to unit root mean square: [..., 1], fp32 at least."""
    return torch.rsqrt(
        x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True) + eps
    )


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_torch` as a kernel: the same arguments, the same meaning."""
    x = x.contiguous()
    out = torch.empty_like(x)
    d = x.shape[-1]
    _rms_norm[(x.numel() // d,)](x, weight, out, d, eps, BLOCK=next_power_of_2(d), **overlap(x))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    return (rms_norm_triton if use_triton(x) else rms_norm_torch)(x, weight, eps)


@triton.jit
def _rms_norm(x, weight, out, d, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    value = tl.load(x + row * d + column, inside, 0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / d + eps)
    type = out.dtype.element_ty
    scaled = tl.load(weight + column, inside, 0.0).to(tl.float32) * value.to(type).to(tl.float32)
    tl.store(out + row * d + column, scaled.to(type), inside)
