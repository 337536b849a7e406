"""Stages in several places: replicas that share the work, one that dies, and carriers that lose or refuse."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hocket.core import CLIENT, SpeechRequest
from hocket.engine import client
from hocket.engine.client import AsyncEngine
from hocket.engine.connector import LocalMailbox
from hocket.engine.messages import Deliver, Message
from hocket.engine.stream import Stream
from hocket.errors import RequestFailed, WorkerDied

APART = {"stages.codec.device": "cpu:1"}
REPLICAS = {f"stages.{stage}.replicas": "3" for stage in ("talker", "codec")}
NOTHING = (0, 0, 0, 0, 0)


@pytest.fixture(scope="module")
def endless(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(size="tiny", variant="custom_voice", never_ends=True)


async def hear(stream: Stream) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *[audio.samples async for audio in stream]])


async def held(engine: AsyncEngine) -> tuple[int, ...]:
    """Slots, blocks, queues, jobs and requests, from heartbeats younger than this call."""
    seats = [seat for seat in engine.fleet.seats.values() if seat.ready]
    before = {id(seat.status) for seat in seats}
    while any(seat.status is None or id(seat.status) in before for seat in seats):
        await asyncio.sleep(0.05)
    stages = [s for seat in seats for s in seat.status.stages]
    sums = [sum(getattr(s, name) for s in stages) for name in ("slots_used", "kv_blocks_used", "waiting")]
    return (*sums, sum(seat.status.jobs for seat in seats), engine.status().running)


async def released(engine: AsyncEngine) -> None:
    """Returns when nothing is held any more."""
    while await held(engine) != NOTHING:
        await asyncio.sleep(0.05)


def speak(seed: int, max_frames: int = 12) -> SpeechRequest:
    return SpeechRequest(text="Go on.", seed=seed, max_frames=max_frames)


# --- replicas ----------------------------------------------------------------------------------


async def test_three_replicas_share_the_work_and_one_may_die(endless: Path) -> None:
    async with AsyncEngine(endless, overrides=REPLICAS) as engine:
        seats = engine.fleet.seats
        assert {name: list(seat.plan.stages) for name, seat in seats.items()} == {
            f"cpu:{n}": ["talker", "codec"] for n in range(3)
        }
        alone = await hear(await engine.submit(speak(1)))
        together = await asyncio.gather(*[hear(await engine.submit(speak(1))) for _ in range(3)])
        for sound in together:  # on each replica the same
            np.testing.assert_array_equal(sound, alone)

        streams = [await engine.submit(speak(n, 4000)) for n in range(6)]
        for stream in streams:
            await anext(stream)
        homes = {
            stream.id: name for stream in streams for name, seat in seats.items() if stream.id in seat.jobs
        }
        assert Counter(homes.values()) == {"cpu:0": 2, "cpu:1": 2, "cpu:2": 2}

        victim = seats["cpu:1"]
        os.kill(victim.launched.process.pid, signal.SIGKILL)
        for stream in streams:
            if homes[stream.id] == "cpu:1":
                with pytest.raises(WorkerDied, match="cpu:1"):
                    await hear(stream)
        assert not victim.ready
        status = engine.status()
        assert (status.ready, status.healthy) == (True, False)
        assert status.reason == "worker cpu:1 is restarting"
        others = [stream for stream in streams if homes[stream.id] != "cpu:1"]
        for stream in others:  # they go on
            await anext(stream)
        late = await engine.submit(speak(1))  # and new ones are taken
        assert not victim.jobs
        np.testing.assert_allclose(await hear(late), alone, atol=1e-5)

        while not victim.ready:
            await asyncio.sleep(0.05)
        back = await engine.submit(speak(1))  # the idle one gets the next
        assert victim.jobs == {back.id}
        np.testing.assert_allclose(await hear(back), alone, atol=1e-5)
        assert engine.status().restarts == 1
        for stream in others:
            await stream.aclose()
        await released(engine)


async def test_with_the_last_replica_gone_requests_fail(endless: Path) -> None:
    async with AsyncEngine(endless, processes=False) as engine:
        (seat,) = engine.fleet.seats.values()
        seat.ready = False  # as `Fleet._worker_ended` leaves it
        stream = Stream(
            engine.fleet, engine.info, speak(1), [engine.front_end.prepare(speak(1))],
            ends=engine._ends, spell=engine.front_end.detokenize,
        )  # fmt: skip
        stream.begin()
        with pytest.raises(WorkerDied, match="no worker runs stage talker"):
            await hear(stream)
        seat.ready = True


# --- carriers ----------------------------------------------------------------------------------


class Carrier:
    """Stands between mailboxes: says what becomes of each message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fate: Callable[[Message], bool]) -> None:
        self.lost: list[Message] = []
        send = LocalMailbox.send

        def carried(box: LocalMailbox, address: str, message: Message) -> None:
            if fate(message):
                send(box, address, message)
            else:
                self.lost.append(message)

        monkeypatch.setattr(LocalMailbox, "send", carried)


def is_chunk(message: Message, stage: str, number: int | None = None) -> bool:
    there = isinstance(message, Deliver) and message.stage == stage
    return there and number in (None, message.number)


@pytest.mark.parametrize("stage", ["codec", CLIENT])
async def test_a_lost_chunk_fails_its_request(
    stage: str, endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine(endless, processes=False, overrides=APART) as engine:
        carrier = Carrier(monkeypatch, lambda m: carrier.lost != [] or not is_chunk(m, stage, 3))
        streams = [await engine.submit(speak(n, 40)) for n in range(2)]
        results = await asyncio.gather(*map(hear, streams), return_exceptions=True)
        (lost,) = carrier.lost
        for stream, result in zip(streams, results, strict=True):
            if stream.id == lost.chunk.job:
                assert isinstance(result, RequestFailed)
                assert result.code == "handoff_lost"
                assert f"chunk 3 from {lost.chunk.source} to {stage} was lost" in result.message
            else:
                assert len(result) == 39 * 1920
        await released(engine)


async def test_a_lost_end_fails_its_request_in_time(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes after it that would show the gap."""
    plan = client.plan_workers

    def hasty(*args: Any) -> Any:
        return [msgspec.structs.replace(p, handoff_timeout_s=0.5) for p in plan(*args)]

    monkeypatch.setattr(client, "plan_workers", hasty)
    async with AsyncEngine(endless, processes=False, overrides=APART) as engine:
        carrier = Carrier(monkeypatch, lambda m: not (is_chunk(m, "codec") and m.chunk.last))
        with pytest.raises(RequestFailed, match=r"codec heard nothing for 0\.5 s") as failed:
            await hear(await engine.submit(speak(1)))
        assert failed.value.code == "handoff_timeout"
        assert len(carrier.lost) == 1
        await released(engine)


async def test_a_carrier_that_refuses_fails_the_request(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine(endless, processes=False, overrides=APART) as engine:

        def refusing(message: Message) -> bool:
            if is_chunk(message, "codec", 2) and message.chunk.job == "refused":
                raise RequestFailed("the connector is full", code="handoff_refused")
            return True

        Carrier(monkeypatch, refusing)
        other = await engine.submit(speak(2))
        refused = speak(1)
        refused.request_id = "refused"
        with pytest.raises(RequestFailed, match="the connector is full") as failed:
            await hear(await engine.submit(refused))
        assert failed.value.code == "handoff_refused"
        assert len(await hear(other)) == 11 * 1920
        await released(engine)
