"""The requests this process is answering, and how the last ones ended.

A client's id may be shared by several requests at once (a retry, a proxy's trace id), so the engine gets an
id of its own where that happens; cancelling an id cancels all that carry it.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["ok", "length", "aborted", "rejected", "invalid", "error"]


@dataclass(slots=True)
class Ticket:
    """One request, from its arrival to its end. Times are of the monotonic clock, in seconds."""

    endpoint: str
    id: str = ""  # what the client sees
    group: str = ""  # the id of the batch or connection it belongs to
    job: str = ""  # what the engine sees
    began: float = field(default_factory=time.monotonic)  # when its body was parsed
    outcome: Outcome = "error"  # until it is known better
    first_audio: float | None = None
    audio_s: float = 0.0  # sound handed to the socket
    underrun_s: float = 0.0  # the longest a player that started at once had to wait for sound
    input_tokens: int = 0
    frames: int = 0

    def __str__(self) -> str:
        """How it went, for the log."""
        if self.first_audio is None:
            return self.outcome
        first_s = self.first_audio - self.began
        return f"{self.outcome}: {self.audio_s:.2f} s of audio, first after {first_s:.3f} s"

    def sent(self, audio_s: float) -> None:
        """Note that all sound up to `audio_s` has now been handed to the socket."""
        now = time.monotonic()
        if self.first_audio is None:
            self.first_audio = now
        self.underrun_s = max(self.underrun_s, now - self.first_audio - self.audio_s)
        self.audio_s = audio_s


@dataclass(slots=True)
class Requests:
    """All tickets that are open, and the outcome of the last `kept` that finished."""

    kept: int
    running: dict[str, Ticket] = field(default_factory=dict)  # by job
    finished: OrderedDict[str, dict[str, Any]] = field(default_factory=OrderedDict)  # by id

    @contextmanager
    def open(self, ticket: Ticket, request_id: str) -> Iterator[None]:
        """Give the parsed request its ids, and list it in `running` for the length of the block."""
        ticket.id = ticket.job = request_id
        if request_id in self.running:
            ticket.job = f"{request_id}~{uuid.uuid4().hex[:8]}"
        ticket.began = time.monotonic()
        self.running[ticket.job] = ticket
        try:
            yield
        finally:
            del self.running[ticket.job]

    def jobs(self, request_id: str) -> list[str]:
        """The engine's ids of what runs under a client's id, or in its batch or connection."""
        return [t.job for t in self.running.values() if request_id in (t.id, t.group)]

    def finish(self, ticket: Ticket, finish_reason: str, usage: dict[str, Any]) -> None:
        """Keep the outcome for GET /v1/audio/speech/{id}."""
        self.finished.pop(ticket.id, None)
        self.finished[ticket.id] = {
            "request_id": ticket.id,
            "finish_reason": finish_reason,
            "usage": usage,
            "audio_seconds": round(ticket.audio_s, 3),
        }
        while len(self.finished) > self.kept:
            self.finished.popitem(last=False)
