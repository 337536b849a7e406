"""POST /v1/audio/speech, the outcome of finished requests, and cancelling running ones.

One coroutine sees a request from its body to its last byte. The status line is sent with the first audio
bytes, so a failure before them is a proper HTTP error; an event stream that has waited long sends it
earlier, and reports the failure as an event.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hocket.audio.encode import MEDIA_TYPES
from hocket.core import ModelInfo
from hocket.errors import Cancelled, HocketError, NotFound, Overloaded, RequestFailed, clip
from hocket.server.body import read_json
from hocket.server.errors import error_object, status_of
from hocket.server.openapi import ERRORS, body_schema
from hocket.server.requests import Outcome, Ticket
from hocket.server.serving import Serving
from hocket.server.sound import Nothing, Sound
from hocket.server.speech_body import Plan, SpeechBody, plan

if TYPE_CHECKING:
    from hocket.engine.stream import Stream

log = logging.getLogger("hocket.server")


def router(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["speech"])

    @router.post(
        "/v1/audio/speech",
        response_class=Response,
        responses={200: {"description": "The audio", "content": _AUDIO_CONTENT}, **ERRORS},
        openapi_extra=body_schema(SpeechBody),
    )
    async def speech(request: Request) -> Response:
        """Speak a text."""
        return _Answer(serving, request)

    @router.get("/v1/audio/speech/{request_id}", responses=ERRORS)
    async def outcome(request_id: str) -> dict[str, Any]:
        """How one of the last finished requests ended: finish reason, usage, seconds of audio."""
        found = serving.requests.finished.get(request_id)
        if found is None:
            raise NotFound(f"no finished request '{clip(request_id)}' is known", code="request_not_found")
        return found

    @router.post("/v1/requests/{request_id}/cancel", responses=ERRORS)
    async def cancel(request_id: str) -> dict[str, Any]:
        """Stop a running request and free what it holds."""
        stopped = [await serving.engine.abort(job) for job in serving.requests.jobs(request_id)]
        if not any(stopped):
            message = f"no running request '{clip(request_id)}' is known"
            raise NotFound(message, code="request_not_found")
        return {"id": request_id, "cancelled": True}

    return router


class _Answer(Response):
    """The answer to one request. It is made while it is sent, and ends with the request."""

    def __init__(self, serving: Serving, request: Request) -> None:
        self.serving = serving
        self.request = request
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ticket = Ticket("speech")
        try:
            await self._run(ticket, send)
        except (ClientDisconnect, _ClientLeft):
            ticket.outcome = "aborted"
        except HocketError as error:
            ticket.outcome = _outcome(error)
            raise
        finally:
            self.serving.metrics.ended(ticket)
            log.info("%s %s", self.request.state.request_id, ticket)

    async def _run(self, ticket: Ticket, send: Send) -> None:
        serving, request = self.serving, self.request
        info = serving.check_open()
        body = await read_json(request, SpeechBody, serving.settings)
        if body.request_id is not None:
            request.state.request_id = body.request_id
        with serving.requests.open(ticket, request.state.request_id):
            async with _while_client_stays(request) as scope:
                wanted = await plan(body, request.headers.get("accept", ""), info, serving.settings)
                wanted.request.request_id = ticket.job
                delivery = _Delivery(serving, ticket, info, wanted, send)
                await _DELIVER[wanted.mode](delivery)
            if scope.cancelled_caught:
                raise _ClientLeft


class _ClientLeft(Exception):
    """The connection closed, or took no bytes for too long."""


@asynccontextmanager
async def _while_client_stays(request: Request) -> AsyncIterator[anyio.CancelScope]:
    """Cancels the block when the client's connection closes. For use after the body has been read."""
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield scope
        finally:
            watcher.cancel()


def _outcome(error: HocketError) -> Outcome:
    status = status_of(error)
    if isinstance(error, Cancelled):
        return "aborted"
    if status == 503:
        return "rejected"
    return "invalid" if status < 500 or status == 501 else "error"


# --- delivery ----------------------------------------------------------------------------------


class _Delivery:
    """One request on its way to its client."""

    def __init__(self, serving: Serving, ticket: Ticket, info: ModelInfo, wanted: Plan, send: Send) -> None:
        self.serving = serving
        self.settings = serving.settings
        self.ticket = ticket
        self.info = info
        self.plan = wanted
        self._send = send
        self.started = False

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream | Nothing]:
        """The engine's stream for the request. However the block ends, the stream is closed and freed."""
        if self.plan.silence:
            yield Nothing(self.info.sample_rate_hz)
            return
        stream = await self.serving.engine.submit(self.plan.request)
        try:
            yield stream
        except Cancelled:
            if self.serving.draining:
                raise Overloaded("the server is shutting down", code="draining", retry_after_s=5) from None
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    def sound(self, *, streaming: bool) -> Sound:
        plan = self.plan
        return Sound(
            plan.format,
            self.info.sample_rate_hz,
            plan.rate_hz,
            streaming=streaming,
            speed=plan.speed,
            stop_at_silence_ms=plan.stop_at_silence_ms,
        )

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

    def end(self, sound: Sound, stream: Stream | Nothing) -> dict[str, Any]:
        """Note how the request ended. -> usage, as in the contract."""
        used = usage(stream)
        ticket = self.ticket
        ticket.outcome = "length" if sound.finish_reason == "length" else "ok"
        ticket.input_tokens, ticket.frames = used["input_tokens"], used["output_tokens"]
        self.serving.requests.finish(ticket, sound.finish_reason, used)
        return used

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            with anyio.fail_after(self.settings.write_timeout_s):
                await self._send(message)
        except OSError as error:  # TimeoutError is one
            raise _ClientLeft from error


async def _deliver_buffered(d: _Delivery) -> None:
    """The whole file in one piece, with its length and what it cost in the headers."""
    for seed_left in (d.plan.retries_runaway, False):
        async with d.stream() as stream:
            sound = d.sound(streaming=False)
            async with aclosing(sound.pieces(stream)) as pieces:
                parts = [piece async for piece in pieces]
        if sound.finish_reason != "length" or not d.plan.retries_runaway:
            break
        if not seed_left:
            raise RequestFailed(
                "the model did not end its speech within the frames that the text allows, with two seeds; "
                "set seed or max_new_tokens to get the audio as it is",
                code="generation_runaway",
            )
    d.ticket.sent(sound.seconds)
    used = d.end(sound, stream)
    details = used["input_token_details"]
    counts = {
        "X-Input-Tokens": used["input_tokens"],
        "X-Output-Tokens": used["output_tokens"],
        "X-Total-Tokens": used["total_tokens"],
        "X-Input-Text-Tokens": details["text_tokens"],
        "X-Input-Audio-Tokens": details["audio_tokens"],
    }
    body = b"".join(parts)
    headers = {
        "Content-Length": str(len(body)),
        "X-Finish-Reason": sound.finish_reason,
        "X-Audio-Duration": f"{sound.seconds:.3f}",
    }
    for name, count in counts.items():
        headers[name] = headers[name.replace("X-", "X-VLLM-OMNI-", 1)] = str(count)
    await d.start(stream, MEDIA_TYPES[d.plan.format], headers)
    await d.body(body, more=False)


async def _deliver_raw(d: _Delivery) -> None:
    """The file's bytes as they are made. A failure cuts the connection, so that the client notices."""
    async with d.stream() as stream:
        sound = d.sound(streaming=True)
        async with aclosing(sound.pieces(stream)) as pieces:
            try:
                async for piece in pieces:
                    if not d.started:
                        await d.start(stream, MEDIA_TYPES[d.plan.format])
                    await d.body(piece, more=True)
                    d.ticket.sent(sound.seconds)
            except HocketError as error:
                if not d.started:
                    raise
                _log_cut(d.ticket, error)
                return  # without the last chunk
        if not d.started:
            await d.start(stream, MEDIA_TYPES[d.plan.format])
        d.end(sound, stream)
    await d.body(b"", more=False)


async def _deliver_events(d: _Delivery) -> None:
    """Server-sent events: deltas of the file, then one event that says how it ended."""
    async with d.stream() as stream:
        sound = d.sound(streaming=True)
        last: dict[str, Any]
        async with aclosing(sound.pieces(stream)) as pieces, aclosing(_with_waits(d, pieces)) as events:
            index = 0
            try:
                async for piece in events:
                    if not d.started:
                        await d.start(stream, "text/event-stream; charset=utf-8")
                    if piece is None:
                        await d.body(b": wait\n\n", more=True)
                        continue
                    delta = {
                        "type": "speech.audio.delta",
                        "audio": base64.b64encode(piece).decode("ascii"),
                        "response_format": d.plan.format,
                        "index": index,
                    }
                    index += 1
                    await d.body(_event(delta), more=True)
                    d.ticket.sent(sound.seconds)
                used = d.end(sound, stream)
                last = {"type": "speech.audio.done", "finish_reason": sound.finish_reason, "usage": used}
            except HocketError as error:
                if not d.started:
                    raise
                _log_cut(d.ticket, error)
                last = {
                    "type": "speech.audio.error",
                    "error": {**error_object(error), "partial_audio": index > 0},
                }
        if not d.started:
            await d.start(stream, "text/event-stream; charset=utf-8")
    await d.body(_event(last), more=False)


_DELIVER = {"buffered": _deliver_buffered, "raw": _deliver_raw, "events": _deliver_events}


async def _with_waits(
    d: _Delivery, pieces: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes | None, None]:
    """`pieces`, with None each time that none has come for `wait_comment_s`."""
    pending: asyncio.Task[bytes] | None = None
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


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def _log_cut(ticket: Ticket, error: HocketError) -> None:
    ticket.outcome = _outcome(error)
    log.warning("%s failed after %.2f s of audio: %s", ticket.id, ticket.audio_s, error.message)


def usage(stream: Stream | Nothing) -> dict[str, Any]:
    """What a request took and gave, in OpenAI's shape; `output_tokens` are frames."""
    text, audio, frames = 0, 0, 0
    if stream.usage is not None:
        text, audio, frames = stream.usage.text_tokens, stream.usage.audio_tokens, stream.usage.frames
    return {
        "input_tokens": text + audio,
        "output_tokens": frames,
        "total_tokens": text + audio + frames,
        "input_token_details": {"text_tokens": text, "audio_tokens": audio},
    }


_AUDIO_CONTENT: dict[str, Any] = {
    **{media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES.values()},
    "text/event-stream": {"schema": {"type": "string"}},
}
