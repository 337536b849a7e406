"""The one place where meanings become status codes, and errors become bodies in OpenAI's shape.

Every non-2xx answer of every route is made by `error_response`; `install` binds it to what the routes,
the engine and the framework raise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from hocket import errors

log = logging.getLogger("hocket.server")

_MESSAGE_CHARS = 1000
_PARAM_CHARS = 80


class Refused(errors.HocketError):
    """Refused by the HTTP layer itself, with the status it has there. `headers` go with the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class _Meaning:
    status: int
    permanent: bool = False  # sending it again gives the same answer: tell the SDKs, which retry every 5xx


# A class not listed takes the row of its nearest base.
_MEANINGS: dict[type[Exception], _Meaning] = {
    errors.InvalidRequest: _Meaning(400),
    errors.Forbidden: _Meaning(403),
    errors.NotFound: _Meaning(404),
    errors.Unsupported: _Meaning(501, permanent=True),
    errors.Overloaded: _Meaning(503),
    errors.DeadlineExceeded: _Meaning(504),
    errors.RequestFailed: _Meaning(500),
    errors.Cancelled: _Meaning(500, permanent=True),
    errors.StartupError: _Meaning(500, permanent=True),
    errors.HocketError: _Meaning(500),
}

# Codes that make an error permanent whatever its class: the server has already tried it twice.
_PERMANENT_CODES = frozenset({"generation_runaway"})

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def status_of(error: Exception) -> int:
    """The HTTP status that `error` has."""
    if isinstance(error, Refused):
        return error.status
    return _meaning(error).status


def error_object(error: Exception) -> dict[str, Any]:
    """The value of the body's `error`: message, type, param and code."""
    known = error if isinstance(error, errors.HocketError) else None
    return {
        "message": errors.clip(known.message if known else _INTERNAL, _MESSAGE_CHARS),
        "type": _TYPES.get(status_of(error), "invalid_request_error"),
        "param": errors.clip(known.param, _PARAM_CHARS) if known and known.param else None,
        "code": known.code if known else "internal_error",
    }


_INTERNAL = "the server failed on this request; its log has the details under the id in X-Request-Id"


def error_response(error: Exception) -> Response:
    """The whole answer for `error`, headers included."""
    headers: dict[str, str] = {}
    if isinstance(error, Refused):
        headers |= error.headers
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = str(min(30, max(1, math.ceil(error.retry_after_s))))
    if _permanent(error):
        headers["x-should-retry"] = "false"
    body = msgspec.json.encode({"error": error_object(error)})
    return Response(body, status_of(error), headers, media_type="application/json")


def install(app: FastAPI) -> None:
    """Make `app` answer every error in the one shape."""

    async def raised(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_from_framework(request, error))

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_from_validation(error))

    app.add_exception_handler(errors.HocketError, raised)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)


async def no_socket(websocket: WebSocket) -> None:
    """Refuse a WebSocket on a path that has none."""
    path = errors.clip(websocket.url.path)
    message = f"there is no WebSocket {path}; those there are: /v1/audio/speech/stream and /v1/realtime"
    await websocket.send_denial_response(error_response(Refused(404, message, code="route_not_found")))


def _from_framework(request: Request, error: HTTPException) -> Refused:
    path = errors.clip(request.url.path)
    if error.status_code == 404:
        return Refused(404, f"there is no route {path}; GET /openapi.json lists them", code="route_not_found")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not take {errors.clip(request.method)}; allowed: {allowed}"
        return Refused(405, message, code="method_not_allowed", headers=error.headers)
    return Refused(error.status_code, str(error.detail), headers=error.headers)


def _from_validation(error: RequestValidationError) -> errors.InvalidRequest:
    """Parameters in the path and the query; bodies are read by `hocket.server.body`."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return errors.InvalidRequest(f"{name!r} is not valid: {first['msg'][:200]}", param=name)


def _meaning(error: Exception) -> _Meaning:
    for base in type(error).__mro__:
        if base in _MEANINGS:
            return _MEANINGS[base]
    return _Meaning(500)


def _permanent(error: Exception) -> bool:
    if isinstance(error, Refused):
        return False
    code = error.code if isinstance(error, errors.HocketError) else None
    return _meaning(error).permanent or code in _PERMANENT_CODES
