"""What a stage has done, for /metrics, heartbeats and the stall check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class StageStats:
    """Gauges and counters of one stage; counters grow from its start."""

    stage: str
    slots_total: int = 0
    kv_blocks_total: int = 0
    slots_used: int = 0
    kv_blocks_used: int = 0
    waiting: int = 0
    steps: int = 0
    step_seconds: float = 0.0  # inside the program
    step_cpu_seconds: float = 0.0  # of this thread, inside the program
    rows: int = 0  # sum of batch sizes over the steps
    frames: int = 0
    preemptions: int = 0
    prefix_hits: int = 0  # blocks
    cache_hits: int = 0
    graph_steps: int = 0  # of the steps, those replayed from a recorded graph
    queued: int = 0  # jobs that got their first place
    queue_seconds: float = 0.0  # how long these waited for it
    last_work: float = 0.0
    busy: bool = False

    @contextmanager
    def timed(self, rows: int = 0) -> Iterator[None]:
        """Count the enclosed call to the program; `rows` makes it a step."""
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.step_seconds += time.perf_counter() - start
            self.step_cpu_seconds += time.thread_time() - cpu
            if rows:
                self.steps += 1
                self.rows += rows

    def observe(self, now: float, worked: bool, busy: bool) -> None:
        """Note one turn of the stage: whether it got on, and whether it has work it could get on with."""
        if worked or not busy or not self.busy:
            self.last_work = now
        self.busy = busy

    def idle_for(self, now: float) -> float:
        """Seconds without progress while there was work."""
        return now - self.last_work if self.busy else 0.0
