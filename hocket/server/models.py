"""The models that are served: one, under its names."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from hocket.server.names import check_model
from hocket.server.openapi import ERRORS
from hocket.server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter(tags=["models"], responses=ERRORS)
    created = int(time.time())

    def entry() -> dict[str, Any]:
        info = serving.check_open()
        return {
            "id": serving.settings.name,
            "object": "model",
            "created": created,
            "owned_by": "hocket",
            "family": info.family,
            "tasks": list(info.tasks),
            "sample_rate": info.sample_rate_hz,
            "modalities": {"input": ["text"], "output": ["audio"]},
            "languages": list(info.languages),
            "capabilities": {
                "streaming": True,
                "voice_cloning": info.clones,
                "instructions": info.instructions,
                "speed": "stretch",
            },
        }

    @router.get("/v1/models")
    @router.get("/v1/audio/models")
    async def models() -> dict[str, Any]:
        """Every model, in the two shapes that clients look for."""
        name = serving.settings.name
        return {"object": "list", "data": [entry()], "models": [{"id": name, "name": name}]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """One model, by any of its names."""
        check_model(model, serving.settings)
        return entry()

    return router
