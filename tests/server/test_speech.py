"""What a speech request gets back: modes, formats, rates, headers, events."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from hocket.audio.decode import decode
from hocket.audio.encode import MEDIA_TYPES
from hocket.audio.wav import to_s16, wav_header
from hocket.errors import RequestFailed, WorkerDied

SPEECH = "/v1/audio/speech"
FORMATS = list(MEDIA_TYPES)
MODES = {"buffered": {"stream": False}, "raw": {"stream_format": "audio"}, "events": {"stream_format": "sse"}}
HOP = 1920
PCM_24K = {"response_format": "pcm"}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each checked for its form."""
    found = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def audio_of(found: list[dict[str, Any]]) -> bytes:
    deltas = [event for event in found if event["type"] == "speech.audio.delta"]
    assert [delta["index"] for delta in deltas] == list(range(len(deltas)))
    return b"".join(base64.b64decode(delta["audio"], validate=True) for delta in deltas)


def speak(client: TestClient, **body: Any) -> tuple[bytes, Any]:
    response = client.post(SPEECH, json={"input": "hello there", **body})
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        return audio_of(events(response.text)), response
    return response.content, response


def samples(data: bytes, file_format: str) -> np.ndarray:
    if file_format == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / 32768
    return decode(data, param="answer")[0]


@pytest.mark.parametrize("file_format", FORMATS)
def test_three_modes_give_the_same_sound(client: TestClient, file_format: str) -> None:
    got = {mode: speak(client, response_format=file_format, **fields)[0] for mode, fields in MODES.items()}
    assert got["raw"] == got["events"]
    sound = {mode: samples(data, file_format) for mode, data in got.items()}
    np.testing.assert_array_equal(sound["raw"], sound["buffered"])
    rate = 48000 if file_format == "opus" else 24000
    frame = {"mp3": 1152, "aac": 1024}.get(file_format, 0)
    length = 10 * HOP * rate // 24000
    assert length <= len(sound["raw"]) <= length + 3 * frame


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_headers_of_every_audio_answer(client: TestClient, file_format: str, mode: str) -> None:
    _, response = speak(client, response_format=file_format, seed=11, **MODES[mode])
    headers = response.headers
    media = "text/event-stream; charset=utf-8" if mode == "events" else MEDIA_TYPES[file_format]
    assert headers["content-type"] == media
    rate = "48000" if file_format == "opus" else "24000"
    assert headers["x-sample-rate"] == headers["x-audio-sample-rate"] == rate
    assert headers["x-channels"] == headers["x-audio-channels"] == "1"
    assert headers.get("x-bit-depth") == ("16" if file_format in ("pcm", "wav", "flac") else None)
    assert (headers["x-model"], headers["x-seed"]) == ("fake-tts", "11")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
    assert headers["x-request-id"].startswith("speech-")
    if mode != "buffered":
        assert "content-length" not in headers
        assert "x-finish-reason" not in headers
        return
    assert int(headers["content-length"]) == len(response.content)
    assert (headers["x-finish-reason"], headers["x-audio-duration"]) == ("stop", "0.800")
    counts = {"input": "11", "output": "10", "total": "21", "input-text": "11", "input-audio": "0"}
    for name, count in counts.items():
        assert headers[f"x-{name}-tokens"] == headers[f"x-vllm-omni-{name}-tokens"] == count


@pytest.mark.parametrize(
    ("fields", "accept", "mode"),
    [
        ({}, None, "raw"),
        ({"response_format": "pcm"}, None, "raw"),
        ({"response_format": "opus"}, None, "raw"),
        ({"response_format": "aac"}, None, "raw"),
        ({"response_format": "wav"}, None, "buffered"),
        ({"response_format": "flac"}, None, "buffered"),
        ({"stream": None, "stream_format": None}, None, "raw"),
        ({"stream": False}, None, "buffered"),
        ({"stream_format": "sse"}, None, "events"),
        ({"stream_format": "sse", "stream": False}, None, "events"),
        ({"stream_format": "audio"}, None, "raw"),
        ({"stream_format": "audio", "stream": True}, "text/event-stream", "raw"),
        ({"stream_format": "audio", "response_format": "wav"}, None, "raw"),
        ({"stream": True}, None, "events"),
        ({"stream": True}, "*/*", "events"),
        ({"stream": True}, "application/json", "events"),
        ({"stream": True}, "text/event-stream", "events"),
        ({"stream": True}, "application/octet-stream", "raw"),
        ({"stream": True}, "audio/mpeg;q=0.9, */*", "raw"),
        ({"stream": True}, "audio/*, text/event-stream", "events"),
        ({}, "text/event-stream", "raw"),
    ],
)
def test_mode_follows_the_table(client: TestClient, fields: Any, accept: str | None, mode: str) -> None:
    headers = {} if accept is None else {"Accept": accept}
    response = client.post(SPEECH, json={"input": "hello", **fields}, headers=headers)
    kind = response.headers["content-type"].startswith("text/event-stream")
    assert ("events" if kind else "buffered" if "x-finish-reason" in response.headers else "raw") == mode


def test_default_is_mp3(client: TestClient) -> None:
    _, response = speak(client)
    assert response.headers["content-type"] == "audio/mpeg"


def test_pcm_is_the_rounded_samples(client: TestClient, engine: Any) -> None:
    engine.samples = np.linspace(-1.5, 1.5, 3 * HOP, dtype=np.float32)
    data, _ = speak(client, **PCM_24K)
    assert data == to_s16(engine.samples).tobytes()


@pytest.mark.parametrize("speed", [0.25, 0.8, 1.5, 4])
def test_speed_changes_the_length_in_every_mode(client: TestClient, speed: float) -> None:
    whole, response = speak(client, speed=speed, stream=False, **PCM_24K)
    assert len(whole) // 2 == round(10 * HOP / speed)
    assert response.headers["x-audio-duration"] == f"{0.8 / speed:.3f}"
    assert speak(client, speed=speed, **PCM_24K)[0] == whole


def test_streamed_wav_has_one_open_header(client: TestClient) -> None:
    data, _ = speak(client, response_format="wav", stream_format="audio")
    assert data[:44] == wav_header(24000, None)
    assert data[4:8] == data[40:44] == b"\xff\xff\xff\xff"
    assert len(data) == 44 + 2 * 10 * HOP


def test_buffered_wav_opens_anywhere(client: TestClient) -> None:
    data, _ = speak(client, response_format="wav")
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (10 * HOP, 24000, 1)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_asked_rate_is_the_rate(client: TestClient, rate: int) -> None:
    whole, response = speak(client, response_format="pcm", sample_rate=rate, stream=False)
    assert response.headers["x-sample-rate"] == str(rate)
    assert abs(len(whole) // 2 - 10 * HOP * rate / 24000) <= 1
    assert speak(client, response_format="pcm", sample_rate=rate)[0] == whole


def test_pcm_keeps_the_models_rate_if_the_owner_wants(app: Callable[..., FastAPI], engine: Any) -> None:
    engine.info = dataclasses.replace(engine.info, sample_rate_hz=44100)
    _, response = speak(TestClient(app()), **PCM_24K)
    assert response.headers["x-sample-rate"] == "24000"
    _, response = speak(TestClient(app(pcm_native_rate=True)), **PCM_24K)
    assert response.headers["x-sample-rate"] == "44100"
    _, response = speak(TestClient(app()), response_format="wav")
    assert response.headers["x-sample-rate"] == "44100"


def test_done_event_is_the_last_and_only_end(client: TestClient) -> None:
    response = client.post(SPEECH, json={"input": "hello", "stream_format": "sse", **PCM_24K})
    found = events(response.text)
    assert [event["type"] for event in found] == ["speech.audio.delta"] * 10 + ["speech.audio.done"]
    assert found[0]["response_format"] == "pcm"
    details = {"text_tokens": 5, "audio_tokens": 0}
    usage = {"input_tokens": 5, "output_tokens": 10, "total_tokens": 15, "input_token_details": details}
    assert found[-1] == {"type": "speech.audio.done", "finish_reason": "stop", "usage": usage}


def test_event_stream_ends_with_an_error_event(client: TestClient, engine: Any) -> None:
    engine.fail_at, engine.error = 3, WorkerDied("the worker that ran this request died")
    response = client.post(SPEECH, json={"input": "hello", "stream_format": "sse", **PCM_24K})
    found = events(response.text)
    assert [event["type"] for event in found] == ["speech.audio.delta"] * 3 + ["speech.audio.error"]
    assert found[-1]["error"] == {
        "message": "the worker that ran this request died",
        "type": "server_error",
        "param": None,
        "code": "worker_died",
        "partial_audio": True,
    }


def test_waiting_event_stream_is_kept_open_by_comments(serve: Callable[..., Any], engine: Any) -> None:
    http = serve(wait_comment_s=0.01).http
    engine.hold_at = 0
    with http.stream("POST", SPEECH, json={"input": "hello", "stream_format": "sse"}) as response:
        text = response.iter_text()
        assert next(text).startswith(": wait\n\n")
        engine.release()
        assert events("".join(text))[-1]["type"] == "speech.audio.done"


def test_failure_after_a_comment_is_an_event_without_audio(serve: Callable[..., Any], engine: Any) -> None:
    http = serve(wait_comment_s=0.01).http
    engine.hold_at = engine.fail_at = 0
    engine.error = RequestFailed("a step failed")
    with http.stream("POST", SPEECH, json={"input": "hello", "stream_format": "sse"}) as response:
        assert response.status_code == 200
        text = response.iter_text()
        next(text)
        engine.release()
        (error,) = events("".join(text))
    assert (error["type"], error["error"]["partial_audio"]) == ("speech.audio.error", False)


def test_outcome_can_be_asked_for(app: Callable[..., FastAPI], engine: Any) -> None:
    client = TestClient(app(kept_results=2))
    engine.finish_reasons = ["length"]
    for name in ("one", "two", "three"):
        speak(client, request_id=name)
    assert client.get(f"{SPEECH}/one").status_code == 404
    assert client.get(f"{SPEECH}/two").json()["finish_reason"] == "stop"
    found = client.get(f"{SPEECH}/three").json()
    assert list(found) == ["request_id", "finish_reason", "usage", "audio_seconds"]
    assert (found["request_id"], found["audio_seconds"]) == ("three", 0.8)


def test_every_field_reaches_the_engine(client: TestClient, engine: Any) -> None:
    speak(
        client,
        voice={"id": "LIN"},
        instructions="softly",
        task_type="CustomVoice",
        language="English",
        max_new_tokens=50,
        seed=-3,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        repetition_penalty=1.1,
        initial_codec_chunk_frames=2,
        non_streaming_mode=False,
        priority=7,
        request_id="mine",
        speaker_embedding=[0.5, 1],
        user="u",
        voice_settings={"x": 1},
        consent=True,
        no_such_field=[1],
    )
    (request,) = engine.requests
    s = request.sampling
    assert (request.text, request.voice, request.instructions) == ("hello there", "lin", "softly")
    assert (request.task, request.language, request.max_frames) == ("CustomVoice", "English", 50)
    assert (s.temperature, s.top_p, s.top_k, s.repetition_penalty) == (0, 0.5, 0, 1.1)
    assert (request.seed, request.first_chunk_frames, request.text_first) == (-3, 2, False)
    assert (request.priority, request.request_id, request.timeout_s) == (7, "mine", 600)
    assert list(request.speaker_embedding) == [0.5, 1]


def test_null_is_the_same_as_left_out(client: TestClient, engine: Any) -> None:
    fields = [
        "model", "voice", "speaker", "instructions", "response_format", "speed", "stream_format", "stream",
        "sample_rate", "task_type", "language", "ref_audio", "ref_text", "references", "x_vector_only_mode",
        "speaker_embedding", "max_new_tokens", "seed", "temperature", "top_p", "top_k", "repetition_penalty",
        "initial_codec_chunk_frames", "non_streaming_mode", "word_timestamps", "extra_params", "priority",
        "request_id", "stop_at_silence_ms",
    ]  # fmt: skip
    plain, _ = speak(client)
    assert speak(client, **dict.fromkeys(fields))[0] == plain
    one, other = engine.requests
    one.request_id = other.request_id = None
    assert one == other


def test_reference_arrives_as_sound(client: TestClient, engine: Any) -> None:
    tone = (np.sin(np.arange(32000) / 20) * 0.5).astype(np.float32)
    data = wav_header(16000, len(tone)) + to_s16(tone).tobytes()
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    speak(client, ref_audio=url, ref_text="what it says")
    speak(client, ref_audio=[url], x_vector_only_mode=True)
    speak(client, references=[{"audio_path": url, "text": "what it says"}])
    speak(client, references=[{"audio": url, "text": "what it says"}], ref_audio=url, ref_text="what it says")
    texts = [request.reference.text for request in engine.requests]
    assert texts == ["what it says", None, "what it says", "what it says"]
    assert [request.reference.speaker_only for request in engine.requests] == [False, True, False, False]
    for request in engine.requests:
        assert request.reference.rate_hz == 16000
        np.testing.assert_allclose(request.reference.samples, tone, atol=1e-4)


def test_what_the_model_cannot_do_of_openais_fields_is_ignored_aloud(client: TestClient, engine: Any) -> None:
    engine.info = dataclasses.replace(engine.info, instructions=False, languages=())
    _, response = speak(client, instructions="softly", language="Auto", speed=1)
    assert response.headers["x-hocket-ignored"] == "instructions,language"
    assert engine.requests[0].instructions is None
    _, response = speak(client)
    assert "x-hocket-ignored" not in response.headers


def test_nothing_to_say_may_be_silence(app: Callable[..., FastAPI], engine: Any) -> None:
    client = TestClient(app(empty_input="silence"))
    data, _ = speak(client, input="...", **PCM_24K)
    assert data == bytes(2 * 2400)
    assert not engine.requests


def test_no_audio_at_all_is_an_empty_file(client: TestClient, engine: Any) -> None:
    engine.samples = np.zeros(0, np.float32)
    for mode in MODES.values():
        assert speak(client, **PCM_24K, **mode)[0] == b""


class TestRunaway:
    """A model that misses its end is tried once more, if the client left seed and length to the server."""

    def test_second_seed_saves_a_buffered_answer(self, client: TestClient, engine: Any) -> None:
        engine.finish_reasons = ["length", "stop"]
        _, response = speak(client, stream=False)
        assert response.headers["x-finish-reason"] == "stop"
        assert len(engine.requests) == 2

    def test_two_misses_are_an_error(self, client: TestClient, engine: Any) -> None:
        engine.finish_reasons = ["length", "length"]
        response = client.post(SPEECH, json={"input": "hello", "stream": False})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_runaway")
        assert response.headers["x-should-retry"] == "false"

    @pytest.mark.parametrize("fields", [{"seed": 1}, {"max_new_tokens": 9}])
    def test_clients_own_choice_stands(self, client: TestClient, engine: Any, fields: Any) -> None:
        engine.finish_reasons = ["length"]
        _, response = speak(client, stream=False, **fields)
        assert response.headers["x-finish-reason"] == "length"
        assert len(engine.requests) == 1

    def test_stream_ends_with_length(self, client: TestClient, engine: Any) -> None:
        engine.finish_reasons = ["length"]
        response = client.post(SPEECH, json={"input": "hello", "stream_format": "sse"})
        assert events(response.text)[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("mode", MODES)
def test_silence_after_a_missed_end_is_cut_to_a_second(client: TestClient, engine: Any, mode: str) -> None:
    tone, quiet = np.full(5 * HOP, 0.5, np.float32), np.zeros(30 * HOP, np.float32)
    engine.samples = np.concatenate([tone, quiet])
    engine.finish_reasons = ["length", "stop"]
    data, _ = speak(client, seed=1, **PCM_24K, **MODES[mode])
    assert len(data) // 2 == 5 * HOP + 24000
    data, _ = speak(client, seed=1, **PCM_24K, **MODES[mode])
    assert len(data) // 2 == 35 * HOP


def test_speech_may_end_at_its_first_long_silence(client: TestClient, engine: Any) -> None:
    tone, quiet = np.full(5 * HOP, 0.5, np.float32), np.zeros(9 * HOP, np.float32)
    engine.samples = np.concatenate([quiet, tone, quiet, tone])
    data, response = speak(client, stop_at_silence_ms=500, stream=False, **PCM_24K)
    assert len(data) // 2 == 14 * HOP + 12000
    assert response.headers["x-finish-reason"] == "stop"
