"""What the routes share: the engine they serve, the owner's choices, the requests they answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.core import ModelInfo
from hocket.errors import Overloaded
from hocket.server.metrics import Metrics
from hocket.server.requests import Requests
from hocket.server.settings import ServerSettings

if TYPE_CHECKING:
    from hocket.engine.client import AsyncEngine


@dataclass(slots=True)
class Serving:
    """One engine behind HTTP. `draining` is set once and never taken back."""

    engine: AsyncEngine
    settings: ServerSettings
    metrics: Metrics
    requests: Requests
    draining: bool = False

    def check_open(self) -> ModelInfo:
        """What the model can do, or Overloaded while nothing new is accepted."""
        if self.draining:
            raise Overloaded("the server is shutting down", code="draining", retry_after_s=5)
        status = self.engine.status()
        if not status.ready:
            reason = status.reason or "it is being loaded"
            raise Overloaded(f"the model is not ready: {reason}", code="loading", retry_after_s=5)
        return self.engine.info
