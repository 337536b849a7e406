"""Whether the server lives, is ready and is well; its version."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

import hocket
from hocket.errors import Overloaded
from hocket.server.errors import error_response
from hocket.server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter(tags=["operation"])

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of the server."""
        return {"version": hocket.__version__}

    @router.get("/live")
    async def live() -> dict[str, str]:
        """200 while the process runs."""
        return {"status": "live"}

    @router.get("/ready", responses=_UNREADY)
    async def ready() -> Response:
        """200 when requests are accepted: all stages are loaded and nothing shuts down."""
        status = serving.engine.status()
        word = "draining" if serving.draining else "asleep" if serving.asleep else "loading"
        word = "ready" if word == "loading" and status.ready else word
        stages = {name: {"replicas": len(replicas)} for name, replicas in status.stages.items()}
        report = {"status": word, "stages": stages}
        if word == "ready":
            return _json(report)
        return _unwell(report, Overloaded(f"the server is {word}", code=word, retry_after_s=5))

    @router.get("/health", responses=_UNREADY)
    async def health() -> Response:
        """200 when every worker answers and no stage with work stands still."""
        reason = _ailment(serving)
        if reason is None:
            return _json({"status": "healthy"})
        report = {"status": "unhealthy", "reason": reason}
        return _unwell(report, Overloaded(f"the server is unhealthy: {reason}", code="unhealthy"))

    return router


_UNREADY: dict[int | str, dict[str, Any]] = {503: {"description": "Not now; `status` says why"}}


def _ailment(serving: Serving) -> str | None:
    """What is wrong, in a few words, or None."""
    status = serving.engine.status()
    if not status.healthy:
        return status.reason or "the engine is not running"
    limit = serving.settings.stall_timeout_s
    for name, replicas in status.stages.items():
        idle_s = max(stage.idle_for_s for stage in replicas)
        if idle_s > limit:
            return f"stage {name} has work but has finished no step for {idle_s:.0f} s"
    return None


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _unwell(report: dict[str, Any], error: Overloaded) -> Response:
    """503 with the report beside the error, so that probes and clients each find what they read."""
    response = error_response(error)
    body = {**report, **msgspec.json.decode(response.body)}
    return Response(
        msgspec.json.encode(body),
        response.status_code,
        {"Retry-After": response.headers["Retry-After"]},
        media_type="application/json",
    )
