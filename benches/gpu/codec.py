"""How long does a codec step take for so many frames of so many streams?

Regime: arithmetic (4.96 GFLOP a frame); at few frames, launches and the 0.23 GB of weights. The ceiling
printed is operations over 790 TFLOP/s, in fp32 over 67.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benches.gpu.frame import event_ms, kernel_times
from benches.gpu.model import Model
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
    stream = own_stream(model.device)
    slots_total = max(b for _, b in grid) + 1
    state = allocate(program.declare(), slots=slots_total, device=model.device).tensors
    for n, b in grid:
        slots = torch.arange(1, b + 1, device=model.device)
        codes = torch.randint(2048, (b, n, 16), dtype=torch.int32, device=model.device)
        pool = GraphPool(stream)
        torch.cuda.synchronize()

        def call(slots: Any = slots, codes: Any = codes) -> Any:
            return program.step(state, slots, codes)

        with torch.cuda.stream(stream):
            pool.capture("step", call)
            ms = event_ms(lambda: pool.replay("step", call), 20)  # noqa: B023
        ceiling = FLOP * n * b / (790e12 if name == "bf16" else 67e12) * 1e3
        rows.append({"dtype": name, "frames": n, "b": b, "ms": ms, "ceiling_ms": ceiling})
        report(
            f"codec {name} {n:3d} frames x {b:3d}  {ms:7.3f} ms  "
            f"ceiling {ceiling:6.3f} ({ceiling / ms:4.0%})  {n * b * 80 / ms:7.0f} audio-s/s"
        )
    return rows


def breakdown(model: Model, program: CodecProgram, n: int, b: int) -> list[tuple[str, float, int]]:
    stream = own_stream(model.device)
    state = allocate(program.declare(), slots=b + 1, device=model.device).tensors
    slots = torch.arange(1, b + 1, device=model.device)
    codes = torch.randint(2048, (b, n, 16), dtype=torch.int32, device=model.device)
    pool = GraphPool(stream)
    with torch.cuda.stream(stream):
        pool.capture("step", lambda: program.step(state, slots, codes))
        torch.cuda.synchronize()
        return kernel_times(lambda: pool.replay("step", lambda: None), 4)
