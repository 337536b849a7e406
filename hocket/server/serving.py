"""What the routes share: the engine they serve, the owner's choices, the requests they answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio import to_thread

from hocket.core import ModelInfo
from hocket.errors import Overloaded
from hocket.server.metrics import Metrics
from hocket.server.references import References
from hocket.server.requests import Requests
from hocket.server.settings import ServerSettings
from hocket.server.voice_store import VoiceStore

if TYPE_CHECKING:
    from hocket.engine.client import AsyncEngine

T = TypeVar("T")


@dataclass(slots=True)
class Serving:
    """One engine behind HTTP. `draining` is set once and never taken back."""

    engine: AsyncEngine
    settings: ServerSettings
    metrics: Metrics
    requests: Requests
    voices: VoiceStore | None  # None: the owner keeps no uploaded voices
    references: References
    media: References  # what chats are about
    draining: bool = False
    asleep: bool = False  # put to sleep by the owner; the engine holds no weights
    profiling: bool = False  # the workers record what they do
    sockets: int = 0  # open WebSockets
    # Work of many milliseconds goes to one thread at a time: two would double the time that the event loop
    # waits for the interpreter, and be done no sooner, since most of the work holds it.
    _heavy: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    def check_open(self) -> ModelInfo:
        """What the model can do, or Overloaded while nothing new is accepted."""
        if self.draining:
            raise Overloaded("the server is shutting down", code="draining", retry_after_s=5)
        if self.asleep:
            raise Overloaded("the model is asleep; POST /admin/wake", code="asleep", retry_after_s=5)
        status = self.engine.status()
        if not status.ready:
            reason = status.reason or "it is being loaded"
            raise Overloaded(f"the model is not ready: {reason}", code="loading", retry_after_s=5)
        return self.engine.info

    def check_room(self) -> None:
        """Raise Overloaded if the queue is full, before a request costs more than its body."""
        self.engine.check_room()

    async def offload(self, call: Callable[..., T], *args: Any) -> T:
        """`call(*args)` in a thread, one call at a time."""
        return await to_thread.run_sync(call, *args, limiter=self._heavy)
