"""What do talker and codec cost each other when they share a GPU?

Question   milliseconds a frame when every fourth frame is followed by a codec step over four frames of all
           streams, on a stream of its own: with streams alike, with the talker's preferred, with
           multiprocessors set aside for the codec (green contexts), and with the codec kept to some while the
           talker may use all.
Regime     the talker is a chain of short kernels, each waiting for the one before; the codec fills the GPU
           with work that can wait. Least: the larger of the two. Most: their sum.

    python -m benches.gpu.beside [--batches 16 64 128 256] [--aside 24 40 56]
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import torch

from benches.gpu.codec import codes
from benches.gpu.frame import CONTEXT, event_ms, states
from benches.gpu.model import Model
from hocket.kernels.cuda import _driver
from hocket.runtime.graphs import GraphPool
from hocket.runtime.state import allocate

FRAMES, CHUNK = 48, 4


def set_aside(device: torch.device, count: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, int]:
    """Two streams, of all but `count` multiprocessors and of about so many; -> also how many it became."""
    driver = _driver()

    def ok(code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"{what} gives {code}")

    torch.cuda.current_stream(device).synchronize()
    whole, part, rest = (ctypes.create_string_buffer(512) for _ in range(3))
    handle, groups = ctypes.c_int(), ctypes.c_uint(1)
    ok(driver.cuDeviceGet(ctypes.byref(handle), device.index or 0), "cuDeviceGet")
    ok(driver.cuDeviceGetDevResource(handle, whole, 1), "cuDeviceGetDevResource")
    ok(
        driver.cuDevSmResourceSplitByCount(part, ctypes.byref(groups), whole, rest, 0, count),
        "cuDevSmResourceSplitByCount",
    )
    streams = []
    for resource in (rest, part):
        description, context, stream = (ctypes.c_void_p() for _ in range(3))
        ok(
            driver.cuDevResourceGenerateDesc(ctypes.byref(description), resource, 1),
            "cuDevResourceGenerateDesc",
        )
        ok(driver.cuGreenCtxCreate(ctypes.byref(context), description, handle, 1), "cuGreenCtxCreate")
        ok(driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, 1, 0), "cuGreenCtxStreamCreate")
        streams.append(torch.cuda.ExternalStream(stream.value, device))
    return streams[0], streams[1], int.from_bytes(part[96:100], "little")


def together(pools: Any, calls: Any, streams: Any, state: Any) -> float:
    """Milliseconds a frame of FRAMES frames and their codec steps."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(4):
        state.cache.position.fill_(CONTEXT)
        torch.cuda.synchronize()
        begin.record(streams[0])
        for i in range(FRAMES):
            with torch.cuda.stream(streams[0]):
                pools[0].replay("x", calls[0])
            if i % CHUNK == CHUNK - 1:
                streams[1].wait_stream(streams[0])
                with torch.cuda.stream(streams[1]):
                    pools[1].replay("x", calls[1])
        streams[0].wait_stream(streams[1])
        end.record(streams[0])
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / FRAMES)
    return sorted(times)[1]


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.beside")
    p.add_argument("--batches", type=int, nargs="+", default=[16, 64, 128, 256])
    p.add_argument("--aside", type=int, nargs="*", default=[32, 48])
    p.add_argument("--size", default="1.7b")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    device = torch.device("cuda")
    model = Model(a.size, device)
    talker, codec = model.talker(), model.codec(torch.bfloat16)
    found: dict[str, Any] = {}
    for b in a.batches:
        state, slots = states(talker, b), torch.arange(1, b + 1, device=device)
        sound = allocate(codec.declare(), slots=b + 1, device=device).tensors
        frames = codes(CHUNK, b, device)
        calls = (
            lambda: talker.step(state, slots, 512, 0),  # noqa: B023
            lambda: codec.step(sound, slots, frames),  # noqa: B023
        )
        variants: dict[str, Any] = {
            "alike": lambda: (torch.cuda.Stream(device), torch.cuda.Stream(device)),
            "talker preferred": lambda: (torch.cuda.Stream(device, priority=-5), torch.cuda.Stream(device)),
        }
        for count in a.aside:
            variants[f"{count} aside"] = lambda count=count: set_aside(device, count)
            variants[f"{count} for codec"] = lambda count=count: (
                torch.cuda.Stream(device, priority=-5), *set_aside(device, count)[1:]
            )  # fmt: skip
        for name, make in variants.items():
            try:
                made = make()
                streams, got = made[:2], made[2] if len(made) > 2 else None
                pools = [GraphPool(s) for s in streams]
                state.cache.position.fill_(CONTEXT)
                torch.cuda.synchronize()
                alone = []
                for pool, call, stream in zip(pools, calls, streams, strict=True):
                    with torch.cuda.stream(stream):
                        pool.capture("x", call)
                        alone.append(event_ms(lambda: pool.replay("x", call), 12))  # noqa: B023
                both = together(pools, calls, streams, state)
                row = {
                    "frame_ms": alone[0],
                    "codec_ms": alone[1],
                    "together_ms": both,
                    "multiprocessors": got,
                }
                said = f"{alone[0]:6.2f} + {alone[1]:6.2f} / {CHUNK} alone, {both:6.2f} together"
                said += f", {b * 80 / both:6.0f} audio-s/s"
            except Exception as e:
                row, said = {"error": repr(e)}, repr(e)
            found[f"b {b}, {name}"] = row
            print(f"b {b:4d}  {name:18s} {said}  {got if name.endswith('aside') else ''}", flush=True)
    if a.out:
        a.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
