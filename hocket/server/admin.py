"""Routes for whoever runs the server. They take the admin key where there is one."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec import Meta, Struct

from hocket.errors import InvalidRequest, Unsupported
from hocket.server.body import decode, read_body
from hocket.server.openapi import ERRORS
from hocket.server.serving import Serving


class SleepBody(Struct):
    level: Annotated[int, Meta(ge=1, le=2)] | None = None


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter(prefix="/admin", tags=["admin"], responses=ERRORS)
    turn = asyncio.Lock()  # one change of state at a time

    @router.get("/requests")
    async def requests() -> dict[str, Any]:
        """What runs now."""
        now = time.monotonic()
        entries = [
            {
                "id": ticket.id,
                "group": ticket.group or None,
                "endpoint": ticket.endpoint,
                "age_seconds": round(now - ticket.began, 3),
                "audio_seconds": round(ticket.audio_s, 3),
                "state": "waiting" if ticket.first_audio is None else "speaking",
            }
            for ticket in serving.requests.running.values()
        ]
        return {"object": "list", "data": entries, "ws_connections": serving.sockets}

    @router.post("/drain")
    async def drain() -> dict[str, Any]:
        """Accept nothing new from now on; what runs goes on."""
        serving.draining = True
        return {"status": "draining", "running": len(serving.requests.running)}

    @router.post("/sleep")
    async def sleep(request: Request) -> dict[str, Any]:
        """Free the memory of the accelerators: requests that run end first, then the workers."""
        body = await read_body(request, serving.settings)
        level = (decode(body, SleepBody).level if body else None) or 1
        if level != 1:
            raise Unsupported("only level 1 exists: the weights are loaded again from disk", param="level")
        async with turn:
            if not serving.asleep:
                serving.check_open()
                serving.asleep = True
                while serving.requests.running:
                    await asyncio.sleep(0.05)
                await serving.engine.close()
                serving.profiling = False
        return {"status": "asleep", "level": 1}

    @router.post("/wake")
    async def wake() -> dict[str, Any]:
        """Load the model again; answers when it is ready."""
        async with turn:
            if serving.asleep:
                await serving.engine.start()
                serving.asleep = False
        return {"status": "ready"}

    @router.post("/profile/start")
    async def start_profile() -> dict[str, Any]:
        """Record what the workers do, with PyTorch's profiler. It slows them down."""
        serving.check_open()
        async with turn:
            if serving.profiling:
                raise InvalidRequest("a recording is running", code="profile_running")
            await serving.engine.start_trace()
            serving.profiling = True
        return {"status": "recording"}

    @router.post("/profile/stop")
    async def stop_profile() -> dict[str, Any]:
        """End the recording: where its files are on the server, for https://ui.perfetto.dev."""
        serving.check_open()
        async with turn:
            if not serving.profiling:
                raise InvalidRequest("no recording is running", code="profile_not_running")
            serving.profiling = False
            folder = Path(tempfile.mkdtemp(prefix="hocket-trace-"))
            files = await serving.engine.stop_trace(folder)
        return {"status": "written", "path": str(folder), "files": [str(file) for file in files]}

    for path, method, what in _LACKING:
        router.add_api_route(path, _lacking(what), methods=[method], name=what)
    return router


_LACKING = (
    ("/loras", "POST", "loading of LoRA adapters"),
    ("/loras/{name}", "DELETE", "unloading of LoRA adapters"),
    ("/weights", "POST", "changing of weights"),
)


def _lacking(what: str) -> Any:
    async def answer() -> None:
        raise Unsupported(f"{what} is not built")

    answer.__doc__ = f"Not built: {what}."
    return answer
