"""Continuous batching for an autoregressive stage.

One `tick` admits waiting jobs while slots and blocks last, spends a budget of tokens on prefill,
and makes one frame for every job that is ready. A job that must give way keeps the frames it has
made; later they are run through prefill again, and since noise depends only on (seed, frame,
codebook, token), it goes on exactly as it would have.

    waiting ──admit──▶ prefill ──▶ ready ──stop──▶ done
       ▲                  │          │
       └────preempted─────┴──────────┤
    parked ◀──slot wanted, no text / listener full──┘
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hocket.core import (
    NOTHING,
    TILE,
    AutoregressiveProgram,
    Chunk,
    ChunkKind,
    Entry,
    HandsOver,
    Heavy,
    Job,
    Places,
    Prompt,
    Span,
    Watches,
)
from hocket.errors import InvalidRequest
from hocket.kernels.rows import put_rows
from hocket.nn.staging import to_device
from hocket.runtime.blocks import KvBlocks
from hocket.runtime.graphs import CALL_ROWS, FrameGraphs, on, own_stream
from hocket.runtime.playback import MARGIN_S, PlaybackClock
from hocket.runtime.ring import OutputRing, Owner
from hocket.runtime.slots import Slots
from hocket.runtime.state import allocate, reset
from hocket.runtime.stats import StageStats

Sink = Callable[[Chunk], None]


@dataclass(frozen=True, slots=True)
class AutoregressiveLimits:
    """How much one autoregressive stage holds and does at once."""

    slots: int = 16
    max_batch: int = 16
    kv_blocks: int = 1024
    block_tokens: int = 16
    max_context: int = 8192  # tokens of one job, prompt and frames
    prefill_tokens: int = 512  # rows of prefill that surely take less time than a frame lasts; 0: no limit
    prefix_cache: bool = True
    in_flight: int = 1  # steps launched before the first of them is read
    graphs: bool = True  # on CUDA


@dataclass(slots=True, eq=False)
class _Task:
    job: Job
    prompt: Prompt
    limit: int  # frames
    order: int  # of arrival
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of its prompt
    frames: list[np.ndarray] = field(default_factory=list)  # made and read, one a step
    launched: int = 0  # made, read or not
    tokens: int = 0  # cache positions written or launched
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    published: int = 0  # blocks whose hash is public
    arrived: float | None = field(default_factory=time.monotonic)  # None: it has had a place
    clock: PlaybackClock = field(default_factory=PlaybackClock)
    paused: bool = False
    handed_over: bool = False  # what its prefill made for its readers
    chunks: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.job.priority, self.order)

    @property
    def prefill_rows(self) -> int:
        """Rows to run before the first step; the last input row is the step's."""
        return len(self.prompt.row_keys) + len(self.frames) - 1

    @property
    def stalled(self) -> bool:
        """Nothing can be made for it now: its text has run out, or its listener is full."""
        ready = self.prompt.frames_ready()
        return self.paused or (ready is not None and self.launched >= ready)


class AutoregressiveRunner:
    """Schedules the jobs of one autoregressive stage; `sink` gets its chunks."""

    def __init__(
        self,
        name: str,
        program: AutoregressiveProgram,
        limits: AutoregressiveLimits,
        device: torch.device,
        sink: Sink,
    ) -> None:
        self.name, self.program, self.limits, self.device = name, program, limits, device
        self._sink = sink
        context = min(limits.max_context, program.max_tokens, (limits.kv_blocks - 1) * limits.block_tokens)
        self._max_context = context
        self._blocks = KvBlocks(limits.kv_blocks, limits.block_tokens, share=limits.prefix_cache)
        self._slots = Slots(limits.slots)
        self._stream = own_stream(device)
        max_blocks = -(-context // limits.block_tokens)
        self._state = allocate(
            program.declare(),
            slots=limits.slots + 1,
            device=device,
            blocks=limits.kv_blocks,
            block_tokens=limits.block_tokens,
            max_blocks=max_blocks,
        )
        self._graphs: FrameGraphs | None = None
        self._run_step, self._run_prefill = program.step, program.prefill
        if self._stream is not None:
            torch.cuda.synchronize(device)  # weights and state come from another stream
            if limits.graphs:
                self._graphs = FrameGraphs(
                    program,
                    self._state.tensors,
                    max_batch=limits.max_batch,
                    max_context=max_blocks * limits.block_tokens,
                    device=device,
                    stream=self._stream,
                )
                self._run_step, self._run_prefill = self._graphs.step, self._graphs.prefill
        self._ring = OutputRing(limits.in_flight)
        self._hands_over = program if isinstance(program, HandsOver) else None
        self._watches = program if isinstance(program, Watches) else None
        self._burst = program.burst_rows if isinstance(program, Heavy) else sys.maxsize
        self._handed = OutputRing(limits.slots)  # what was made before a job's first step
        self._tasks: dict[str, _Task] = {}
        self._waiting: list[tuple[tuple[int, int], _Task]] = []
        self._resident: dict[int, _Task] = {}  # by slot
        self._arrivals = 0
        self._table_writes: list[tuple[int, int, int]] = []
        self._grown: dict[int, _Task] = {}  # by slot: whose text is longer than what the slot has of it
        self._batch: tuple[tuple[int, ...], Tensor] = ((), torch.zeros(0, dtype=torch.int64, device=device))
        self.stats = StageStats(name, limits.slots, self._blocks.total)

    # --- what the worker calls --------------------------------------------------------------------

    def start(self, job: Job, arrived: Mapping[str, Chunk]) -> None:
        """Queue a job. Raises InvalidRequest when it could never fit."""
        prompt = self.program.begin(job, arrived)
        limit = job.frames_allowed(self.name)
        tokens = len(prompt.row_keys) + limit - 1
        if tokens > self._max_context:
            raise InvalidRequest(
                f"the prompt takes {len(prompt.row_keys)} positions and {limit} frames are allowed, "
                f"but {self.name} holds {self._max_context} in all; shorten the text or lower max_new_tokens",
                param="input",
                code="context_too_long",
            )
        self._arrivals += 1
        task = _Task(job, prompt, limit, self._arrivals)
        self._tasks[job.id] = task
        self._unpark(task)

    def push(self, chunk: Chunk) -> None:
        """Hand on what an upstream stage made; it may be what the job waits for."""
        task = self._tasks.get(chunk.job)
        if task is not None:
            self.program.take(task.prompt, chunk)
            if task.prompt.frames_ready() == NOTHING:
                self._end_empty(task)
            else:
                self._text_grew(task)

    def warm(self) -> None:
        """Do before the first request what the first requests would wait for."""
        if self._graphs is not None:
            with on(self._stream):
                self._graphs.warm()

    def feed(self, job_id: str, data: bytes) -> None:
        """Hand on more of a job's text."""
        task = self._tasks.get(job_id)
        if task is not None:
            self.program.feed(task.prompt, data)
            self._text_grew(task)

    def _text_grew(self, task: _Task) -> None:
        if task.slot:
            self._grown[task.slot] = task
        self._unpark(task)

    def pause(self, job_id: str, paused: bool) -> None:
        task = self._tasks.get(job_id)
        if task is not None:
            task.paused = paused
            self._unpark(task)

    def abort(self, job_id: str) -> None:
        task = self._tasks.pop(job_id, None)
        if task is not None:
            self._evict(task)
            self._waiting = [entry for entry in self._waiting if entry[1] is not task]
            heapq.heapify(self._waiting)

    def _end_empty(self, task: _Task) -> None:
        """End a job for which there is nothing to make."""
        self.abort(task.job.id)
        kind = self.program.gives
        self._sink(
            Chunk(
                job=task.job.id,
                source=self.name,
                index=0,
                kind=kind,
                arrays={kind.value: np.zeros((0, 0), np.int32)},
                last=True,
                finish_reason="stop",
            )
        )

    def tick(self, now: float, collect: bool | None = None) -> bool:
        """Launch what can be launched, read what is there. False when there was nothing to do.

        Never waits for the device, unless only one step may be in flight. collect: whether to read the oldest
        step in flight, and then to wait for it; None: read it if it is there. With it given, what this does
        follows from the calls so far alone: see `hocket.engine.ranks`.
        """
        with on(self._stream):
            worked = collect is not False and self._collect(now, wait=collect is True)
            if not self._ring.full:
                self._admit(now)
                worked |= self._prefill(self._budget(now))
                worked |= self._step(now)
                if self.limits.in_flight == 1 or not (worked or collect is not None):
                    worked |= self._collect(now, wait=self.limits.in_flight == 1)
        self.stats.observe(now, worked, any(not task.stalled for task in self._tasks.values()))
        return worked

    def jobs(self) -> list[str]:
        return list(self._tasks)

    @property
    def readable(self) -> bool:
        """Whether `tick` would read a step without waiting for it."""
        return self._ring.readable

    @property
    def full(self) -> bool:
        """Whether `tick` can launch nothing before it has read a step."""
        return self._ring.full

    @property
    def launched(self) -> bool:
        """Whether the device is at work, or its results wait to be read."""
        return len(self._ring) > 0

    def refresh_stats(self) -> StageStats:
        s = self.stats
        s.waiting = len(self._waiting)
        s.slots_used = self._slots.used
        s.kv_blocks_used = self._blocks.used
        return s

    # --- admission and giving way -------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Give waiting jobs their places, as long as there are any, and let them enter together."""
        placed: list[_Task] = []
        while self._waiting:
            _, task = self._waiting[0]
            if task.stalled:
                heapq.heappop(self._waiting)  # parked: comes back when text arrives
                continue
            if not self._slots.free and not self._make_way(task, now, slot=True):
                break
            if not self._place(task) and not (self._make_way(task, now, slot=False) and self._place(task)):
                break
            heapq.heappop(self._waiting)
            placed.append(task)
            if task.arrived is not None:
                self.stats.queued += 1
                self.stats.queue_seconds += max(0.0, now - task.arrived)
                task.arrived = None
        self._enter([task for task in placed if task.slot])  # who came later may have taken a place

    def _enter(self, tasks: list[_Task]) -> None:
        """Write what the slots of these tasks hold: a few launches, however many tasks they are."""
        if not tasks:
            return
        slots = [task.slot for task in tasks]
        blocks = np.zeros((len(tasks), max(len(task.blocks) for task in tasks)), np.int32)
        for row, task in zip(blocks, tasks, strict=True):
            row[: len(task.blocks)] = task.blocks
        reset(self._state, to_device(slots, self.device))
        state = self._state.tensors
        positions = np.array([task.prefill_rows for task in tasks])  # where the first step goes on
        put_rows(slots, [(state.cache.position, positions), (state.cache.blocks, blocks)])
        entries = [Entry(task.slot, task.job, task.prompt, self._frames(task)) for task in tasks]
        with self.stats.timed():
            self.program.join(state, entries)

    def _place(self, task: _Task) -> bool:
        """Give the task a slot and the blocks of its rows, or nothing at all."""
        if not task.hashes:
            whole = (len(task.prompt.row_keys) - 1) // self.limits.block_tokens  # the last row is the step's
            task.hashes = self._blocks.hashes(task.prompt.row_keys)[:whole]
        shared = self._blocks.match(task.hashes)
        rows = task.prefill_rows + 1
        # One block more a resident: room to grow before anyone has to give way again.
        spare = len(self._resident) if self._resident else 0
        need = -(-rows // self.limits.block_tokens) - len(shared)
        fresh = self._blocks.take(need) if need + spare <= self._blocks.available else None
        if fresh is None:
            self._blocks.release(shared)
            return False
        slot = self._slots.take()
        assert slot is not None
        task.slot, task.blocks = slot, shared + fresh
        task.tokens = len(shared) * self.limits.block_tokens
        task.published = len(shared)
        task.launched = len(task.frames)
        self.stats.prefix_hits += len(shared)
        self._resident[slot] = task
        return True

    def _make_way(self, task: _Task, now: float, *, slot: bool) -> bool:
        """Preempt someone for a waiting task: who can make nothing now, or has a lower priority."""
        others = [t for t in self._resident.values() if t.stalled or t.job.priority < task.job.priority]
        if not others:
            return False
        victim = min(others, key=lambda t: (not t.stalled, t.job.priority, -t.clock.slack(now)))
        self._preempt(victim)
        return True

    def _preempt(self, task: _Task) -> None:
        self._evict(task)
        self.stats.preemptions += 1
        if not task.stalled:
            heapq.heappush(self._waiting, (task.rank, task))

    def _unpark(self, task: _Task) -> None:
        if not task.slot and not task.stalled and not any(t is task for _, t in self._waiting):
            heapq.heappush(self._waiting, (task.rank, task))

    def _evict(self, task: _Task) -> None:
        if task.slot:
            del self._resident[task.slot]
            self._slots.release(task.slot)
            self._blocks.release(task.blocks)
            self._table_writes = [w for w in self._table_writes if w[0] != task.slot]
            self._grown.pop(task.slot, None)
            task.slot, task.blocks = 0, []
            task.launched = len(task.frames)  # steps in flight are lost with the slot

    def _grow(self, task: _Task, now: float) -> bool:
        """Make sure the task's next position has a block. May preempt others, or the task itself.

        The first in rank is never preempted, so it always gets on, and so in turn does everyone.
        """
        while task.tokens >= len(task.blocks) * self.limits.block_tokens:
            fresh = self._blocks.take(1)
            if fresh is not None:
                self._table_writes.append((task.slot, len(task.blocks), fresh[0]))
                task.blocks += fresh
                continue
            top = min(self._resident.values(), key=lambda t: t.rank)
            others = [t for t in self._resident.values() if t is not top]
            assert others, "one job fits the pool: checked in start"
            victim = max(others, key=lambda t: (t.stalled, -t.job.priority, t.clock.slack(now), t.order))
            self._preempt(victim)
            if victim is task:
                return False
        return True

    # --- device work ----------------------------------------------------------------------------------

    def _budget(self, now: float) -> int:
        """Prompt rows to run before the next frame: all there are while nobody listens yet, so that a burst
        is heard together and as soon as can be (of a `Heavy` program, as many as it says); else what the
        listener with least audio in hand can wait for. There are always some, so that a prompt gets on
        however little slack others have."""
        least = self.limits.prefill_tokens
        slack = [t.clock.slack(now) for t in self._resident.values() if t.launched and not t.stalled]
        if not least:
            return sys.maxsize
        if not slack:
            return max(least, self._burst)
        return least * max(1, int((min(slack) - MARGIN_S) * self.program.frame_rate_hz))

    def _prefill(self, budget: int) -> bool:
        """Run prompt rows of new tasks, `budget` of them at most, in rank order."""
        pending = sorted(
            (t for t in self._resident.values() if t.tokens < t.prefill_rows), key=lambda t: t.rank
        )
        call: list[tuple[_Task, int]] = []
        room = CALL_ROWS
        for task in pending:
            rows = min(task.prefill_rows - task.tokens, budget)
            budget -= rows
            while rows > 0:
                count = min(rows, room)
                call.append((task, count))
                rows, room = rows - count, room - count
                if room == 0 or len(call) == self.limits.max_batch:
                    self._prefill_call(call)
                    call, room = [], CALL_ROWS
        if call:
            self._prefill_call(call)
        return bool(pending)

    def _prefill_call(self, parts: list[tuple[_Task, int]]) -> None:
        """Run so many rows of each of these tasks as one call."""
        spans = [Span(t.prompt, self._frames(t), t.tokens, t.tokens + count) for t, count in parts]
        slot, position, tiles, first = [], [], [], 0
        for (task, count), span in zip(parts, spans, strict=True):
            slot.append(np.full(count, task.slot))
            position.append(np.arange(span.start, span.stop))
            tiles += [(first + at, min(TILE, count - at)) for at in range(0, count, TILE)]
            first += count
        packed = np.concatenate([*slot, *position, np.array(tiles).flatten()]).astype(np.int32)
        with self.stats.timed():
            slots, positions, tile = to_device(packed, self.device).split([first, first, 2 * len(tiles)])
            places = Places(slots, positions, tile.view(-1, 2))
            context = self._context(max(span.stop for span in spans))
            self._run_prefill(self._state.tensors, self.program.rows(spans), places, context)
        for (task, _), span in zip(parts, spans, strict=True):
            task.tokens = span.stop
            full = min(task.tokens // self.limits.block_tokens, len(task.hashes))
            for i in range(task.published, full):
                self._blocks.publish(task.blocks[i], task.hashes[i])
            task.published = max(task.published, full)

    def _step(self, now: float) -> bool:
        if self._ring.full:
            return False
        ready = [
            t
            for t in self._resident.values()
            if t.tokens >= t.prefill_rows and t.launched < t.limit and not t.stalled
        ]
        if len(ready) > self.limits.max_batch:
            ready.sort(key=lambda t: (-t.job.priority, t.clock.slack(now), t.order))
            ready = ready[: self.limits.max_batch]
        ready = [t for t in ready if t.slot and self._grow(t, now)]
        ready = [t for t in ready if t.slot]  # a later one may have taken an earlier one's place
        if not ready:
            return False
        self._write_tables()
        if self._grown:
            self.program.write_texts(
                self._state.tensors, list(self._grown), [t.prompt for t in self._grown.values()]
            )
            self._grown.clear()
        self._hand_over(ready)
        owners = [Owner(t.slot, self._slots.epoch[t.slot], t) for t in ready]
        context = self._context(max(t.tokens for t in ready) + 1)
        variant = 0
        for t in ready:
            variant |= t.prompt.variant
            t.tokens += 1
            t.launched += 1
        with self.stats.timed(rows=len(ready)):
            out = self._run_step(self._state.tensors, self._batch_slots(ready), context, variant)
            self.stats.graph_steps += self._graphs is not None
            self._ring.push(owners, [out.chunk, out.emit, out.stop])
        return True

    def _hand_over(self, ready: list[_Task]) -> None:
        """Send on their way what the prefill of these tasks made for their readers."""
        if self._hands_over is None:
            return
        for t in ready:
            if not t.handed_over:
                t.handed_over = True
                made = self._hands_over.hand_over(self._state.tensors, t.slot, t.prompt)
                if made:
                    owner = Owner(t.slot, self._slots.epoch[t.slot], (t, list(made)))
                    self._handed.push([owner], [tensor[None] for tensor in made.values()])

    def _batch_slots(self, tasks: list[_Task]) -> Tensor:
        """The batch's slots on the device; the last tensor again while the batch is the same."""
        slots = tuple(t.slot for t in tasks)
        if slots != self._batch[0]:
            self._batch = (slots, to_device(slots, self.device))
        return self._batch[1]

    def _context(self, tokens: int) -> int:
        """Few distinct values, so that shapes repeat."""
        step = 4 * self.limits.block_tokens
        return min(
            -(-tokens // step) * step,
            -(-self._max_context // self.limits.block_tokens) * self.limits.block_tokens,
        )

    def _write_tables(self) -> None:
        if self._table_writes:
            slot, at, block = to_device(np.array(self._table_writes).T.copy(), self.device)
            self._state.tensors.cache.blocks[slot, at] = block.int()
            self._table_writes = []

    def _frames(self, task: _Task) -> np.ndarray:
        return np.stack(task.frames) if task.frames else np.zeros((0, 0), np.int32)

    # --- results ----------------------------------------------------------------------------------------

    def _collect(self, now: float, *, wait: bool) -> bool:
        popped = self._ring.pop(wait=wait)
        if popped is None:
            return False
        self._collect_handed()
        owners, (chunks, emits, stops) = popped
        for owner, frame, emit, stop in zip(owners, chunks, emits.tolist(), stops.tolist(), strict=False):
            if self._slots.epoch[owner.slot] != owner.epoch:
                continue  # preempted or aborted since
            task: _Task = owner.task
            task.frames.append(frame)  # what was not emitted too: a resume replays every step
            if emit:
                task.clock.deliver(1 / self.program.frame_rate_hz, now)
                self.stats.frames += 1
            if emit or stop:
                self._pass_on(task, frame[None] if emit else frame[None][:0], stop)
        return True

    def _pass_on(self, task: _Task, made: np.ndarray, last: bool) -> None:
        """Hand on what a step made for a task, and end it if it is over."""
        reason = "length" if len(made) and len(task.frames) >= task.limit else "stop"
        if self._watches is not None:
            made, over = self._watches.watch(task.prompt, made, last)
            last, reason = last or over, "stop" if over else reason
        if last:
            del self._tasks[task.job.id]
            self._evict(task)
        if len(made) or last:
            self._emit(task, made, reason if last else "")

    def _collect_handed(self) -> None:
        """Pass on what was launched before the step that was just read: it comes before its frames."""
        while (popped := self._handed.pop(wait=False)) is not None:
            (owner,), arrays = popped
            task, names = owner.task
            task.handed_over = self._slots.epoch[owner.slot] == owner.epoch  # else once more, after a resume
            if task.handed_over:
                rows = {name: array[0] for name, array in zip(names, arrays, strict=True)}
                chunk = Chunk(
                    job=task.job.id, source=self.name, index=task.chunks, kind=ChunkKind.ROWS, arrays=rows
                )
                task.chunks += 1
                self._sink(chunk)

    def _emit(self, task: _Task, frames: np.ndarray, reason: str) -> None:
        """reason: why the task ended, "stop" or "length"; empty: it goes on."""
        kind = self.program.gives
        self._sink(
            Chunk(
                job=task.job.id,
                source=self.name,
                index=task.chunks,
                kind=kind,
                arrays={kind.value: frames},
                last=bool(reason),
                finish_reason=reason,
            )
        )
        task.chunks += 1
