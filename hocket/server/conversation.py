"""A chat with a model that understands: what it is told, shown and played, and what it answers."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hocket.audio.decode import decode
from hocket.core import Chat, Media, Message, ModelInfo
from hocket.engine.stream import Audio, Stream, Text
from hocket.errors import HocketError, InvalidRequest, clip
from hocket.server.chat_answer import KEPT_S, ChatAnswer, event
from hocket.server.chat_body import ChatBody, ChatMessage, ContentPart, MediaUrl
from hocket.server.delivery import EVENTS, Delivery, log_cut, with_waits
from hocket.server.errors import error_object
from hocket.server.serving import Serving
from hocket.server.speech_body import sampling
from hocket.video import decode_film, decode_image

_LONGEST_S = 3600.0  # of a recording
_KINDS = {"image_url": "image", "audio_url": "audio", "video_url": "video", "input_audio": "audio"}

# Fields of a speech request that mean nothing to a model that answers in its own words and voices.
MEANINGLESS = (
    "instructions", "language", "task_type", "ref_audio", "ref_text", "references", "x_vector_only_mode",
    "speaker_embedding", "non_streaming_mode",
)  # fmt: skip


# --- reading -----------------------------------------------------------------------------------


async def read_conversation(body: ChatBody, info: ModelInfo, serving: Serving) -> Chat:
    """The chat in `body`, its media loaded. Raises InvalidRequest naming the message and the part."""
    if body.n is not None and body.n != 1:
        raise InvalidRequest(f"'n' must be 1; got {body.n}", param="n")
    if not body.messages:
        raise InvalidRequest("'messages' is empty", param="messages")
    options = body.mm_processor_kwargs
    heard = bool(options and options.use_audio_in_video)
    messages = [
        Message(
            role=message.role,
            parts=await _parts(message, f"messages.{index}.content", heard, info, serving),
            tool_calls=message.tool_calls or (),
        )
        for index, message in enumerate(body.messages)
    ]
    stages = body.sampling_params_list or []
    own = stages[0] if stages else None
    drawing = sampling(body)
    if own is not None:
        given = sampling(own)
        for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
            if getattr(drawing, name) is None:
                setattr(drawing, name, getattr(given, name))
    return Chat(
        messages=messages,
        modalities=body.modalities,
        sampling=drawing,
        max_tokens=body.max_completion_tokens or body.max_tokens or (own.max_tokens if own else None),
        stops=body.stops,
        tools=body.tools or (),
        audio_in_video=heard,
    )


async def _parts(
    message: ChatMessage, param: str, heard: bool, info: ModelInfo, serving: Serving
) -> list[str | Media]:
    content = message.content or ""
    if isinstance(content, str):
        _check_text(content, param, serving)
        return [content]
    return [await _part(part, f"{param}.{at}", heard, info, serving) for at, part in enumerate(content)]


async def _part(part: ContentPart, param: str, heard: bool, info: ModelInfo, serving: Serving) -> str | Media:
    if part.type == "text" and part.text is not None:
        _check_text(part.text, f"{param}.text", serving)
        return part.text
    kind = _KINDS.get(part.type)
    if kind is None or kind not in info.reads:
        known = ", ".join(["text", *(name for name, kind in _KINDS.items() if kind in info.reads)])
        raise InvalidRequest(
            f"'{param}.type' is {clip(part.type)!r}; this model reads {known}",
            param=f"{param}.type",
            code="unsupported_content",
        )
    given = getattr(part, part.type)
    if given is None:
        raise InvalidRequest(f"'{param}.{part.type}' is required", param=f"{param}.{part.type}")
    where = f"{param}.{part.type}"
    if part.input_audio is not None and part.type == "input_audio":
        where += ".data"
        sound = part.input_audio.data
        # OpenAI's clients send bare base64 and its format apart; some send a whole data URL.
        locator = (
            sound if sound.startswith("data:") else f"data:audio/{part.input_audio.format};base64,{sound}"
        )
    else:
        locator = given.url if isinstance(given, MediaUrl) else given
    data = await serving.media.read(locator, param=where, offload=serving.offload, kind=kind)
    media: Media = await serving.offload(_decoded, data, kind, where, heard)
    return media


def _check_text(text: str, param: str, serving: Serving) -> None:
    limit = serving.settings.max_input_chars
    if len(text) > limit:
        message = f"'{param}' has {len(text)} characters; at most {limit} are accepted"
        raise InvalidRequest(message, param=param, code="input_too_long")
    if "\0" in text:
        raise InvalidRequest(f"'{param}' holds a NUL character; remove it", param=param)


def _decoded(data: bytes, kind: str, param: str, heard: bool) -> Media:
    if kind == "image":
        return Media(kind="image", data=decode_image(data, param=param))
    if kind == "audio":
        return _sound(data, param)
    frames, rate = decode_film(data, param=param)
    return Media(kind="video", data=frames, rate_hz=rate, sound=_sound(data, param) if heard else None)


def _sound(data: bytes, param: str) -> Media:
    samples, rate = decode(data, param=param, max_seconds=_LONGEST_S)
    return Media(kind="audio", data=samples, rate_hz=rate)


# --- tools -------------------------------------------------------------------------------------

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPENING = "<tool_call>"


@dataclass(slots=True)
class ToolCalls:
    """Finds calls of tools in a text that is still being written."""

    wanted: bool  # else all is text
    calls: list[dict[str, Any]] = field(default_factory=list)
    _held: str = ""  # may be the beginning of a call

    def add(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """-> text that belongs to no call, and calls that are complete. What is no call is text."""
        if not self.wanted:
            return text, []
        self._held += text
        shown, new = "", list[dict[str, Any]]()
        while (match := _CALL.search(self._held)) is not None:
            call = _call(match[1], len(self.calls))
            shown += self._held[: match.start()] + ("" if call else match[0])
            self._held = self._held[match.end() :]
            if call:
                self.calls.append(call)
                new.append(call)
        safe = len(self._held) if last else _safe(self._held)
        shown, self._held = shown + self._held[:safe], self._held[safe:]
        return shown, new


def _safe(text: str) -> int:
    """Characters before what may begin a call, blanks before it included."""
    at = text.find(_OPENING)
    return len(text[: at if at >= 0 else _before(text, _OPENING)].rstrip())


def _before(text: str, mark: str) -> int:
    """Characters before an end of `text` that may be the beginning of `mark`."""
    sizes = range(len(mark) - 1, 0, -1)
    return next((len(text) - n for n in sizes if text.endswith(mark[:n])), len(text))


def _call(content: str, index: int) -> dict[str, Any] | None:
    """A call in OpenAI's shape, or None where the model wrote something else between the marks."""
    try:
        said = json.loads(content)
        name, arguments = said["name"], said.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(name, str):
        return None
    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": given}
    return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(slots=True)
class Thoughts:
    """Parts an answer that is still being written into thoughts and what is said after them."""

    inside: bool  # it begins with thoughts; else those begin with <think>, if there are any
    _held: str = ""
    _begun: bool = False  # it is known whether there are thoughts
    _ended: bool = False  # they are over, and nothing was said yet: line feeds between are neither's

    def add(self, text: str, *, last: bool) -> tuple[str, str]:
        """-> thoughts, what is said"""
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if not last and "<think>".startswith(start[:7]) and len(start) < 7:
                return "", ""
            self._begun = True
            if start.startswith("<think>"):
                self.inside, self._held = True, start[7:]
        thought, end, said = self._held.partition("</think>") if self.inside else ("", "", self._held)
        if end:
            self.inside, self._ended = False, True
        if not self.inside:
            said = said.lstrip("\n") if self._ended else said
            self._ended, self._held = self._ended and not said, ""
            return thought, said
        safe = len(thought) if last else _before(thought, "</think>")
        thought, self._held = thought[:safe], thought[safe:]
        return thought, ""


# --- answering ---------------------------------------------------------------------------------


class Conversation(ChatAnswer):
    """An answer that is made while it is sent."""

    def __init__(self, delivery: Delivery, body: ChatBody, chat: Chat, info: ModelInfo, chat_id: str) -> None:
        super().__init__(delivery, body, chat_id)
        modalities = info.answers if chat.modalities is None else chat.modalities
        self.shown, self.heard = "text" in modalities, "audio" in modalities
        self.thoughts, self.tools = Thoughts(info.thinks), ToolCalls(bool(chat.tools))
        self._stream: Stream | None = None

    async def put(self, chunk: dict[str, Any]) -> None:
        """Send a chunk, with what was used so far if the client wants that."""
        options = self.body.stream_options
        if self._stream is not None and options is not None and options.continuous_usage_stats:
            chunk.setdefault("usage", usage(self._stream))
        await super().put(chunk)

    async def whole(self) -> None:
        """The answer as one object."""
        d = self.delivery
        sound = d.sound(streaming=False)
        parts: list[bytes] = []
        async with d.opened() as stream, aclosing(_pieces(stream)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Audio):
                    parts.append(await sound.encode(piece.samples))
            if self.heard:
                parts.append(sound.finish(stream.finish_reason))
                d.ticket.sent(sound.seconds)
        thought, said = self.thoughts.add(stream.text, last=True)
        text, calls = self.tools.add(said, last=True)
        reason = self._reason(stream)
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        if self.shown:
            message["content"] = text if text or not (calls or thought) else None
            if thought:
                message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        if self.heard:
            message["audio"] = {
                "id": self.audio_id,
                "data": base64.b64encode(b"".join(parts)).decode(),
                "expires_at": self.created + KEPT_S,
                "transcript": stream.text,
            }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        d.end(reason, stream)
        await self.send_whole(stream, {"choices": [choice], "usage": usage(stream)})

    async def stream(self) -> None:
        """The answer in chunks, text and sound as they come."""
        d = self.delivery
        begun: set[str] = set()
        async with d.opened() as stream:
            self._stream = stream
            sound, sent = d.sound(streaming=True), 0.0
            async with aclosing(_pieces(stream)) as pieces, aclosing(with_waits(d, pieces)) as events:
                try:
                    async for piece in events:
                        if not d.started:
                            await d.start(stream, EVENTS)
                        if piece is None:
                            await d.body(b": wait\n\n", more=True)
                        elif isinstance(piece, Text):
                            await self._text(piece, begun)
                        else:
                            data = await sound.encode(piece.samples)
                            await self._sound(data, round((sound.seconds - sent) * sound.rate_hz), begun)
                            sent = sound.seconds
                            d.ticket.sent(sent)
                    if not d.started:
                        await d.start(stream, EVENTS)
                    reason = self._reason(stream)
                    if self.heard:
                        data = sound.finish(stream.finish_reason)
                        await self._sound(data, round((sound.seconds - sent) * sound.rate_hz), begun)
                        d.ticket.sent(sound.seconds)
                        await self.send_sound_end(reason)
                    else:
                        await self.send_chunk({}, "text", {"finish_reason": reason})
                    d.end(reason, stream)
                    await self.send_usage(usage(stream))
                except HocketError as error:
                    if not d.started:
                        raise
                    log_cut(d.ticket, error)
                    said = {"error": {**error_object(error), "partial_audio": "audio" in begun}}
                    return await d.body(event(said), more=False)
        await d.body(b"data: [DONE]\n\n", more=False)

    async def _text(self, piece: Text, begun: set[str]) -> None:
        thought, said = self.thoughts.add(piece.text, last=piece.last)
        text, calls = self.tools.add(said, last=piece.last)
        role = {} if "text" in begun else {"role": "assistant"}
        if self.shown and (thought or text or calls):
            begun.add("text")
            delta: dict[str, Any] = {**role, **({"content": text} if text else {})}
            if thought:
                delta["reasoning_content"] = thought
            if calls:
                delta["tool_calls"] = calls
            await self.send_chunk(delta, "text")
        elif text and self.body.audio_delta != "content":  # sound alone: its transcript goes with it
            audio = {"id": self.audio_id, "transcript": text}
            first = {} if "audio" in begun else {"role": "assistant"}
            begun.add("audio")
            await self.send_chunk({**first, "audio": audio}, "audio", self.metadata(0))

    async def _sound(self, data: bytes, samples: int, begun: set[str]) -> None:
        if not data:
            return
        if "audio" not in begun and self.body.audio_delta != "content":
            opening = {"role": "assistant", "audio": {"id": self.audio_id, "transcript": ""}}
            await self.send_chunk(opening, "audio", self.metadata(0))
        begun.add("audio")
        await self.send_sound(base64.b64encode(data).decode(), samples)

    def _reason(self, stream: Stream) -> str:
        return "tool_calls" if self.tools.calls else stream.finish_reason or "stop"


async def _pieces(stream: Stream) -> AsyncGenerator[Audio | Text, None]:
    async for piece in stream.pieces():
        yield piece


def usage(stream: Stream) -> dict[str, Any]:
    """What a chat took and gave, in OpenAI's shape. A token of sound is a frame."""
    u = stream.usage
    prompt, made = u.text_tokens + u.audio_tokens, u.answer_tokens + u.frames
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"audio_tokens": u.audio_tokens, "cached_tokens": 0},
        "completion_tokens_details": {"audio_tokens": u.frames, "reasoning_tokens": 0},
    }
