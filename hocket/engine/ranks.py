"""A stage over several processes that work in step: one leads, the others repeat what it does.

The leader is the worker: it hears the engine, and what its stage makes goes on its way. A follower holds
another part of the stage's weights, under a scheduler of its own that gets the same calls in the same order.
A scheduler's choices follow from its calls, but for two things that differ from process to process: the time,
and whether a step's result is there yet. The leader says both with each turn, so all choose alike, launch the
same steps, and meet in their sums (`hocket.nn.parallel`). What crosses is a job's input once and a few
dozen bytes a step; no table of the cache, no batch and no token needs to be told.

    leader    start(job)  turn(12.1, no)  turn(12.1, yes)  abort(job)
    follower      start(job)  turn(12.1, no)  turn(12.1, yes)  abort(job)

A rank that fails in a turn has launched what the others have not, or the other way round. Nothing can be said
of any of them then: the worker ends, all ranks of it, and is started anew.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from hocket.core import Chunk, Job
from hocket.engine.connector import Mailbox
from hocket.engine.messages import Abort, Deliver, Feed, Message, Pause, Shutdown, Start, Turn
from hocket.errors import HocketError
from hocket.runtime.autoregressive import AutoregressiveRunner
from hocket.runtime.stats import StageStats

log = logging.getLogger("hocket.ranks")

POLL_S = 0.25


def rank_address(address: str, rank: int) -> str:
    """Where the calls for a rank of the worker at `address` arrive."""
    return f"{address}-rank{rank}" if rank else address


class Leader:
    """Stands for the leader's runner, and has its calls repeated by the followers at these addresses."""

    def __init__(self, runner: AutoregressiveRunner, mailbox: Mailbox, followers: Sequence[str]) -> None:
        self._runner, self._mailbox, self._followers = runner, mailbox, followers
        self.name = runner.name

    def _tell(self, message: Message) -> None:
        for address in self._followers:
            self._mailbox.send(address, message)

    def start(self, job: Job, arrived: Mapping[str, Chunk]) -> None:
        self._tell(Start(job=job, arrived=dict(arrived)))
        self._runner.start(job, arrived)

    def push(self, chunk: Chunk) -> None:
        self._tell(Deliver(stage=self.name, chunk=chunk))
        self._runner.push(chunk)

    def feed(self, job_id: str, data: bytes) -> None:
        self._tell(Feed(job=job_id, stage=self.name, data=data))
        self._runner.feed(job_id, data)

    def pause(self, job_id: str, paused: bool) -> None:
        self._tell(Pause(job=job_id, paused=paused))
        self._runner.pause(job_id, paused)

    def abort(self, job_id: str) -> None:
        self._tell(Abort(job=job_id))
        self._runner.abort(job_id)

    def warm(self) -> None:
        """As every rank does of its own accord."""
        self._runner.warm()

    def tick(self, now: float) -> bool:
        runner = self._runner
        collect = runner.readable
        if not collect and (runner.full or not (runner.jobs() or runner.launched)):
            # Nothing can happen. While the device works this is asked thousands of times a second.
            runner.stats.observe(now, False, bool(runner.jobs()))
            return False
        self._tell(Turn(now=now, collect=collect))
        self._mailbox.flush()  # the sums of this turn wait for the others
        return runner.tick(now, collect)

    def jobs(self) -> list[str]:
        return self._runner.jobs()

    @property
    def launched(self) -> bool:
        return self._runner.launched

    @property
    def stats(self) -> StageStats:
        return self._runner.stats

    def refresh_stats(self) -> StageStats:
        return self._runner.refresh_stats()

    def close(self) -> None:
        """Let the followers go."""
        self._tell(Shutdown())
        self._mailbox.flush()


class Follower:
    """Repeats the leader's calls on a runner whose results nobody reads."""

    def __init__(self, runner: AutoregressiveRunner, mailbox: Mailbox) -> None:
        self._runner, self._mailbox = runner, mailbox

    def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Follow until the leader says to stop, or until `alive` says that whoever started this is gone."""
        while alive():
            for message in self._mailbox.poll(POLL_S):
                if isinstance(message, Shutdown):
                    return
                self._repeat(message)

    def _repeat(self, m: Message) -> None:
        runner = self._runner
        if isinstance(m, Turn):
            runner.tick(m.now, m.collect)
        elif isinstance(m, Start):
            with _refused_alike():
                runner.start(m.job, m.arrived)
        elif isinstance(m, Deliver):
            with _refused_alike():
                runner.push(m.chunk)
        elif isinstance(m, Feed):
            with _refused_alike():
                runner.feed(m.job, m.data)
        elif isinstance(m, Pause):
            runner.pause(m.job, m.paused)
        elif isinstance(m, Abort):
            runner.abort(m.job)

    def close(self) -> None:
        """Nothing to do: nobody follows a follower."""


@contextlib.contextmanager
def _refused_alike() -> Iterator[None]:
    """What fails for one job fails on all ranks, before anything is launched; the leader tells the client."""
    try:
        yield
    except HocketError as e:
        log.debug("refused: %s", e.message)
    except Exception:
        log.exception("refused")
