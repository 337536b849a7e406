"""An autoregressive stage that reads what another stage is still making."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Entry, Job, PagedKV, Places, Span, StepOutput, declared
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner

CPU = torch.device("cpu")
FIRST = 2  # rows that must have come before anything can be made


@dataclass
class SumState:
    cache: PagedKV
    values: Tensor  # int32 [slots, 64]
    length: Tensor  # int32 [slots]
    closed: Tensor  # bool [slots]
    frame: Tensor  # int32 [slots]


@dataclass
class SumPrompt:
    values: list[int] = field(default_factory=list)
    closed: bool = False
    variant: int = 0

    @property
    def row_keys(self) -> list[bytes]:
        return [bytes([v]) for v in self.values[:FIRST]]

    def frames_ready(self) -> int | None:
        return None if self.closed else max(0, len(self.values) - FIRST + 1)


class SumProgram:
    """Frame t is the sum of the first FIRST + t values; it ends when the values have."""

    gives = ChunkKind.CODES
    max_tokens = 256
    frame_rate_hz = 10.0

    def declare(self) -> SumState:
        i32 = torch.int32
        return SumState(
            PagedKV.declare(1, 1, 1, torch.float32),
            declared(i32, "slots", 64),
            declared(i32, "slots"),
            declared(torch.bool, "slots"),
            declared(i32, "slots"),
        )

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> SumPrompt:
        return SumPrompt()

    def feed(self, prompt: SumPrompt, data: bytes) -> None:
        raise NotImplementedError

    def take(self, prompt: SumPrompt, chunk: Chunk) -> None:
        prompt.values += chunk.arrays["rows"].tolist()
        prompt.closed = chunk.last

    def write_texts(self, state: SumState, slots: Sequence[int], prompts: Sequence[SumPrompt]) -> None:
        for slot, prompt in zip(slots, prompts, strict=True):
            n = len(prompt.values)
            state.values[slot, :n] = torch.tensor(prompt.values, dtype=torch.int32)
            state.length[slot], state.closed[slot] = n, prompt.closed

    def join(self, state: SumState, entries: Sequence[Entry]) -> None:
        self.write_texts(state, [e.slot for e in entries], [e.prompt for e in entries])
        for e in entries:
            state.frame[e.slot] = len(e.frames)

    def rows(self, spans: Sequence[Span]) -> Tensor:
        return torch.zeros(sum(span.stop - span.start for span in spans), 1)

    def prefill(self, state: SumState, x: Tensor, places: Places, context: int) -> None:
        """Nothing is read from the cache."""

    def step(self, state: SumState, slots: Tensor, context: int, variant: int) -> StepOutput:
        used = FIRST + state.frame[slots]
        sums = (
            torch.where(torch.arange(64) < used[:, None], state.values[slots], 0).sum(1, keepdim=True).int()
        )
        stop = state.closed[slots] & (used >= state.length[slots])
        state.frame[slots] += 1
        state.cache.position[slots] += 1
        return StepOutput(chunk=sums, emit=torch.ones_like(stop), stop=stop)


class Driver:
    def __init__(self, **limits: Any) -> None:
        self.out: list[Chunk] = []
        self.runner = AutoregressiveRunner(
            "sum",
            SumProgram(),
            AutoregressiveLimits(kv_blocks=32, block_tokens=2, **limits),
            CPU,
            self.out.append,
        )

    def start(self, name: str) -> None:
        job = Job(id=name, route=("upstream", "sum"), inputs={}, seed=0, max_frames=50)
        self.runner.start(job, {})

    def push(self, name: str, *values: int, last: bool = False) -> None:
        rows = np.array(values, np.int32)
        self.runner.push(
            Chunk(job=name, source="upstream", index=0, kind=ChunkKind.ROWS, arrays={"rows": rows}, last=last)
        )

    def finish(self) -> None:
        while self.runner.tick(time.monotonic()):
            pass

    def made(self, name: str) -> list[int]:
        return [int(c.arrays["codes"][0, 0]) for c in self.out if c.job == name]


def test_it_waits_without_a_slot_until_there_is_enough_and_then_keeps_up() -> None:
    d = Driver()
    d.start("a")
    d.push("a", 1)
    d.finish()
    assert d.runner.refresh_stats().slots_used == 0
    d.push("a", 2)
    d.finish()
    assert d.made("a") == [3]
    d.push("a", 3, 4)
    d.finish()
    assert d.made("a") == [3, 6, 10]
    d.push("a", 5, last=True)
    d.finish()
    assert d.made("a") == [3, 6, 10, 15]
    assert d.out[-1].last
    assert d.runner.jobs() == []


def test_waiting_for_upstream_is_no_stall() -> None:
    d = Driver()
    d.start("a")
    d.push("a", 1)
    for now in (0.0, 100.0):
        d.runner.tick(now)
    assert d.runner.stats.idle_for(200.0) == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_one_that_waits_gives_way_and_goes_on(slots: int) -> None:
    d = Driver(slots=slots, max_batch=slots)
    for name in "abc":
        d.start(name)
        d.push(name, 1, 1)
        d.finish()
    for name in "abc":
        d.push(name, 1, last=True)
        d.finish()
        assert d.made(name) == [2, 3]
    assert d.runner.refresh_stats().slots_used == 0
