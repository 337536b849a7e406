"""x + b sin(a x)^2 with its gradient: a torch function and one Triton kernel each way.

Written out in torch it is seven passes over the decoder's largest tensors, in fp32.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def snake_torch(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x [..., c]; a, b fp32 [c] -> like x. fp32 inside: bf16 loses the sine's phase."""
    v = x.float()
    return (v + b * torch.sin(v * a).pow(2)).to(x.dtype)


if triton is not None:

    @triton.jit
    def _forward(x, a, b, y, rows, C: tl.constexpr, R: tl.constexpr):
        r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
        c = tl.arange(0, C)
        at, ok = r[:, None] * C + c[None, :], (r < rows)[:, None]
        v = tl.load(x + at, ok, 0.0).to(tl.float32)
        s = tl.sin(v * tl.load(a + c)[None, :])
        tl.store(y + at, v + tl.load(b + c)[None, :] * s * s, ok)

    @triton.jit
    def _backward(x, a, b, g, dx, da, db, rows, C: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr):
        c = tl.arange(0, C)
        f, h = tl.load(a + c)[None, :], tl.load(b + c)[None, :]
        sum_a, sum_b = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        for tile in range(TILES):
            r = (tl.program_id(0).to(tl.int64) * TILES + tile) * R + tl.arange(0, R)
            at, ok = r[:, None] * C + c[None, :], (r < rows)[:, None]
            v, u = tl.load(x + at, ok, 0.0).to(tl.float32), tl.load(g + at, ok, 0.0).to(tl.float32)
            s, k = tl.sin(v * f), tl.cos(v * f)
            turn = 2 * h * s * k * u
            tl.store(dx + at, u + turn * f, ok)
            sum_a += tl.sum(turn * v, 0)
            sum_b += tl.sum(u * s * s, 0)
        tl.atomic_add(da + c, sum_a)
        tl.atomic_add(db + c, sum_b)


class SnakeTriton(torch.autograd.Function):
    """`snake_torch`, where c is a power of two."""

    @staticmethod
    def forward(ctx, x, a, b):
        x = x.contiguous()
        ctx.save_for_backward(x, a, b)
        c, y = x.shape[-1], torch.empty_like(x)
        rows, block = x.numel() // c, max(1, 4096 // c)
        _forward[(triton.cdiv(rows, block),)](x, a, b, y, rows, c, block)
        return y

    @staticmethod
    def backward(ctx, g):
        x, a, b = ctx.saved_tensors
        g = g.contiguous()
        c, dx = x.shape[-1], torch.empty_like(x)
        da, db = torch.zeros_like(a), torch.zeros_like(b)
        rows, block = x.numel() // c, max(1, 4096 // c)
        _backward[(triton.cdiv(rows, 8 * block),)](x, a, b, g, dx, da, db, rows, c, block, 8)
        return dx, da, db


def worst(device, dtype) -> float:
    """The largest difference between the two, of values and gradients, relative to the largest value."""
    out = 0.0
    for c in (16, 128):
        g = torch.Generator(device).manual_seed(c)
        x = torch.randn(3, 777, c, device=device, generator=g).to(dtype)
        a, b = (torch.rand(c, device=device, generator=g) + 0.5 for _ in range(2))
        up = torch.randn(3, 777, c, device=device, generator=g).to(dtype)
        sides = []
        for call in (snake_torch, SnakeTriton.apply):
            leaves = [t.clone().requires_grad_() for t in (x, a, b)]
            y = call(*leaves)
            sides.append([y, *torch.autograd.grad(y, leaves, up)])
        for p, q in zip(*sides, strict=True):
            out = max(out, float((p - q).detach().float().abs().max() / p.detach().float().abs().max()))
    return out
