"""A level played by one process or by several, warm-up first, and how far it has come meanwhile.

Python's `perf_counter` is one clock for all processes of a machine, so traces need no alignment.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

from hocket.bench.http import Client
from hocket.bench.load import Level, Load, Share, Tally, Workload
from hocket.errors import RequestFailed

T = TypeVar("T")
Watch = Callable[[Level, Sequence[Tally], float], None]

_TICK_S = 0.25
_LEAD_S = 0.05  # from the order to the first request, so that all processes begin at once


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where there is one."""
    if sys.platform != "win32" and sys.implementation.name == "cpython":
        import uvloop  # not made for Windows or PyPy

        return uvloop.run(work)
    return asyncio.run(work)


class Crew:
    """Plays levels. Use as a context manager; `stop()` may be called by a signal's handler."""

    def __init__(self, work: Workload, processes: int = 1) -> None:
        self.work = work
        self.stopped = False
        self._client = Client(work.url, api_key=work.api_key, timeout_s=work.timeout_s)
        self._load: Load | None = None
        self._pipes: list[Connection] = []
        self._children: list[Any] = []
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            for _ in range(processes):
                ours, theirs = context.Pipe()
                child = context.Process(target=_child, args=(theirs, work), daemon=True)
                child.start()
                theirs.close()
                self._pipes.append(ours)
                self._children.append(child)
            for pipe in self._pipes:
                pipe.recv()  # it is ready

    def stop(self) -> None:
        """End the running level with what it has, and begin no other."""
        self.stopped = True
        if self._load is not None:
            self._load.stop()
        for pipe in self._pipes:
            pipe.send(None)

    async def warm(self, level: Level, rounds: int, watch: Watch) -> Level:
        """Send `rounds` requests for each client, uncounted. -> the level as it should then be played

        Raises RequestFailed if none succeeds.
        """
        if rounds == 0:
            return level
        clients = max(1, round(level.load))
        load = Level(kind="closed", load=clients, requests=rounds * clients, warming=True)
        shares, _ = await self.play(load, watch)
        traces = [trace for share in shares for trace in share.traces]
        good = [trace for trace in traces if not trace.failure]
        if not good and not self.stopped:
            first = next(trace for trace in traces if trace.failure != "interrupted")
            raise RequestFailed(f"no request succeeded; the first: {first.failure}: {first.detail}")
        if not good:
            return level
        return replace(level, spread_s=sum(trace.audio_s for trace in good) / len(good))

    async def play(self, level: Level, watch: Watch) -> tuple[list[Share], float]:
        """-> what each process brought home, and when the level began"""
        began = time.perf_counter() + _LEAD_S
        if self._pipes:
            return await self._conduct(level, began, watch), began
        self._load = load = Load(self.work, level, self._client, began)
        running = asyncio.ensure_future(load.run())
        while not running.done():
            await asyncio.wait({running}, timeout=_TICK_S)
            watch(level, [load.tally], began)
        self._load = None
        return [running.result()], began

    async def _conduct(self, level: Level, began: float, watch: Watch) -> list[Share]:
        parts = len(self._pipes) if level.kind == "arrivals" else min(len(self._pipes), level.clients)
        for part, pipe in enumerate(self._pipes[:parts]):
            pipe.send((level, began, part, parts))
        tallies = [Tally() for _ in range(parts)]
        shares: dict[int, Share] = {}
        while len(shares) < parts:
            await asyncio.sleep(_TICK_S)
            for part, pipe in enumerate(self._pipes[:parts]):
                while part not in shares and pipe.poll():
                    try:
                        news = pipe.recv()
                    except EOFError:
                        raise RequestFailed("a client process has died") from None
                    if isinstance(news, Share):
                        shares[part] = news
                    else:
                        tallies[part] = news
            watch(level, tallies, began)
        return [shares[part] for part in range(parts)]

    async def close(self) -> None:
        """Leave the server. To be called on the loop that played."""
        await self._client.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(5)
            if child.is_alive():
                child.kill()


def until(shares: Iterable[Share]) -> float:
    """When the first client process stopped, on the monotonic clock; 0 if none says."""
    return min((share.until for share in shares if share.until), default=0.0)


def _child(pipe: Connection, work: Workload) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and tells us
    run_loop(_serve(pipe, work))


async def _serve(pipe: Connection, work: Workload) -> None:
    client = Client(work.url, api_key=work.api_key, timeout_s=work.timeout_s)
    pipe.send("ready")
    while True:
        try:
            order = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            break
        if order is None:
            continue  # stopped between two levels
        level, began, part, parts = order
        load = Load(work, level, client, began, part, parts)
        running = asyncio.ensure_future(load.run())
        while not running.done():
            await asyncio.wait({running}, timeout=_TICK_S)
            if pipe.poll():
                try:
                    pipe.recv()
                except (EOFError, OSError):  # the parent has died
                    await client.close()
                    return
                load.stop()
            pipe.send(load.tally)
        pipe.send(running.result())
    await client.close()
