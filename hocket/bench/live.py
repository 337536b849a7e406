"""The running level on a terminal: how far it is, and the figures of its latest requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from statistics import median
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hocket.bench.load import Level, Tally

_RATE_OVER_S = 5.0


class Live:
    """A context manager whose `watch` is told of tallies as they change."""

    def __init__(self, console: Console) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
        self._bar = Progress(
            *columns,
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._level: Level | None = None
        self._bytes: deque[tuple[float, int]] = deque()

    def watch(self, level: Level, tallies: Sequence[Tally], began: float) -> None:
        if level is not self._level:
            self._level = level
            self._bytes.clear()
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            name = f"warm-up, {level.name}" if level.warming else level.name
            self._bar.add_task(name, total=level.requests or level.duration_s, figures="")
        now = time.perf_counter()
        done = sum(t.done + t.failed for t in tallies)
        reached = done if level.requests else min(now - began, level.duration_s or 0)
        figures = self._figures(tallies, now)
        self._bar.update(self._bar.task_ids[-1], completed=reached, figures=figures)

    def _figures(self, tallies: Sequence[Tally], now: float) -> str:
        sent, done = sum(t.sent for t in tallies), sum(t.done for t in tallies)
        failed = sum(t.failed for t in tallies)
        self._bytes.append((now, sum(t.bytes_in for t in tallies)))
        while now - self._bytes[0][0] > _RATE_OVER_S:
            self._bytes.popleft()
        (then, before), (_, after) = self._bytes[0], self._bytes[-1]
        parts = [f"{done} done", f"{sent - done - failed} running"]
        if failed:
            parts.append(f"[red]{failed} failed[/]")
        if now > then:
            parts.append(f"{(after - before) / tallies[0].bytes_per_s / (now - then):.1f} audio-s/s")
        for name, field in (("TTFP", "ttfp_s"), ("smooth", "smooth_s")):
            latest = list(chain.from_iterable(getattr(t, field) for t in tallies))
            if latest:
                parts.append(f"{name} {1000 * median(latest):.0f} ms")
        return " · ".join(parts)

    def __enter__(self) -> Live:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
