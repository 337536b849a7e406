"""POST /v1/audio/speech, the outcome of finished requests, and cancelling running ones."""

from __future__ import annotations

import base64
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from hocket.audio.encode import MEDIA_TYPES
from hocket.errors import HocketError, NotFound, clip
from hocket.server.body import read_json
from hocket.server.delivery import EVENTS, Answer, Delivery, log_cut, with_waits
from hocket.server.errors import error_object
from hocket.server.leaving import while_client_stays
from hocket.server.openapi import ERRORS, body_schema
from hocket.server.requests import Ticket
from hocket.server.serving import Serving
from hocket.server.speech_body import SpeechBody, plan


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
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


class _Answer(Answer):
    endpoint = "speech"

    async def run(self, ticket: Ticket, send: Send) -> None:
        serving, request = self.serving, self.request
        info = serving.check_open()
        body = await read_json(request, SpeechBody, serving)
        if body.request_id is not None:
            request.state.request_id = body.request_id
        with serving.requests.open(ticket, request.state.request_id):
            async with while_client_stays(request):
                serving.check_room()
                wanted = await plan(body, request.headers.get("accept", ""), info, serving)
                await _DELIVER[wanted.mode](Delivery(serving, ticket, info, wanted, send))


async def _deliver_buffered(d: Delivery) -> None:
    """The whole file in one piece, with its length and what it cost in the headers."""
    whole = await d.whole()
    used = whole.usage
    details = used["input_token_details"]
    counts = {
        "X-Input-Tokens": used["input_tokens"],
        "X-Output-Tokens": used["output_tokens"],
        "X-Total-Tokens": used["total_tokens"],
        "X-Input-Text-Tokens": details["text_tokens"],
        "X-Input-Audio-Tokens": details["audio_tokens"],
    }
    headers = {
        "Content-Length": str(len(whole.data)),
        "X-Finish-Reason": whole.finish_reason,
        "X-Audio-Duration": f"{whole.seconds:.3f}",
    }
    for name, count in counts.items():
        headers[name] = headers[name.replace("X-", "X-VLLM-OMNI-", 1)] = str(count)
    await d.start(whole.stream, MEDIA_TYPES[d.plan.format], headers)
    await d.body(whole.data, more=False)


async def _deliver_raw(d: Delivery) -> None:
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
                log_cut(d.ticket, error)
                return  # without the last chunk
        if not d.started:
            await d.start(stream, MEDIA_TYPES[d.plan.format])
        d.end(sound.finish_reason, stream)
    await d.body(b"", more=False)


async def _deliver_events(d: Delivery) -> None:
    """Server-sent events: deltas of the file, then one event that says how it ended."""
    async with d.stream() as stream:
        sound = d.sound(streaming=True)
        last: dict[str, Any]
        async with aclosing(sound.pieces(stream)) as pieces, aclosing(with_waits(d, pieces)) as events:
            index = 0
            try:
                async for piece in events:
                    if not d.started:
                        await d.start(stream, EVENTS)
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
                used = d.end(sound.finish_reason, stream)
                last = {"type": "speech.audio.done", "finish_reason": sound.finish_reason, "usage": used}
            except HocketError as error:
                if not d.started:
                    raise
                log_cut(d.ticket, error)
                last = {
                    "type": "speech.audio.error",
                    "error": {**error_object(error), "partial_audio": index > 0},
                }
        if not d.started:
            await d.start(stream, EVENTS)
    await d.body(_event(last), more=False)


_DELIVER = {"buffered": _deliver_buffered, "raw": _deliver_raw, "events": _deliver_events}


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


_AUDIO_CONTENT: dict[str, Any] = {
    **{media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES.values()},
    "text/event-stream": {"schema": {"type": "string"}},
}
