"""One step of a flow that is guided by its own unconditioned velocity."""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.kernels.choice import next_power_of_2, overlap, tl, triton, use_triton


def guided_step_torch(
    x: Tensor, velocity: Tensor, guidance: Tensor, length: Tensor, dtype: torch.dtype
) -> Tensor:
    """Move x along a guided velocity (classifier-free guidance with CFG-Zero*, arXiv 2503.18886).

    x fp32 [b, n] is written in place: x -= length * u, with u = s q + guidance (p - s q), where velocity
    [2 b, n] holds p, the conditioned rows, before q, the others, and s = <p, q> / (<q, q> + 1e-8).
    guidance, length fp32 [b]; a length of 0 leaves a row as it is. Computed in fp32: products of half
    precision would lose s. -> x in `dtype`, which the next estimate reads.
    """
    p, q = velocity.float().chunk(2)
    q = q * ((p * q).sum(1) / (q.square().sum(1) + 1e-8))[:, None]
    x -= length[:, None] * (q + guidance[:, None] * (p - q))
    return x.to(dtype)


def guided_step_triton(
    x: Tensor, velocity: Tensor, guidance: Tensor, length: Tensor, dtype: torch.dtype
) -> Tensor:
    """`guided_step_torch` as a kernel: the same arguments, the same meaning."""
    assert x.is_contiguous(), "rows are read without strides"
    assert velocity.is_contiguous(), "rows are read without strides"
    b, n = x.shape
    out = torch.empty_like(x, dtype=dtype)
    _guided_step[(b,)](
        x, velocity, guidance, length, out, b, n, BLOCK=next_power_of_2(n), num_warps=1, **overlap(x)
    )
    return out


def guided_step(x: Tensor, velocity: Tensor, guidance: Tensor, length: Tensor, dtype: torch.dtype) -> Tensor:
    """`guided_step_torch`, which says what it does, or its kernel; `hocket.kernels.choice` picks."""
    call = guided_step_triton if use_triton(x) else guided_step_torch
    return call(x, velocity, guidance, length, dtype)


@triton.jit(do_not_specialize=["b"])
def _guided_step(x, velocity, guidance, length, out, b, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    p = tl.load(velocity + row * n + column, inside, 0.0).to(tl.float32)
    q = tl.load(velocity + (b + row) * n + column, inside, 0.0).to(tl.float32)
    q *= tl.sum(p * q, 0) / (tl.sum(q * q, 0) + 1e-8)
    moved = tl.load(x + row * n + column, inside, 0.0)
    moved -= tl.load(length + row) * (q + tl.load(guidance + row) * (p - q))
    tl.store(x + row * n + column, moved, inside)
    tl.store(out + row * n + column, moved.to(out.dtype.element_ty), inside)
