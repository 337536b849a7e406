"""The engine as a caller sees it: submit a request, iterate over its audio.

An `AsyncEngine` holds no model. It resolves the checkpoint, reads the profile, has a fleet of
workers started, and turns requests into jobs for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from hocket.core import CLIENT, Chat, ChunkKind, FrontEnd, Job, ModelInfo, SpeechRequest, StageKind, TextFeed
from hocket.engine.fleet import Fleet, Transfers, plan_workers
from hocket.engine.hub import resolve_model
from hocket.engine.launcher import ProcessLauncher, ThreadLauncher
from hocket.engine.messages import StageStatus
from hocket.engine.profile import Profile, load_profile, match_stages
from hocket.engine.stream import Stream
from hocket.errors import Cancelled, InvalidRequest, Overloaded, Unsupported
from hocket.models import family_of, load_family

T = TypeVar("T")

_LIGHT_CHARS = 2000  # about a millisecond
_SEED_STEP = 0x9E3779B97F4A7C15  # seeds of the units of one text differ, and unit 0 keeps the request's


@dataclass(slots=True)
class EngineStatus:
    """How an engine is; see `AsyncEngine.status`."""

    ready: bool
    healthy: bool
    reason: str | None  # why not
    stages: dict[str, list[StageStatus]]  # by stage, one entry a replica
    workers: dict[str, str]  # name -> loading, ready or restarting
    running: int
    waiting: int
    restarts: int
    overhead_seconds: float  # CPU time of the workers' loops outside the programs
    transfers: dict[str, Transfers] = field(default_factory=dict)  # of chunks, by the stage they come from


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
        self._processes = processes
        self._max_waiting = max_waiting
        self._buffer_s = buffer_s
        self._requests: dict[str, Stream] = {}
        self._rate = _DrainRate()
        self._capacity = 0  # requests that can run at once
        self._preparing = 0  # admitted, and not yet in `_requests`
        self.fleet: Fleet | None = None
        self.info: ModelInfo
        self.front_end: FrontEnd
        self.profile: Profile
        self.folder: Path

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load everything; returns when all workers are ready. Raises StartupError."""
        await asyncio.to_thread(self._read)
        launcher = ProcessLauncher() if self._processes else ThreadLauncher()
        plans = plan_workers(self.profile, self._used, self.folder)
        self.fleet = Fleet(launcher, plans, self._kinds, self._finished)
        await self.fleet.start()

    def _read(self) -> None:
        self.folder = resolve_model(str(self._model))
        name = family_of(self.folder)
        family = load_family(name)
        self.front_end = family.front_end(self.folder)
        self.profile = load_profile(self._profile_name or family.profile, self._platform, self._overrides)
        match_stages(self.profile, family.stages)
        self._kinds = {s.name: s.kind for s in family.stages}
        self._ends = {s.name: s.gives for s in family.stages if CLIENT in s.feeds}
        self._taps = tuple(s.name for s in family.stages if s.gives in (ChunkKind.CODES, ChunkKind.LATENTS))
        self._used = tuple(s for s in family.used_stages(self.folder) if s in self.profile.stages)
        gives = {self._ends[s] for s in self._used if s in self._ends}
        made = {"text": ChunkKind.TOKENS in gives, "audio": ChunkKind.PCM in gives}
        info = self.front_end.info
        self.info = replace(info, answers=tuple(what for what in info.answers if made[what]))
        held = [self.profile.stages[s] for s in self._used if self._kinds[s] is not StageKind.ONE_SHOT]
        self._capacity = min(p.slots * p.replicas for p in held)
        if self._max_waiting is None:
            self._max_waiting = self.profile.max_waiting

    async def close(self) -> None:
        """Abort what runs and end the workers."""
        for stream in list(self._requests.values()):
            stream.end(Cancelled("the engine is shutting down", code="shutting_down"))
        if self.fleet is not None:
            await self.fleet.close()
            self.fleet = None

    # --- requests ---------------------------------------------------------------------------------------

    async def submit(self, request: SpeechRequest, *, want_codes: bool = False) -> Stream:
        """Start one utterance. Raises InvalidRequest (naming the field) or Overloaded."""
        jobs = await self._prepared(self._prepare, request)
        return self._open(request, jobs, None, want_codes)

    async def submit_live(self, request: SpeechRequest, *, want_codes: bool = False) -> Stream:
        """Start an utterance whose text is still being written; `request.text` is its beginning.

        Go on with `Stream.add_text` and end with `Stream.close_text`. Raises as `submit` does.
        """
        job, feed = await self._prepared(self.front_end.open_text, request)
        return self._open(request, [job], feed, want_codes)

    def _prepare(self, request: SpeechRequest) -> list[Job]:
        """One job for each unit of the text. All begin from the request's own voice and options."""
        if request.chat is not None:
            return [self._chat_job(request, request.chat)]
        units = [u for u in self.front_end.units(request.text) if any(c.isalnum() for c in u)]
        if len(units) <= 1:
            return [self.front_end.prepare(request)]
        jobs: list[Job] = []
        for n, text in enumerate(units):
            job = self.front_end.prepare(replace(request, text=text))
            if n:
                seed = (jobs[0].seed + n * _SEED_STEP) % (1 << 63)
                job = msgspec.structs.replace(job, id=f"{jobs[0].id}/{n}", seed=seed)
            jobs.append(job)
        return jobs

    def _chat_job(self, request: SpeechRequest, chat: Chat) -> Job:
        if not self.info.answers:
            raise Unsupported("this model speaks texts and answers no chat", param="messages")
        if chat.modalities is None:
            request = replace(request, chat=replace(chat, modalities=self.info.answers))
        job = self.front_end.prepare(request)
        missing = [stage for stage in job.route if stage not in self._used]
        if missing:
            raise InvalidRequest(
                f"this server runs without the stage {missing[0]}, which the request needs; it answers with "
                f"{' and '.join(self.info.answers)}",
                param="modalities",
                code="unsupported_modality",
            )
        return job

    async def _prepared(self, prepare: Callable[[SpeechRequest], T], request: SpeechRequest) -> T:
        """Prepare an admitted request, a heavy one in a thread. From now on it holds its place."""
        self._admit(request)
        if _light(request):
            return prepare(request)
        self._preparing += 1
        try:
            return await asyncio.to_thread(prepare, request)
        finally:
            self._preparing -= 1

    def check_room(self) -> None:
        """Raises Overloaded if a request submitted now would be refused."""
        if self.fleet is None or not self.fleet.serving:
            raise Overloaded("the model is loading or restarting", retry_after_s=2, code="not_ready")
        assert self._max_waiting is not None
        held = len(self._requests) + self._preparing
        if held >= self._capacity + self._max_waiting:
            raise Overloaded(
                f"the queue is full: {self._capacity} running and {self._max_waiting} waiting",
                retry_after_s=self._rate.seconds_for(held - self._capacity + 1),
                code="queue_full",
            )

    def _admit(self, request: SpeechRequest) -> None:
        self.check_room()
        if request.request_id is not None and request.request_id in self._requests:
            raise InvalidRequest("a request with this id is running", param="request_id", code="duplicate_id")

    def _open(
        self, request: SpeechRequest, jobs: list[Job], feed: TextFeed | None, want_codes: bool
    ) -> Stream:
        self._admit(request)  # preparing took a while
        assert self.fleet is not None
        if want_codes:
            jobs = [msgspec.structs.replace(job, taps=self._taps) for job in jobs]
        if request.seed is not None:
            jobs = [msgspec.structs.replace(job, reproducible=True) for job in jobs]
        stream = Stream(
            self.fleet,
            self.info,
            request,
            jobs,
            ends=self._ends,
            spell=self.front_end.detokenize,
            feed=feed,
            buffer_s=self._buffer_s,
        )
        self._requests[stream.id] = stream
        stream.begin()
        return stream

    def _finished(self, stream: Stream) -> None:
        if self._requests.pop(stream.id, None) is not None:
            self._rate.count(time.monotonic())

    async def abort(self, request_id: str) -> bool:
        """End a request; False when no such request runs."""
        stream = self._requests.get(request_id)
        if stream is None:
            return False
        await stream.aclose()
        return True

    async def start_trace(self) -> None:
        """Record what the workers do, with PyTorch's profiler. Raises RequestFailed if that runs already."""
        assert self.fleet is not None
        await self.fleet.trace(None)

    async def stop_trace(self, folder: Path) -> list[Path]:
        """End the recording; one file a worker in `folder`. Raises RequestFailed if none runs."""
        assert self.fleet is not None
        files = {name: folder / f"{name.replace(':', '-')}.json" for name in self.fleet.seats}
        await self.fleet.trace({name: str(file) for name, file in files.items()})
        return list(files.values())

    def status(self) -> EngineStatus:
        """How the engine is now; gauges are those of the workers' last heartbeats, at most a second old."""
        fleet = self.fleet
        seats = fleet.seats if fleet is not None else {}
        away = "restarting" if fleet is not None and fleet.restarts else "loading"
        reason = fleet.trouble() if fleet is not None else "the engine is not running"
        return EngineStatus(
            ready=fleet is not None and fleet.serving,
            healthy=reason is None,
            reason=reason,
            stages=fleet.stages() if fleet is not None else {},
            workers={name: "ready" if seat.ready else away for name, seat in seats.items()},
            running=min(len(self._requests), self._capacity),
            waiting=max(0, len(self._requests) - self._capacity),
            restarts=fleet.restarts if fleet is not None else 0,
            overhead_seconds=sum(s.status.overhead_seconds for s in seats.values() if s.status),
            transfers=dict(fleet.transfers) if fleet is not None else {},
        )


def _light(request: SpeechRequest) -> bool:
    """Whether to prepare it takes no longer than a thread waits for the interpreter, which a busy event loop
    keeps for milliseconds (benches/prepare.py)."""
    return request.reference is None and request.chat is None and len(request.text) <= _LIGHT_CHARS


class _DrainRate:
    """How fast requests end, for telling a refused client when to come back."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def count(self, now: float) -> None:
        self._ends.append(now)

    def seconds_for(self, requests: int) -> float:
        """Seconds until so many more have ended, 1 to 30."""
        if len(self._ends) < 2:
            return 1.0
        span = max(time.monotonic() - self._ends[0], 1e-3)
        return min(30.0, max(1.0, requests * span / len(self._ends)))
