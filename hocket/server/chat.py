"""POST /v1/chat/completions: a speech model speaks the last message of the user."""

from __future__ import annotations

import base64
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.types import Send

from hocket.audio.encode import Format
from hocket.core import ModelInfo
from hocket.errors import HocketError, InvalidRequest
from hocket.server.body import read_json
from hocket.server.delivery import EVENTS, Answer, Delivery, log_cut, with_waits
from hocket.server.errors import error_object
from hocket.server.leaving import while_client_stays
from hocket.server.openapi import ERRORS, body_schema
from hocket.server.requests import Ticket
from hocket.server.serving import Serving
from hocket.server.speech_body import Plan, SpeechBody, SpeechOptions, VoiceRef, check_input, plan

_KEPT_S = 3600  # what `expires_at` promises; nothing is stored, so a client that has the audio has all

ChatFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"]


class ContentPart(Struct):
    type: str
    text: str | None = None


class ChatMessage(Struct):
    role: str
    content: str | list[ContentPart] | None = None


class ChatAudio(Struct):
    voice: str | VoiceRef | None = None
    format: ChatFormat | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class ChatBody(SpeechOptions, kw_only=True):
    """POST /v1/chat/completions: OpenAI's fields, and those of a speech request."""

    messages: Annotated[list[ChatMessage], Meta(description="The last one of the user is spoken.")]
    modalities: list[Literal["text", "audio"]] | None = None
    audio: ChatAudio | None = None
    n: int | None = None
    max_tokens: Annotated[int, Meta(ge=1, description="Tokens of text to speak.")] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    audio_delta: Annotated[
        Literal["audio", "content"] | None, Meta(description="Where chunks carry the audio.")
    ] = None


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter(tags=["chat"])

    @router.post(
        "/v1/chat/completions",
        response_class=Response,
        responses={200: {"description": "The message, or a stream of chunks", "content": _CONTENT}, **ERRORS},
        openapi_extra=body_schema(ChatBody),
    )
    async def chat(request: Request) -> Response:
        """Speak the last message of the user."""
        return _Answer(serving, request)

    return router


@dataclass(slots=True)
class _Said:
    text: str
    shown: bool  # the client wants the text as well
    cut: bool  # by max_tokens


class _Answer(Answer):
    endpoint = "chat"

    async def run(self, ticket: Ticket, send: Send) -> None:
        serving, request = self.serving, self.request
        info = serving.check_open()
        body = await read_json(request, ChatBody, serving)
        if body.request_id is not None:
            request.state.request_id = body.request_id
        with serving.requests.open(ticket, request.state.request_id):
            async with while_client_stays(request):
                serving.check_room()
                said = await _said(body, serving)
                wanted = await _planned(body, said, info, serving)
                delivery = Delivery(serving, ticket, info, wanted, send)
                chat = _Chat(delivery, body, said, request.state.request_id)
                await (chat.stream() if body.stream else chat.whole())


async def _planned(body: ChatBody, said: _Said, info: ModelInfo, serving: Serving) -> Plan:
    try:
        return await plan(_speech(body, said.text), "", info, serving)
    except InvalidRequest as error:
        if error.param == "voice" and body.audio is not None and body.audio.voice is not None:
            error.param = "audio.voice"
        raise


async def _said(body: ChatBody, serving: Serving) -> _Said:
    """What the answer says: the last user message, as far as max_tokens allows."""
    modalities = body.modalities or ["text", "audio"]
    if "audio" not in modalities:
        message = 'this model answers with speech: \'modalities\' must be ["audio"] or ["text", "audio"]'
        raise InvalidRequest(message, param="modalities", code="unsupported_modality")
    if body.n is not None and body.n != 1:
        raise InvalidRequest(f"'n' must be 1; got {body.n}", param="n")
    index = max((i for i, message in enumerate(body.messages) if message.role == "user"), default=None)
    if index is None:
        raise InvalidRequest("'messages' holds no message of the role user", param="messages")
    text = _text(body.messages[index], index)
    try:
        check_input(text, serving.settings)
    except InvalidRequest as error:
        error.param = f"messages.{index}.content"
        error.message = error.message.replace("'input'", f"'{error.param}'")
        raise
    limit = body.max_completion_tokens or body.max_tokens
    cut = False
    if limit is not None:
        front_end = serving.engine.front_end
        ids = await serving.offload(front_end.tokenize, text)
        if len(ids) > limit:
            cut, text = True, front_end.detokenize(ids[:limit]).rstrip("\ufffd")
    return _Said(text, "text" in modalities, cut)


def _text(message: ChatMessage, index: int) -> str:
    content = message.content or ""
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if part.type != "text" or part.text is None:
            problem = "this model reads text only: content parts must be of type text"
            param = f"messages.{index}.content.{at}.type"
            raise InvalidRequest(problem, param=param, code="unsupported_content")
    return "".join(part.text or "" for part in content)


def _speech(body: ChatBody, text: str) -> SpeechBody:
    """The speech request that a chat amounts to."""
    fields = {name: getattr(body, name) for name in SpeechOptions.__struct_fields__}
    audio = body.audio or ChatAudio()
    named = audio.format or fields["response_format"] or "wav"
    file_format: Format = "pcm" if named == "pcm16" else named
    fields |= {
        "input": text,
        "voice": audio.voice if audio.voice is not None else body.voice,
        "response_format": file_format,
        "stream": bool(body.stream),
        "stream_format": "sse" if body.stream else None,
    }
    return SpeechBody(**fields)


class _Chat:
    """One answer in OpenAI's shape."""

    def __init__(self, delivery: Delivery, body: ChatBody, said: _Said, chat_id: str) -> None:
        self.delivery, self.body, self.said = delivery, body, said
        self.id = chat_id
        self.audio_id = f"audio-{uuid.uuid4().hex}"
        self.created = int(time.time())

    async def whole(self) -> None:
        d = self.delivery
        whole = await d.whole()
        audio = {
            "id": self.audio_id,
            "data": base64.b64encode(whole.data).decode(),
            "expires_at": self.created + _KEPT_S,
            "transcript": self.said.text,
        }
        message = {"role": "assistant", "content": self.said.text if self.said.shown else None}
        choice = {
            "index": 0,
            "message": {**message, "refusal": None, "audio": audio},
            "logprobs": None,
            "finish_reason": self._reason(whole.finish_reason),
        }
        answer = {**self._head("chat.completion"), "choices": [choice], "usage": _usage(whole.usage)}
        content = await d.serving.offload(msgspec.json.encode, answer)
        await d.start(whole.stream, "application/json", {"Content-Length": str(len(content))})
        await d.body(content, more=False)

    async def stream(self) -> None:
        d = self.delivery
        async with d.stream() as stream:
            sound = d.sound(streaming=True)
            heard, seconds = False, 0.0
            async with aclosing(sound.pieces(stream)) as pieces, aclosing(with_waits(d, pieces)) as events:
                try:
                    async for piece in events:
                        if not d.started:
                            await d.start(stream, EVENTS)
                        if piece is None:
                            await d.body(b": wait\n\n", more=True)
                            continue
                        if not heard:
                            await self._opening()
                            heard = True
                        frames = round((sound.seconds - seconds) * sound.rate_hz)
                        seconds = sound.seconds
                        await self._audio({"data": base64.b64encode(piece).decode()}, frames)
                        d.ticket.sent(sound.seconds)
                    if not d.started:
                        await d.start(stream, EVENTS)
                    if not heard:
                        await self._opening()
                    used = d.end(sound, stream)
                    await self._closing(self._reason(sound.finish_reason), used)
                except HocketError as error:
                    if not d.started:
                        raise
                    log_cut(d.ticket, error)
                    said = {"error": {**error_object(error), "partial_audio": heard}}
                    return await d.body(_data(said), more=False)
        await d.body(b"data: [DONE]\n\n", more=False)

    async def _opening(self) -> None:
        """The text, and the name of the audio that follows."""
        if self.said.shown:
            delta = {"role": "assistant", "content": self.said.text}
            await self._chunk(delta, "text")
        audio = {"id": self.audio_id, "transcript": self.said.text}
        if self.body.audio_delta != "content":
            await self._chunk({"role": "assistant", "audio": audio}, "audio", self._metadata(0))

    async def _audio(self, audio: dict[str, Any], frames: int) -> None:
        if self.body.audio_delta == "content":
            delta = {"role": "assistant", "content": audio["data"]}
        else:
            delta = {"audio": audio}
        await self._chunk(delta, "audio", self._metadata(frames))

    async def _closing(self, reason: str, used: dict[str, Any]) -> None:
        delta: dict[str, Any] = {"audio": {"id": self.audio_id, "expires_at": self.created + _KEPT_S}}
        if self.body.audio_delta == "content":
            delta = {}
        await self._chunk(delta, "audio", {**self._metadata(0), "finish_reason": reason})
        options = self.body.stream_options
        if options is not None and options.include_usage:
            await self._put({**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(used)})

    def _metadata(self, frames: int) -> dict[str, Any]:
        plan = self.delivery.plan
        shown = "pcm16" if plan.format == "pcm" else plan.format
        metadata = {
            "format": shown,
            "sample_rate_hz": plan.rate_hz,
            "frame_count": frames,
            "channels": 1,
        }
        return {"audio_metadata": metadata}

    async def _chunk(self, delta: dict[str, Any], modality: str, more: dict[str, Any] | None = None) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}
        await self._put({**self._head("chat.completion.chunk"), "choices": [choice], "modality": modality})

    async def _put(self, chunk: dict[str, Any]) -> None:
        await self.delivery.body(_data(chunk), more=True)

    def _head(self, kind: str) -> dict[str, Any]:
        name = self.delivery.settings.name
        return {"id": self.id, "object": kind, "created": self.created, "model": name}

    def _reason(self, reason: str) -> str:
        return "length" if self.said.cut else reason


def _data(value: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _usage(used: dict[str, Any]) -> dict[str, Any]:
    details = used["input_token_details"]
    return {
        "prompt_tokens": used["input_tokens"],
        "completion_tokens": used["output_tokens"],
        "total_tokens": used["total_tokens"],
        "prompt_tokens_details": {"audio_tokens": details["audio_tokens"], "cached_tokens": 0},
        "completion_tokens_details": {"audio_tokens": used["output_tokens"], "reasoning_tokens": 0},
    }


_CONTENT: dict[str, Any] = {
    "application/json": {"schema": {"type": "object"}},
    "text/event-stream": {"schema": {"type": "string"}},
}
