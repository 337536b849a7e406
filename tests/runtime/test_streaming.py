"""Streams through a codec made for the test: each sample tells which frame and which place it came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Item, Job, StreamPrompt, declared
from hocket.runtime.one_shot import OneShotLimits, OneShotRunner
from hocket.runtime.streaming import StreamingLimits, StreamingRunner

HOP = 4
CPU = torch.device("cpu")


@dataclass
class EchoState:
    last: Tensor  # fp32 [slots]  running sum of all frames of the stream
    held: Tensor  # fp32 [slots, lookahead]  sound not yet given


class EchoProgram:
    """Gives the running sum of the frames, HOP times each, `lookahead` samples late."""

    hop, rate_hz = HOP, HOP * 10

    def __init__(self, lookahead: int = 0) -> None:
        self.lookahead = lookahead
        self.batches: list[tuple[int, int]] = []

    def declare(self) -> EchoState:
        return EchoState(declared(torch.float32, "slots"), declared(torch.float32, "slots", self.lookahead))

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> StreamPrompt:
        if job.inputs.get("codec"):
            return StreamPrompt(np.array([[100]] * 5, np.int32), job.inputs["codec"])
        return StreamPrompt()

    def step(self, state: EchoState, slots: Tensor, frames: Tensor) -> Tensor:
        self.batches.append((len(slots), frames.shape[1]))
        sums = state.last[slots][:, None] + frames[..., 0].float().cumsum(1)
        state.last[slots] = sums[:, -1]
        joined = torch.cat([state.held[slots], sums.repeat_interleave(HOP, dim=1)], dim=1)
        state.held[slots] = joined[:, joined.shape[1] - self.lookahead :]
        return joined[:, : frames.shape[1] * HOP]

    def prime(self, state: EchoState, slots: Tensor, frames: Tensor) -> None:
        self.step(state, slots, frames)

    def flush(self, state: EchoState, slots: Tensor) -> Tensor:
        return state.held[slots]


class Driver:
    def __init__(self, program: EchoProgram, **limits: Any) -> None:
        self.out: defaultdict[str, list[Chunk]] = defaultdict(list)
        self.runner = StreamingRunner(
            "codec", program, StreamingLimits(**limits), CPU, lambda c: self.out[c.job].append(c)
        )
        self.now = 0.0

    def start(self, name: str, prime: bytes = b"") -> None:
        inputs = {"codec": prime} if prime else {}
        self.runner.start(Job(id=name, route=("codec",), inputs=inputs, seed=0, max_frames=99), {})

    def push(self, name: str, frames: Sequence[int], last: bool = False) -> None:
        array = np.array(frames, np.int32).reshape(-1, 1)
        self.runner.push(
            Chunk(
                job=name,
                source="talker",
                index=0,
                kind=ChunkKind.CODES,
                arrays={"codes": array},
                last=last,
                finish_reason="stop" if last else "",
            )
        )

    def tick(self, times: int = 1, dt: float = 0.0) -> None:
        for _ in range(times):
            self.runner.tick(self.now)
            self.now += dt

    def heard(self, name: str) -> list[float]:
        return np.concatenate([c.arrays["pcm"] for c in self.out[name]]).tolist()


def expected(frames: Sequence[int], start: int = 0) -> list[float]:
    return [float(v) for v in np.repeat(np.cumsum(frames) + start, HOP)]


@pytest.mark.parametrize("lookahead", [0, 3, 7], ids=lambda n: f"look-ahead {n}")
@pytest.mark.parametrize("late", [False, True], ids=["end with a frame", "end known later"])
def test_all_of_a_stream_is_heard_once_and_in_order(lookahead: int, late: bool) -> None:
    d = Driver(EchoProgram(lookahead))
    d.start("a")
    frames = list(range(1, 12))
    for n in frames:
        d.push("a", [n], last=not late and n == frames[-1])
        d.tick()
    d.tick(200, dt=0.1)  # the listener plays on, so waiting frames come due
    if late:
        d.push("a", [], last=True)
    d.tick(5)
    assert d.heard("a") == expected(frames)
    assert [c.last for c in d.out["a"]].count(True) == 1
    assert d.out["a"][-1].last
    assert d.out["a"][-1].finish_reason == "stop"
    assert d.runner.refresh_stats().slots_used == 0
    assert d.runner.jobs() == []


def test_one_stream_ends_while_another_goes_on_in_the_same_step() -> None:
    d = Driver(EchoProgram(2 * HOP + 1))
    for name in "ab":
        d.start(name)
    d.push("a", [1], last=True)
    d.push("b", [5])
    d.tick()
    d.push("b", [6], last=True)
    d.tick(3)
    assert d.heard("a") == expected([1])
    assert d.heard("b") == expected([5, 6])


def test_stream_without_a_frame_ends_cleanly() -> None:
    d = Driver(EchoProgram(3))
    d.start("a")
    d.push("a", [], last=True)
    d.tick()
    assert d.heard("a") == []
    assert d.out["a"][-1].last


def test_first_frame_is_decoded_at_once_and_later_chunks_grow() -> None:
    d = Driver(EchoProgram())
    d.start("a")
    for n in range(60):
        d.push("a", [n])
        d.tick(dt=0.005)  # twenty times real time
    sizes = [len(c.arrays["pcm"]) // HOP for c in d.out["a"]]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert max(sizes) >= 8


def test_streams_with_equal_chunks_share_a_step() -> None:
    program = EchoProgram()
    d = Driver(program, slots=8, max_batch=4)
    for name in "abcdef":
        d.start(name)
        d.push(name, [1])
    d.tick()
    assert sorted(program.batches) == [(2, 1), (4, 1)]


def test_more_streams_than_slots_wait_their_turn() -> None:
    d = Driver(EchoProgram(), slots=2)
    for n, name in enumerate("abcde"):
        d.start(name)
        d.push(name, [n, n], last=True)
    d.tick(10)
    for n, name in enumerate("abcde"):
        assert d.heard(name) == expected([n, n])


def test_primed_voice_is_run_once_and_never_heard() -> None:
    program = EchoProgram()
    d = Driver(program)
    for name in "abc":
        d.start(name, prime=b"voice")
        d.push(name, [1, 2], last=True)
        d.tick(3)
        assert d.heard(name) == expected([1, 2], start=500)
    assert d.runner.stats.cache_hits == 2


def test_next_owner_of_a_slot_starts_from_nothing() -> None:
    d = Driver(EchoProgram(), slots=1)
    for name in "ab":
        d.start(name)
        d.push(name, [7], last=True)
        d.tick(2)
        assert d.heard(name) == expected([7])


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_abort_frees_the_slot(ticks: int) -> None:
    d = Driver(EchoProgram(), slots=1)
    d.start("a")
    d.push("a", [1, 2, 3])
    d.tick(ticks)
    before = len(d.out["a"])
    d.runner.abort("a")
    d.tick(3)
    assert len(d.out["a"]) == before
    assert d.runner.refresh_stats().slots_used == 0


# --- one-shot ------------------------------------------------------------------------------------


class SquareProgram:
    def __init__(self) -> None:
        self.batches: list[int] = []

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Item:
        value = job.inputs["square"]
        return Item(value=value, bucket=len(value), cache_key=value)

    def run(self, items: Sequence[Item]) -> list[dict[str, np.ndarray]]:
        self.batches.append(len(items))
        assert len({item.bucket for item in items}) == 1
        return [{"square": np.array([int(item.value) ** 2])} for item in items]


def test_one_shot_batches_by_length_and_computes_equal_inputs_once() -> None:
    program, out = SquareProgram(), {}
    runner = OneShotRunner(
        "square",
        program,
        ChunkKind.CONDITIONING,
        OneShotLimits(max_batch=3),
        lambda c: out.__setitem__(c.job, c),
    )
    for n, value in enumerate([b"1", b"22", b"3", b"3", b"44", b"5"]):
        runner.start(Job(id=f"{n}", route=("square",), inputs={"square": value}, seed=0, max_frames=1), {})
    runner.abort("5")
    while runner.tick(0.0):
        pass
    assert {k: int(c.arrays["square"][0]) for k, c in out.items()} == {
        "0": 1,
        "1": 484,
        "2": 9,
        "3": 9,
        "4": 1936,
    }
    assert program.batches == [2, 2]
    runner.start(Job(id="again", route=("square",), inputs={"square": b"44"}, seed=0, max_frames=1), {})
    assert int(out["again"].arrays["square"][0]) == 1936
    assert runner.stats.cache_hits == 1


def test_a_batch_that_fails_takes_only_its_own_jobs_along() -> None:
    class Failing(SquareProgram):
        def run(self, items: Sequence[Item]) -> list[dict[str, np.ndarray]]:
            if items[0].value == b"13":
                raise ValueError("unlucky")
            return super().run(items)

    out: dict[str, Chunk] = {}
    runner = OneShotRunner(
        "square", Failing(), ChunkKind.CONDITIONING, OneShotLimits(), lambda c: out.__setitem__(c.job, c)
    )
    for value in (b"13", b"7"):
        job = Job(id=value.decode(), route=("square",), inputs={"square": value}, seed=0, max_frames=1)
        runner.start(job, {})
    with pytest.raises(ValueError, match="unlucky"):
        runner.tick(0.0)
    assert runner.jobs() == ["13"]
    for job_id in runner.jobs():
        runner.abort(job_id)
    while runner.tick(0.0):
        pass
    assert list(out) == ["7"]
