"""What would 8-bit products give VoxCPM2's diffusion, and what would they cost in precision?

Part of `python -m benches.gpu voxcpm`.

Regime: arithmetic from some eight requests on; fp8 doubles its ceiling to 1,580 TFLOP/s. Matrices are rounded
to e4m3 with a scale a row; activations when they are made, with a scale a token, in the kernels that make
them anyway (norm and gate) and in one pass over what attention gives. All else stays as it is. The error is
that of a patch against fp32, beside bf16's, for equal inputs. Weights are random: trained ones have outliers,
and what decides is speech, judged by ear and by transcript.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benches.gpu.frame import event_ms
from hocket.kernels.attention import whole_attention
from hocket.kernels.choice import next_power_of_2, tl, triton
from hocket.models.voxcpm import patches
from hocket.models.voxcpm.patches import diffuse
from hocket.models.voxcpm.stacks import Stack
from hocket.models.voxcpm.talker import CALLS, STEPS, TalkerProgram
from hocket.nn.norm import rms_norm
from hocket.runtime.graphs import GraphPool, own_stream

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
TEN = CALLS[STEPS.index(10)]  # estimates of ten Euler steps


@triton.jit
def _norm_round(x, added, norm, out, scale, d, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    type = x.dtype.element_ty
    value = tl.load(x + row * d + column, inside, 0.0).to(tl.float32)
    if ADD:
        value = (
            (value + tl.load(added + row * d + column, inside, 0.0).to(tl.float32)).to(type).to(tl.float32)
        )
        tl.store(x + row * d + column, value.to(type), inside)
    value = (value * tl.rsqrt(tl.sum(value * value, 0) / d + eps)).to(type).to(tl.float32)
    value *= tl.load(norm + column, inside, 0.0).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
    tl.store(out + row * d + column, (value / size).to(out.dtype.element_ty), inside)
    tl.store(scale + row, size)


@triton.jit
def _gate_round(gate_up, out, scale, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(gate_up + row * 2 * f + column, inside, 0.0).to(tl.float32)
    value = (
        gate / (1 + tl.exp(-gate)) * tl.load(gate_up + row * 2 * f + f + column, inside, 0.0).to(tl.float32)
    )
    size = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
    tl.store(out + row * f + column, (value / size).to(out.dtype.element_ty), inside)
    tl.store(scale + row, size)


@triton.jit
def _round(x, out, scale, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    value = tl.load(x + row * d + column, inside, 0.0).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
    tl.store(out + row * d + column, (value / size).to(out.dtype.element_ty), inside)
    tl.store(scale + row, size)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [n, k] -> e4m3 [n, k], fp32 [1, n], what each row is multiplied by."""
    size = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (weight.float() / size).to(FP8), size.t().contiguous()


def product(a: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor]) -> Tensor:
    return torch._scaled_mm(
        a[0], w[0].t(), scale_a=a[1], scale_b=w[1], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _empty(m: int, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(m, d, dtype=FP8, device=device), torch.empty(m, 1, device=device)


def norm_round(x: Tensor, norm: Tensor, eps: float, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The norm of x, to which `added` is added first, in place."""
    m, d = x.shape
    out = _empty(m, d, x.device)
    _norm_round[(m,)](
        x, x if added is None else added, norm, *out, d, eps, ADD=added is not None, BLOCK=next_power_of_2(d),
        num_warps=4,
    )  # fmt: skip
    return out


class Rounded:
    """A stack's layers with fp8 matrices; stands in for `run_whole` in the diffusion."""

    def __init__(self, stack: Stack) -> None:
        self.layers = [
            {name: rounded(getattr(layer.weights, name)) for name in ("qkv", "out", "gate_up", "down")}
            for layer in stack.layers
        ]

    def __call__(
        self, w: Stack, x: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, share: Tensor | None
    ) -> Tensor:
        b, n, _ = x.shape
        width, eps = w.shape.heads * w.shape.head_dim, w.shape.eps
        x = x.flatten(0, 1)
        added: Tensor | None = None
        for layer, m in zip(w.layers, self.layers, strict=True):
            qkv = product(norm_round(x, layer.weights.norm_in, eps, added), m["qkv"]).unflatten(0, (b, n))
            a = whole_attention(qkv[..., :width], qkv[..., width:], cos, sin, 0).flatten(0, 1)
            out = _empty(b * n, width, x.device)
            _round[(b * n,)](a, *out, width, BLOCK=next_power_of_2(width), num_warps=4)
            gate_up = product(
                norm_round(x, layer.weights.norm_mlp, eps, product(out, m["out"])), m["gate_up"]
            )
            f = gate_up.shape[1] // 2
            out = _empty(b * n, f, x.device)
            _gate_round[(b * n,)](gate_up, *out, f, BLOCK=next_power_of_2(f), num_warps=8)
            added = product(out, m["down"])
        kept = (x + added).unflatten(0, (b, n))[:, first : first + count]
        return rms_norm(kept, w.norm, eps)


def main(exact: TalkerProgram, talker: TalkerProgram, report: Callable[[str], None]) -> dict[str, Any]:
    """exact: the same weights in fp32."""
    out: dict[str, Any] = {}
    stream, device, c = own_stream(talker.device), talker.device, talker.config
    plain, fp8 = patches.run_whole, Rounded(talker.w.diffusion.stack)

    def call(program: TalkerProgram, b: int) -> Tensor:
        g = torch.Generator(device).manual_seed(b)
        mu = torch.randn(b, 2 if c.v2 else 1, c.dit_config.hidden_dim, generator=g, device=device)
        before = torch.randn(b, c.patch_size, c.feat_dim, generator=g, device=device)
        noise = torch.randn(b, c.patch_size, c.feat_dim, generator=g, device=device)
        given = (mu.to(program.dtype), before.to(program.dtype), noise)
        guidance, steps = torch.full((b,), 2.0, device=device), torch.full((b,), 10, device=device)
        return diffuse(program.w.diffusion, *given, guidance, steps, TEN, True, None)

    def relative(got: Tensor, wanted: Tensor) -> float:
        return ((got - wanted).square().mean() / wanted.square().mean()).sqrt().item()

    wanted = call(exact, 64)
    for name, run in (("bf16", plain), ("fp8", fp8)):
        patches.run_whole = run  # type: ignore[assignment]
        out[f"{name}: rms of a patch's error over its rms"] = relative(call(talker, 64), wanted)
    for b in (1, 8, 16, 32, 64, 128):
        guidance, steps = torch.full((b,), 2.0, device=device), torch.full((b,), 10, device=device)
        mu = torch.randn(b, 2 if c.v2 else 1, c.dit_config.hidden_dim, device=device, dtype=torch.bfloat16)
        before = torch.randn(b, c.patch_size, c.feat_dim, device=device, dtype=torch.bfloat16)
        noise = torch.randn(b, c.patch_size, c.feat_dim, device=device)
        times = []
        for run in (plain, fp8):
            patches.run_whole = run  # type: ignore[assignment]

            def estimate(given: tuple[Tensor, ...] = (mu, before, noise, guidance, steps)) -> Tensor:
                mu, before, noise, guidance, steps = given
                return diffuse(
                    talker.w.diffusion, mu, before, noise.clone(), guidance, steps, TEN, True, None
                )

            pool = GraphPool(stream)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                pool.capture(0, estimate)
                times.append(event_ms(partial(pool.replay, 0, estimate), 15))
        out[f"diffusion of {b}, ms"] = {"bf16": times[0], "fp8": times[1]}
        gain = times[0] / times[1]
        report(f"b {b:4d}  diffusion bf16 {times[0]:7.3f} ms  fp8 {times[1]:7.3f} ms  ({gain:.2f} x)")
    patches.run_whole = plain
    return out
