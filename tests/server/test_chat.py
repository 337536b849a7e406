"""Chat completions of a speech model: the last message of the user, spoken."""

from __future__ import annotations

import base64
import json
import wave
from io import BytesIO
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from hocket.audio.decode import decode
from hocket.errors import Overloaded, RequestFailed

CHAT = "/v1/chat/completions"
HOP = 1920
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "reply"},
    {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
]


def chat(client: TestClient, **fields: Any) -> Any:
    return client.post(CHAT, json={"messages": MESSAGES, "model": "tts-1", **fields})


def chunks(text: str) -> list[dict[str, Any]]:
    *lines, done = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_text_and_audio_are_in_one_choice(client: TestClient, engine: Any) -> None:
    response = chat(client, audio={"voice": "lin", "format": "wav"})
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["object"], body["model"], body["id"]) == (
        "chat.completion",
        "fake-tts",
        response.headers["x-request-id"],
    )
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["role"], message["content"], choice["finish_reason"]) == (
        "assistant",
        "Hello there",
        "stop",
    )
    audio = message["audio"]
    assert (audio["transcript"], audio["expires_at"] > body["created"]) == ("Hello there", True)
    assert audio["id"].startswith("audio-")
    with wave.open(BytesIO(base64.b64decode(audio["data"]))) as file:
        assert file.getnframes() == 10 * HOP
    assert body["usage"]["completion_tokens_details"]["audio_tokens"] == 10
    assert body["usage"]["total_tokens"] == 10 + len("Hello there")
    assert engine.requests[0].voice == "lin"


def test_audio_alone_has_no_content(client: TestClient) -> None:
    message = chat(client, modalities=["audio"]).json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["audio"]["transcript"] == "Hello there"


@pytest.mark.parametrize("file_format", ["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"])
def test_format_is_honoured_whole_and_streamed(client: TestClient, file_format: str) -> None:
    audio = {"format": file_format}
    whole = base64.b64decode(chat(client, audio=audio).json()["choices"][0]["message"]["audio"]["data"])
    response = chat(client, audio=audio, stream=True)
    parts = [c["choices"][0]["delta"].get("audio", {}).get("data", "") for c in chunks(response.text)]
    streamed = b"".join(map(base64.b64decode, parts))
    for data in (whole, streamed):
        if file_format.startswith("pcm"):
            assert len(data) == 20 * HOP
        else:
            samples, rate = decode(data, param="answer")
            assert len(samples) >= 10 * HOP * rate // 24000
    metadata = chunks(response.text)[-1]["choices"][0]["audio_metadata"]
    shown = "pcm16" if file_format == "pcm" else file_format
    rate = 48000 if file_format == "opus" else 24000
    assert metadata == {"format": shown, "sample_rate_hz": rate, "frame_count": 0, "channels": 1}


def test_chunks_come_in_order(client: TestClient) -> None:
    response = chat(client, stream=True, audio={"format": "pcm16"}, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    got = chunks(response.text)
    *body, usage = got
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 10)
    assert {c["object"] for c in got} == {"chat.completion.chunk"}
    assert len({c["id"] for c in got}) == 1
    text, opening, *sounds, closing = [(c["modality"], c["choices"][0]) for c in body]
    assert (text[0], text[1]["delta"]["content"]) == ("text", "Hello there")
    assert opening[1]["delta"]["audio"]["transcript"] == "Hello there"
    audio_id = opening[1]["delta"]["audio"]["id"]
    assert len(sounds) == 10
    for modality, choice in sounds:
        assert (modality, list(choice["delta"]["audio"])) == ("audio", ["data"])
        assert choice["audio_metadata"]["frame_count"] == HOP
    assert closing[1]["delta"]["audio"]["id"] == audio_id
    assert closing[1]["delta"]["audio"]["expires_at"]
    reasons = [choice["finish_reason"] for _, choice in (text, opening, *sounds, closing)]
    assert reasons == [None] * 12 + ["stop"]


def test_audio_may_be_in_the_content(client: TestClient) -> None:
    response = chat(client, stream=True, audio={"format": "pcm"}, audio_delta="content")
    got = chunks(response.text)
    sound = [c["choices"][0]["delta"].get("content", "") for c in got if c["modality"] == "audio"]
    assert len(b"".join(map(base64.b64decode, sound))) == 20 * HOP
    assert all("audio" not in c["choices"][0]["delta"] for c in got)


@pytest.mark.parametrize("fields", [{"max_tokens": 5}, {"max_completion_tokens": 5}])
def test_audio_covers_the_text_that_max_tokens_leaves(client: TestClient, engine: Any, fields: Any) -> None:
    choice = chat(client, **fields).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "length")
    assert choice["message"]["audio"]["transcript"] == engine.requests[0].text == "Hello"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop": " th"}, "Hello"),
        ({"stop": ["x", "l", "lo"], "max_tokens": 5}, "He"),
        ({"stop": []}, "Hello there"),
    ],
)
def test_audio_covers_the_text_before_a_stop(client: TestClient, engine: Any, fields: Any, said: str) -> None:
    choice = chat(client, **fields).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
    assert choice["message"]["audio"]["transcript"] == engine.requests[0].text == said


def test_speech_fields_work_here_too(client: TestClient, engine: Any) -> None:
    chat(client, seed=4, temperature=0, language="English", instructions="softly", voice="lin")
    request = engine.requests[0]
    assert (request.seed, request.sampling.temperature, request.voice) == (4, 0, "lin")
    assert (request.language, request.instructions) == ("English", "softly")


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing is left": ({"stop": "Hel"}, "stop", "invalid_value"),
    "an empty stop": ({"stop": ""}, "stop", "invalid_value"),
    "no messages": ({"messages": None}, "messages", "invalid_value"),
    "empty messages": ({"messages": []}, "messages", "invalid_value"),
    "nobody asks": ({"messages": [{"role": "system", "content": "a"}]}, "messages", "invalid_value"),
    "message without a role": ({"messages": [{"content": "a"}]}, "messages.0.role", "missing_field"),
    "empty message": ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content", "empty_input"),
    "null message": ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "empty_input"),
    "content as number": (
        {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_value",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type", "unsupported_content",
    ),
    "text alone": ({"modalities": ["text"]}, "modalities", "unsupported_modality"),
    "video": ({"modalities": ["video"]}, "modalities.0", "invalid_value"),
    "format": ({"audio": {"format": "ogg"}}, "audio.format", "invalid_value"),
    "voice": ({"audio": {"voice": "eve"}}, "audio.voice", "voice_not_found"),
    "two choices": ({"n": 2}, "n", "invalid_value"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "delta": ({"audio_delta": "both"}, "audio_delta", "invalid_value"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chat(client: TestClient, fields: dict[str, Any], param: str, code: str, stream: bool) -> None:
    response = chat(client, stream=stream, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


def test_failures(client: TestClient, engine: Any) -> None:
    engine.refusal = Overloaded("full")
    assert chat(client, stream=True).status_code == 503
    engine.refusal = None
    engine.fail_at, engine.error = 0, RequestFailed("a step failed")
    for stream in (True, False):
        assert chat(client, stream=stream).status_code == 500
    engine.fail_at = 2
    lines = [line for line in chat(client, stream=True, audio={"format": "pcm"}).text.split("\n\n") if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["partial_audio"] is True


def test_openai_sdk(serve: Any) -> None:
    running = serve()
    with openai.OpenAI(base_url=running.url + "/v1", api_key="k", max_retries=0) as sdk:
        wanted: Any = {
            "model": "gpt-4o-mini-tts",
            "modalities": ["text", "audio"],
            "audio": {"voice": "alloy", "format": "pcm16"},
            "messages": [{"role": "user", "content": "hello"}],
        }
        whole = sdk.chat.completions.create(**wanted)
        assert len(base64.b64decode(whole.choices[0].message.audio.data)) == 20 * HOP
        data = b""
        for chunk in sdk.chat.completions.create(**wanted, stream=True):
            audio = chunk.choices[0].delta.audio
            data += base64.b64decode((audio and audio.data) or "")
        assert len(data) == 20 * HOP
