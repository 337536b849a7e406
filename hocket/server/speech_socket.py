"""WS /v1/audio/speech/stream: text in as it is written, sound out as it is made.

    reader                 starter                    speaker
    messages ──texts──▶ units, started ahead ──▶ heard in order

One connection speaks many utterances, one after the other. A unit is a sentence, a clause, or all of an
utterance's text; each is a request of its own, and at most two are in the engine. With `live` the utterance
is one request whose text goes on growing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import msgspec
from anyio.abc import ObjectSendStream, TaskGroup
from fastapi import APIRouter
from msgspec import Meta, Raw, Struct
from starlette.websockets import WebSocket

from hocket.core import ModelInfo
from hocket.errors import HocketError, InvalidRequest
from hocket.server.body import decoded
from hocket.server.requests import Ticket
from hocket.server.serving import Serving
from hocket.server.sockets import TEXT_BYTES, Socket, error_message, opened, read
from hocket.server.speech_body import Plan, SpeechBody, SpeechOptions, check_input, plan
from hocket.server.utterance import Utterance, Whole, counted, freed
from hocket.text import Cutter

if TYPE_CHECKING:
    from hocket.engine.stream import Stream

log = logging.getLogger("hocket.server")

_IN_FLIGHT = 2
_UTTERANCE_CHARS = 256 << 10
_UTTERANCES = 16  # that may wait for their turn on one connection
_CANCELLED = "cancelled"

Granularity = Literal["none", "sentence", "clause", "live"]


class SessionConfig(SpeechOptions, kw_only=True):
    """session.config: how to speak what follows."""

    stream_audio: Annotated[bool | None, Meta(description="Chunks, not one file for each unit.")] = None
    split_granularity: Granularity | None = None


class _Message(Struct):
    type: str
    text: str | None = None
    session: Raw = Raw(b"null")


def router(serving: Serving) -> APIRouter:
    """The routes of this resource."""
    router = APIRouter()

    @router.websocket("/v1/audio/speech/stream")
    async def stream(websocket: WebSocket) -> None:
        async with opened(serving, websocket) as socket:
            if socket is not None:
                await _Session(serving, socket).run()

    return router


@dataclass(slots=True)
class _Mode:
    """An accepted configuration."""

    info: ModelInfo
    plan: Plan  # for any text
    stream_audio: bool
    granularity: Granularity


class _Session:
    """One connection."""

    def __init__(self, serving: Serving, socket: Socket) -> None:
        self.serving = serving
        self.socket = socket
        self.mode: _Mode | None = None
        self.utterances: list[_Speaking] = []  # not yet over; the last may still take text
        self.count = 0
        self.quiet_since = time.monotonic()

    async def run(self) -> None:
        async with anyio.create_task_group() as self.group:
            await self._read()
            self.group.cancel_scope.cancel()

    async def _read(self) -> None:
        while (message := await self._next()) is not None:
            try:
                if not await self._handle(message):
                    return
            except HocketError as error:
                await self.socket.send(error_message(error))
                if self.mode is None:
                    return await self.socket.close(1008)
        # The client has gone, or was told to.

    async def _next(self) -> str | bytes | None:
        """The next message; None when there will be none."""
        settings = self.serving.settings
        self.quiet_since = time.monotonic()
        while True:
            limit_s = settings.ws_config_s if self.mode is None else settings.ws_idle_s
            with anyio.move_on_after(self.quiet_since + limit_s - time.monotonic()):
                return await self.socket.receive()
            if any(utterance.busy for utterance in self.utterances):
                self.quiet_since = time.monotonic()  # sound is under way
                continue
            if self.mode is None:
                problem = f"no session.config came within {limit_s:g} s"
            else:
                problem = f"no message came for {limit_s:g} s, and no sound is under way"
            await self.socket.send(error_message(InvalidRequest(problem, code="idle_timeout")))
            await self.socket.close(1008 if self.mode is None else 1000)
            return None

    async def _handle(self, raw: str | bytes) -> bool:
        """Do what a message says. False: the connection is to end."""
        message = await read(raw, _Message, self.serving)
        if message.type == "session.close":
            await self.socket.close(1000)
            return False
        if message.type == "session.config":
            await self._configure(raw, message)
            return True
        if self.mode is None:
            raise InvalidRequest("the first message must be session.config", param="type", code="no_config")
        if message.type == "input.text":
            return await self._text(message)
        if message.type == "input.done":
            self._open().close()
        elif message.type == "input.cancel":
            for utterance in self.utterances:
                utterance.cancel()
        else:
            known = "session.config, input.text, input.done, input.cancel, session.close"
            problem = f"type must be one of {known}; got '{message.type[:40]}'"
            raise InvalidRequest(problem, param="type", code="unknown_message")
        return True

    async def _configure(self, raw: str | bytes, message: _Message) -> None:
        if self.utterances:
            problem = "an utterance is under way; send session.config between utterances"
            raise InvalidRequest(problem, code="utterance_open")
        info = self.serving.check_open()
        nested = bytes(message.session)
        assert isinstance(raw, str)
        config = await decoded(raw.encode() if nested == b"null" else nested, SessionConfig, self.serving)
        streams, granularity = bool(config.stream_audio), config.split_granularity or "none"
        body = msgspec.convert(_fields(config), SpeechBody)
        body.response_format = config.response_format or ("pcm" if streams else "wav")
        body.stream, body.stream_format = streams, "audio" if streams else None
        planned = await plan(body, "", info, self.serving)
        if granularity == "live":
            if not info.streams_text:
                problem = "live needs a model that reads text while it speaks; use sentence or clause"
                raise InvalidRequest(problem, param="split_granularity", code="unsupported_field")
            if planned.request.text_first:
                problem = "non_streaming_mode puts all text before the first sound; live needs false"
                raise InvalidRequest(problem, param="non_streaming_mode")
        self.mode = _Mode(info, planned, streams, granularity)
        await self.socket.send(
            {
                "type": "session.configured",
                "session_id": self.socket.id,
                "response_format": planned.format,
                "sample_rate": planned.rate_hz,
                "stream_audio": streams,
                "split_granularity": granularity,
            }
        )

    async def _text(self, message: _Message) -> bool:
        text = message.text
        if text is None:
            raise InvalidRequest("'text' is required: a string", param="text", code="missing_field")
        if len(text.encode()) > TEXT_BYTES:
            problem = f"'text' is over {TEXT_BYTES >> 10} KiB; send it in pieces"
            error = InvalidRequest(problem, param="text", code="message_too_large")
            await self.socket.send(error_message(error))
            await self.socket.close(1009)
            return False
        if "\0" in text:
            raise InvalidRequest("'text' holds a NUL character; remove it", param="text")
        self._open().add(text)
        return True

    def _open(self) -> _Speaking:
        """The utterance that takes text: the last, or a new one."""
        if self.utterances and not self.utterances[-1].closed:
            return self.utterances[-1]
        if len(self.utterances) >= _UTTERANCES:
            problem = f"{_UTTERANCES} utterances are waiting to be spoken; wait for session.done"
            raise InvalidRequest(problem, code="too_many_utterances")
        self.serving.check_open()
        assert self.mode is not None
        before = self.utterances[-1].over if self.utterances else None
        utterance = _Speaking(self, self.mode, self.count, before)
        self.count += 1
        self.utterances.append(utterance)
        self.group.start_soon(utterance.run)
        return utterance

    def ended(self, utterance: _Speaking) -> None:
        self.utterances.remove(utterance)
        self.quiet_since = time.monotonic()


def _fields(config: SessionConfig) -> dict[str, Any]:
    """The fields of a speech request. `input` is any text: it is replaced for each unit."""
    return {"input": "a", **{name: getattr(config, name) for name in SpeechOptions.__struct_fields__}}


class _Speaking:
    """One utterance: takes text until it is closed, and speaks it when it is its turn."""

    def __init__(self, session: _Session, mode: _Mode, index: int, before: anyio.Event | None) -> None:
        self.session, self.mode, self.index = session, mode, index
        self.socket = session.socket
        self.over = anyio.Event()
        self.closed = False
        self._before = before
        self._chars = 0
        self._cutter = Cutter(clauses=mode.granularity == "clause")
        self._whole: list[str] = []
        self._send, self._texts = anyio.create_memory_object_stream[str](float("inf"))
        self._scope = anyio.CancelScope()
        self._cancelled = False
        self._turns = anyio.Semaphore(_IN_FLIGHT)
        self._units: list[_Unit] = []  # started and not yet over
        self._count = 0
        self._heard: _Unit | None = None  # announced by audio.start, and not yet done

    @property
    def busy(self) -> bool:
        """Whether sound is under way. A live one counts only while it gives some: it may wait for text."""
        return self.closed or (self.mode.granularity != "live" and bool(self._units))

    # --- text in ----------------------------------------------------------------------------

    def add(self, text: str) -> None:
        if self._chars + len(text) > _UTTERANCE_CHARS:
            problem = f"an utterance may have {_UTTERANCE_CHARS} characters; send input.done before more"
            raise InvalidRequest(problem, param="text", code="input_too_long")
        self._chars += len(text)
        if self.mode.granularity == "none":
            self._whole.append(text)
        elif self.mode.granularity == "live":
            self._give(text)
        else:
            for unit in self._cutter.add(text):
                self._give(unit)

    def close(self) -> None:
        self.closed = True
        rest = ["".join(self._whole)] if self.mode.granularity == "none" else self._cutter.close()
        for unit in rest:
            self._give(unit)
        self._send.close()

    def cancel(self) -> None:
        self.closed = self._cancelled = True
        self._send.close()
        self._scope.cancel()

    def _give(self, text: str) -> None:
        if text:
            self._send.send_nowait(text)

    # --- sound out --------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            with self._scope:
                if self._before is not None:
                    await self._before.wait()
                await self._speak()
            if self._cancelled:
                if self._before is not None:
                    await self._before.wait()
                if self._heard is not None:
                    await self._done(self._heard, error=False, cancelled=True)
            await self.socket.send(
                {
                    "type": "session.done",
                    "utterance_index": self.index,
                    "total_sentences": self._count,
                }
                | ({"cancelled": True} if self._cancelled else {})
            )
        finally:
            self._send.close()
            self._texts.close()
            self.session.ended(self)
            self.over.set()

    async def _speak(self) -> None:
        ready, started = anyio.create_memory_object_stream["_Unit"](float("inf"))
        start = self._start_live if self.mode.granularity == "live" else self._start_units
        try:
            async with anyio.create_task_group() as group, started:
                group.start_soon(start, ready, group)
                async for unit in started:
                    await self._hear(unit)
                    self._units.remove(unit)
                    await unit.aclose()
                    self._turns.release()
            if not self._count:
                error = InvalidRequest(
                    "the text holds nothing to say: no letter and no digit", param="text", code="empty_input"
                )
                await self.socket.send(error_message(error))
        finally:
            with anyio.CancelScope(shield=True):
                for unit in self._units:
                    await unit.aclose()

    async def _start_units(self, ready: ObjectSendStream[_Unit], group: TaskGroup) -> None:
        async with ready:
            async for text in self._texts:
                if not any(character.isalnum() for character in text):
                    continue
                await self._turns.acquire()
                unit = self._unit(text)
                await ready.send(unit)
                group.start_soon(unit.start)

    async def _start_live(self, ready: ObjectSendStream[_Unit], group: TaskGroup) -> None:
        """Start as soon as the text so far makes a beginning; then pass on what comes."""
        async with ready:
            unit: _Unit | None = None
            text = ""
            async for piece in self._texts:
                if unit is not None:
                    await unit.add(piece)
                    continue
                text += piece
                if any(character.isalnum() for character in text):
                    made = self._unit(text)
                    if await made.start_live():
                        unit = made
                        await ready.send(unit)
                    else:  # not a whole word yet
                        self._units.remove(made)
                        self._count -= 1
            if unit is not None:
                await unit.add(None)
            elif any(character.isalnum() for character in text):
                unit = self._unit(text)
                unit.plan.request.text_first = False
                await ready.send(unit)
                await unit.start()

    def _unit(self, text: str) -> _Unit:
        unit = _Unit(self, self._count, text)
        self._count += 1
        self._units.append(unit)
        return unit

    async def _hear(self, unit: _Unit) -> None:
        await self.socket.send(
            {
                "type": "audio.start",
                "id": unit.ticket.id,
                "utterance_index": self.index,
                "sentence_index": unit.index,
                "sentence_text": unit.text,
                "format": unit.plan.format,
                "sample_rate": unit.plan.rate_hz,
            }
        )
        self._heard = unit
        try:
            async with aclosing(unit.pieces()) as pieces:
                async for piece in pieces:
                    unit.sent += len(piece)
                    self.session.quiet_since = time.monotonic()
                    await self.socket.send(piece)
        except HocketError as error:
            said = error_message(error)
            if unit.sent:
                said |= {"partial_audio": True, "action": "discard"}
            await self.socket.send(said)
            await self._done(unit, error=True)
        else:
            await self._done(unit, error=False)

    async def _done(self, unit: _Unit, *, error: bool, cancelled: bool = False) -> None:
        self._heard = None
        reason = None if error else _CANCELLED if cancelled else unit.finish_reason
        await self.socket.send(
            {
                "type": "audio.done",
                "id": unit.ticket.id,
                "utterance_index": self.index,
                "sentence_index": unit.index,
                "total_bytes": unit.sent,
                "error": error,
                "finish_reason": reason,
            }
            | ({"cancelled": True} if cancelled else {})
        )


@dataclass(slots=True, eq=False)
class _Unit:
    """One request to the engine. It is started ahead of its turn, and closed when it has been heard."""

    owner: _Speaking
    index: int
    text: str
    ticket: Ticket = field(init=False)
    plan: Plan = field(init=False)
    sent: int = 0
    finish_reason: str | None = None
    _utterance: Utterance = field(init=False)
    _stream: Stream | None = None
    _whole: Whole | None = None
    _error: HocketError | None = None
    _counted: bool = False
    _started: anyio.Event = field(default_factory=anyio.Event)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        mode, session = self.owner.mode, self.owner.session
        base = mode.plan
        request = replace(base.request, text=self.text, sampling=replace(base.request.sampling))
        self.plan = replace(base, request=request, silence=False)
        self.ticket = Ticket("speech_stream", group=session.socket.id)
        name = f"{session.socket.id}-{self.owner.index}-{self.index}"
        self._stack.enter_context(session.serving.requests.open(self.ticket, name))
        self._utterance = Utterance(session.serving, self.ticket, mode.info, self.plan)

    async def start(self) -> None:
        """Give the request to the engine. What goes wrong is told when it is the unit's turn."""
        serving = self.owner.session.serving
        try:
            check_input(self.text, serving.settings)
            if self.owner.mode.stream_audio:
                self._stream = await serving.engine.submit(self.plan.request)
            else:
                self._whole = await self._utterance.whole()
        except HocketError as error:
            self._error = error
        finally:
            self._started.set()

    async def start_live(self) -> bool:
        """Start with the beginning of a text. False if it is not yet enough."""
        serving = self.owner.session.serving
        try:
            self._stream = await serving.engine.submit_live(self.plan.request)
        except InvalidRequest as error:
            if error.code == "empty_input":
                self._stack.close()
                return False
            self._error = error
        except HocketError as error:
            self._error = error
        self._started.set()
        return True

    async def add(self, text: str | None) -> None:
        """More of the text; None: it is complete."""
        if self._stream is None or self._stream.over:
            return
        await (self._stream.close_text() if text is None else self._stream.add_text(text))

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The file: in chunks as they are made, or whole."""
        serving = self.owner.session.serving
        self._counted = True
        with counted(serving, self.ticket):
            await self._started.wait()
            if self._error is not None:
                raise self._error
            if self._whole is not None:
                self.finish_reason = self._whole.finish_reason
                yield self._whole.data
                return
            assert self._stream is not None
            streams = self.owner.mode.stream_audio
            sound = self._utterance.sound(streaming=streams)
            held: list[bytes] = []
            async with freed(serving, self._stream), aclosing(sound.pieces(self._stream)) as pieces:
                async for piece in pieces:
                    if streams:
                        yield piece
                        self.ticket.sent(sound.seconds)
                    else:
                        held.append(piece)
            if held:
                yield b"".join(held)
                self.ticket.sent(sound.seconds)
            self._utterance.end(sound.finish_reason, self._stream)
            self.finish_reason = sound.finish_reason

    async def aclose(self) -> None:
        """Free what the unit holds in the engine."""
        if self._stream is not None:
            await self._stream.aclose()
        self._stack.close()
        if not self._counted:  # cancelled before its turn
            self.ticket.outcome = "aborted"
            self.owner.session.serving.metrics.ended(self.ticket)
        log.info("%s %s", self.ticket.id, self.ticket)
