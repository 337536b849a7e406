"""WS /v1/realtime: the part of OpenAI's realtime protocol that is speech output.

A session takes text items and speaks them. It has no ears: audio input is answered with an error.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from contextlib import aclosing
from typing import Any, Literal

import anyio
from fastapi import APIRouter
from msgspec import UNSET, Struct, UnsetType
from starlette.websockets import WebSocket

from hocket.core import ModelInfo
from hocket.errors import HocketError, InvalidRequest
from hocket.server.errors import error_object
from hocket.server.names import check_model
from hocket.server.requests import Ticket
from hocket.server.serving import Serving
from hocket.server.sockets import Socket, opened, read
from hocket.server.speech_body import Plan, SpeechBody, VoiceRef, plan
from hocket.server.utterance import Utterance, counted

log = logging.getLogger("hocket.server")

_RATE_HZ: Literal[24000] = 24000
_ITEMS = 256  # of a conversation; older ones are forgotten
_SEGMENT = 48_000  # bytes of sound in one message, at most: a second


class AudioFormat(Struct):
    type: str | None = None
    rate: int | None = None


class AudioOutput(Struct):
    format: AudioFormat | None = None
    voice: str | VoiceRef | None = None
    speed: float | None = None


class Audio(Struct):
    output: AudioOutput | None = None


class Settings(Struct):
    """What session.update changes, and response.create for one response."""

    model: str | None = None
    output_modalities: list[str] | None = None
    audio: Audio | None = None
    instructions: str | None = None


class Part(Struct):
    type: str
    text: str | None = None


class Item(Struct):
    type: str = "message"
    role: str = "user"
    content: list[Part] | None = None


class Wanted(Settings):
    input: list[Item] | None = None


class Message(Struct):
    type: str
    event_id: str | None = None
    session: Settings | None = None
    response: Wanted | None = None
    response_id: str | None = None
    item: Item | UnsetType = UNSET


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter()

    @router.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        async with opened(serving, websocket) as socket:
            if socket is not None:
                await _Session(serving, socket, websocket.query_params.get("model")).run()

    return router


class _Session:
    """One connection; it speaks one response at a time."""

    def __init__(self, serving: Serving, socket: Socket, model: str | None) -> None:
        self.serving, self.socket, self.model = serving, socket, model
        self.voice: str | VoiceRef | None = None
        self.speed: float | None = None
        self.instructions: str | None = None
        self.items: list[str] = []  # texts of user items that no response has spoken
        self.response: _Response | None = None
        self.quiet_since = time.monotonic()

    async def run(self) -> None:
        try:
            check_model(self.model, self.serving.settings)
        except HocketError as error:
            await self._error(error, None)
            return await self.socket.close(1008)
        await self._send("session.created", session=self._shown())
        async with anyio.create_task_group() as self.group:
            while (raw := await self._next()) is not None:
                event_id = None
                try:
                    message = await read(raw, Message, self.serving)
                    event_id = message.event_id
                    await self._handle(message)
                except HocketError as error:
                    await self._error(error, event_id)
            self.group.cancel_scope.cancel()

    async def _next(self) -> str | bytes | None:
        limit_s = self.serving.settings.ws_idle_s
        self.quiet_since = time.monotonic()
        while True:
            with anyio.move_on_after(self.quiet_since + limit_s - time.monotonic()):
                return await self.socket.receive()
            if self.response is not None:
                self.quiet_since = time.monotonic()
                continue
            problem = f"no message came for {limit_s:g} s, and no response is under way"
            await self._error(InvalidRequest(problem, code="idle_timeout"), None)
            await self.socket.close(1000)
            return None

    async def _handle(self, message: Message) -> None:
        if message.type == "session.update":
            await self._update(message.session or Settings())
            await self._send("session.updated", session=self._shown())
        elif message.type == "conversation.item.create":
            item = message.item if message.item is not UNSET else Item()
            self.items = [*self.items, _text_of([item], "item")][-_ITEMS:]
            shown = {"id": _id("item"), "object": "realtime.item", "type": "message", "role": item.role}
            shown["status"] = "completed"
            await self._send("conversation.item.created", previous_item_id=None, item=shown)
        elif message.type == "response.create":
            await self._create(message.response or Wanted())
        elif message.type == "response.cancel":
            if self.response is None:
                raise InvalidRequest("no response is under way", code="response_cancel_not_active")
            self.response.cancel()
        elif message.type.startswith("input_audio_buffer."):
            problem = "this model hears nothing: send text as input_text"
            raise InvalidRequest(problem, param="type", code="unsupported_content")
        else:
            problem = f"messages of type '{message.type[:60]}' are not understood here"
            raise InvalidRequest(problem, param="type", code="unknown_message")

    async def _update(self, wanted: Settings) -> None:
        """Take over what is given; nothing of it if anything is wrong."""
        check_model(wanted.model, self.serving.settings)
        if wanted.output_modalities is not None and "audio" not in wanted.output_modalities:
            problem = "'output_modalities' must hold audio: this model answers with speech"
            raise InvalidRequest(problem, param="session.output_modalities", code="unsupported_modality")
        output = (wanted.audio and wanted.audio.output) or AudioOutput()
        form = output.format or AudioFormat()
        if form.type not in (None, "audio/pcm") or form.rate not in (None, _RATE_HZ):
            problem = f"'audio.output.format' must be audio/pcm at {_RATE_HZ} Hz"
            raise InvalidRequest(problem, param="session.audio.output.format", code="unsupported_format")
        voice = output.voice if output.voice is not None else self.voice
        speed = output.speed if output.speed is not None else self.speed
        instructions = wanted.instructions if wanted.instructions is not None else self.instructions
        await self._plan("a", voice, speed, instructions)
        self.voice, self.speed, self.instructions = voice, speed, instructions

    async def _plan(
        self, text: str, voice: str | VoiceRef | None, speed: float | None, instructions: str | None
    ) -> tuple[ModelInfo, Plan]:
        info = self.serving.check_open()
        if speed is not None and not 0.25 <= speed <= 4:
            raise InvalidRequest("'speed' must be from 0.25 to 4", param="session.audio.output.speed")
        body = SpeechBody(
            input=text,
            voice=voice,
            speed=speed,
            # An empty string, or one for a model that reads none, asks for nothing.
            instructions=(instructions or None) if info.instructions else None,
            response_format="pcm",
            sample_rate=_RATE_HZ,
            stream=True,
            stream_format="audio",
        )
        return info, await plan(body, "", info, self.serving)

    async def _create(self, wanted: Wanted) -> None:
        if self.response is not None:
            problem = "a response is under way; wait for response.done or cancel it"
            raise InvalidRequest(problem, code="conversation_already_has_active_response")
        text = "\n".join(self.items) if wanted.input is None else _text_of(wanted.input, "response.input")
        output = (wanted.audio and wanted.audio.output) or AudioOutput()
        voice = output.voice if output.voice is not None else self.voice
        speed = output.speed if output.speed is not None else self.speed
        instructions = wanted.instructions if wanted.instructions is not None else self.instructions
        self.serving.check_room()
        info, planned = await self._plan(text, voice, speed, instructions)
        if wanted.input is None:
            self.items = []
        self.response = _Response(self, info, planned, text)
        self.group.start_soon(self.response.run)

    def _shown(self) -> dict[str, Any]:
        voice = self.voice.id if isinstance(self.voice, VoiceRef) else self.voice
        form = {"type": "audio/pcm", "rate": _RATE_HZ}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.socket.id,
            "model": self.serving.settings.name,
            "output_modalities": ["audio"],
            "instructions": self.instructions or "",
            "audio": {"output": {"format": form, "voice": voice, "speed": self.speed or 1.0}},
        }

    async def _send(self, kind: str, **fields: Any) -> None:
        await self.socket.send({"type": kind, "event_id": _id("event"), **fields})

    async def _error(self, error: HocketError, event_id: str | None) -> None:
        await self._send("error", error={**error_object(error), "event_id": event_id})


class _Response:
    """One response: the sound of one text."""

    def __init__(self, session: _Session, info: ModelInfo, planned: Plan, text: str) -> None:
        self.session, self.info, self.plan, self.text = session, info, planned, text
        self.id, self.item_id = _id("resp"), _id("item")
        self._scope = anyio.CancelScope()

    def cancel(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        session = self.session
        await session._send("response.created", response=self._shown("in_progress"))
        status, details = "cancelled", None
        try:
            with self._scope:
                status, details = await self._speak()
            if self._scope.cancelled_caught:
                status = "cancelled"
        finally:
            session.response = None
            session.quiet_since = time.monotonic()
        done = {**self._shown(status), "status_details": details}
        await session._send("response.done", response=done)

    async def _speak(self) -> tuple[str, dict[str, Any] | None]:
        session, serving = self.session, self.session.serving
        ticket = Ticket("realtime", group=session.socket.id)
        where = {"response_id": self.id, "item_id": self.item_id, "output_index": 0, "content_index": 0}
        try:
            with counted(serving, ticket), serving.requests.open(ticket, self.id):
                utterance = Utterance(serving, ticket, self.info, self.plan)
                async with utterance.stream() as stream:
                    sound = utterance.sound(streaming=True)
                    async with aclosing(sound.pieces(stream)) as pieces:
                        async for piece in pieces:
                            for start in range(0, len(piece), _SEGMENT):
                                delta = base64.b64encode(piece[start : start + _SEGMENT]).decode()
                                await session._send("response.output_audio.delta", **where, delta=delta)
                            ticket.sent(sound.seconds)
                    utterance.end(sound.finish_reason, stream)
        except HocketError as error:
            await session._error(error, None)
            return "failed", {"type": "failed", "error": error_object(error)}
        finally:
            log.info("%s %s", self.id, ticket)
        transcript = {"transcript": self.text}
        await session._send("response.output_audio_transcript.done", **where, **transcript)
        await session._send("response.output_audio.done", **where)
        if sound.finish_reason == "length":
            return "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}
        return "completed", None

    def _shown(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "object": "realtime.response", "status": status, "output": []}


def _text_of(items: list[Item], param: str) -> str:
    texts = []
    for item in items:
        for part in item.content or []:
            if part.type not in ("input_text", "text") or part.text is None:
                problem = "this model reads text only: content must be of type input_text"
                raise InvalidRequest(problem, param=f"{param}.content", code="unsupported_content")
            texts.append(part.text)
    return "\n".join(texts)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
