"""WebSockets of clients: taken in, counted, read within limits, written to while they read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from hocket.errors import HocketError, InvalidRequest, Overloaded
from hocket.server.body import decoded
from hocket.server.edge import KEY_PROTOCOL
from hocket.server.errors import error_object, error_response
from hocket.server.serving import Serving

T = TypeVar("T")

TEXT_BYTES = 128 << 10  # of one message of text


class Socket:
    """One open connection. When the client goes away, `scope` is cancelled."""

    def __init__(self, serving: Serving, websocket: WebSocket, scope: anyio.CancelScope) -> None:
        self.serving = serving
        self.id: str = websocket.state.request_id
        self._websocket = websocket
        self._scope = scope
        self._closed = False

    async def receive(self) -> str | bytes | None:
        """The next message; None when the client has gone."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            self._closed = True
            return None
        text: str | None = message.get("text")
        return text if text is not None else message.get("bytes") or b""

    async def send(self, message: dict[str, Any] | bytes) -> None:
        """Send an object as JSON, or bytes as they are."""
        if self._closed:
            return
        kind = "bytes" if isinstance(message, bytes) else "text"
        data = message if isinstance(message, bytes) else msgspec.json.encode(message).decode()
        try:
            with anyio.fail_after(self.serving.settings.write_timeout_s):
                await self._websocket.send({"type": "websocket.send", kind: data})
        except (OSError, RuntimeError, WebSocketDisconnect):  # TimeoutError is an OSError
            self._closed = True
            self._scope.cancel()
            await anyio.sleep(0)  # the cancellation lands here

    async def close(self, code: int) -> None:
        if not self._closed:
            self._closed = True
            with suppress(OSError, RuntimeError, WebSocketDisconnect):
                await self._websocket.close(code)


@asynccontextmanager
async def opened(serving: Serving, websocket: WebSocket) -> AsyncIterator[Socket | None]:
    """The connection, accepted and counted; None where it was refused. Closed when the block ends."""
    try:
        serving.check_open()
        if serving.sockets >= serving.settings.max_ws:
            message = f"{serving.settings.max_ws} WebSockets are open, and no more are accepted"
            raise Overloaded(message, code="too_many_connections", retry_after_s=5)
    except HocketError as error:
        await websocket.send_denial_response(error_response(error))
        yield None
        return
    serving.sockets += 1
    serving.metrics.sockets.set(serving.sockets)
    try:
        with anyio.CancelScope() as scope:
            await websocket.accept(subprotocol=_protocol(websocket))
            socket = Socket(serving, websocket, scope)
            yield socket
        with anyio.CancelScope(shield=True):
            await socket.close(1000)
    finally:
        serving.sockets -= 1
        serving.metrics.sockets.set(serving.sockets)


def _protocol(websocket: WebSocket) -> str | None:
    """The sub-protocol to choose: the first that is no key, as browsers insist on one of theirs."""
    offered: list[str] = websocket.scope.get("subprotocols", [])
    return next((p for p in offered if not p.startswith(KEY_PROTOCOL)), None)


async def read(message: str | bytes, kind: type[T], serving: Serving) -> T:
    """A message as `kind`. Raises InvalidRequest."""
    if isinstance(message, bytes):
        raise InvalidRequest("messages to the server are JSON text, not binary", code="invalid_message")
    return await decoded(message.encode("utf-8", "replace"), kind, serving)


def error_message(error: Exception) -> dict[str, Any]:
    """An error in the form of the speech WebSocket."""
    said = error_object(error)
    return {"type": "error", "message": said["message"], "error_type": said["type"]} | {
        "param": said["param"],
        "code": said["code"],
    }
