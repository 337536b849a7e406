"""Text that arrives while it is spoken: the same codes as all of it at once, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hocket.core import Sampling, SpeechRequest
from hocket.engine.client import AsyncEngine
from hocket.engine.stream import Stream
from hocket.errors import InvalidRequest, Overloaded

TEXT = "Each of the voices fills the rests of the others, and none of them sings the melody alone."
GREEDY = Sampling(temperature=0)


def request(text: str, **changes: object) -> SpeechRequest:
    return SpeechRequest(text=text, text_first=False, sampling=GREEDY, max_frames=60, **changes)


async def codes(stream: Stream) -> np.ndarray:
    async for _ in stream:
        pass
    return stream.codes


@pytest.fixture(scope="module")
def endless(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(variant="custom_voice", never_ends=True)


async def test_text_word_by_word_gives_the_codes_of_the_text_at_once(endless: Path) -> None:
    words = TEXT.split(" ")
    async with AsyncEngine(endless, processes=False) as engine:
        expected = await codes(await engine.submit(request(TEXT), want_codes=True))
        assert len(expected) == 59
        for pause in (False, True):
            stream = await engine.submit_live(request(f"{words[0]} {words[1]} "), want_codes=True)
            heard = asyncio.create_task(codes(stream))
            for word in words[2:-1]:
                await stream.add_text(word + " ")
                if pause:
                    await asyncio.sleep(0.01)  # the frames that the text allows are made meanwhile
            await stream.add_text(words[-1])
            await stream.close_text()
            np.testing.assert_array_equal(await heard, expected)


async def test_generation_waits_for_text_without_making_frames(endless: Path) -> None:
    async with AsyncEngine(endless, processes=False) as engine:
        stream = await engine.submit_live(request("One two three "), want_codes=True)
        allowed = len(engine.front_end.tokenize("One two three"))
        frames = 0

        async def count() -> None:
            nonlocal frames
            async for audio in stream:
                frames += len(audio.samples) // 1920

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(count(), 1)
        assert 0 < frames <= allowed
        other = await codes(await engine.submit(request("Hello there."), want_codes=True))
        assert len(other) == 59  # the one that waits keeps nobody from being spoken
        await stream.aclose()
        assert engine.status().running == 0


async def test_beginning_needs_a_whole_word(endless: Path) -> None:
    async with AsyncEngine(endless, processes=False) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.submit_live(request("Hel"))
        assert refused.value.code == "empty_input"


async def test_requests_that_are_being_prepared_count_in_the_queue(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"stages.talker.slots": "1", "stages.talker.max_batch": "1"}
    async with AsyncEngine(endless, processes=False, overrides=small, max_waiting=2) as engine:
        go = asyncio.Event()

        async def slowly(prepare: object, request: SpeechRequest) -> object:
            await go.wait()
            return prepare(request)  # type: ignore[operator]

        monkeypatch.setattr(asyncio, "to_thread", slowly)
        counter = itertools.count()
        asked = [
            asyncio.create_task(engine.submit(request("Hello. " * 300, request_id=f"r{next(counter)}")))
            for _ in range(10)  # too long to be prepared at once
        ]
        await asyncio.sleep(0)
        refused = [task for task in asked if task.done()]
        assert len(refused) == 7
        assert all(isinstance(task.exception(), Overloaded) for task in refused)
        with pytest.raises(Overloaded, match="queue is full"):
            engine.check_room()
        go.set()
        monkeypatch.undo()
        for task in asked:
            if task not in refused:
                await (await task).aclose()
        engine.check_room()
