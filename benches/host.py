"""How much host time does a frame cost, when the device costs none?

Both stages run programs that give fixed tensors at once, so what is left is scheduling, rings and chunks. The
ceiling is the device's time for a frame: while the host needs less, steps overlap and it is not seen.

    python -m benches.host
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Declared, Job, PagedKV, StepOutput, StreamPrompt, declared
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.streaming import StreamingLimits, StreamingRunner

CPU = torch.device("cpu")
FRAMES = 137


@dataclass
class Prompt:
    row_keys: list[bytes]
    variant: int = 0

    def frames_ready(self) -> int | None:
        return None


@dataclass
class State:
    cache: PagedKV


class Talker:
    gives, max_tokens, frame_rate_hz = ChunkKind.CODES, 1024, 12.5

    def __init__(self, rows: int) -> None:
        self.out = StepOutput(
            chunk=torch.zeros(rows, 16, dtype=torch.int32),
            emit=torch.ones(rows, dtype=torch.bool),
            stop=torch.zeros(rows, dtype=torch.bool),
        )

    def declare(self) -> Any:
        return State(PagedKV.declare(1, 1, 1, torch.float32))

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Prompt:
        return Prompt([b"x"] * 10)

    def join(self, *_: Any) -> None: ...

    def rows(self, prompt: Any, frames: np.ndarray, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start, 1)

    def prefill(self, *_: Any) -> None: ...

    def step(self, state: Any, slots: Tensor, context: int, variant: int) -> StepOutput:
        return self.out


class Codec:
    hop, rate_hz, lookahead = 1920, 24000, 0
    frame: Declared = declared(torch.int32, 16)

    def declare(self) -> Any:
        return declared(torch.int32, "slots")

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> StreamPrompt:
        return StreamPrompt()

    def step(self, state: Any, slots: Tensor, frames: Tensor) -> Tensor:
        return torch.empty(frames.shape[0], frames.shape[1] * self.hop)


def run(clients: int) -> dict[str, float]:
    heard = 0

    def listen(chunk: Chunk) -> None:
        nonlocal heard
        heard += 1

    codec = StreamingRunner("codec", Codec(), StreamingLimits(slots=clients, max_batch=64), CPU, listen)
    limits = AutoregressiveLimits(slots=clients, max_batch=clients, kv_blocks=clients * 12 + 1)
    talker = AutoregressiveRunner("talker", Talker(clients), limits, CPU, codec.push)
    for i in range(clients):
        job = Job(id=str(i), route=("talker", "codec"), inputs={}, seed=0, max_frames=FRAMES)
        codec.start(job, {})
        talker.start(job, {})
    seconds = {"talker": 0.0, "codec": 0.0}
    for frame in range(FRAMES):
        now = frame * 0.02  # four times as fast as listening
        for name, runner in (("talker", talker), ("codec", codec)):
            begin = time.perf_counter()
            runner.tick(now)
            seconds[name] += time.perf_counter() - begin
    return {name: s / FRAMES * 1e3 for name, s in seconds.items()} | {"chunks": heard}


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for clients in (1, 16, 64, 128, 256):
        row = {"clients": clients, **run(clients)}
        rows.append(row)
        print(
            f"{clients:4d} streams: talker {row['talker']:6.3f} ms a frame, codec {row['codec']:6.3f}, "
            f"{(row['talker'] + row['codec']) / clients * 1e3:5.1f} us a row"
        )
    if "--profile" in sys.argv:
        with cProfile.Profile() as p:
            run(256)
        pstats.Stats(p).sort_stats("tottime").print_stats(18)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
