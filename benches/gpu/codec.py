"""How long does a codec step take for so many frames of so many streams?

Regime: arithmetic (4.96 GFLOP a frame); at few frames, launches and the 0.23 GB of weights. The ceiling
printed is operations over 790 TFLOP/s, in fp32 over 67.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benches.gpu.frame import event_ms, kernel_times
from benches.gpu.model import Model
from hocket.core import StreamingProgram
from hocket.models.qwen3_tts.codec import CodecProgram
from hocket.runtime.graphs import GraphPool, own_stream
from hocket.runtime.state import allocate

FLOP = 4.96e9


def main(
    model: Model,
    program: CodecProgram,
    grid: tuple[tuple[int, int], ...],
    name: str,
    report: Callable[[str], None],
) -> list[Any]:
    rows = []
    for n, b in grid:
        ms = step_ms(program, codes(n, b, model.device))
        ceiling = FLOP * n * b / (790e12 if name == "bf16" else 67e12) * 1e3
        rows.append({"dtype": name, "frames": n, "b": b, "ms": ms, "ceiling_ms": ceiling})
        report(
            f"codec {name} {n:3d} frames x {b:3d}  {ms:7.3f} ms  "
            f"ceiling {ceiling:6.3f} ({ceiling / ms:4.0%})  {n * b * 80 / ms:7.0f} audio-s/s"
        )
    return rows


def breakdown(model: Model, program: CodecProgram, n: int, b: int) -> list[tuple[str, float, int]]:
    return step_kernels(program, codes(n, b, model.device))


def codes(n: int, b: int, device: torch.device) -> Tensor:
    return torch.randint(2048, (b, n, 16), dtype=torch.int32, device=device)


def step_ms(program: StreamingProgram, frames: Tensor) -> float:
    """Median time of a step over frames [b, n, ...] of as many streams, from a graph."""
    stream, replay = _recorded(program, frames)
    with torch.cuda.stream(stream):
        return event_ms(replay, 20)


def step_kernels(program: StreamingProgram, frames: Tensor) -> list[tuple[str, float, int]]:
    """`kernel_times` of such a step."""
    stream, replay = _recorded(program, frames)
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
        return kernel_times(replay, 4)


def _recorded(program: StreamingProgram, frames: Tensor) -> tuple[Any, Callable[[], Any]]:
    """A stream, and what to call there."""
    b, stream = len(frames), own_stream(frames.device)
    state = allocate(program.declare(), slots=b + 1, device=frames.device).tensors
    slots = torch.arange(1, b + 1, device=frames.device)
    pool = GraphPool(stream)
    torch.cuda.synchronize()

    def call() -> Any:
        return program.step(state, slots, frames)

    with torch.cuda.stream(stream):
        pool.capture("step", call)
    return stream, lambda: pool.replay("step", call)
