"""How an answer to a chat is framed: OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from hocket.server.chat_body import ChatBody
from hocket.server.delivery import Delivery

KEPT_S = 3600  # what `expires_at` promises; nothing is stored, so a client that has the audio has all


class ChatAnswer:
    """One answer in OpenAI's shape."""

    def __init__(self, delivery: Delivery, body: ChatBody, chat_id: str) -> None:
        self.delivery, self.body = delivery, body
        self.id = chat_id
        self.audio_id = f"audio-{uuid.uuid4().hex}"
        self.created = int(time.time())

    async def send_whole(self, stream: Any, answer: dict[str, Any]) -> None:
        """The whole answer as one JSON object."""
        d = self.delivery
        content = await d.serving.offload(msgspec.json.encode, {**self.head("chat.completion"), **answer})
        await d.start(stream, "application/json", {"Content-Length": str(len(content))})
        await d.body(content, more=False)

    async def send_sound(self, data: str, frames: int) -> None:
        """A chunk of sound: base64 of so many samples."""
        if self.body.audio_delta == "content":
            delta: dict[str, Any] = {"role": "assistant", "content": data}
        else:
            delta = {"audio": {"data": data}}
        await self.send_chunk(delta, "audio", self.metadata(frames))

    async def send_sound_end(self, reason: str) -> None:
        """The last chunk of sound, which has none."""
        delta: dict[str, Any] = {"audio": {"id": self.audio_id, "expires_at": self.created + KEPT_S}}
        if self.body.audio_delta == "content":
            delta = {}
        await self.send_chunk(delta, "audio", {**self.metadata(0), "finish_reason": reason})

    async def send_usage(self, used: dict[str, Any]) -> None:
        """The last chunk of all, if the client wants it."""
        options = self.body.stream_options
        if options is not None and options.include_usage:
            await self.put({**self.head("chat.completion.chunk"), "choices": [], "usage": used})

    def metadata(self, frames: int) -> dict[str, Any]:
        plan = self.delivery.plan
        shown = "pcm16" if plan.format == "pcm" else plan.format
        metadata = {
            "format": shown,
            "sample_rate_hz": plan.rate_hz,
            "frame_count": frames,
            "channels": 1,
        }
        return {"audio_metadata": metadata}

    async def send_chunk(
        self, delta: dict[str, Any], modality: str, more: dict[str, Any] | None = None
    ) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}
        await self.put({**self.head("chat.completion.chunk"), "choices": [choice], "modality": modality})

    async def put(self, chunk: dict[str, Any]) -> None:
        await self.delivery.body(event(chunk), more=True)

    def head(self, kind: str) -> dict[str, Any]:
        name = self.delivery.settings.name
        return {"id": self.id, "object": kind, "created": self.created, "model": name}


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(value)
