"""The voices that can be asked for by name."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from hocket.server.openapi import ERRORS
from hocket.server.serving import Serving


def router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["voices"], responses=ERRORS)

    @router.get("/v1/audio/voices")
    async def voices(legacy: bool = False, names_only: bool = False) -> dict[str, Any]:
        """All voices; `legacy` gives `voices` as plain names, `names_only` the uploaded ones' names alone."""
        # TODO(issue 5): uploaded voices.
        if names_only:
            return {"uploaded_voice_names": []}
        known = serving.check_open().voices
        entries = [
            {"id": voice.id, "name": voice.name, "kind": "builtin", "languages": list(voice.languages)}
            for voice in known
        ]
        listed = [voice.id for voice in known] if legacy else entries
        return {"object": "list", "voices": listed, "data": entries, "uploaded_voices": []}

    return router
