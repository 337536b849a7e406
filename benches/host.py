"""How much host time does a frame cost, when the device costs none?

Both stages run programs that give fixed tensors at once, so what is left is scheduling, rings and chunks. The
ceiling is the device's time for a frame: while the host needs less, steps overlap and it is not seen.

    python -m benches.host

Then, in virtual time: when do requests that arrive together hear something? Schedulers are the real ones, and
programs take the time that they take on an H200: 64 prompts of 50 rows, one frame and one chunk take 22 ms.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.core import (
    Chunk,
    ChunkKind,
    Declared,
    Job,
    PagedKV,
    Places,
    Span,
    StepOutput,
    StreamPrompt,
    declared,
)
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.playback import PlaybackClock
from hocket.runtime.ring import OutputRing, Owner
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

    def rows(self, spans: Sequence[Span]) -> Tensor:
        return torch.zeros(sum(span.stop - span.start for span in spans), 1)

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


# --- bursts --------------------------------------------------------------------------------------


class Device:
    """A device in virtual time, which does one thing after the other."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def work(self, ms: float) -> None:
        self.free = max(self.now, self.free) + ms / 1e3


class Late(OutputRing):
    """Results are there when the device has done what was launched before them."""

    def __init__(self, depth: int, device: Device) -> None:
        super().__init__(depth)
        self._device, self._done = device, deque[float]()

    def push(self, owners: list[Owner], tensors: list[Tensor]) -> None:
        super().push(owners, tensors)
        self._done.append(self._device.free)

    def pop(self, *, wait: bool) -> Any:
        assert not wait
        if not self._done or self._done[0] > self._device.now:
            return None
        self._done.popleft()
        return super().pop(wait=wait)


@dataclass
class TimedState:
    cache: PagedKV
    made: Tensor


class TimedTalker(Talker):
    """Takes what Qwen3-TTS 1.7B takes on an H200, in ms: docs/performance.md."""

    def __init__(self, rows: int, device: Device) -> None:
        super().__init__(rows)
        self._device = device

    def declare(self) -> Any:
        return TimedState(super().declare().cache, declared(torch.int32, "slots"))

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Prompt:
        return Prompt([job.id.encode()] * (25 + int(job.id) * 7 % 46))

    def prefill(self, state: TimedState, x: Tensor, places: Places, context: int) -> None:
        self._device.work(2.2 + max(0, len(x) - 250) * 0.0042)

    def step(self, state: TimedState, slots: Tensor, context: int, variant: int) -> StepOutput:
        b = len(slots)
        self._device.work(float(np.interp(b, [1, 16, 64, 128, 256], [3.0, 3.8, 4.6, 5.6, 7.2])))
        state.made[slots] += 1
        return StepOutput(self.out.chunk[:b], self.out.emit[:b], state.made[slots] >= FRAMES)


class TimedCodec(Codec):
    def __init__(self, device: Device) -> None:
        self._device = device

    def step(self, state: Any, slots: Tensor, frames: Tensor) -> Tensor:
        self._device.work(1.0 + 0.0212 * frames.shape[0] * frames.shape[1])
        return torch.zeros(1).expand(frames.shape[0], frames.shape[1] * self.hop)


def burst(listening: int, arriving: int, apart_ms: float) -> dict[str, float]:
    """`arriving` requests, one every `apart_ms`, join `listening` ones in the middle of theirs."""
    device = Device()
    begun: dict[str, float] = {}
    heard: dict[str, PlaybackClock] = {}

    def listen(chunk: Chunk) -> None:
        seconds = len(chunk.arrays["pcm"]) / Codec.rate_hz
        if seconds:
            heard.setdefault(chunk.job, PlaybackClock()).deliver(seconds, device.now)

    slots = listening + arriving
    codec = StreamingRunner(
        "codec", TimedCodec(device), StreamingLimits(slots=slots, max_batch=64, in_flight=2), CPU, listen
    )
    limits = AutoregressiveLimits(
        slots=slots, max_batch=slots, kv_blocks=slots * 14 + 1, prefill_tokens=2048, in_flight=2
    )
    talker = AutoregressiveRunner("talker", TimedTalker(slots, device), limits, CPU, codec.push)
    talker._ring, codec._ring = Late(2, device), Late(2, device)
    coming = [(0.0, i) for i in range(listening)]
    coming += [(0.2 + i * apart_ms / 1e3, listening + i) for i in range(arriving)]
    while coming or codec.jobs():
        while coming and coming[0][0] <= device.now:
            at, i = coming.pop(0)
            job = Job(id=str(i), route=("talker", "codec"), inputs={}, seed=0, max_frames=FRAMES)
            begun[job.id] = at
            codec.start(job, {})
            talker.start(job, {})
        worked = [runner.tick(device.now) for runner in (talker, codec)]
        device.now += (0.25 + 0.006 * len(talker.jobs())) / 1e3 if any(worked) else 5e-5
    late = [heard[job].started_at - at for job, at in begun.items() if int(job) >= listening]  # type: ignore[operator]
    return {
        "listening": listening,
        "arriving": arriving,
        "apart_ms": apart_ms,
        "ttfp_p50_ms": round(float(np.percentile(late, 50)) * 1e3, 1),
        "ttfp_p99_ms": round(float(np.percentile(late, 99)) * 1e3, 1),
        "gaps": sum(clock.worst_underrun_s > 0 for clock in heard.values()),
    }


def bursts() -> list[dict[str, float]]:
    rows = []
    for listening, arriving in ((0, 16), (0, 64), (0, 128), (0, 256), (64, 64), (128, 128)):
        for apart_ms in (0.0, 1.0):
            row = burst(listening, arriving, apart_ms)
            rows.append(row)
            print(
                f"{arriving:4d} arrive {apart_ms:.0f} ms apart while {listening:3d} listen: TTFP "
                f"{row['ttfp_p50_ms']:5.1f} / {row['ttfp_p99_ms']:5.1f} ms (p50, p99), gaps for {row['gaps']}"
            )
    return rows


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
    print(json.dumps({"frames": rows, "bursts": bursts()}))


if __name__ == "__main__":
    main()
