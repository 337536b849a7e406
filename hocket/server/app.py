"""The application: resources, middleware and error shape put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import hocket
from hocket.server import (
    admin,
    batch,
    chat,
    errors,
    health,
    models,
    openapi,
    page,
    realtime,
    speech,
    speech_socket,
    tokens,
    voices,
)
from hocket.server.edge import Gate, Identified
from hocket.server.metrics import Metrics
from hocket.server.references import References
from hocket.server.requests import Requests
from hocket.server.serving import Serving
from hocket.server.settings import ServerSettings
from hocket.server.voice_store import VoiceStore

if TYPE_CHECKING:
    from hocket.engine.client import AsyncEngine


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """An ASGI application that serves `engine`.

    The engine is started and closed by the caller; until it is ready, requests get 503. What the routes
    share is in `app.state.serving`; setting its `draining` makes the server refuse new work.
    """
    metrics = Metrics(settings.name, engine.status)
    folder = settings.voices_dir
    serving = Serving(
        engine,
        settings,
        metrics,
        Requests(settings.kept_results),
        voices=None if folder is None else VoiceStore(folder, settings.max_voices),
        references=References(settings),
        media=References(settings, max_bytes=settings.max_body_mib << 20),
    )
    middleware = [Middleware(Identified)]
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        )
    middleware.append(Middleware(Gate, settings=settings))  # after CORS, whose preflights carry no key
    app = FastAPI(
        title="hocket",
        version=hocket.__version__,
        middleware=middleware,
        redirect_slashes=False,
        redoc_url=None,
    )
    app.state.serving = serving
    errors.install(app)
    openapi.install(app, "Speech from text, streamed while it is made. Errors are in OpenAI's shape.")
    for resource in (
        speech, batch, speech_socket, chat, realtime, models, tokens, voices, health, admin, page,
    ):  # fmt: skip
        app.include_router(resource.router(serving))
    app.include_router(metrics.router())
    app.add_api_websocket_route("/{path:path}", errors.no_socket)
    return app
