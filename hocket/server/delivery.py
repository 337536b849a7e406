"""An answer that is made while it is sent.

One coroutine sees a request from its body to its last byte. The status line is sent with the first audio
bytes, so a failure before them is a proper HTTP error; an event stream that has waited long sends it
earlier, and reports the failure as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.parse
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hocket.core import ModelInfo
from hocket.errors import HocketError
from hocket.server.leaving import ClientLeft
from hocket.server.requests import Ticket
from hocket.server.serving import Serving
from hocket.server.sound import Nothing
from hocket.server.speech_body import Plan
from hocket.server.utterance import Utterance, counted, outcome_of

if TYPE_CHECKING:
    from hocket.engine.stream import Stream

log = logging.getLogger("hocket.server")

T = TypeVar("T")

EVENTS = "text/event-stream; charset=utf-8"


class Answer(Response):
    """The answer to one request. It is made while it is sent, and ends with the request."""

    endpoint: ClassVar[str]

    def __init__(self, serving: Serving, request: Request) -> None:
        self.serving = serving
        self.request = request
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ticket = Ticket(self.endpoint)
        try:
            with counted(self.serving, ticket):
                try:
                    await self.run(ticket, send)
                except ClientDisconnect:
                    raise ClientLeft from None
        except ClientLeft:
            pass
        finally:
            log.info("%s %s", self.request.state.request_id, ticket)

    async def run(self, ticket: Ticket, send: Send) -> None:
        """Read the body, and answer it."""
        raise NotImplementedError


class Delivery(Utterance):
    """One request on its way to its client."""

    def __init__(self, serving: Serving, ticket: Ticket, info: ModelInfo, wanted: Plan, send: Send) -> None:
        super().__init__(serving, ticket, info, wanted)
        self.settings = serving.settings
        self._send = send
        self.started = False

    async def start(
        self, stream: Stream | Nothing, media_type: str, more: dict[str, str] | None = None
    ) -> None:
        """Send the status line and the headers that every audio answer has, and `more`."""
        plan = self.plan
        rate = str(plan.rate_hz)
        headers = {
            "Content-Type": media_type,
            "X-Sample-Rate": rate,
            "X-Audio-Sample-Rate": rate,
            "X-Channels": "1",
            "X-Audio-Channels": "1",
            "X-Model": urllib.parse.quote(self.settings.name, safe="/:@+ "),  # headers are ASCII
            "X-Seed": str(stream.seed),
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
            **(more or {}),
        }
        if plan.format in ("pcm", "wav", "flac"):
            headers["X-Bit-Depth"] = "16"
        if plan.ignored:
            headers["X-Hocket-Ignored"] = ",".join(plan.ignored)
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.started = True
        await self._put({"type": "http.response.start", "status": 200, "headers": raw})

    async def body(self, piece: bytes, *, more: bool) -> None:
        await self._put({"type": "http.response.body", "body": piece, "more_body": more})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            with anyio.fail_after(self.settings.write_timeout_s):
                await self._send(message)
        except OSError as error:  # TimeoutError is one
            raise ClientLeft from error


async def with_waits(d: Delivery, pieces: AsyncGenerator[T, None]) -> AsyncGenerator[T | None, None]:
    """`pieces`, with None each time that none has come for `wait_comment_s`."""
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(pieces))
            done, _ = await asyncio.wait({pending}, timeout=d.settings.wait_comment_s)
            if not done:
                yield None
                continue
            finished, pending = pending, None
            try:
                piece = finished.result()
            except StopAsyncIteration:
                return
            yield piece
    finally:
        if pending is not None:
            pending.cancel()
            with anyio.CancelScope(shield=True), contextlib.suppress(Exception, asyncio.CancelledError):
                await pending


def log_cut(ticket: Ticket, error: HocketError) -> None:
    """Note a failure that came after the first sound."""
    ticket.outcome = outcome_of(error)
    log.warning("%s failed after %.2f s of audio: %s", ticket.id, ticket.audio_s, error.message)
