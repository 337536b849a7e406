"""POST /v1/chat/completions: a model that understands answers; a speech model speaks the last message."""

from __future__ import annotations

import base64
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Send

from hocket.audio.encode import Format
from hocket.core import Chat, ModelInfo
from hocket.errors import HocketError, InvalidRequest
from hocket.server.body import read_json
from hocket.server.chat_answer import KEPT_S, ChatAnswer, event
from hocket.server.chat_body import ChatAudio, ChatBody, ChatMessage
from hocket.server.conversation import MEANINGLESS, Conversation, read_conversation
from hocket.server.delivery import EVENTS, Answer, Delivery, log_cut, with_waits
from hocket.server.errors import error_object
from hocket.server.leaving import while_client_stays
from hocket.server.openapi import ERRORS, body_schema
from hocket.server.requests import Ticket
from hocket.server.serving import Serving
from hocket.server.speech_body import Plan, SpeechBody, SpeechOptions, check_input, plan, sampling


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
        """Answer a chat, or speak its last message."""
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
                answer = await (_answered if info.answers else _spoken)(
                    body, info, serving, ticket, send, request.state.request_id
                )
                await (answer.stream() if body.stream else answer.whole())


async def _answered(
    body: ChatBody, info: ModelInfo, serving: Serving, ticket: Ticket, send: Send, chat_id: str
) -> Conversation:
    ignored = tuple(name for name in MEANINGLESS if getattr(body, name))
    for name in MEANINGLESS:
        setattr(body, name, None)
    chat = await read_conversation(body, info, serving)
    wanted = await _planned(body, "", info, serving, chat)
    wanted.ignored += ignored
    stages = body.sampling_params_list or []
    if len(stages) > 1:
        wanted.request.sampling = sampling(stages[1])
        wanted.request.max_frames = wanted.request.max_frames or stages[1].max_tokens
    return Conversation(Delivery(serving, ticket, info, wanted, send), body, chat, info, chat_id)


async def _spoken(
    body: ChatBody, info: ModelInfo, serving: Serving, ticket: Ticket, send: Send, chat_id: str
) -> _Spoken:
    said = await _said(body, serving)
    wanted = await _planned(body, said.text, info, serving)
    return _Spoken(Delivery(serving, ticket, info, wanted, send), body, said, chat_id)


async def _planned(
    body: ChatBody, text: str, info: ModelInfo, serving: Serving, chat: Chat | None = None
) -> Plan:
    try:
        return await plan(_speech(body, text), "", info, serving, chat)
    except InvalidRequest as error:
        if error.param == "voice" and body.audio is not None and body.audio.voice is not None:
            error.param = "audio.voice"
        raise


async def _said(body: ChatBody, serving: Serving) -> _Said:
    """What the answer says: the last user message, as far as max_tokens and stop allow."""
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
    ends = [at for stop in body.stops if (at := text.find(stop)) >= 0]
    if ends:
        cut, text = False, text[: min(ends)]
        if not text.strip():
            raise InvalidRequest("'stop' leaves nothing of the message to speak", param="stop")
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


class _Spoken(ChatAnswer):
    """What a speech model says: a text that is known."""

    def __init__(self, delivery: Delivery, body: ChatBody, said: _Said, chat_id: str) -> None:
        super().__init__(delivery, body, chat_id)
        self.said = said

    async def whole(self) -> None:
        d = self.delivery
        whole = await d.whole()
        audio = {
            "id": self.audio_id,
            "data": base64.b64encode(whole.data).decode(),
            "expires_at": self.created + KEPT_S,
            "transcript": self.said.text,
        }
        message = {"role": "assistant", "content": self.said.text if self.said.shown else None}
        choice = {
            "index": 0,
            "message": {**message, "refusal": None, "audio": audio},
            "logprobs": None,
            "finish_reason": self._reason(whole.finish_reason),
        }
        await self.send_whole(whole.stream, {"choices": [choice], "usage": _usage(whole.usage)})

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
                        await self.send_sound(base64.b64encode(piece).decode(), frames)
                        d.ticket.sent(sound.seconds)
                    if not d.started:
                        await d.start(stream, EVENTS)
                    if not heard:
                        await self._opening()
                    used = d.end(sound.finish_reason, stream)
                    await self.send_sound_end(self._reason(sound.finish_reason))
                    await self.send_usage(_usage(used))
                except HocketError as error:
                    if not d.started:
                        raise
                    log_cut(d.ticket, error)
                    said = {"error": {**error_object(error), "partial_audio": heard}}
                    return await d.body(event(said), more=False)
        await d.body(b"data: [DONE]\n\n", more=False)

    async def _opening(self) -> None:
        """The text, and the name of the audio that follows."""
        if self.said.shown:
            delta = {"role": "assistant", "content": self.said.text}
            await self.send_chunk(delta, "text")
        audio = {"id": self.audio_id, "transcript": self.said.text}
        if self.body.audio_delta != "content":
            await self.send_chunk({"role": "assistant", "audio": audio}, "audio", self.metadata(0))

    def _reason(self, reason: str) -> str:
        return "length" if self.said.cut else reason


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
