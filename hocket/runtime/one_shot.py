"""One-shot stages: whole input in, whole output out, inputs of one length bucket run together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.core import Chunk, ChunkKind, Item, Job, OneShotProgram
from hocket.runtime.autoregressive import Sink
from hocket.runtime.stats import StageStats


@dataclass(frozen=True, slots=True)
class OneShotLimits:
    """How many inputs run together, and how many results are kept."""

    max_batch: int = 8
    cached_results: int = 256


class OneShotRunner:
    """Schedules the jobs of one one-shot stage; `sink` gets its results."""

    launched = False  # a batch is waited for

    def __init__(
        self, name: str, program: OneShotProgram, gives: ChunkKind, limits: OneShotLimits, sink: Sink
    ) -> None:
        self.name, self.program, self.gives, self.limits = name, program, gives, limits
        self._sink = sink
        self._queue: dict[str, tuple[Job, Item]] = {}  # in order of arrival
        self._running: list[str] = []  # jobs of the batch under way
        self._results: OrderedDict[bytes, dict[str, np.ndarray]] = OrderedDict()
        self.stats = StageStats(name)

    def warm(self) -> None:
        """Nothing to do: shapes are the requests' own."""

    def start(self, job: Job, arrived: Mapping[str, Chunk]) -> None:
        item = self.program.begin(job, arrived)
        known = self._results.get(item.cache_key) if item.cache_key is not None else None
        if known is None:
            self._queue[job.id] = (job, item)
            return
        assert item.cache_key is not None
        self._results.move_to_end(item.cache_key)
        self.stats.cache_hits += 1
        self._emit(job, known)

    def push(self, chunk: Chunk) -> None:
        raise NotImplementedError(f"{self.name} reads no streamed chunks")

    def feed(self, job_id: str, data: bytes) -> None:
        raise NotImplementedError(f"{self.name} reads no text")

    def pause(self, job_id: str, paused: bool) -> None:
        """Nothing to do: one result, made once."""

    def abort(self, job_id: str) -> None:
        self._queue.pop(job_id, None)

    def tick(self, now: float) -> bool:
        if self._queue:
            oldest = max(self._queue.values(), key=lambda entry: entry[0].priority)
            batch = [e for e in self._queue.values() if e[1].bucket == oldest[1].bucket][
                : self.limits.max_batch
            ]
            self._running = [job.id for job, _ in batch]
            self._run(batch)
            self._running = []
            self.stats.observe(now, True, bool(self._queue))
            return True
        self.stats.observe(now, False, False)
        return False

    def _run(self, batch: list[tuple[Job, Item]]) -> None:
        """Equal inputs that arrived together are computed once."""
        unique: dict[bytes | int, Item] = {}
        for at, (_, item) in enumerate(batch):
            unique.setdefault(at if item.cache_key is None else item.cache_key, item)
        with self.stats.timed(rows=len(unique)):
            results = dict(zip(unique, self.program.run(list(unique.values())), strict=True))
        for at, (job, item) in enumerate(batch):
            result = results[at if item.cache_key is None else item.cache_key]
            if item.cache_key is not None:
                self._results[item.cache_key] = result
                if len(self._results) > self.limits.cached_results:
                    self._results.popitem(last=False)
            if self._queue.pop(job.id, None) is not None:  # an earlier result may have ended this job
                self._emit(job, result)

    def _emit(self, job: Job, result: dict[str, np.ndarray]) -> None:
        self._sink(Chunk(job=job.id, source=self.name, index=0, kind=self.gives, arrays=result, last=True))

    def jobs(self) -> list[str]:
        """The jobs that a failure of `tick` concerns: those of the batch under way."""
        return list(self._running)

    def refresh_stats(self) -> StageStats:
        self.stats.waiting = len(self._queue)
        return self.stats
