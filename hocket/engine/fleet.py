"""The workers of one engine: started, watched, started again; jobs placed on them, chunks taken back.

Each job goes to the least loaded replica of every stage it visits and stays there. When a worker
dies, the streams of its jobs end with a clear error and a new worker takes its seat.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hocket.core import Job, StageKind
from hocket.engine.connector import open_mailbox
from hocket.engine.launcher import Launched, Launcher
from hocket.engine.messages import (
    Abort,
    Deliver,
    Failed,
    Feed,
    Message,
    Pause,
    Ready,
    StageStatus,
    Status,
    Submit,
    Subscribe,
    Trace,
    Traced,
)
from hocket.engine.profile import Profile, StageProfile
from hocket.engine.stream import Stream
from hocket.engine.worker import WorkerPlan, error_of, lost_chunk
from hocket.errors import HocketError, RequestFailed, StartupError, WorkerDied

log = logging.getLogger("hocket.engine")

START_TIMEOUT_S = 900.0
RESTART_DELAY_S = 0.5  # times the number of restarts so far, up to 10 s
HEARTBEAT_LIMIT_S = 5.0
STALL_LIMIT_S = 30.0
TRACE_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seat:
    """A worker's place: what it runs, and who fills it now."""

    plan: WorkerPlan
    launched: Launched | None = None
    ready: bool = False
    heard: float = 0.0
    status: Status | None = None
    jobs: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Transfers:
    """Chunks on their way from a worker to here; both read one machine's clock."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


class Fleet:
    """Implements `hocket.engine.stream.Desk`. Everything but `_pump` runs on the event loop.

    finished: called with each stream when its last job is over.
    """

    def __init__(
        self,
        launcher: Launcher,
        plans: Iterable[WorkerPlan],
        kinds: Mapping[str, StageKind],
        finished: Callable[[Stream], None],
    ) -> None:
        self._launcher, self._kinds, self._finished = launcher, kinds, finished
        self.seats = {plan.name: Seat(plan) for plan in plans}
        self._stages = {stage for seat in self.seats.values() for stage in seat.plan.stages}
        self.restarts = 0
        self.transfers: defaultdict[str, Transfers] = defaultdict(Transfers)  # by the stage they come from
        self._streams: dict[str, Stream] = {}  # by job
        self._traced: dict[str, asyncio.Future[str]] = {}  # answers that are waited for, by worker
        self._placements: dict[str, dict[str, str]] = {}  # job -> stage -> address
        self._received: defaultdict[str, dict[str, int]] = defaultdict(dict)  # job -> stage -> chunks
        self._mailbox = open_mailbox(launcher.client_address())
        self._open = True
        self._error: HocketError | None = None

    # --- life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Launch every worker; returns when all are ready. Raises StartupError."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._pump, name="hocket engine", daemon=True)
        self._thread.start()
        for seat in self.seats.values():
            self._launch(seat)
        self._ticker = asyncio.create_task(self._tick())
        loading = asyncio.create_task(self._until_ready())
        done, _ = await asyncio.wait({loading}, timeout=START_TIMEOUT_S)
        if not done:
            loading.cancel()
            self._error = StartupError(f"workers were not ready within {START_TIMEOUT_S:g} s")
        if self._error is not None:
            await self.close()
            raise self._error

    async def _until_ready(self) -> None:
        while self._error is None and not self.ready:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """End the workers. Streams must have ended before. While `start` waits, it makes that fail."""
        if not self._open:
            return
        self._open = False
        self._error = self._error or StartupError("the engine was closed while it was loading")
        self._changed.set()
        self._ticker.cancel()
        launched = [seat.launched for seat in self.seats.values() if seat.launched is not None]
        await asyncio.gather(*(asyncio.to_thread(worker.stop, 5.0) for worker in launched))
        await asyncio.to_thread(self._thread.join)
        self._mailbox.close()
        self._launcher.close()

    def _launch(self, seat: Seat) -> None:
        def ended(address: str, who: str) -> None:
            self._on_loop(lambda: self._worker_ended(seat, address, who))

        seat.ready, seat.status, seat.heard = False, None, time.monotonic()
        seat.launched = self._launcher.launch(seat.plan, self._mailbox.address, ended)
        self._send(seat.launched.address, Subscribe(client=self._mailbox.address))

    def _worker_ended(self, seat: Seat, address: str, who: str) -> None:
        if not self._open or seat.launched is None or seat.launched.address != address:
            return
        was_ready, seat.ready = seat.ready, False
        for job_id in list(seat.jobs):
            stream = self._streams.get(job_id)
            if stream is not None:
                stream.end(WorkerDied(f"the {who} that ran this request ended unexpectedly"))
        seat.jobs.clear()
        self._mailbox.forget(address)
        if not was_ready and self.restarts == 0:  # it never ran: `start` raises
            self._error = self._error or StartupError(f"{who} ended while loading")
            self._changed.set()
            return
        log.error("%s ended; starting it again", who)
        self.restarts += 1
        self._loop.call_later(RESTART_DELAY_S * min(self.restarts, 20), self._relaunch, seat)

    def _relaunch(self, seat: Seat) -> None:
        if self._open:
            self._launch(seat)

    # --- health ---------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return all(seat.ready for seat in self.seats.values())

    @property
    def serving(self) -> bool:
        """Whether every stage has a replica that runs."""
        there = {stage for seat in self.seats.values() if seat.ready for stage in seat.plan.stages}
        return self._stages <= there

    def trouble(self) -> str | None:
        """Why the fleet is not healthy; None when it is."""
        now = time.monotonic()
        for name, seat in self.seats.items():
            if not seat.ready:
                return f"worker {name} is {'restarting' if self.restarts else 'loading'}"
            if now - seat.heard > HEARTBEAT_LIMIT_S:
                return f"worker {name} has sent no heartbeat for {now - seat.heard:.0f} s"
            for stage in seat.status.stages if seat.status else []:
                if stage.idle_for_s > STALL_LIMIT_S:
                    return f"stage {stage.stage} has made no progress for {stage.idle_for_s:.0f} s"
        return None

    def stages(self) -> dict[str, list[StageStatus]]:
        """The last heartbeats by stage, one entry a replica."""
        out: dict[str, list[StageStatus]] = {}
        for seat in self.seats.values():
            for status in seat.status.stages if seat.status else []:
                out.setdefault(status.stage, []).append(status)
        return out

    # --- messages -------------------------------------------------------------------------------------

    def _pump(self) -> None:
        while self._open:
            messages = self._mailbox.poll(0.2)
            if messages:
                self._on_loop(lambda m=messages: self._take(m))  # type: ignore[misc]

    def _on_loop(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop was closed under us: nobody is left to tell
            self._open = False

    def _take(self, messages: list[Message]) -> None:
        for m in messages:
            if isinstance(m, Deliver):
                self.transfers[m.chunk.source].add(time.monotonic() - m.sent)
                self._deliver(m)
            elif isinstance(m, Failed):
                self._failed(m)
            elif isinstance(m, Traced):
                answer = self._traced.pop(m.worker, None)
                if answer is not None and not answer.done():
                    answer.set_result(m.error)
            elif isinstance(m, (Ready, Status)):
                seat = self.seats.get(m.worker)
                if seat is not None:
                    seat.heard = time.monotonic()
                    if isinstance(m, Ready):
                        seat.ready = True
                        self._changed.set()
                    else:
                        seat.status = m

    def _deliver(self, m: Deliver) -> None:
        stream = self._streams.get(m.chunk.job)
        if stream is None:
            return
        received = self._received[m.chunk.job]
        expected = received.get(m.chunk.source, 0)
        received[m.chunk.source] = expected + 1
        if m.number != expected:
            stream.end(lost_chunk(m, expected))
        else:
            stream.receive(m.chunk)

    async def trace(self, files: Mapping[str, str] | None) -> None:
        """Have every worker record what it does; with files, by worker, stop and write there.

        Raises RequestFailed if one of them cannot.
        """
        waiting = []
        for name, seat in self.seats.items():
            if seat.launched is None or not seat.ready:
                raise RequestFailed(f"worker {name} is not ready")
            waiting.append(self._loop.create_future())
            self._traced[name] = waiting[-1]
            file = files[name] if files else ""
            self._send(seat.launched.address, Trace(client=self._mailbox.address, file=file))
        try:
            errors = await asyncio.wait_for(asyncio.gather(*waiting), TRACE_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise RequestFailed(f"no trace within {TRACE_TIMEOUT_S:g} s") from None
        if any(errors):
            raise RequestFailed(next(filter(None, errors)), code="profile_failed")

    def _failed(self, m: Failed) -> None:
        if not m.job:
            self._error = error_of(m)
            self._changed.set()
        elif m.job in self._streams:
            self._streams[m.job].end(error_of(m))

    def _send(self, address: str, message: Message) -> None:
        self._mailbox.send(address, message)
        self._mailbox.flush()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for seat in self.seats.values():
                if seat.launched is not None:
                    self._send(seat.launched.address, Subscribe(client=self._mailbox.address))

    # --- Desk -------------------------------------------------------------------------------------------

    def dispatch(self, stream: Stream, job: Job) -> None:
        placement: dict[str, str] = {}
        for stage in job.route:
            hosts = [s for s in self.seats.values() if stage in s.plan.stages and s.ready]
            if not hosts:  # the last one died since the request was admitted
                stream.end(WorkerDied(f"no worker runs stage {stage} now"))
                return
            # A job's stages share a worker where they can: its chunks then never leave it.
            seat = min(hosts, key=lambda s: (len(s.jobs) - (job.id in s.jobs), job.id not in s.jobs))
            assert seat.launched is not None
            placement[stage] = seat.launched.address
            seat.jobs.add(job.id)
        self._streams[job.id] = stream
        self._placements[job.id] = placement
        message = Submit(job=job, placement=placement, reply_to=self._mailbox.address)
        for address in dict.fromkeys(reversed(placement.values())):  # readers before writers
            self._send(address, message)

    def feed(self, job_id: str, data: bytes) -> None:
        for stage, address in self._placements.get(job_id, {}).items():
            if self._kinds[stage] is StageKind.AUTOREGRESSIVE:
                self._send(address, Feed(job=job_id, stage=stage, data=data))

    def pause(self, job_id: str, paused: bool) -> None:
        for address in set(self._placements.get(job_id, {}).values()):
            self._send(address, Pause(job=job_id, paused=paused))

    def abort(self, job_id: str) -> None:
        for address in set(self._placements.get(job_id, {}).values()):
            self._send(address, Abort(job=job_id))

    def forget(self, stream: Stream, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self._streams.pop(job_id, None)
            self._placements.pop(job_id, None)
            self._received.pop(job_id, None)
            for seat in self.seats.values():
                seat.jobs.discard(job_id)
        if stream.over:
            self._finished(stream)


def _cores() -> int:
    """How many cores all workers may use: OMP_NUM_THREADS where it is set, as for other programs."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) > 0 else os.cpu_count() or 1


def plan_workers(profile: Profile, stages: Iterable[str], folder: Path) -> list[WorkerPlan]:
    """One worker a device; a stage's further replicas go to the devices after those of its first.

    Raises StartupError when two stages that are split begin on one device.
    """
    placed: dict[str, dict[str, StageProfile]] = {}
    for stage in stages:
        p = profile.stages[stage]
        kind, _, number = p.device.partition(":")
        for replica in range(p.replicas):
            there = placed.setdefault(f"{kind}:{int(number or 0) + replica * p.tensor_parallel}", {})
            split = [other for other in there if there[other].tensor_parallel > 1]
            if split and p.tensor_parallel > 1:
                field = f"stages.{stage}.tensor_parallel"
                message = f"{field}: {stage} and {split[0]} are both split and both begin on {p.device}"
                raise profile.error(field, message)
            there[stage] = p
    ranks = sum(max(p.tensor_parallel for p in there.values()) for there in placed.values())
    share = max(1, _cores() // ranks)
    return [
        WorkerPlan(
            name=name,
            family=profile.family,
            folder=str(folder),
            stages=there,
            device="cpu" if name.startswith("cpu") else name,
            threads=profile.threads or share,
        )
        for name, there in placed.items()
    ]
