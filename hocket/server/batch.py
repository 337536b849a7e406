"""POST /v1/audio/speech/batch: several texts in one request, one answer for all of them.

An item that cannot be served is an error among the results; only when none can is the whole answer an error.
"""

from __future__ import annotations

import base64
import logging
from typing import Annotated, Any

import anyio
import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta, Raw
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from hocket.audio.encode import MEDIA_TYPES
from hocket.core import ModelInfo
from hocket.errors import HocketError, InvalidRequest, Overloaded
from hocket.server.body import decode, read_body
from hocket.server.errors import error_object, status_of
from hocket.server.leaving import ClientLeft, while_client_stays
from hocket.server.openapi import ERRORS, body_schema
from hocket.server.requests import Ticket
from hocket.server.serving import Serving
from hocket.server.speech_body import SpeechBody, SpeechOptions, plan
from hocket.server.utterance import Utterance, counted

log = logging.getLogger("hocket.server")

_AT_ONCE = 8  # of one batch in the engine: other clients want to be heard too


class BatchBody(SpeechOptions, kw_only=True):
    """What the items share, and the items: a text each, with fields of its own where it differs."""

    items: Annotated[list[SpeechBody], Meta(min_length=1)]


class _Envelope(SpeechOptions, kw_only=True):
    items: list[Raw]  # each is read by itself, so that one bad item does not spoil the others


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter(tags=["speech"])

    @router.post(
        "/v1/audio/speech/batch",
        responses={200: {"description": "A result for each item, in order"}, **ERRORS},
        openapi_extra=body_schema(BatchBody),
    )
    async def batch(request: Request) -> Response:
        """Speak several texts."""
        info = serving.check_open()
        try:
            body = await read_body(request, serving.settings)
            items = await serving.offload(_items, body, serving.settings.max_batch_items)
            async with while_client_stays(request):
                serving.check_room()
                return await _answer(serving, request.state.request_id, info, items)
        except (ClientDisconnect, ClientLeft):
            return Response(status_code=499)  # nobody is there to read it

    return router


def _items(body: bytearray, limit: int) -> list[SpeechBody | HocketError]:
    """The items, each with the shared fields it does not set itself, or what is wrong with it."""
    envelope = decode(body, _Envelope)
    if not 1 <= len(envelope.items) <= limit:
        message = f"'items' must hold 1 to {limit} items; got {len(envelope.items)}"
        raise InvalidRequest(message, param="items", code="invalid_items")
    found: list[SpeechBody | HocketError] = []
    for index, raw in enumerate(envelope.items):
        try:
            item = decode(bytes(raw), SpeechBody)
        except InvalidRequest as error:
            error.param = f"items.{index}.{error.param}" if error.param else f"items.{index}"
            found.append(error)
            continue
        for name in SpeechOptions.__struct_fields__:
            if getattr(item, name) is None:
                setattr(item, name, getattr(envelope, name))
        item.response_format = item.response_format or "wav"
        item.stream, item.stream_format = False, None
        found.append(item)
    return found


async def _answer(
    serving: Serving, batch_id: str, info: ModelInfo, items: list[SpeechBody | HocketError]
) -> Response:
    results: list[dict[str, Any]] = [{} for _ in items]
    errors: list[HocketError] = []
    turns = anyio.Semaphore(_AT_ONCE)

    async def run(index: int, item: SpeechBody | HocketError) -> None:
        async with turns:
            ticket = Ticket("batch", group=batch_id)
            try:
                with counted(serving, ticket):
                    results[index] = await _speak(serving, ticket, info, index, item)
            except HocketError as error:
                errors.append(error)
                results[index] = _failed(index, error)
            log.info("%s %s", ticket.id or f"{batch_id}-{index}", ticket)

    async with anyio.create_task_group() as group:
        for index, item in enumerate(items):
            group.start_soon(run, index, item)
    failed = len(errors)
    if failed == len(items) and all(isinstance(error, Overloaded) for error in errors):
        raise errors[0]
    answer = {
        "id": batch_id,
        "results": results,
        "total": len(items),
        "succeeded": len(items) - failed,
        "failed": failed,
    }
    invalid = failed == len(items) and all(status_of(error) < 500 for error in errors)
    content = await serving.offload(msgspec.json.encode, answer)
    return Response(content, 400 if invalid else 200, media_type="application/json")


async def _speak(
    serving: Serving, ticket: Ticket, info: ModelInfo, index: int, item: SpeechBody | HocketError
) -> dict[str, Any]:
    if isinstance(item, HocketError):
        raise item
    with serving.requests.open(ticket, item.request_id or f"{ticket.group}-{index}"):
        try:
            wanted = await plan(item, "", info, serving)
            whole = await Utterance(serving, ticket, info, wanted).whole()
        except InvalidRequest as error:
            error.param = f"items.{index}.{error.param}" if error.param else f"items.{index}"
            raise
    result = {
        "index": index,
        "status": "success",
        "audio_data": base64.b64encode(whole.data).decode(),
        "media_type": MEDIA_TYPES[wanted.format],
        "format": wanted.format,
        "finish_reason": whole.finish_reason,
        "usage": whole.usage,
    }
    if wanted.ignored:
        result["ignored"] = list(wanted.ignored)
    return result


def _failed(index: int, error: HocketError) -> dict[str, Any]:
    said = error_object(error)
    return {"index": index, "status": "error", "error": said["message"], "error_detail": said}
