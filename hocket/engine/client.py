"""The engine as a caller sees it: submit a request, iterate over its audio.

An `AsyncEngine` holds no model. It resolves the checkpoint, reads the profile, starts the workers,
turns requests into jobs, sends each job to the least loaded replica of every stage it visits, and
hands the audio out in order. When a worker dies its jobs fail with a clear error and a new one is
started. `Engine` is the same for programs without an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from hocket.core import Chunk, ChunkKind, FrontEnd, Job, ModelInfo, SpeechRequest, StageKind, TextFeed
from hocket.engine.connector import Mailbox, open_mailbox
from hocket.engine.hub import resolve_model
from hocket.engine.launcher import Launched, Launcher, ProcessLauncher, ThreadLauncher
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
)
from hocket.engine.profile import Profile, load_profile, match_stages
from hocket.engine.worker import WorkerPlan, error_of
from hocket.errors import (
    Cancelled,
    DeadlineExceeded,
    HocketError,
    InvalidRequest,
    NotFound,
    Overloaded,
    StartupError,
    WorkerDied,
)
from hocket.models import family_of, load_family

log = logging.getLogger("hocket.engine")

START_TIMEOUT_S = 900.0
RESTART_DELAY_S = 0.5
HEARTBEAT_LIMIT_S = 5.0
STALL_LIMIT_S = 30.0
UNITS_IN_FLIGHT = 2
_SEED_STEP = 0x9E3779B97F4A7C15  # seeds of the units of one text differ, and unit 0 keeps the request's

T = TypeVar("T")


@dataclass(slots=True)
class Audio:
    """A piece of a stream's audio."""

    samples: np.ndarray  # float32 [n], mono, in [-1, 1]
    index: int
    last: bool = False
    finish_reason: str = ""  # "stop" or "length" with `last`


@dataclass(slots=True)
class Usage:
    text_tokens: int = 0
    audio_tokens: int = 0  # reference frames used as conditioning
    frames: int = 0


@dataclass(slots=True)
class Speech:
    """A whole utterance."""

    samples: np.ndarray  # float32 [n], mono
    sample_rate_hz: int
    finish_reason: str
    usage: Usage
    seed: int


@dataclass(slots=True)
class EngineStatus:
    ready: bool
    healthy: bool
    reason: str | None
    stages: dict[str, list[StageStatus]]  # by stage, one entry a replica
    workers: dict[str, str]  # name -> loading, ready or restarting
    running: int
    waiting: int
    restarts: int
    overhead_seconds: float


@dataclass(slots=True)
class _WorkerSeat:
    plan: WorkerPlan
    launched: Launched | None = None
    ready: bool = False
    heard: float = 0.0
    status: Status | None = None
    jobs: set[str] = field(default_factory=set)


class Stream:
    """One request's audio, in order. Iterate; or `aclose` to abort. Made by `AsyncEngine.submit`."""

    def __init__(self, engine: AsyncEngine, request: SpeechRequest, jobs: list[Job], live: TextFeed | None) -> None:
        self._engine, self._request = engine, request
        self._units = deque(jobs)
        self._queue: asyncio.Queue[Audio | HocketError] = asyncio.Queue()
        self._ahead: dict[str, list[Chunk]] = {}  # units that run before their turn
        self._order: deque[str] = deque()  # jobs under way, in the order to be heard
        self._feed = live
        self._index = 0
        self._buffered_s = 0.0
        self._paused = False
        self._ended = False
        self._deadline: asyncio.TimerHandle | None = None
        self._codes: list[np.ndarray] = []
        self.id = jobs[0].id
        self.seed = jobs[0].seed
        self.sample_rate_hz = engine.info.sample_rate_hz
        self.finish_reason: str | None = None
        self.usage = Usage(sum(j.text_tokens for j in jobs), sum(j.audio_tokens for j in jobs))

    @property
    def codes(self) -> np.ndarray:
        """int32 [frames, codebooks]; collected when the request was submitted with `want_codes`."""
        return np.concatenate(self._codes) if self._codes else np.zeros((0, self._engine.info.codebooks), np.int32)

    def __aiter__(self) -> AsyncIterator[Audio]:
        return self

    async def __anext__(self) -> Audio:
        if self.finish_reason is not None and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, HocketError):
            self.finish_reason = "error"
            raise item
        self._buffered_s -= len(item.samples) / self.sample_rate_hz
        if self._paused and self._buffered_s < self._engine._buffer_s / 2:
            self._set_paused(False)
        if item.last:
            self.finish_reason = item.finish_reason
        return item

    async def aclose(self) -> None:
        """Stop. What was queued, running or under way for this request is freed."""
        self._end(Cancelled("the request was aborted"))

    async def add_text(self, text: str) -> None:
        """More of a text that was opened with `submit_live`."""
        self._send_text(self._open_feed().add(text))

    async def close_text(self) -> None:
        """Say that the text is complete."""
        self._send_text(self._open_feed().close())
        self._feed = None

    def _open_feed(self) -> TextFeed:
        if self._feed is None:
            raise InvalidRequest("the text of this request is closed", param="input")
        return self._feed

    def _send_text(self, data: bytes) -> None:
        if data and not self._ended:
            self._engine._feed(self.id, data)

    # --- what the engine calls, on the event loop -------------------------------------------------

    def _begin(self) -> None:
        if self._request.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._request.timeout_s, self._expire)
        self._next_unit()

    def _expire(self) -> None:
        self._end(DeadlineExceeded(f"no audio within {self._request.timeout_s:g} s"))

    def _next_unit(self) -> None:
        if self._units and len(self._order) < UNITS_IN_FLIGHT:
            job = self._units.popleft()
            self._order.append(job.id)
            self._engine._dispatch(self, job)

    def _chunk(self, chunk: Chunk) -> None:
        if self._ended or chunk.job not in self._order:
            return
        if chunk.kind is not ChunkKind.PCM:
            self._codes.append(chunk.arrays[chunk.kind.value])
            return
        if chunk.job != self._order[0]:
            self._ahead.setdefault(chunk.job, []).append(chunk)
            return
        self._hear(chunk)

    def _hear(self, chunk: Chunk) -> None:
        samples = chunk.arrays["pcm"]
        if self._deadline is not None and len(samples):
            self._deadline.cancel()
            self._deadline = None
        unit_over = chunk.last
        last = unit_over and not self._units and len(self._order) == 1
        self._buffered_s += len(samples) / self.sample_rate_hz
        self.usage.frames += round(len(samples) / self.sample_rate_hz * self._engine.info.frame_rate_hz)
        self._queue.put_nowait(Audio(samples, self._index, last, chunk.finish_reason if last else ""))
        self._index += 1
        if last:
            self._ended = True
            self._engine._forget(self, self._order)
        elif unit_over:
            self._engine._forget(self, [self._order.popleft()])
            self._next_unit()
            for ahead in self._ahead.pop(self._order[0], []):
                self._hear(ahead)
        else:
            self._next_unit()
            if self._buffered_s > self._engine._buffer_s and not self._paused:
                self._set_paused(True)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        for job_id in self._order:
            self._engine._pause(job_id, paused)

    def _end(self, error: HocketError) -> None:
        if self._ended:
            return
        self._ended = True
        if self._deadline is not None:
            self._deadline.cancel()
        for job_id in self._order:
            self._engine._abort(job_id)
        self._engine._forget(self, self._order)
        self._units.clear()
        self._queue.put_nowait(error)


class AsyncEngine:
    """Serves one checkpoint.

    model: folder, Hugging Face id or ModelScope id. profile: name or path; the family's own by
    default. overrides: dotted profile fields to YAML scalars. processes: workers are processes of
    their own (a server) or threads of this program. max_waiting: requests that may queue beyond the
    slots; more are refused with `Overloaded`. buffer_s: audio that may wait for a slow listener
    before generation pauses.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        profile: str | Path | None = None,
        platform: str | None = None,
        overrides: Mapping[str, str] | None = None,
        processes: bool = True,
        max_waiting: int | None = None,
        buffer_s: float = 30.0,
    ) -> None:
        self._model, self._profile_name, self._platform = model, profile, platform
        self._overrides = overrides
        self._launcher: Launcher = ProcessLauncher() if processes else ThreadLauncher()
        self._max_waiting = max_waiting
        self._buffer_s = buffer_s
        self._seats: dict[str, _WorkerSeat] = {}
        self._streams: dict[str, Stream] = {}  # by job
        self._placements: dict[str, dict[str, str]] = {}  # job -> stage -> address
        self._requests: dict[str, Stream] = {}
        self._pumping = False
        self._restarts = 0
        self._rate = _DrainRate()
        self.info: ModelInfo
        self.front_end: FrontEnd
        self.profile: Profile
        self.folder: Path

    # --- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load everything; returns when all workers are ready. Raises StartupError."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._read)
        held = [self.profile.stages[s] for s in self._used if self._kinds[s] is not StageKind.ONE_SHOT]
        self._capacity = min(p.slots * p.replicas for p in held)  # requests that can run at once
        self._mailbox: Mailbox = open_mailbox(self._launcher.client_address())
        self._pumping = True
        self._pump_thread = threading.Thread(target=self._pump, name="hocket engine", daemon=True)
        self._changed = asyncio.Event()
        self._startup_error: HocketError | None = None
        self._pump_thread.start()
        for plan in self._plans():
            self._seats[plan.name] = _WorkerSeat(plan)
            self._launch(self._seats[plan.name])
        self._ticker = asyncio.create_task(self._tick())
        try:
            await asyncio.wait_for(self._until_ready(), START_TIMEOUT_S)
        except TimeoutError as e:
            await self.close()
            raise StartupError(f"workers were not ready within {START_TIMEOUT_S:g} s") from e
        except StartupError:
            await self.close()
            raise

    def _read(self) -> None:
        self.folder = resolve_model(str(self._model))
        name = family_of(self.folder)
        family = load_family(name)
        self._kinds = {s.name: s.kind for s in family.stages}
        self._family = family
        self.front_end = family.front_end(self.folder)
        self.info = self.front_end.info
        self.profile = load_profile(self._profile_name or name, self._platform, self._overrides)
        match_stages(self.profile, family.stages)
        self._used = family.used_stages(self.folder)
        if self._max_waiting is None:
            self._max_waiting = self.profile.max_waiting

    def _plans(self) -> list[WorkerPlan]:
        """One worker a device; a stage's further replicas go to the devices after its first."""
        placed: dict[str, dict[str, Any]] = {}
        for stage in self._used:
            p = self.profile.stages[stage]
            for replica in range(p.replicas):
                kind, _, number = p.device.partition(":")
                name = f"{kind}:{int(number or 0) + replica}"
                placed.setdefault(name, {})[stage] = p
        return [
            WorkerPlan(
                name=name,
                family=self.profile.family,
                folder=str(self.folder),
                stages=stages,
                device="cpu" if name.startswith("cpu") else name,
                threads=self.profile.threads,
            )
            for name, stages in placed.items()
        ]

    async def _until_ready(self) -> None:
        while not all(seat.ready for seat in self._seats.values()):
            self._changed.clear()
            await self._changed.wait()
            if self._startup_error is not None:
                raise self._startup_error

    async def close(self) -> None:
        """Abort what runs and end the workers."""
        for stream in list(self._requests.values()):
            stream._end(Cancelled("the engine is shutting down", code="shutting_down"))
        self._mailbox.flush()
        self._pumping = False
        if hasattr(self, "_ticker"):
            self._ticker.cancel()
        seats = list(self._seats.values())
        self._seats = {}
        await asyncio.gather(*(asyncio.to_thread(s.launched.stop, 5.0) for s in seats if s.launched))
        await asyncio.to_thread(self._pump_thread.join)
        self._mailbox.close()
        self._launcher.close()

    def _launch(self, seat: _WorkerSeat) -> None:
        def ended(address: str) -> None:
            self._on_loop(lambda: self._worker_ended(seat, address))

        seat.ready, seat.status, seat.heard = False, None, time.monotonic()
        seat.launched = self._launcher.launch(seat.plan, self._mailbox.address, ended)
        self._send(seat.launched.address, Subscribe(client=self._mailbox.address))

    def _worker_ended(self, seat: _WorkerSeat, address: str) -> None:
        if not self._pumping or seat.launched is None or seat.launched.address != address:
            return
        was_ready, seat.ready = seat.ready, False
        self._mailbox.forget(address)
        for job_id in list(seat.jobs):
            stream = self._streams.get(job_id)
            if stream is not None:
                stream._end(WorkerDied(f"the worker {seat.plan.name} that ran this request ended unexpectedly"))
        seat.jobs.clear()
        if not was_ready:
            self._startup_error = self._startup_error or StartupError(f"worker {seat.plan.name} ended while loading")
            self._changed.set()
            if self._restarts == 0:
                return  # never ran: `start` raises
        log.error("worker %s ended; starting it again", seat.plan.name)
        self._restarts += 1
        self._loop.call_later(RESTART_DELAY_S * min(self._restarts, 20), self._relaunch, seat)

    def _relaunch(self, seat: _WorkerSeat) -> None:
        if self._pumping:
            self._launch(seat)

    # --- messages -------------------------------------------------------------------------------------

    def _pump(self) -> None:
        while self._pumping:
            messages = self._mailbox.poll(0.2)
            if messages:
                self._on_loop(lambda m=messages: self._take(m))

    def _on_loop(self, action: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop was closed under us: nobody is left to tell
            self._pumping = False

    def _take(self, messages: list[Message]) -> None:
        for m in messages:
            if isinstance(m, Deliver):
                stream = self._streams.get(m.chunk.job)
                if stream is not None:
                    stream._chunk(m.chunk)
            elif isinstance(m, Failed):
                self._failed(m)
            elif isinstance(m, (Ready, Status)):
                seat = self._seats.get(m.worker)
                if seat is not None:
                    seat.heard = time.monotonic()
                    if isinstance(m, Ready):
                        seat.ready = True
                        self._changed.set()
                    else:
                        seat.status = m
        self._mailbox.flush()

    def _failed(self, m: Failed) -> None:
        if not m.job:
            self._startup_error = StartupError(m.message)
            self._changed.set()
            return
        stream = self._streams.get(m.job)
        if stream is not None:
            stream._end(error_of(m))

    def _send(self, address: str, message: Message) -> None:
        self._mailbox.send(address, message)
        self._mailbox.flush()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for seat in self._seats.values():
                if seat.launched is not None:
                    self._send(seat.launched.address, Subscribe(client=self._mailbox.address))

    # --- requests ---------------------------------------------------------------------------------------

    async def submit(self, request: SpeechRequest, *, want_codes: bool = False) -> Stream:
        """Start one utterance. Raises InvalidRequest (naming the field) or Overloaded."""
        self._admit(request)
        jobs = await asyncio.to_thread(self._prepare, request)
        return self._open(request, jobs, None, want_codes)

    async def submit_live(self, request: SpeechRequest, *, want_codes: bool = False) -> Stream:
        """Start an utterance whose text is still being written; `request.text` is its beginning.

        Go on with `Stream.add_text` and end with `Stream.close_text`.
        """
        self._admit(request)
        job, feed = await asyncio.to_thread(self.front_end.open_text, request)
        return self._open(request, [job], feed, want_codes)

    def _prepare(self, request: SpeechRequest) -> list[Job]:
        units = self.front_end.units(request.text)
        if len(units) <= 1:
            return [self.front_end.prepare(request)]
        jobs: list[Job] = []
        for text in units:
            if not any(c.isalnum() for c in text):
                continue
            job = self.front_end.prepare(_with_text(request, text))
            if jobs:
                seed = (jobs[0].seed + len(jobs) * _SEED_STEP) % (1 << 63)
                job = msgspec.structs.replace(job, id=f"{jobs[0].id}/{len(jobs)}", seed=seed)
            jobs.append(job)
        return jobs or [self.front_end.prepare(request)]

    def _admit(self, request: SpeechRequest) -> None:
        if not all(seat.ready for seat in self._seats.values()):
            raise Overloaded("the model is loading or restarting", retry_after_s=2, code="not_ready")
        assert self._max_waiting is not None
        if len(self._requests) >= self._capacity + self._max_waiting:
            raise Overloaded(
                f"the queue is full: {self._capacity} running and {self._max_waiting} waiting",
                retry_after_s=self._rate.seconds_for(len(self._requests) - self._capacity + 1),
                code="queue_full",
            )
        if request.request_id is not None and request.request_id in self._requests:
            raise InvalidRequest("a request with this id is running", param="request_id", code="duplicate_id")

    def _open(self, request: SpeechRequest, jobs: list[Job], feed: TextFeed | None, want_codes: bool) -> Stream:
        self._admit(request)  # preparing took a while
        if want_codes:
            taps = tuple(s.name for s in self._family.stages if s.gives in (ChunkKind.CODES, ChunkKind.LATENTS))
            jobs = [msgspec.structs.replace(job, taps=taps) for job in jobs]
        stream = Stream(self, request, jobs, feed)
        self._requests[stream.id] = stream
        stream._begin()
        return stream

    async def abort(self, request_id: str) -> bool:
        """End a request; False when no such request runs."""
        stream = self._requests.get(request_id)
        if stream is None:
            return False
        await stream.aclose()
        return True

    def status(self) -> EngineStatus:
        now = time.monotonic()
        stages: dict[str, list[StageStatus]] = {}
        reason = None
        for name, seat in self._seats.items():
            for s in seat.status.stages if seat.status else []:
                stages.setdefault(s.stage, []).append(s)
                if s.idle_for_s > STALL_LIMIT_S:
                    reason = f"stage {s.stage} has made no progress for {s.idle_for_s:.0f} s"
            if not seat.ready:
                reason = f"worker {name} is {'restarting' if self._restarts else 'loading'}"
            elif now - seat.heard > HEARTBEAT_LIMIT_S:
                reason = f"worker {name} has sent no heartbeat for {now - seat.heard:.0f} s"
        ready = bool(self._seats) and all(seat.ready for seat in self._seats.values())
        return EngineStatus(
            ready=ready,
            healthy=ready and reason is None,
            reason=reason,
            stages=stages,
            workers={n: "ready" if s.ready else "restarting" if self._restarts else "loading" for n, s in self._seats.items()},
            running=min(len(self._requests), getattr(self, "_capacity", 0)),
            waiting=max(0, len(self._requests) - getattr(self, "_capacity", 0)),
            restarts=self._restarts,
            overhead_seconds=sum(s.status.overhead_seconds for s in self._seats.values() if s.status),
        )

    # --- what streams call ------------------------------------------------------------------------------

    def _dispatch(self, stream: Stream, job: Job) -> None:
        placement: dict[str, str] = {}
        for stage in job.route:
            hosts = [s for s in self._seats.values() if stage in s.plan.stages and s.launched is not None]
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

    def _feed(self, job_id: str, data: bytes) -> None:
        for stage, address in self._placements.get(job_id, {}).items():
            if self._kinds[stage] is StageKind.AUTOREGRESSIVE:
                self._send(address, Feed(job=job_id, stage=stage, data=data))

    def _pause(self, job_id: str, paused: bool) -> None:
        for address in set(self._placements.get(job_id, {}).values()):
            self._send(address, Pause(job=job_id, paused=paused))

    def _abort(self, job_id: str) -> None:
        for address in set(self._placements.get(job_id, {}).values()):
            self._send(address, Abort(job=job_id))

    def _forget(self, stream: Stream, job_ids: Any) -> None:
        for job_id in list(job_ids):
            self._streams.pop(job_id, None)
            self._placements.pop(job_id, None)
            for seat in self._seats.values():
                seat.jobs.discard(job_id)
        if stream._ended and self._requests.pop(stream.id, None) is not None:
            self._rate.count(time.monotonic())


class _DrainRate:
    """How fast requests end, for telling a refused client when to come back."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def count(self, now: float) -> None:
        self._ends.append(now)

    def seconds_for(self, requests: int) -> float:
        if len(self._ends) < 2:
            return 1.0
        span = max(time.monotonic() - self._ends[0], 1e-3)
        return min(30.0, max(1.0, requests * span / len(self._ends)))


def _with_text(request: SpeechRequest, text: str) -> SpeechRequest:
    from dataclasses import replace

    return replace(request, text=text)


class Engine:
    """`AsyncEngine` for programs without an event loop; the same arguments. A context manager."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._engine = AsyncEngine(model, **{"processes": False, **options})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hocket loop", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        try:
            self._run(self._engine.start())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._engine.close())
        self._stop()

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def speak(self, request: SpeechRequest, *, want_codes: bool = False) -> SyncStream:
        """Start one utterance and iterate over its audio."""
        return SyncStream(self, self._run(self._engine.submit(request, want_codes=want_codes)))

    def speech(self, request: SpeechRequest) -> Speech:
        """One whole utterance."""
        stream = self.speak(request)
        parts = [audio.samples for audio in stream]
        inner = stream.stream
        samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return Speech(samples, inner.sample_rate_hz, inner.finish_reason or "", inner.usage, inner.seed)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncStream:
    """A `Stream` without an event loop: iterate, or `close` to abort."""

    def __init__(self, engine: Engine, stream: Stream) -> None:
        self._engine, self.stream = engine, stream

    def __iter__(self) -> Iterator[Audio]:
        return self

    def __next__(self) -> Audio:
        try:
            return self._engine._run(self.stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self._engine._run(self.stream.aclose())
