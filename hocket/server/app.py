"""The application: resources, middleware and error shape put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import hocket
from hocket.errors import Unsupported
from hocket.server import errors, health, models, openapi, page, speech, voices
from hocket.server.edge import Gate, Identified
from hocket.server.metrics import Metrics
from hocket.server.requests import Requests
from hocket.server.serving import Serving
from hocket.server.settings import ServerSettings

if TYPE_CHECKING:
    from hocket.engine.client import AsyncEngine


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """An ASGI application that serves `engine`.

    The engine is started and closed by the caller; until it is ready, requests get 503. What the routes
    share is in `app.state.serving`; setting its `draining` makes the server refuse new work.
    """
    metrics = Metrics(settings.name, engine.status)
    serving = Serving(engine, settings, metrics, Requests(settings.kept_results))
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
    for method, path in _LATER:  # before the routes that have a parameter where these have a word
        app.add_api_route(path, _not_built, methods=[method], include_in_schema=False)
    for resource in (speech, models, voices, health, page):
        app.include_router(resource.router(serving))
    app.include_router(metrics.router())
    return app


# TODO(issue 5): what the contract has beyond the routes above.
_LATER = (
    ("POST", "/v1/audio/speech/batch"),
    ("POST", "/v1/audio/voices"),
    ("GET", "/v1/audio/voices/{name}"),
    ("DELETE", "/v1/audio/voices/{name}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)


async def _not_built() -> None:
    raise Unsupported("this route is not built yet")
