"""The OpenAI SDK, unchanged, against a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from hocket.audio.decode import decode
from hocket.errors import RequestFailed

FORMATS = ["mp3", "opus", "aac", "flac", "wav", "pcm"]
SAMPLES = 10 * 1920


@pytest.fixture
def sdk(serve: Callable[..., Any]) -> Any:
    running = serve(api_keys=("key",))
    with openai.OpenAI(base_url=running.url + "/v1", api_key="key", max_retries=0) as client:
        yield client


def length(data: bytes, file_format: str) -> float:
    """Seconds of sound in a file."""
    if file_format == "pcm":
        return len(data) / 2 / 24000
    sound, rate = decode(data, param="answer")
    return len(sound) / rate


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_speaks_in_six_formats(sdk: Any, file_format: str, streamed: bool) -> None:
    wanted = {"model": "gpt-4o-mini-tts", "voice": "ash", "input": "hello", "response_format": file_format}
    if streamed:
        with sdk.audio.speech.with_streaming_response.create(**wanted) as response:
            data = b"".join(response.iter_bytes())
    else:
        data = sdk.audio.speech.create(**wanted).content
    frame = {"mp3": 1152, "aac": 1024}.get(file_format, 0)
    assert SAMPLES / 24000 <= length(data, file_format) <= (SAMPLES + 3 * frame) / 24000


def test_default_format_is_an_mp3(sdk: Any) -> None:
    data = sdk.audio.speech.create(model="tts-1", voice="alloy", input="hello").content
    assert length(data, "mp3") > 0.7


@pytest.mark.parametrize("voice", ["nova", {"id": "lin"}])
def test_voice_by_name_or_id(sdk: Any, engine: Any, voice: Any) -> None:
    sdk.audio.speech.create(model="fake-tts", voice=voice, input="hello")
    assert engine.requests[0].voice == (voice if isinstance(voice, str) else "lin")


@pytest.mark.parametrize("file_format", FORMATS)
def test_sound_arrives_before_the_end(sdk: Any, engine: Any, file_format: str) -> None:
    engine.hold_at = 4
    extra = {"stream_format": "audio"}
    with sdk.audio.speech.with_streaming_response.create(
        model="tts-1", voice="ada", input="hello", response_format=file_format, extra_body=extra
    ) as response:
        pieces = response.iter_bytes()
        first = next(pieces)
        assert first
        assert engine.open
        engine.release()
        assert length(first + b"".join(pieces), file_format) >= SAMPLES / 24000


def test_events(sdk: Any) -> None:
    with sdk.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="ash", input="hello", response_format="mp3", stream_format="sse"
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-2] == "event: speech.audio.done"


def test_same_seed_is_the_same_sound(sdk: Any) -> None:
    one, other = (
        sdk.audio.speech.create(
            model="tts-1", voice="ada", input="hello", response_format="pcm", extra_body={"seed": 3}
        ).content
        for _ in range(2)
    )
    np.testing.assert_array_equal(np.frombuffer(one, "<i2"), np.frombuffer(other, "<i2"))


def test_errors_are_the_sdks_own(sdk: Any, engine: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.audio.speech.create(model="tts-1", voice="nobody", input="hello")
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "voice",
        "voice_not_found",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError):
        sdk.audio.speech.create(model="gpt-9", voice="ada", input="hello")
    with pytest.raises(openai.AuthenticationError):
        sdk.with_options(api_key="wrong").models.list()
    engine.fail_at, engine.error = 0, RequestFailed("a step failed")
    with pytest.raises(openai.InternalServerError):
        sdk.audio.speech.create(model="tts-1", voice="ada", input="hello")


def test_models(sdk: Any) -> None:
    assert [model.id for model in sdk.models.list()] == ["fake-tts"]
    assert sdk.models.retrieve("tts-1").id == "fake-tts"
