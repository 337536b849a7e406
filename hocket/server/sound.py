"""From the engine's samples to the bytes of one file: silence, speed, rate, format."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import numpy as np
from anyio import to_thread

from hocket.audio.encode import Encoder, Format
from hocket.audio.resample import Resampler
from hocket.audio.stretch import Stretch
from hocket.audio.wav import Samples
from hocket.server.silence import SilenceGate

if TYPE_CHECKING:
    from hocket.engine.stream import Stream

_SILENCE_S = 0.1  # the answer to an input that holds nothing to say, if the owner wants one
_INLINE_S = 1.0  # more sound than this in one go takes milliseconds to encode: not on the event loop


class Sound:
    """One answer in the making: one file in `file_format` at `rate_hz`, made of sound at `native_hz`.

    `finish_reason` is known once `pieces` has ended: "stop" or "length".
    """

    def __init__(
        self,
        file_format: Format,
        native_hz: int,
        rate_hz: int,
        *,
        streaming: bool,
        speed: float = 1.0,
        stop_at_silence_ms: int | None = None,
    ) -> None:
        self.finish_reason = ""
        self.native_hz = native_hz
        self.rate_hz = rate_hz
        self._gate = SilenceGate(native_hz, stop_at_silence_ms)
        self._stretch = Stretch(native_hz, speed)
        self._resampler = Resampler(native_hz, rate_hz)
        self._encoder = Encoder(file_format, rate_hz, streaming)
        self._samples = 0

    @property
    def seconds(self) -> float:
        """Length of the sound encoded so far."""
        return self._samples / self.rate_hz

    async def pieces(self, stream: Stream | Nothing) -> AsyncGenerator[bytes, None]:
        """The file, piece by piece, as `stream` gives its sound; each piece holds at least one byte."""
        async for audio in stream:
            piece = await self.encode(audio.samples)
            if piece:
                yield piece
            if self._gate.ended:
                break
        last = self.finish(stream.finish_reason)
        if last:
            yield last

    async def encode(self, samples: Samples) -> bytes:
        """The next bytes of the file; none while they are held back."""
        if len(samples) <= _INLINE_S * self.native_hz:
            return self._add(samples)
        return await to_thread.run_sync(self._add, samples)

    def finish(self, reason: str | None) -> bytes:
        """The last bytes of the file. reason: how the sound ended."""
        self.finish_reason = "stop" if self._gate.ended else reason or "stop"
        return self._end(self._gate.ended or self.finish_reason == "length")

    def _add(self, samples: Samples) -> bytes:
        return self._encode(self._resampler.process(self._stretch.process(self._gate.process(samples))))

    def _end(self, missed_end: bool) -> bytes:
        held = self._stretch.process(self._gate.finish(missed_end=missed_end))
        last = self._resampler.process(np.concatenate([held, self._stretch.finish()]))
        return self._encode(np.concatenate([last, self._resampler.finish()])) + self._encoder.finish()

    def _encode(self, samples: Samples) -> bytes:
        self._samples += len(samples)
        return self._encoder.encode(samples)


class Nothing:
    """A stream that says nothing, for a little while. Stands in for the engine's `Stream`."""

    seed = 0
    finish_reason = "stop"
    usage = None

    def __init__(self, rate_hz: int) -> None:
        self.samples = np.zeros(int(_SILENCE_S * rate_hz), np.float32)

    async def __aiter__(self) -> AsyncGenerator[Nothing, None]:
        yield self

    async def aclose(self) -> None:
        pass
