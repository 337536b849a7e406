"""What every request passes before its route: its id, its path, its key, its declared size.

Plain ASGI, so that bodies and streams go through untouched.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hocket.server.errors import Refused, error_response
from hocket.server.settings import ServerSettings

log = logging.getLogger("hocket.server")

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_OPEN = frozenset({"/", "/live", "/ready", "/health"})
_LISTINGS = frozenset({"/v1/models", "/v1/audio/models", "/v1/audio/voices"})
KEY_PROTOCOL = "openai-insecure-api-key."
_PAGE = "/playground/"
_ADMIN = ("/metrics", "/admin/")
_KINDS = (
    ("/v1/audio/speech/batch", "speech-batch"),
    ("/v1/audio/speech", "speech"),
    ("/v1/chat/completions", "chatcmpl"),
    ("/v1/realtime", "sess"),
)


def valid_request_id(text: str) -> bool:
    """Whether a client's id may be used as it is."""
    return _ID.fullmatch(text) is not None


_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class Identified:
    """Gives each request its id, drops a trailing slash, takes HEAD where there is GET, and turns what nobody
    caught into a 500.

    The id is in `scope["state"]["request_id"]`, where a route may replace it by one from the body; the
    answer carries what is there when its status line is sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path: str = scope["path"]
        if len(path) > 1 and path.endswith("/"):
            # Not a redirect: some clients drop the body on a 307.
            path = path.rstrip("/") or "/"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # the server knows which it was, and sends no body
        own = Headers(scope=scope).get("x-request-id", "")
        kind = next((kind for start, kind in _KINDS if path.startswith(start)), "request")
        state = scope.setdefault("state", {})
        state["request_id"] = own if valid_request_id(own) else f"{kind}-{uuid.uuid4().hex}"
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] in _STARTS:
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:  # whatever it is: this is the last place that can still answer
            log.exception("%s failed", state["request_id"])
            if started and scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1011})
            elif not started:  # else the answer stays incomplete, and the server cuts the connection
                await error_response(error)(scope, receive, send_with_id)


class Gate:
    """Lets a request in if it has the key it needs and does not declare a body over the limit."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            refusal = self._refusal(scope)
            if refusal is not None:
                return await error_response(refusal)(scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refused | None:
        headers = Headers(scope=scope)
        keys = self._keys(scope["path"])
        if keys and not _has_key(headers, keys):
            return Refused(
                401,
                "this server needs a key: send 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.settings.max_body_mib << 20:
            return body_too_large(self.settings)
        return None

    def _keys(self, path: str) -> tuple[str, ...]:
        settings = self.settings
        if path in _OPEN or path.startswith(_PAGE) or (settings.public_listings and path in _LISTINGS):
            return ()
        if path.startswith(_ADMIN) and settings.admin_keys:
            return settings.admin_keys
        return settings.api_keys


def body_too_large(settings: ServerSettings) -> Refused:
    """The refusal of a body over the limit; the connection is closed, since the rest is not read."""
    message = f"the body is larger than the {settings.max_body_mib} MiB this server accepts"
    return Refused(413, message, code="body_too_large", headers={"Connection": "close"})


def _has_key(headers: Headers, keys: Iterable[str]) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        # A page cannot set headers of a WebSocket; OpenAI's clients put the key here.
        if not given and protocol.strip().startswith(KEY_PROTOCOL):
            given = protocol.strip().removeprefix(KEY_PROTOCOL)
    # Every key is compared, in constant time, so that the time tells nothing about any of them.
    return max([hmac.compare_digest(given.encode(), key.encode()) for key in keys])
