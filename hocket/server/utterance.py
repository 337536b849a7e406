"""One utterance: from a plan to the bytes of one file, and how it ended. Every route that speaks uses it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from hocket.core import ModelInfo
from hocket.errors import Cancelled, HocketError, Overloaded, RequestFailed
from hocket.server.errors import status_of
from hocket.server.leaving import ClientLeft
from hocket.server.requests import Outcome, Ticket
from hocket.server.serving import Serving
from hocket.server.sound import Nothing, Sound
from hocket.server.speech_body import Plan

if TYPE_CHECKING:
    from hocket.engine.stream import Stream


@dataclass(slots=True)
class Whole:
    """A finished utterance."""

    data: bytes
    seconds: float
    finish_reason: str
    usage: dict[str, Any]
    stream: Stream | Nothing


class Utterance:
    """One request on its way through the engine. Its ticket is open while it is used."""

    def __init__(self, serving: Serving, ticket: Ticket, info: ModelInfo, plan: Plan) -> None:
        self.serving = serving
        self.ticket = ticket
        self.info = info
        self.plan = plan
        plan.request.request_id = ticket.job

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream | Nothing]:
        """The engine's stream for the request. However the block ends, the stream is closed and freed."""
        if self.plan.silence:
            yield Nothing(self.info.sample_rate_hz)
            return
        async with self.opened() as stream:
            yield stream

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Stream]:
        """As `stream`, of a request that has something to be made."""
        async with freed(self.serving, await self.serving.engine.submit(self.plan.request)) as stream:
            yield stream

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

    async def whole(self) -> Whole:
        """The file in one piece. A model that misses its end is given one more seed, where the plan says."""
        for seed_left in (self.plan.retries_runaway, False):
            async with self.stream() as stream:
                sound = self.sound(streaming=False)
                async with aclosing(sound.pieces(stream)) as pieces:
                    parts = [piece async for piece in pieces]
            if sound.finish_reason != "length" or not self.plan.retries_runaway:
                break
            if not seed_left:
                raise RequestFailed(
                    "the model did not end its speech within the frames that the text allows, with two "
                    "seeds; set seed or max_new_tokens to get the audio as it is",
                    code="generation_runaway",
                )
        self.ticket.sent(sound.seconds)
        used = self.end(sound.finish_reason, stream)
        return Whole(b"".join(parts), sound.seconds, sound.finish_reason, used, stream)

    def end(self, reason: str, stream: Stream | Nothing) -> dict[str, Any]:
        """Note how the request ended. -> usage, as in the contract."""
        used = usage(stream)
        ticket = self.ticket
        ticket.outcome = "length" if reason == "length" else "ok"
        ticket.input_tokens, ticket.frames = used["input_tokens"], used["output_tokens"]
        self.serving.requests.finish(ticket, reason, used)
        return used


@asynccontextmanager
async def freed(serving: Serving, stream: Stream) -> AsyncIterator[Stream]:
    """`stream`, closed when the block ends, whatever ended it; a drain's abort is told as such."""
    try:
        yield stream
    except Cancelled:
        if serving.draining:
            raise Overloaded("the server is shutting down", code="draining", retry_after_s=5) from None
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await stream.aclose()


@contextlib.contextmanager
def counted(serving: Serving, ticket: Ticket) -> Iterator[None]:
    """Count the ticket's request when the block ends, by what ended it. Passes every exception on."""
    try:
        yield
    except HocketError as error:
        ticket.outcome = outcome_of(error)
        raise
    except (ClientLeft, anyio.get_cancelled_exc_class()):
        ticket.outcome = "aborted"
        raise
    finally:
        serving.metrics.ended(ticket)


def outcome_of(error: HocketError) -> Outcome:
    """How a request that ended with `error` is counted in the metrics."""
    status = status_of(error)
    if isinstance(error, Cancelled):
        return "aborted"
    if status == 503:
        return "rejected"
    return "invalid" if status < 500 or status == 501 else "error"


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
