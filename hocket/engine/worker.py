"""One worker: the stages placed on one device, and one loop over them that never blocks on a stage.

Each turn takes the messages that have arrived, lets every stage launch and collect what it can, and
sends what came out. A stage that fails fails the jobs it held and nobody else's.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from hocket import errors
from hocket.core import CLIENT, AutoregressiveProgram, Chunk, ChunkKind, Family, Job, StageKind, leaves
from hocket.engine.connector import Mailbox
from hocket.engine.messages import (
    Abort,
    Deliver,
    Failed,
    Feed,
    Message,
    Pause,
    Ready,
    Shutdown,
    StageStatus,
    Status,
    Submit,
    Subscribe,
    Trace,
    Traced,
)
from hocket.engine.profile import StageProfile
from hocket.engine.ranks import Follower, Leader, rank_address
from hocket.engine.trace import Tracer
from hocket.errors import HocketError, RequestFailed, StartupError
from hocket.models import load_family
from hocket.nn.parallel import WHOLE, Shard, join
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.one_shot import OneShotLimits, OneShotRunner
from hocket.runtime.streaming import StreamingLimits, StreamingRunner

log = logging.getLogger("hocket.worker")

HEARTBEAT_S = 1.0
CLIENT_SILENCE_S = 10.0  # a client unheard for so long is gone, and its jobs with it
EARLY_S = 10.0  # how long chunks wait for a job whose submission is still on its way
IDLE_POLL_S = 0.25
BUSY_POLL_S = 0.002  # with jobs but nothing to do now: a slack runs down
DEVICE_POLL_S = 50e-6  # while a device is at work; a chunk late by this much is late for its listener

Runner = AutoregressiveRunner | Leader | StreamingRunner | OneShotRunner


class WorkerPlan(msgspec.Struct, kw_only=True):
    """What a worker is to load. Travels to its process when it is started."""

    name: str
    family: str
    folder: str
    stages: dict[str, StageProfile]
    device: str
    threads: int = 0
    handoff_timeout_s: float = 30.0
    rank: int = 0  # of the processes that hold a part each of the stage that is split; 0 is the worker
    meeting: str = ""  # the file through which they find each other

    @property
    def ranks(self) -> int:
        """How many processes the worker is."""
        return max(stage.tensor_parallel for stage in self.stages.values())

    def of_rank(self, rank: int, meeting: str) -> WorkerPlan:
        """What the process of that rank is to load: 0 everything, others their part of what is split."""
        kind, _, number = self.device.partition(":")
        stages = {name: p for name, p in self.stages.items() if rank == 0 or p.tensor_parallel > 1}
        device = f"{kind}:{int(number) + rank}" if number else self.device
        return msgspec.structs.replace(self, stages=stages, device=device, rank=rank, meeting=meeting)


@dataclass(slots=True)
class _Job:
    job: Job
    placement: dict[str, str]
    reply_to: str
    running: set[str]  # stages here that have not given their last chunk
    started: set[str] = field(default_factory=set)
    conditions: dict[str, dict[str, list[Chunk]]] = field(default_factory=dict)  # by stage, then source
    early: defaultdict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    heard: float | None = None  # when something last came from another worker
    ended: set[str] = field(default_factory=set)  # stages elsewhere that have given their last chunk
    sent: defaultdict[tuple[str, str], int] = field(
        default_factory=lambda: defaultdict(int)
    )  # source, reader
    received: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    paused: bool = False


def build_runners(
    family: Family, plan: WorkerPlan, sink: Callable[[Chunk], None], mailbox: Mailbox
) -> dict[str, Runner]:
    """Load each stage of the plan and put its scheduler around it."""
    device, folder = torch.device(plan.device), Path(plan.folder)
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartupError(f"there is no {device}: {torch.cuda.device_count()} devices are visible")
        torch.cuda.set_device(device)  # of this thread: else pinned memory would open device 0 as well
    in_flight = 2 if device.type == "cuda" else 1
    runners: dict[str, Runner] = {}
    for stage in family.stages:
        if stage.name not in plan.stages:
            continue
        p = plan.stages[stage.name]
        shard = WHOLE
        if p.tensor_parallel > 1:
            shard = join(plan.meeting, plan.rank, p.tensor_parallel, device)
        options = load_options(p, shard)
        program = family.load(stage.name, folder, device, dtype_of(p.dtype, device), **options)
        if stage.kind is StageKind.AUTOREGRESSIVE:
            kv_blocks = p.kv_blocks or blocks_that_fit(program, p, device)
            if shard.size > 1:
                kv_blocks = shard.least(kv_blocks, device)
            limits = AutoregressiveLimits(
                slots=p.slots,
                max_batch=p.max_batch,
                kv_blocks=kv_blocks + 1,
                block_tokens=p.block_tokens,
                max_context=p.max_context,
                prefill_tokens=p.prefill_tokens,
                prefix_cache=p.prefix_cache,
                in_flight=in_flight,
            )
            runner = AutoregressiveRunner(stage.name, program, limits, device, sink)
            runners[stage.name] = runner
            if shard.size > 1 and shard.rank == 0:
                others = [rank_address(mailbox.address, rank) for rank in range(1, shard.size)]
                runners[stage.name] = Leader(runner, mailbox, others)
        elif stage.kind is StageKind.STREAMING:
            runners[stage.name] = StreamingRunner(
                stage.name,
                program,
                StreamingLimits(
                    slots=p.slots,
                    max_batch=p.max_batch,
                    max_chunk_frames=p.max_chunk_frames,
                    in_flight=in_flight,
                ),
                device,
                sink,
            )
        else:
            runners[stage.name] = OneShotRunner(
                stage.name, program, stage.gives, OneShotLimits(max_batch=p.max_batch), sink
            )
    return runners


def load_options(p: StageProfile, shard: Shard) -> dict[str, Any]:
    """What a stage's profile asks of `Family.load` beyond the usual."""
    options: dict[str, Any] = {"float8": True} if p.weights == "float8" else {}
    return options | ({"shard": shard} if shard.size > 1 else {})


def blocks_that_fit(program: AutoregressiveProgram, p: StageProfile, device: torch.device) -> int:
    """KV blocks in the share `kv_memory` of what the device has free, now that the weights are there."""
    assert p.kv_memory is not None, "a stage has kv_blocks or kv_memory: checked in match_stages"
    if device.type != "cuda":
        raise StartupError(f"free memory of {device} cannot be read; set kv_blocks in place of kv_memory")
    block = sum(
        math.prod(
            p.block_tokens if size == "block_tokens" else size for size in leaf.shape if size != "blocks"
        )
        * leaf.dtype.itemsize
        for leaf in leaves(program.declare())
        if "blocks" in leaf.shape
    )
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(free * p.kv_memory / block))


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """A profile's dtype; "auto" is float32 on a CPU, where half precision is emulated, else bfloat16."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def open_worker(plan: WorkerPlan, mailbox: Mailbox) -> Worker | Follower:
    """What one process of a worker runs, loaded. Raises StartupError."""
    if plan.rank == 0:
        return Worker(plan, mailbox)
    if plan.threads:
        torch.set_num_threads(plan.threads)
    (runner,) = build_runners(load_family(plan.family), plan, lambda chunk: None, mailbox).values()
    assert isinstance(runner, AutoregressiveRunner), "no other kind is split: checked in match_stages"
    runner.warm()
    return Follower(runner, mailbox)


class Worker:
    """Loads what its plan names and serves it; see the module's docstring. Raises StartupError."""

    def __init__(self, plan: WorkerPlan, mailbox: Mailbox) -> None:
        if plan.threads:
            torch.set_num_threads(plan.threads)
        self.plan, self._mailbox = plan, mailbox
        self._family = load_family(plan.family)
        self._stages = {stage.name: stage for stage in self._family.stages}
        self._runners = build_runners(self._family, plan, self._route, mailbox)
        for runner in self._runners.values():
            runner.warm()
        self._tracer = Tracer(torch.device(plan.device))
        self._jobs: dict[str, _Job] = {}
        self._orphans: dict[str, tuple[float, list[Deliver]]] = {}
        self._clients: dict[str, float] = {}  # address -> last heard
        self._beat = 0.0
        self._busy_s = 0.0
        self._done = False

    def run(self, alive: Callable[[], bool] = lambda: True) -> None:
        """Serve until told to shut down, or until `alive` says that whoever started this is gone."""
        poll_s = 0.0
        while not self._done and alive():
            messages = self._mailbox.poll(poll_s)
            begin = time.thread_time()
            for message in messages:
                self._handle(message)
            worked = bool(messages)
            now = time.monotonic()
            for runner in self._runners.values():
                worked |= self._tick(runner, now)
            if now - self._beat >= HEARTBEAT_S:
                self._heartbeat(now)
            self._mailbox.flush()
            if worked:
                self._busy_s += time.thread_time() - begin
            poll_s = 0.0 if worked else BUSY_POLL_S if self._jobs else IDLE_POLL_S
            if not worked and any(runner.launched for runner in self._runners.values()):
                time.sleep(DEVICE_POLL_S)
                poll_s = 0.0

    def close(self) -> None:
        """Let go of the other ranks."""
        for runner in self._runners.values():
            if isinstance(runner, Leader):
                runner.close()

    # --- messages in --------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        if isinstance(message, Deliver):
            self._receive(message)
        elif isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Feed):
            self._guarded(message.job, lambda: self._runners[message.stage].feed(message.job, message.data))
        elif isinstance(message, Abort):
            self._drop(message.job)
        elif isinstance(message, Pause):
            self._pause(message)
        elif isinstance(message, Subscribe):
            if message.client not in self._clients:
                self._mailbox.send(message.client, Ready(worker=self.plan.name, stages=list(self._runners)))
                self._beat = 0.0
            self._clients[message.client] = time.monotonic()
        elif isinstance(message, Trace):
            self._trace(message)
        elif isinstance(message, Shutdown):
            self._done = True

    def _trace(self, m: Trace) -> None:
        error = ""
        try:
            self._tracer.stop(m.file) if m.file else self._tracer.start()
        except HocketError as e:
            error = e.message
        except (OSError, RuntimeError) as e:  # no room for the file; another profiler in this process
            log.exception("trace")
            error = f"the profiler failed: {type(e).__name__}"
        self._mailbox.send(m.client, Traced(worker=self.plan.name, error=error))

    def _submit(self, m: Submit) -> None:
        local = [s for s in m.job.route if m.placement[s] == self._mailbox.address]
        record = _Job(m.job, m.placement, m.reply_to, running=set(local))
        self._jobs[m.job.id] = record
        for stage in local:
            record.conditions[stage] = {source: [] for source in self._conditions_of(stage, m.job)}
        for stage in local:
            self._maybe_start(record, stage)
        for message in self._orphans.pop(m.job.id, (0.0, []))[1]:
            self._receive(message)

    def _conditions_of(self, stage: str, job: Job) -> list[str]:
        """Stages whose whole output this one needs before it starts."""
        whole = self._stages[stage].kind is StageKind.ONE_SHOT
        return [
            s.name
            for s in self._family.stages
            if s.name in job.route and stage in s.feeds and (whole or s.gives is ChunkKind.CONDITIONING)
        ]

    def _pause(self, m: Pause) -> None:
        record = self._jobs.get(m.job)
        if record is not None:
            record.paused = m.paused
            record.heard = record.heard and time.monotonic()
            for stage in record.started & record.running:
                self._runners[stage].pause(m.job, m.paused)

    # --- chunks ---------------------------------------------------------------------------------------

    def _route(self, chunk: Chunk) -> None:
        """Take a chunk from a stage here to every stage that reads it."""
        record = self._jobs.get(chunk.job)
        if record is None:
            return
        if chunk.last:
            record.running.discard(chunk.source)
        stage = self._stages[chunk.source]
        readers = [
            r for r in stage.feeds if r in record.job.route or (r == CLIENT and chunk.kind is stage.gives)
        ]
        if chunk.source in record.job.taps:
            readers.append(CLIENT)
        try:
            for reader in readers:
                self._send(record, reader, chunk)
        except HocketError as e:  # what the carrier refuses
            self._fail(chunk.job, e)
        if not record.running:
            self._jobs.pop(chunk.job, None)

    def _send(self, record: _Job, stage: str, chunk: Chunk) -> None:
        address = record.reply_to if stage == CLIENT else record.placement[stage]
        if address == self._mailbox.address:
            self._arrive(record, stage, chunk)
            return
        way = chunk.source, stage
        message = Deliver(stage=stage, chunk=chunk, number=record.sent[way], sent=time.monotonic())
        record.sent[way] += 1
        self._mailbox.send(address, message)

    def _receive(self, m: Deliver) -> None:
        record = self._jobs.get(m.chunk.job)
        if record is None:  # its submission may be on another socket still, or it was aborted
            self._orphans.setdefault(m.chunk.job, (time.monotonic(), []))[1].append(m)
            return
        way = m.chunk.source, m.stage
        if m.number != record.received[way]:
            self._fail(m.chunk.job, lost_chunk(m, record.received[way]))
            return
        record.received[way] += 1
        record.heard = time.monotonic()
        if m.chunk.last:
            record.ended.add(m.chunk.source)
        self._arrive(record, m.stage, m.chunk)

    def _arrive(self, record: _Job, stage: str, chunk: Chunk) -> None:
        if chunk.source in record.conditions[stage]:
            record.conditions[stage][chunk.source].append(chunk)
            self._maybe_start(record, stage)
        elif stage in record.started:
            self._guarded(chunk.job, lambda: self._runners[stage].push(chunk))
        else:
            record.early[stage].append(chunk)

    def _maybe_start(self, record: _Job, stage: str) -> None:
        sources = record.conditions[stage]
        if stage in record.started or not all(chunks and chunks[-1].last for chunks in sources.values()):
            return
        record.started.add(stage)
        arrived = {source: joined(chunks) for source, chunks in sources.items()}

        def start() -> None:
            self._runners[stage].start(record.job, arrived)
            for chunk in record.early.pop(stage, []):
                self._runners[stage].push(chunk)

        self._guarded(record.job.id, start)

    # --- failing ----------------------------------------------------------------------------------------

    def _guarded(self, job_id: str, action: Callable[[], None]) -> None:
        """Run something for one job; what goes wrong is that job's failure."""
        if job_id not in self._jobs:
            return
        try:
            action()
        except HocketError as e:
            self._fail(job_id, e)
        except Exception as e:  # a bug in a program must not take the other jobs along
            log.exception("job %s", job_id)
            self._fail(job_id, RequestFailed(f"internal error: {type(e).__name__}"))

    def _tick(self, runner: Runner, now: float) -> bool:
        try:
            return runner.tick(now)
        except Exception as e:  # which row of a batch it was cannot be told
            if isinstance(runner, Leader):
                raise  # nor what the other ranks have launched
            log.exception("stage %s", runner.name)
            for job_id in runner.jobs():
                self._fail(job_id, RequestFailed(f"stage {runner.name} failed: {type(e).__name__}"))
            return True

    def _fail(self, job_id: str, error: HocketError) -> None:
        record = self._jobs.get(job_id)
        if record is not None:
            failed = Failed(
                job=job_id,
                error=type(error).__name__,
                message=error.message,
                code=error.code,
                param=error.param,
            )
            self._mailbox.send(record.reply_to, failed)
        self._drop(job_id)

    def _drop(self, job_id: str) -> None:
        self._orphans.pop(job_id, None)
        if self._jobs.pop(job_id, None) is not None:
            for runner in self._runners.values():
                runner.abort(job_id)

    # --- once a second ------------------------------------------------------------------------------------

    def _heartbeat(self, now: float) -> None:
        self._beat = now
        for client, heard in list(self._clients.items()):
            if now - heard > CLIENT_SILENCE_S:
                del self._clients[client]
                self._mailbox.forget(client)
                for job_id in [j for j, r in self._jobs.items() if r.reply_to == client]:
                    self._drop(job_id)
        for job_id, (since, _) in list(self._orphans.items()):
            if now - since > EARLY_S:
                del self._orphans[job_id]
        self._check_handoffs(now)
        status = self.status(now)
        for client in self._clients:
            self._mailbox.send(client, status)

    def _check_handoffs(self, now: float) -> None:
        """A stage that waits for one placed elsewhere must not wait for ever."""
        limit = self.plan.handoff_timeout_s
        for job_id, record in list(self._jobs.items()):
            if (
                self._reads_elsewhere(record)
                and not record.paused
                and not record.job.text_open
                and record.heard is not None  # before the first it waits in a queue, which is no fault
                and now - record.heard > limit
            ):
                waits = ", ".join(sorted(record.running))
                self._fail(
                    job_id, RequestFailed(f"{waits} heard nothing for {limit:g} s", code="handoff_timeout")
                )

    def _reads_elsewhere(self, record: _Job) -> bool:
        here = self._mailbox.address
        elsewhere = [s for s in record.job.route if record.placement[s] != here and s not in record.ended]
        return any(stage in self._stages[source].feeds for source in elsewhere for stage in record.running)

    def status(self, now: float) -> Status:
        stages = []
        for runner in self._runners.values():
            s = runner.refresh_stats()
            stages.append(
                StageStatus(
                    stage=s.stage,
                    slots_used=s.slots_used,
                    slots_total=s.slots_total,
                    kv_blocks_used=s.kv_blocks_used,
                    kv_blocks_total=s.kv_blocks_total,
                    waiting=s.waiting,
                    steps=s.steps,
                    step_seconds=s.step_seconds,
                    rows=s.rows,
                    frames=s.frames,
                    preemptions=s.preemptions,
                    prefix_hits=s.prefix_hits,
                    cache_hits=s.cache_hits,
                    graph_steps=s.graph_steps,
                    queued=s.queued,
                    queue_seconds=s.queue_seconds,
                    idle_for_s=s.idle_for(now),
                )
            )
        inside = sum(runner.stats.step_cpu_seconds for runner in self._runners.values())
        return Status(
            worker=self.plan.name, stages=stages, jobs=len(self._jobs), overhead_seconds=self._busy_s - inside
        )


def joined(chunks: list[Chunk]) -> Chunk:
    """A stage's whole output as one chunk."""
    if len(chunks) == 1:
        return chunks[0]
    arrays = {name: np.concatenate([c.arrays[name] for c in chunks]) for name in chunks[-1].arrays}
    return msgspec.structs.replace(chunks[-1], arrays=arrays)


def lost_chunk(m: Deliver, expected: int) -> RequestFailed:
    """What to say when a chunk did not come."""
    return RequestFailed(
        f"chunk {expected} from {m.chunk.source} to {m.stage} was lost; number {m.number} came instead",
        code="handoff_lost",
    )


def error_of(failed: Failed) -> HocketError:
    """The exception a `Failed` stands for."""
    kind: Any = getattr(errors, failed.error, RequestFailed)
    error: HocketError = kind(failed.message, param=failed.param, code=failed.code)
    return error


def parent_watch() -> Callable[[], bool]:
    """True as long as the process that started this one lives."""
    parent = os.getppid()
    return lambda: os.getppid() == parent
