"""Streaming stages: fixed-shape steps over per-stream state, frames in, PCM out.

A stream takes a slot with its first frame. Streams whose next chunk has the same number of frames
share a step; first chunks go before steady ones, and among those the listener with least audio in
hand goes first. How many frames a chunk has is decided by the playback clock, or by the count of
frames where the samples must be reproducible.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Job, StreamingProgram, StreamPrompt
from hocket.nn.staging import to_device
from hocket.runtime.autoregressive import Sink
from hocket.runtime.graphs import StreamGraphs, on, own_stream
from hocket.runtime.playback import CHUNK_FRAMES, PlaybackClock, chunk_frames, counted_frames
from hocket.runtime.ring import OutputRing, Owner
from hocket.runtime.slots import Slots
from hocket.runtime.state import allocate, reset, restore, snapshot
from hocket.runtime.stats import StageStats


@dataclass(frozen=True, slots=True)
class StreamingLimits:
    """How much one streaming stage holds and does at once."""

    slots: int = 16
    max_batch: int = 16
    max_chunk_frames: int = 8
    primed_voices: int = 64  # states kept of voices whose reference was already run
    in_flight: int = 1
    graphs: bool = True  # on CUDA


@dataclass(slots=True, eq=False)
class _Stream:
    job: Job
    prompt: StreamPrompt
    order: int
    pending: deque[np.ndarray] = field(default_factory=deque)  # one frame each
    ended: bool = False
    finish_reason: str = ""
    slot: int = 0
    launched: bool = False  # its first chunk is under way
    closing: bool = False  # ... and its last
    skip: int = 0  # samples of look-ahead still to be dropped
    clock: PlaybackClock = field(default_factory=PlaybackClock)
    decoded: int = 0  # frames
    promised_s: float = 0.0  # audio launched, delivered or not
    chunks: int = 0
    began: float | None = None  # when its first frame was there

    def pace_s(self, now: float) -> float | None:
        """How long a frame has taken to come so far; None before there are two."""
        if self.began is None:
            self.began = now
        came = self.decoded + len(self.pending) - 1
        return (now - self.began) / came if came else None


@dataclass(slots=True)
class _Piece:
    stream: _Stream
    samples: int  # of its frames; what follows is look-ahead, heard only at the end
    last: bool


class StreamingRunner:
    """Schedules the streams of one streaming stage; `sink` gets their PCM."""

    def __init__(
        self,
        name: str,
        program: StreamingProgram,
        limits: StreamingLimits,
        device: torch.device,
        sink: Sink,
    ) -> None:
        self.name, self.program, self.limits, self.device = name, program, limits, device
        self._sink = sink
        self._slots = Slots(limits.slots)
        self._state = allocate(program.declare(), slots=limits.slots + 1, device=device)
        self._stream = own_stream(device)
        self._graphs: StreamGraphs | None = None
        self._run_step = program.step
        if self._stream is not None:
            torch.cuda.synchronize(device)  # weights and state come from another stream
            if limits.graphs:
                self._graphs = StreamGraphs(
                    program,
                    self._state.tensors,
                    max_batch=limits.max_batch,
                    device=device,
                    stream=self._stream,
                )
                self._run_step = self._graphs.step
        self._ring = OutputRing(limits.in_flight)
        self._streams: dict[str, _Stream] = {}
        self._primed: OrderedDict[bytes, Tensor] = OrderedDict()
        self._arrivals = 0
        self.stats = StageStats(name, limits.slots)

    # --- what the worker calls ----------------------------------------------------------------------

    def start(self, job: Job, arrived: Mapping[str, Chunk]) -> None:
        self._arrivals += 1
        stream = _Stream(job, self.program.begin(job, arrived), self._arrivals, skip=self.program.lookahead)
        self._streams[job.id] = stream

    def push(self, chunk: Chunk) -> None:
        stream = self._streams.get(chunk.job)
        if stream is None:
            return
        stream.pending.extend(chunk.arrays[chunk.kind.value])
        if chunk.last:
            stream.ended = True
            stream.finish_reason = chunk.finish_reason

    def warm(self) -> None:
        """Do before the first request what the first requests would wait for."""
        if self._graphs is not None:
            with on(self._stream):
                self._graphs.warm(n for n in CHUNK_FRAMES if n <= self.limits.max_chunk_frames)

    def feed(self, job_id: str, data: bytes) -> None:
        raise NotImplementedError(f"{self.name} reads no text")

    def pause(self, job_id: str, paused: bool) -> None:
        """Nothing to do: with its source paused a stream soon has no frames."""

    def abort(self, job_id: str) -> None:
        stream = self._streams.pop(job_id, None)
        if stream is not None:
            self._release(stream)

    def tick(self, now: float) -> bool:
        """As `AutoregressiveRunner.tick`."""
        with on(self._stream):
            worked = self._collect(now, wait=False)
            if not self._ring.full:
                for frames, streams in self._due(now):
                    if self._ring.full and not self._collect(now, wait=self.limits.in_flight == 1):
                        break  # the rest is due in a later turn
                    self._step(frames, streams)
                    worked = True
                worked |= self._collect(now, wait=self.limits.in_flight == 1)
        self.stats.observe(now, worked, any(s.pending for s in self._streams.values()))
        return worked

    def jobs(self) -> list[str]:
        return list(self._streams)

    @property
    def launched(self) -> bool:
        """Whether the device is at work, or its results wait to be read."""
        return len(self._ring) > 0

    def refresh_stats(self) -> StageStats:
        self.stats.slots_used = self._slots.used
        self.stats.waiting = sum(1 for s in self._streams.values() if s.pending and not s.slot)
        return self.stats

    # --- which streams, how many frames ---------------------------------------------------------------

    def _due(self, now: float) -> list[tuple[int, list[_Stream]]]:
        """Groups (frames, streams) to decode now, the most urgent first."""
        frame_s = self.program.hop / self.program.rate_hz
        groups: dict[int, list[tuple[tuple[bool, float], _Stream]]] = {}
        placed: list[_Stream] = []
        for stream in sorted(self._streams.values(), key=lambda s: (-s.job.priority, s.order)):
            if stream.closing:
                continue
            if not stream.pending:
                if stream.ended:
                    self._finish_empty(stream, now)
                continue
            slack = self._slack(stream, now)
            if stream.job.reproducible:
                count = counted_frames(
                    len(stream.pending),
                    ended=stream.ended,
                    first=stream.job.first_chunk_frames,
                    decoded=stream.decoded,
                    largest=self.limits.max_chunk_frames,
                )
            else:
                count = chunk_frames(
                    len(stream.pending),
                    ended=stream.ended,
                    first=stream.job.first_chunk_frames,
                    slack_s=slack if stream.launched else None,
                    frame_s=frame_s,
                    largest=self.limits.max_chunk_frames,
                    pace_s=stream.pace_s(now),
                )
            if count and not stream.slot and self._place(stream):
                placed.append(stream)
            if count and stream.slot:
                groups.setdefault(count, []).append(((stream.launched, slack), stream))
        self._enter(placed)
        out = []
        for count, members in groups.items():
            members.sort(key=lambda m: m[0])
            for at in range(0, len(members), self.limits.max_batch):
                part = members[at : at + self.limits.max_batch]
                out.append((part[0][0], count, [stream for _, stream in part]))
        out.sort(key=lambda group: group[0])
        return [(count, streams) for _, count, streams in out]

    def _slack(self, stream: _Stream, now: float) -> float:
        """As the listener's, with audio that is under way counted as delivered."""
        if stream.clock.started_at is None:
            return stream.promised_s
        return stream.promised_s - (now - stream.clock.started_at)

    def _place(self, stream: _Stream) -> bool:
        """Give the stream a slot, which `_enter` makes ready."""
        slot = self._slots.take()
        stream.slot = slot or 0
        return slot is not None

    def _enter(self, streams: list[_Stream]) -> None:
        """Make the slots of these streams what their steps start from."""
        if not streams:
            return
        reset(self._state, to_device([stream.slot for stream in streams], self.device))
        known: list[tuple[int, Tensor]] = []
        for stream in streams:
            prime, key = stream.prompt.prime, stream.prompt.prime_key
            if prime is None:
                continue
            state = self._primed.get(key) if key is not None else None
            if state is not None:
                assert key is not None
                self.stats.cache_hits += 1
                self._primed.move_to_end(key)
                known.append((stream.slot, state))
                continue
            self._prime(stream.slot, prime)
            if key is not None:
                self._primed[key] = snapshot(self._state, stream.slot)
                if len(self._primed) > self.limits.primed_voices:
                    self._primed.popitem(last=False)
        if known:
            restore(self._state, [slot for slot, _ in known], [state for _, state in known])

    def _prime(self, slot: int, frames: np.ndarray) -> None:
        """Run frames that nobody hears, so that what follows continues them."""
        slots = to_device([slot], self.device)
        x = to_device(np.ascontiguousarray(frames), self.device)[None]
        with self.stats.timed():
            self.program.prime(self._state.tensors, slots, x)

    # --- device work and results -----------------------------------------------------------------------

    def _step(self, frames: int, streams: list[_Stream]) -> None:
        owners = []
        batch = []
        last = []
        for stream in streams:
            batch.append([stream.pending.popleft() for _ in range(frames)])
            stream.launched = True
            stream.decoded += frames
            stream.promised_s += frames * self.program.hop / self.program.rate_hz
            ends = stream.ended and not stream.pending
            stream.closing = ends
            last.append(ends)
            owners.append(
                Owner(
                    stream.slot,
                    self._slots.epoch[stream.slot],
                    _Piece(stream, frames * self.program.hop, ends),
                )
            )
        x = to_device(np.asarray(batch), self.device)
        slots = to_device([s.slot for s in streams], self.device)
        with self.stats.timed(rows=len(streams)):
            pcm = self._run_step(self._state.tensors, slots, x)
            self.stats.graph_steps += self._graphs is not None
            if self.program.lookahead and any(last):
                tail = self.program.flush(self._state.tensors, slots)
                pcm = torch.cat([pcm[: len(tail)], tail], dim=1)
            self._ring.push(owners, [pcm])
        self.stats.frames += frames * len(streams)

    def _collect(self, now: float, *, wait: bool) -> bool:
        popped = self._ring.pop(wait=wait)
        if popped is None:
            return False
        owners, (pcm,) = popped
        for owner, samples in zip(owners, pcm, strict=False):
            if self._slots.epoch[owner.slot] != owner.epoch:
                continue
            piece: _Piece = owner.task
            heard = samples if piece.last else samples[: piece.samples]
            drop = min(piece.stream.skip, len(heard))
            piece.stream.skip -= drop
            self._deliver(piece.stream, heard[drop:], now, last=piece.last)
        return True

    def _finish_empty(self, stream: _Stream, now: float) -> None:
        """The end became known after the last frame was decoded, or there never was a frame."""
        tail = np.zeros(0, np.float32)
        if stream.slot and self.program.lookahead:
            slots = torch.tensor([stream.slot], device=self.device)
            tail = self.program.flush(self._state.tensors, slots)[0].cpu().numpy()[stream.skip :]
        while len(self._ring):  # what is under way comes first
            self._collect(now, wait=True)
        self._deliver(stream, tail, now, last=True)

    def _deliver(self, stream: _Stream, samples: np.ndarray, now: float, *, last: bool) -> None:
        if len(samples):
            stream.clock.deliver(len(samples) / self.program.rate_hz, now)
        if last:
            del self._streams[stream.job.id]
            self._release(stream)
        self._sink(
            Chunk(
                job=stream.job.id,
                source=self.name,
                index=stream.chunks,
                kind=ChunkKind.PCM,
                arrays={"pcm": samples},
                last=last,
                finish_reason=stream.finish_reason if last else "",
            )
        )
        stream.chunks += 1

    def _release(self, stream: _Stream) -> None:
        if stream.slot:
            self._slots.release(stream.slot)
            stream.slot = 0
