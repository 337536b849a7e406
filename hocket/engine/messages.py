"""What the engine's processes say to each other. Typed structs; new fields get defaults.

Client (API process or Python program) -> worker: Submit, Feed, Abort, Pause, Trace, Shutdown.
Worker -> worker: Deliver (a chunk for a stage placed elsewhere), Abort.
Worker -> rank of a stage that is split: Start, Turn, Deliver, Feed, Pause, Abort, Shutdown.
Worker -> client: Deliver (to `CLIENT`), Failed, Ready, Status, Traced.
"""

from __future__ import annotations

import msgspec

from hocket.core import Chunk, Job


class Submit(msgspec.Struct, tag=True, kw_only=True):
    """Run `job`. `placement` names the worker of each stage on its route, `reply_to` the client."""

    job: Job
    placement: dict[str, str]
    reply_to: str


class Feed(msgspec.Struct, tag=True, kw_only=True):
    """More text for a job whose text is still open."""

    job: str
    stage: str
    data: bytes


class Abort(msgspec.Struct, tag=True, kw_only=True):
    """End a job; nothing more comes of it."""

    job: str


class Pause(msgspec.Struct, tag=True, kw_only=True):
    """Stop or go on making audio for a job whose listener reads too slowly."""

    job: str
    paused: bool


class Start(msgspec.Struct, tag=True, kw_only=True):
    """Begin `job` in the stage; `arrived` is what stages before it gave, by their names."""

    job: Job
    arrived: dict[str, Chunk] = {}


class Turn(msgspec.Struct, tag=True, kw_only=True):
    """Let the stage do what it can. `now` is the leader's clock, in seconds; `collect`: read the oldest step
    in flight first."""

    now: float
    collect: bool


class Deliver(msgspec.Struct, tag=True, kw_only=True):
    """`chunk` for stage `stage` of its job. `number` counts what went from one stage to another for a job, so
    that the reader sees a gap; `sent` is the sender's monotonic clock, in seconds."""

    stage: str
    chunk: Chunk
    number: int = 0
    sent: float = 0.0


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """The job ended without its audio. `error` is the name of a class in hocket.errors."""

    job: str
    error: str
    message: str
    code: str | None = None
    param: str | None = None


class Subscribe(msgspec.Struct, tag=True, kw_only=True):
    """Send Ready and Status to `client` from now on."""

    client: str


class StageStatus(msgspec.Struct, kw_only=True):
    """Gauges and counters of one stage of one worker; counters grow from its start."""

    stage: str
    slots_used: int = 0
    slots_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    waiting: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    rows: int = 0  # sum of batch sizes over the steps
    frames: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    cache_hits: int = 0
    graph_steps: int = 0
    queued: int = 0
    queue_seconds: float = 0.0
    idle_for_s: float = 0.0  # since the last step, while there was work


class Status(msgspec.Struct, tag=True, kw_only=True):
    """Heartbeat of a worker, once a second and after each change that a caller waits for."""

    worker: str
    stages: list[StageStatus]
    jobs: int
    overhead_seconds: float = 0.0  # CPU time of the loop outside the programs


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """The worker's stages are loaded and warm."""

    worker: str
    stages: list[str]


class Trace(msgspec.Struct, tag=True, kw_only=True):
    """Start recording what the worker does; with a `file`, stop and write it there. Answered by Traced."""

    client: str
    file: str = ""


class Traced(msgspec.Struct, tag=True, kw_only=True):
    worker: str
    error: str = ""  # what went wrong


class Shutdown(msgspec.Struct, tag=True, kw_only=True):
    """End the worker's loop."""

    pass


Message = (
    Submit
    | Start
    | Turn
    | Feed
    | Abort
    | Pause
    | Deliver
    | Failed
    | Subscribe
    | Status
    | Ready
    | Trace
    | Traced
    | Shutdown
)
