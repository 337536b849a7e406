"""Strings that end a text: found wherever tokens are cut, and no part of one is given away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket import SpeechRequest
from hocket.core import Chat, Message
from hocket.errors import InvalidRequest
from hocket.models.qwen3_omni.frontend import QwenOmniFrontEnd
from hocket.models.qwen3_omni.stops import StopTexts, Words
from tests.models.qwen3_omni.test_whole import Heard, hear, request, served

LETTERS = "abé💬"  # one to four bytes each, and stops that begin alike


class Pairs(Words):
    """A vocabulary in which an id is any two bytes, so that it may begin and end inside characters."""

    def __init__(self) -> None:
        self.tokenizer = self  # type: ignore[assignment]

    def spelled(self, id: int) -> bytes:
        return id.to_bytes(2, "big") if id >= 0 else bytes([-1 - id])

    def encode_bytes(self, data: bytes) -> list[int]:
        return [-1 - b for b in data]

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        pairs = [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data) - 1, 2)]
        return pairs + self.encode_bytes(data[-1:] if len(data) % 2 else b"")


@given(
    st.text(LETTERS, max_size=12),
    st.lists(st.text(LETTERS, min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_what_comes_before_the_first_stop_is_the_text(text: str, stops: list[str]) -> None:
    words = Pairs()
    watch, given_away, over = StopTexts(stops, words), b"", False
    ids = words.encode(text)
    for at, id in enumerate(ids):
        new, over = watch.add([id], last=at + 1 == len(ids))
        given_away += b"".join(map(words.spelled, new))
        if over:
            break
        # Whatever comes now, no stop can begin in what was given away.
        made = b"".join(map(words.spelled, ids[: at + 1]))
        assert made.startswith(given_away)
        for stop in stops:
            assert stop.encode() not in made
            for size in range(1, len(stop.encode())):
                if at + 1 < len(ids) and made.endswith(stop.encode()[:size]):
                    assert len(given_away) <= len(made) - size
    seen = b"".join(map(words.spelled, ids[: at + 1])) if ids else b""
    found = [place for stop in stops if (place := seen.find(stop.encode())) >= 0]
    assert over == bool(found)
    assert given_away == (seen[: min(found)] if found else text.encode())


def test_ids_that_are_no_beginning_are_given_at_once(omni: Callable[..., Path]) -> None:
    words = Words(omni())
    ids = words.tokenizer.encode("one two")
    watch = StopTexts(["zwei"], words)
    assert [watch.add([id], last=False) for id in ids] == [([id], False) for id in ids]


def test_a_token_in_which_a_stop_begins_is_spelled_anew(omni: Callable[..., Path]) -> None:
    words = Words(omni())
    (user,) = words.tokenizer.encode("user")
    assert words.spelled(user) == b"user"
    kept, over = StopTexts(["er"], words).add([user], last=False)
    assert over
    assert (user not in kept, b"".join(map(words.spelled, kept))) == (True, b"us")
    assert words.tokenizer.encode_bytes(b"\xc3") == [
        id for id in words.tokenizer.encode("é") if words.spelled(id) == b"\xc3"
    ]


@pytest.mark.parametrize("modalities", [("text", "audio"), ("audio",)])
def test_sound_covers_exactly_the_text_before_a_stop(
    modalities: tuple[str, ...], omni: Callable[..., Path], omni_golden: Any
) -> None:
    """As the sound of a text does that was cut there."""
    front = QwenOmniFrontEnd(omni())
    ids = omni_golden("speech_text_300")["text"].tolist()[:64]
    whole = front.detokenize(ids)
    cuts: dict[int, str] = {}  # tokens before a stop -> the stop
    for tokens in range(1, 40):
        text = front.detokenize(ids[:tokens])
        stop = whole[len(text) : len(text) + 2]
        if whole.startswith(text) and "\ufffd" not in text[-1:] + stop and whole.index(stop) == len(text):
            cuts[tokens] = stop
    assert len(cuts) >= 3

    def asked(tokens: int, stops: list[str]) -> SpeechRequest:
        r = request("text_300", tokens, extra={}, max_frames=40)
        assert r.chat is not None
        r.chat.stops, r.chat.modalities = stops, modalities
        return r

    async def main() -> None:
        async with served(omni()) as engine:
            for tokens, stop in list(cuts.items())[::2]:
                cut = await hear(engine, asked(tokens, []))
                heard = await hear(engine, asked(64, ["no such text", stop]))
                assert heard.text == cut.text == front.detokenize(ids[:tokens])
                np.testing.assert_array_equal(heard.codes, cut.codes)
                np.testing.assert_allclose(heard.wave, cut.wave, rtol=0, atol=1e-5)
            absent = await hear(engine, asked(64, ["no such text"]))
            assert (absent.text, absent.reason) == (whole, "length")

    asyncio.run(main())


def test_a_text_that_begins_with_a_stop_is_empty_and_silent(
    omni: Callable[..., Path], omni_golden: Any
) -> None:
    front = QwenOmniFrontEnd(omni())
    first = front.detokenize(omni_golden("speech_image")["text"].tolist())[0]
    r = request("image", 7, extra={})
    assert r.chat is not None
    r.chat.stops = [first]

    async def main() -> Heard:
        async with served(omni()) as engine:
            return await hear(engine, r)

    heard = asyncio.run(main())
    assert (heard.text, len(heard.wave), heard.reason) == ("", 0, "stop")


@pytest.mark.parametrize(("stops", "param"), [(["a", ""], "stop.1"), (["a"] * 17, "stop")])
def test_bad_stops_are_named(stops: list[str], param: str, omni: Callable[..., Path]) -> None:
    chat = Chat(messages=[Message(role="user", parts=["Hi."])], stops=stops)
    with pytest.raises(InvalidRequest) as refused:
        QwenOmniFrontEnd(omni()).prepare(SpeechRequest(chat=chat))
    assert refused.value.param == param
