"""What do 8-bit products give VoxCPM2's diffusion, and what do they cost in precision?

Part of `python -m benches.gpu voxcpm`.

Regime: arithmetic from some eight requests on; fp8 doubles its ceiling to 1,580 TFLOP/s. The error is that
of a patch against fp32, beside bf16's, for equal inputs. Weights are random: trained ones have outliers, and
what decides is speech, judged by ear and by transcript.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benches.gpu.frame import event_ms
from hocket.models.voxcpm.patches import Diffusion, diffuse
from hocket.models.voxcpm.stacks import in_float8
from hocket.models.voxcpm.talker import CALLS, STEPS, TalkerProgram
from hocket.runtime.graphs import GraphPool, own_stream

TEN = CALLS[STEPS.index(10)]  # estimates of ten Euler steps


def main(exact: TalkerProgram, talker: TalkerProgram, report: Callable[[str], None]) -> dict[str, Any]:
    """exact: the same weights in fp32."""
    out: dict[str, Any] = {}
    stream, device, c = own_stream(talker.device), talker.device, talker.config
    plain = replace(talker.w.diffusion, whole=None)
    ways = {"bf16": plain, "fp8": replace(plain, stack=in_float8(plain.stack))}

    def given(w: Diffusion, b: int) -> tuple[Any, ...]:
        g = torch.Generator(device).manual_seed(b)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device)

        dtype = w.enter.weight.dtype
        mu = normal(b, 2 if c.v2 else 1, c.dit_config.hidden_dim).to(dtype)
        before, noise = normal(b, c.patch_size, c.feat_dim).to(dtype), normal(b, c.patch_size, c.feat_dim)
        guidance, steps = torch.full((b,), 2.0, device=device), torch.full((b,), 10, device=device)
        return mu, before, noise, guidance, steps

    def draw(w: Diffusion, mu: Tensor, before: Tensor, noise: Tensor, *rest: Tensor) -> Tensor:
        return diffuse(w, mu, before, noise.clone(), rest[0], rest[1], TEN, True, None)

    def relative(got: Tensor, wanted: Tensor) -> float:
        return ((got - wanted).square().mean() / wanted.square().mean()).sqrt().item()

    wanted = draw(exact.w.diffusion, *given(exact.w.diffusion, 64))
    for name, w in ways.items():
        out[f"{name}: rms of a patch's error over its rms"] = relative(draw(w, *given(w, 64)), wanted)
    for b in (1, 8, 16, 32, 64, 128):
        times = {}
        for name, w in ways.items():
            call = partial(draw, w, *given(w, b))
            pool = GraphPool(stream)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                pool.capture(0, call)
                times[name] = event_ms(partial(pool.replay, 0, call), 15)
        out[f"diffusion of {b}, ms"] = times
        gain = times["bf16"] / times["fp8"]
        report(
            f"b {b:4d}  diffusion bf16 {times['bf16']:7.3f} ms  fp8 {times['fp8']:7.3f} ms  ({gain:.2f} x)"
        )
    return out
