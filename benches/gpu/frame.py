"""How long does a frame take, and where does the time go?

Regime: memory at small batches (talker and fifteen passes of the predictor read 5.2 GB of weights a frame,
1.2 ms at 4.3 TB/s), launches between kernels, and arithmetic from a batch of some 200 on. The ceiling printed
is the larger of bytes over 4.3 TB/s and operations over 790 TFLOP/s, talker and predictor each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benches.gpu.model import Model
from hocket.core import leaves
from hocket.kernels import choice, linear
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.runtime.graphs import GraphPool, own_stream
from hocket.runtime.state import allocate

BANDWIDTH, ARITHMETIC = 4.3e12, 790e12
CONTEXT = 200


def event_ms(call: Callable[[], Any], repeat: int, warm: int = 3) -> float:
    """Median time of a call on the current stream."""
    for _ in range(warm):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
    return times[len(times) // 2]


def ceiling_ms(program: TalkerProgram, b: int) -> tuple[float, float]:
    def size(layers: Any) -> int:
        return sum(t.numel() for layer in layers for t in leaves(layer))

    w = program.w
    outer = size(w.layers) + w.head.numel()
    inner, heads = size(w.inner_layers), w.inner_heads.numel()
    books = program.books
    kv = len(w.layers) * 2 * program.shape.kv_heads * program.shape.head_dim * 2 * CONTEXT * b
    talker = max((outer * 2 + kv) / BANDWIDTH, 2 * outer * b / ARITHMETIC)
    predictor = max(
        ((books - 1) * inner + heads) * 2 / BANDWIDTH, 2 * (books * inner + heads) * b / ARITHMETIC
    )
    return talker * 1e3, predictor * 1e3


def states(program: TalkerProgram, b: int) -> Any:
    """A batch in the middle of its utterances."""
    blocks = 32
    state = allocate(
        program.declare(), slots=b + 1, device=program.device, blocks=(b + 1) * blocks, max_blocks=blocks
    ).tensors
    state.cache.kv.normal_()
    state.cache.blocks.copy_(torch.arange((b + 1) * blocks, device=program.device).view(-1, blocks))
    state.cache.position.fill_(CONTEXT)
    state.x.normal_()
    state.live[1:] = True
    state.frame.fill_(CONTEXT - 20)
    state.limit.fill_(1 << 30)
    state.seed.copy_(torch.arange(b + 1, device=program.device))
    state.temperature.fill_(0.9)
    state.top_k.fill_(50)
    state.penalty.fill_(1.05)
    if program.device.type == "cuda":
        torch.cuda.synchronize()  # what reads it runs on a stream of its own
    return state


def parts(program: TalkerProgram, state: Any, slots: Tensor) -> dict[str, Callable[[], Any]]:
    b, d = slots.shape[0], program.width
    h = torch.randn(b, d, device=slots.device, dtype=program.dtype)
    x = torch.randn(b, program.w.inner_norm.shape[0], device=slots.device, dtype=program.dtype)
    key = torch.randint(1 << 32, (b, program.books), device=slots.device)
    codes = torch.zeros(b, program.books, dtype=torch.int64, device=slots.device)
    from hocket.nn.sampler import DrawOptions

    o = DrawOptions(state.temperature[:, 1], state.top_k[:, 1], state.top_p[:, 1])
    return {
        "frame": lambda: program.step(state, slots, 32 * 16, 0),
        "predictor": lambda: program._predict(h, x, o, slots, key, 0, codes),
    }


def main(
    model: Model, program: TalkerProgram, batches: tuple[int, ...], report: Callable[[str], None]
) -> list[Any]:
    rows = []
    stream = own_stream(model.device)
    for b in batches:
        slots = torch.arange(1, b + 1, device=model.device)
        talker, predictor = ceiling_ms(program, b)
        for skinny, overlap in ((0, False), (2, False)) if b <= 2 else ((0, False),):
            linear.SKINNY, choice.OVERLAP = skinny, overlap
            state = states(program, b)
            pool = GraphPool(stream)
            begin = time.perf_counter()
            calls = parts(program, state, slots)
            with torch.cuda.stream(stream):
                for name, call in calls.items():
                    pool.capture(name, call)
                capture_s = time.perf_counter() - begin
                row = {
                    "b": b,
                    "fused rows": skinny,
                    "overlap": overlap,
                    "ceiling_ms": talker + predictor,
                    "capture_s": capture_s,
                }
                row["graph_ms"] = event_ms(lambda: pool.replay("frame", calls["frame"]), 30)  # noqa: B023
                row["predictor_ms"] = event_ms(lambda: pool.replay("predictor", calls["predictor"]), 30)  # noqa: B023
                row["eager_ms"] = event_ms(calls["frame"], 3, warm=1)
            rows.append(row)
            ms = row["graph_ms"]
            report(
                f"b {b:4d}  fused rows {skinny:3d} overlap {overlap:d}  graph {ms:7.3f} ms  "
                f"predictor {row['predictor_ms']:7.3f}  eager {row['eager_ms']:8.2f}  "
                f"ceiling {talker + predictor:6.3f} ({(talker + predictor) / ms:4.0%})  "
                f"{b * 80 / ms:7.0f} audio-s/s  capture {capture_s:.1f} s"
            )
    linear.SKINNY = 2
    return rows


def breakdown(model: Model, program: TalkerProgram, b: int, skinny: int) -> list[tuple[str, float, int]]:
    """Kernel times within one frame: name, ms a frame, launches."""
    linear.SKINNY = skinny
    stream = own_stream(model.device)
    state, slots = states(program, b), torch.arange(1, b + 1, device=model.device)
    pool = GraphPool(stream)
    call = parts(program, state, slots)["frame"]
    with torch.cuda.stream(stream):
        pool.capture("frame", call)
        pool.replay("frame", call)
        torch.cuda.synchronize()
        return kernel_times(lambda: pool.replay("frame", call), 4)


def kernel_times(call: Callable[[], Any], repeat: int) -> list[tuple[str, float, int]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(repeat):
            call()
        torch.cuda.synchronize()
    rows = [
        (e.key[:90], e.self_device_time_total / 1e3 / repeat, round(e.count / repeat))
        for e in p.key_averages()
        if e.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row[1])
