"""One request as its caller sees it: a text cut into units, heard as one continuous sound."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hocket.core import Chunk, ChunkKind, Job, ModelInfo, SpeechRequest, TextFeed
from hocket.errors import Cancelled, DeadlineExceeded, HocketError, InvalidRequest

UNITS_IN_FLIGHT = 2


@dataclass(slots=True)
class Audio:
    """A piece of a stream's audio."""

    samples: np.ndarray  # float32 [n], mono, in [-1, 1]
    index: int
    last: bool = False
    finish_reason: str = ""  # "stop" or "length" with `last`


@dataclass(slots=True)
class Text:
    """A piece of a stream's text; whole characters."""

    text: str
    last: bool = False
    finish_reason: str = ""  # "stop" or "length" with `last`


@dataclass(slots=True)
class Usage:
    """What a request took and gave. `answer_tokens` and `frames` grow while it is heard."""

    text_tokens: int = 0  # text to speak and instructions, or a chat's prompt
    audio_tokens: int = 0  # reference frames used as conditioning
    answer_tokens: int = 0  # of text
    frames: int = 0


@dataclass(slots=True)
class Speech:
    """A whole utterance."""

    samples: np.ndarray  # float32 [n], mono
    sample_rate_hz: int
    finish_reason: str
    usage: Usage
    seed: int
    text: str = ""  # of an answer to a chat


class Desk(Protocol):
    """Where a stream hands its jobs in; see `hocket.engine.fleet.Fleet`."""

    def dispatch(self, stream: Stream, job: Job) -> None:
        """Run `job`; its chunks go to `stream.receive`."""

    def feed(self, job_id: str, data: bytes) -> None:
        """More text for a running job. A job that is over is left alone, here and below."""

    def pause(self, job_id: str, paused: bool) -> None:
        """Stop making sound for a job, or go on."""

    def abort(self, job_id: str) -> None:
        """End a job wherever it runs; nothing more comes of it."""

    def forget(self, stream: Stream, job_ids: Iterable[str]) -> None:
        """These jobs are over; when `stream.over`, so is the request."""


class Stream:
    """One request's audio, in order. Iterate; or `aclose` to abort. Made by `AsyncEngine.submit`.

    Where a model writes as well, `pieces` gives text and audio as they come, and `text` is what was written
    so far. Raises DeadlineExceeded, RequestFailed, WorkerDied or Cancelled while iterating.

    ends: stages that give the caller something, and what. spell: text ids to text.
    """

    def __init__(
        self,
        desk: Desk,
        info: ModelInfo,
        request: SpeechRequest,
        jobs: list[Job],
        *,
        ends: Mapping[str, ChunkKind],
        spell: Callable[[Sequence[int]], str],
        feed: TextFeed | None = None,
        buffer_s: float = 30.0,
    ) -> None:
        self._desk, self._info, self._request = desk, info, request
        self._units = deque(jobs)
        self._under_way: deque[str] = deque()  # jobs, in the order to be heard
        self._ahead: dict[str, list[Chunk]] = {}  # sound of units that run before their turn
        self._open = {job.id: {s for s in job.route if s in ends} for job in jobs}  # stages not at their end
        self._kinds = {ends[s] for s in jobs[0].route if s in ends}  # ... and kinds the caller has not all of
        self._sounds = ChunkKind.PCM in self._kinds
        self._given = frozenset(self._kinds)
        self._spelling = _Spelling(spell)
        self._queue: asyncio.Queue[Audio | Text | HocketError] = asyncio.Queue()
        self._feed = feed
        self._buffer_s = buffer_s
        self._index = 0
        self._samples = 0
        self._cut_short = False  # some unit ended by its limit
        self._deadline: asyncio.TimerHandle | None = None
        self._codes: dict[str, list[np.ndarray]] = {job.id: [] for job in jobs}
        self.id = jobs[0].id
        self.seed = jobs[0].seed
        self.text = ""  # written so far, as far as it was taken
        self.sample_rate_hz = info.sample_rate_hz
        self.finish_reason: str | None = None  # known once the last piece has been taken
        self.usage = Usage(sum(j.text_tokens for j in jobs), sum(j.audio_tokens for j in jobs))
        self.over = False  # nothing more is made for it
        self.paused = False
        self.waiting_s = 0.0  # audio made and not yet taken

    @property
    def codes(self) -> np.ndarray:
        """int32 [frames, codebooks]; collected when the request was submitted with `want_codes`."""
        parts = [part for unit in self._codes.values() for part in unit if len(part)]
        return np.concatenate([np.zeros((0, self._info.codebooks), np.int32), *parts])

    def __aiter__(self) -> AsyncIterator[Audio]:
        return self

    async def __anext__(self) -> Audio:
        while True:
            piece = await self._next()
            if isinstance(piece, Audio):
                return piece

    async def pieces(self) -> AsyncIterator[Audio | Text]:
        """Audio and text, in the order in which they come."""
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await self._next()

    async def _next(self) -> Audio | Text:
        if self.finish_reason is not None and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, HocketError):
            self.finish_reason = "error"
            raise item
        if isinstance(item, Text):
            self.text += item.text
        else:
            self.waiting_s -= len(item.samples) / self.sample_rate_hz
            if self.paused and self.waiting_s < self._buffer_s / 2:
                self._set_paused(False)
        if item.last:
            self._kinds.discard(ChunkKind.TOKENS if isinstance(item, Text) else ChunkKind.PCM)
            if not self._kinds:
                self.finish_reason = "length" if self._cut_short else "stop"
        return item

    async def aclose(self) -> None:
        """Stop. What was queued, running or under way for this request is freed."""
        self.end(Cancelled("the request was aborted"))

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
        if data and not self.over:
            self._desk.feed(self.id, data)

    # --- what the engine calls, on the event loop -------------------------------------------------

    def begin(self) -> None:
        if self._request.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._request.timeout_s, self._expire)
        self._next_unit()

    def receive(self, chunk: Chunk) -> None:
        """A chunk of one of its jobs; what comes before its unit's turn waits."""
        if self.over or chunk.job not in self._under_way:
            return
        if chunk.kind not in self._given:
            self._codes[chunk.job].append(chunk.arrays[chunk.kind.value])
        elif chunk.job == self._under_way[0]:
            self._take(chunk)
        else:
            self._ahead.setdefault(chunk.job, []).append(chunk)

    def end(self, error: HocketError) -> None:
        """Abort what is under way; whoever iterates gets `error`."""
        if self.over:
            return
        self.over = True
        self._cancel_deadline()
        for job_id in self._under_way:
            self._desk.abort(job_id)
        self._desk.forget(self, self._under_way)
        self._units.clear()
        self._queue.put_nowait(error)

    def _expire(self) -> None:
        self.end(DeadlineExceeded(f"no audio within {self._request.timeout_s:g} s"))

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _next_unit(self) -> None:
        if self._units and len(self._under_way) < UNITS_IN_FLIGHT:
            job = self._units.popleft()
            self._under_way.append(job.id)
            self._desk.dispatch(self, job)
            if self.paused:
                self._desk.pause(job.id, True)

    def _take(self, chunk: Chunk) -> None:
        self._cut_short |= chunk.finish_reason == "length"
        last = chunk.last and not self._units and len(self._under_way) == 1
        if chunk.kind is ChunkKind.PCM:
            self._hear(chunk, last)
        else:
            self._read(chunk, last)
        stages = self._open[chunk.job]
        if chunk.last:
            stages.discard(chunk.source)
        if not stages:
            self._unit_over()
        elif self._sounds:
            self._next_unit()  # the one after this is made while this is heard

    def _hear(self, chunk: Chunk, last: bool) -> None:
        samples = chunk.arrays["pcm"]
        if len(samples):
            self._cancel_deadline()
        self.waiting_s += len(samples) / self.sample_rate_hz
        self._samples += len(samples)
        self.usage.frames = round(self._samples / self.sample_rate_hz * self._info.frame_rate_hz)
        reason = ("length" if self._cut_short else "stop") if last else ""
        self._queue.put_nowait(Audio(samples, self._index, last, reason))
        self._index += 1
        if not chunk.last and self.waiting_s > self._buffer_s and not self.paused:
            self._set_paused(True)

    def _read(self, chunk: Chunk, last: bool) -> None:
        ids = chunk.arrays["tokens"][:, 0].tolist() if chunk.arrays["tokens"].size else []
        self.usage.answer_tokens += len(ids)
        text = self._spelling.add(ids, last=chunk.last)
        if ids and not self._sounds:
            self._cancel_deadline()
        if text or last:
            self._queue.put_nowait(Text(text, last, chunk.finish_reason if last else ""))

    def _unit_over(self) -> None:
        if not self._units and len(self._under_way) == 1:
            self.over = True
            self._cancel_deadline()
            self._desk.forget(self, self._under_way)
            return
        self._desk.forget(self, [self._under_way.popleft()])
        self._next_unit()
        for ahead in self._ahead.pop(self._under_way[0], []):
            self._take(ahead)

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        for job_id in self._under_way:
            self._desk.pause(job_id, paused)


class _Spelling:
    """Text ids to text, in pieces that together are the text of all ids."""

    def __init__(self, spell: Callable[[Sequence[int]], str]) -> None:
        self._spell = spell
        self._held: list[int] = []  # the last of them may have the beginning of a character

    def add(self, ids: list[int], *, last: bool) -> str:
        self._held += ids
        text = self._spell(self._held)
        if text.endswith("\ufffd") and not last:
            return ""
        self._held = []
        return text
