"""HTTP as uvicorn speaks it, with limits on what comes before a request, and errors in our form.

Until the head of a request is there, it has no key and no route, and so none of their limits. uvicorn would
take a head of any length for any time, and tell of bytes that are no HTTP in plain text.
"""

from __future__ import annotations

import asyncio
import uuid

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from hocket.server.errors import Refused, error_response

HEAD_BYTES = 64 << 10
HEAD_S = 60.0


class Protocol(HttpToolsProtocol):
    """One connection. A head is refused when it passes HEAD_BYTES by more than one read from the socket."""

    _unread = 0  # bytes of the head, or of trailers, so far
    _head: asyncio.TimerHandle | None = None  # runs while a head is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's too
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES and not self.transport.is_closing():
            message = f"the request's head is larger than the {HEAD_BYTES >> 10} KiB this server accepts"
            self._refuse(Refused(431, message, code="head_too_large"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    # the parser calls these

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def _await_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._late)

    def _end_head(self) -> None:
        self._unread = 0
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _late(self) -> None:
        self._head = None
        if self._unread:
            message = f"the request's head did not arrive within {HEAD_S:g} s"
            self._refuse(Refused(408, message, code="head_timeout"))
        else:
            self.transport.close()  # nobody asked for anything

    def _refuse(self, error: Refused) -> None:
        """Answer with `error`, unless another answer has begun, and close the connection."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            response = error_response(error)
            headers = [
                *self.server_state.default_headers,
                *response.raw_headers,
                (b"connection", b"close"),
                (b"x-request-id", f"request-{uuid.uuid4().hex}".encode()),
            ]
            lines = [b"%b: %b\r\n" % header for header in headers]
            body = bytes(response.body)
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.close()
