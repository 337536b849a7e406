"""The load: who sends what and when, in one process.

A *closed* loop has C clients, each of which sends when its last request has ended. *Arrivals* come by a
Poisson process whatever the server does. *Listeners* each play what they hear in real time and ask for more
when it is over. In the last two a request's latency counts from when it was due, so that a server that
keeps them waiting cannot hide it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from hocket.bench.http import Client, Exchange
from hocket.bench.metrics import Trace, heard
from hocket.bench.texts import Text, data_url, read_texts, sentence

SPEECH = "/v1/audio/speech"
Kind = Literal["closed", "arrivals", "listeners"]
_RETRY_S = 1.0  # a closed client's pause after a failure that names none
_LONGEST_RETRY_S = 30.0
_HOPELESS = 8  # failures without one success after which a level is given up


@dataclass(slots=True, frozen=True, kw_only=True)
class Workload:
    """What is asked of the server, the same for every level but for the texts drawn."""

    url: str
    api_key: str | None = None
    model: str | None = None
    voice: str | None = None
    format: str = "pcm"
    sample_rate_hz: int = 24_000  # where the answer does not say
    texts: Path | None = None
    max_new_tokens: tuple[int, int] | None = None  # least and largest, drawn for each request
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of the body; None takes one out
    seed: int = 0
    timeout_s: float = 300.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Level:
    """One load. It ends after `requests` or `duration_s`, whichever is given; both: whichever is first."""

    kind: Kind
    load: float  # clients, requests a second, or listeners
    requests: int | None = None
    duration_s: float | None = None
    warming: bool = False
    spread_s: float = 5.0  # over which listeners come in

    @property
    def clients(self) -> int:
        return 1 if self.kind == "arrivals" else int(self.load)

    @property
    def name(self) -> str:
        unit = {"closed": "clients", "arrivals": "req/s", "listeners": "listeners"}[self.kind]
        return f"{self.load:g} {unit.removesuffix('s') if self.load == 1 and unit != 'req/s' else unit}"


class Bodies:
    """The body of each request, drawn from the seed, the level and the request's number alone."""

    def __init__(self, work: Workload, level: Level) -> None:
        self.work = work
        self.seed = f"{work.seed}/{level.kind}/{level.load:g}/{level.warming}"
        self.texts: list[Text] | None = None
        if work.texts is not None:
            self.texts = read_texts(work.texts)
            random.Random(self.seed).shuffle(self.texts)

    def draw(self, number: int) -> tuple[bytes, Text]:
        rng = random.Random(f"{self.seed}/{number}")
        text = self.texts[number % len(self.texts)] if self.texts else sentence(rng)
        body: dict[str, Any] = {"input": text.words, "response_format": self.work.format}
        body |= {"stream": True, "stream_format": "audio"}
        if self.work.model is not None:
            body["model"] = self.work.model
        if self.work.voice is not None:
            body["voice"] = self.work.voice
        if text.reference is not None:
            body |= {"ref_audio": data_url(text.reference), "ref_text": text.said}
        if self.work.max_new_tokens is not None:
            body["max_new_tokens"] = rng.randint(*self.work.max_new_tokens)
        body |= self.work.extra
        return msgspec.json.encode({k: v for k, v in body.items() if v is not None}), text


@dataclass(slots=True)
class Tally:
    """How far a level has come, for whoever watches."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    bytes_in: int = 0
    bytes_per_s: float = 48_000.0
    ttfp_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # of the latest
    smooth_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))


@dataclass(slots=True)
class Share:
    """What one process brings home of a level."""

    traces: list[Trace] = field(default_factory=list)
    until: float = 0.0  # when the first client found no more work
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Load:
    """One process's part of a level: `part` of `parts`."""

    def __init__(
        self, work: Workload, level: Level, client: Client, began: float, part: int = 0, parts: int = 1
    ) -> None:
        self.work, self.level, self.client = work, level, client
        self.began = began
        self.part, self.parts = part, parts
        self.bodies = Bodies(work, level)
        self.share = Share()
        self.tally = Tally()
        self.stopped = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more, and end what runs."""
        self._exhausted()
        self.stopped.set()
        self.client.stop("interrupted")

    async def run(self) -> Share:
        gc.freeze()  # no pause for what was made before
        await self._until(self.began)
        cpu, wall = time.process_time(), time.perf_counter()
        await {"closed": self._closed, "arrivals": self._arrivals, "listeners": self._listeners}[
            self.level.kind
        ]()
        self.share.cpu_s = time.process_time() - cpu
        self.share.wall_s = time.perf_counter() - wall
        gc.unfreeze()
        return self.share

    # --- the three loops ---

    async def _closed(self) -> None:
        mine = range(self.part, self.level.clients, self.parts)
        numbers = self._numbers(self.part, self.parts)
        await asyncio.gather(*(self._client(c, numbers) for c in mine))

    async def _client(self, client: int, numbers: Iterator[int]) -> None:
        while (number := self._next(numbers, time.perf_counter())) is not None:
            trace = await self._speak(number, client)
            if trace.failure and await self._pause(trace):
                break

    async def _arrivals(self) -> None:
        running = set()
        numbers = self._numbers(0, 1)
        for due in self.arrivals():
            number = self._next(numbers, due)
            if number is None or await self._until(due):
                break
            if number % self.parts == self.part:
                task = asyncio.create_task(self._speak(number, 0, due))
                running.add(task)
                task.add_done_callback(running.discard)
        self._exhausted()
        await asyncio.gather(*running)

    def arrivals(self) -> Iterator[float]:
        """When requests are due, of all processes together."""
        gaps = np.random.default_rng([self.work.seed, int(1000 * self.level.load)])
        due = self.began
        while True:
            for gap in gaps.exponential(1 / self.level.load, 256):
                due += float(gap)
                yield due

    async def _listeners(self) -> None:
        mine = range(self.part, self.level.clients, self.parts)
        await asyncio.gather(*(self._listener(c) for c in mine))

    async def _listener(self, listener: int) -> None:
        # Evenly spread, so that not all wait for their first packet at once.
        due = self.began + self.level.spread_s * listener / self.level.clients
        numbers = self._numbers(listener, self.level.clients)
        while (number := self._next(numbers, due)) is not None and not await self._until(due):
            trace = await self._speak(number, listener, due)
            if trace.failure:
                if await self._pause(trace):
                    break
                due = time.perf_counter()
            else:
                times = np.asarray(trace.times) - trace.due
                start = heard(times, np.asarray(trace.sizes) / trace.bytes_per_s).smooth_start_s
                due = max(trace.due + start + trace.audio_s, trace.ended)  # the last sample has been played

    # --- one request ---

    async def _speak(self, number: int, client: int, due: float | None = None) -> Trace:
        body, text = self.bodies.draw(number)
        self.tally.sent += 1
        sent = time.perf_counter()
        trace = Trace(min(sent, due or sent), sent, client, len(text.words.split()))
        settle(trace, await self.client.request("POST", SPEECH, body), self.work.sample_rate_hz)
        self.share.traces.append(trace)
        self.tally.bytes_in = self.client.bytes_in
        if trace.failure:
            self.tally.failed += 1
            if self.tally.done == 0 and self.tally.failed >= max(_HOPELESS, 2 * self.level.clients):
                self.stop()
        else:
            self.tally.done += 1
            self.tally.bytes_per_s = trace.bytes_per_s
            one = heard(np.asarray(trace.times) - trace.due, np.asarray(trace.sizes) / trace.bytes_per_s)
            self.tally.ttfp_s.append(one.ttfp_s)
            self.tally.smooth_s.append(one.smooth_start_s)
        return trace

    # --- when to go on ---

    def _numbers(self, first: int, step: int) -> Iterator[int]:
        if self.level.requests is None:
            return itertools.count(first, step)
        return iter(range(first, self.level.requests, step))

    def _next(self, numbers: Iterator[int], due: float) -> int | None:
        late = self.level.duration_s is not None and due >= self.began + self.level.duration_s
        number = None if late or self.stopped.is_set() else next(numbers, None)
        if number is None:
            self._exhausted()
        return number

    def _exhausted(self) -> None:
        self.share.until = self.share.until or time.perf_counter()

    async def _pause(self, trace: Trace) -> bool:
        """Wait as long as a refused client should. -> whether the level has been stopped"""
        wait = _RETRY_S if trace.retry_after_s is None else min(trace.retry_after_s, _LONGEST_RETRY_S)
        return await self._until(time.perf_counter() + wait)

    async def _until(self, when: float) -> bool:
        """Sleep until then, or until the level is stopped. -> whether it has been"""
        seconds = when - time.perf_counter()
        if seconds > 0 and not self.stopped.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.stopped.wait(), seconds)
        return self.stopped.is_set()


def settle(trace: Trace, exchange: Exchange, default_rate_hz: int) -> None:
    """Write into `trace` how its request went."""
    headers = exchange.headers
    trace.times, trace.sizes = exchange.times.tolist(), exchange.sizes.tolist()
    trace.ended = exchange.ended
    trace.failure, trace.detail = exchange.failure, exchange.detail
    if exchange.layout is not None:
        rate, channels, bits = exchange.layout
        trace.bytes_per_s = rate * channels * bits / 8
    else:
        rate = (
            _integer(headers, "x-sample-rate") or _integer(headers, "x-audio-sample-rate") or default_rate_hz
        )
        trace.bytes_per_s = 2.0 * rate * (_integer(headers, "x-channels") or 1)
    if trace.failure:
        return
    if exchange.status != 200:
        trace.failure = f"HTTP {exchange.status}"
        trace.detail = _message(exchange.head)
        trace.retry_after_s = _seconds(headers.get("retry-after"))
    elif exchange.head:
        trace.failure = "not audio"
        trace.detail = f"{headers.get('content-type', 'no type')}: {_message(exchange.head)}"
    elif not trace.sizes:
        trace.failure = "no audio"


def _integer(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isdecimal() else None


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None  # a date: no server of speech sends one


def _message(body: bytes) -> str:
    """What an error body says, in any of the forms that servers use."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:300].decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return str(found)[:300]
