"""`AsyncEngine` for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hocket.core import ModelInfo, SpeechRequest
from hocket.engine.client import AsyncEngine
from hocket.engine.stream import Audio, Speech, Stream, Text

T = TypeVar("T")


class Engine:
    """`AsyncEngine` for programs without an event loop. A context manager.

    The same arguments, but `processes` is False unless given: the worker is a thread of this program.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._engine = AsyncEngine(model, **{"processes": False, **options})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hocket loop", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        try:
            self._run(self._engine.start())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._engine.close())
        self._stop()

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    def speak(self, request: SpeechRequest, *, want_codes: bool = False) -> SyncStream:
        """Start one utterance and iterate over its audio. Raises as `AsyncEngine.submit`, and while
        iterating as `hocket.engine.stream.Stream`."""
        return SyncStream(self, self._run(self._engine.submit(request, want_codes=want_codes)))

    def speech(self, request: SpeechRequest) -> Speech:
        """One whole utterance. Raises as `speak`, and as iterating does."""
        stream = self.speak(request)
        parts = [audio.samples for audio in stream]
        inner = stream.stream
        samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        return Speech(
            samples, inner.sample_rate_hz, inner.finish_reason or "", inner.usage, inner.seed, inner.text
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncStream:
    """A `Stream` without an event loop: iterate, or `close` to abort."""

    def __init__(self, engine: Engine, stream: Stream) -> None:
        self._engine, self.stream = engine, stream

    def __iter__(self) -> Iterator[Audio]:
        return self

    def __next__(self) -> Audio:
        try:
            return self._engine._run(self.stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def pieces(self) -> Iterator[Audio | Text]:
        """Audio and text, in the order in which they come."""
        pieces = self.stream.pieces()

        async def following() -> Audio | Text | None:
            return await anext(pieces, None)

        while (piece := self._engine._run(following())) is not None:
            yield piece

    def close(self) -> None:
        """Abort the request; nothing when it is over."""
        self._engine._run(self.stream.aclose())
