"""The error table of the API contract, row by row, and a table of bad bodies."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from hocket import errors
from hocket.audio.wav import to_s16, wav_header

SPEECH = "/v1/audio/speech"


def wav_url(samples: np.ndarray, rate: int = 16000) -> str:
    data = wav_header(rate, len(samples)) + to_s16(samples).tobytes()
    return "data:audio/wav;base64," + base64.b64encode(data).decode()


def tone(seconds: float) -> np.ndarray:
    return np.sin(np.arange(int(16000 * seconds)) / 20).astype(np.float32) * 0.5


def check(response: Any, status: int, kind: str, code: str | None, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 2048
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert "Traceback" not in error["message"]
    return error


BAD_BODIES: dict[str, tuple[Any, str | None, str]] = {
    # what is sent: (body, param, code)
    "nothing": (b"", None, "invalid_json"),
    "not json": (b"input=hello", None, "invalid_json"),
    "cut off": (b'{"input": "a', None, "invalid_json"),
    "more after the object": (b'{"input": "a"} x', None, "invalid_json"),
    "a list": ([{"input": "a"}], None, "invalid_json"),
    "a string": ("input", None, "invalid_json"),
    "null": (b"null", None, "invalid_json"),
    "not utf-8": (b'{"input": "\xff\xfe"}', None, "invalid_json"),
    "lone surrogate": (b'{"input": "a \\ud800 b"}', None, "invalid_json"),
    "lone low surrogate": (b'{"input": "a \\udc00 b"}', None, "invalid_json"),
    "very deep": (b'{"x":' + b"[" * 100_000, None, "invalid_json"),
    "deep beside a bad field": (b'{"input": 1, "x":' + b"[" * 100_000, None, "invalid_json"),
    "no input": ({}, "input", "missing_field"),
    "null input": ({"input": None}, "input", "invalid_value"),
    "numeric input": ({"input": 5}, "input", "invalid_value"),
    "input in a list": ({"input": ["a"]}, "input", "invalid_value"),
    "empty input": ({"input": ""}, "input", "empty_input"),
    "blank input": ({"input": " \n\t\u3000"}, "input", "empty_input"),
    "punctuation": ({"input": "?! … 。"}, "input", "empty_input"),
    "nul": ({"input": "a\0b"}, "input", "invalid_value"),
    "long input": ({"input": "a" * 100_001}, "input", "input_too_long"),
    "long instructions": ({"input": "a", "instructions": "b" * 501}, "instructions", "too_long"),
    "numeric model": ({"input": "a", "model": 4}, "model", "invalid_value"),
    "unknown voice": ({"input": "a", "voice": "nobody"}, "voice", "voice_not_found"),
    "numeric voice": ({"input": "a", "voice": 4}, "voice", "invalid_value"),
    "voice without id": ({"input": "a", "voice": {"name": "ada"}}, "voice.id", "missing_field"),
    "voice with numeric id": ({"input": "a", "voice": {"id": 1}}, "voice.id", "invalid_value"),
    "two voices": ({"input": "a", "voice": "ada", "speaker": "lin"}, "speaker", "invalid_value"),
    "unknown format": ({"input": "a", "response_format": "ogg"}, "response_format", "invalid_value"),
    "upper-case format": ({"input": "a", "response_format": "MP3"}, "response_format", "invalid_value"),
    "low speed": ({"input": "a", "speed": 0.2}, "speed", "invalid_value"),
    "high speed": ({"input": "a", "speed": 4.01}, "speed", "invalid_value"),
    "nan speed": (b'{"input": "a", "speed": NaN}', None, "invalid_json"),
    "infinite speed": (b'{"input": "a", "speed": 1e999}', "speed", "invalid_value"),
    "speed as text": ({"input": "a", "speed": "fast"}, "speed", "invalid_value"),
    "unknown stream format": ({"input": "a", "stream_format": "raw"}, "stream_format", "invalid_value"),
    "stream as number": ({"input": "a", "stream": 1}, "stream", "invalid_value"),
    "odd rate": ({"input": "a", "sample_rate": 44000}, "sample_rate", "invalid_value"),
    "rate as text": ({"input": "a", "sample_rate": "24000"}, "sample_rate", "invalid_value"),
    "no frames": ({"input": "a", "max_new_tokens": 0}, "max_new_tokens", "invalid_value"),
    "fractional frames": ({"input": "a", "max_new_tokens": 1.5}, "max_new_tokens", "invalid_value"),
    "huge seed": ({"input": "a", "seed": 1 << 63}, "seed", "invalid_value"),
    "5000-digit seed": (b'{"input": "a", "seed": ' + b"9" * 5000 + b"}", "seed", "invalid_value"),
    "boolean seed": ({"input": "a", "seed": True}, "seed", "invalid_value"),
    "negative temperature": ({"input": "a", "temperature": -0.1}, "temperature", "invalid_value"),
    "zero top_p": ({"input": "a", "top_p": 0}, "top_p", "invalid_value"),
    "top_p over 1": ({"input": "a", "top_p": 1.1}, "top_p", "invalid_value"),
    "negative top_k": ({"input": "a", "top_k": -2}, "top_k", "invalid_value"),
    "zero penalty": ({"input": "a", "repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    "negative chunk": (
        {"input": "a", "initial_codec_chunk_frames": -1},
        "initial_codec_chunk_frames",
        "invalid_value",
    ),
    "high priority": ({"input": "a", "priority": 101}, "priority", "invalid_value"),
    "request id with blank": ({"input": "a", "request_id": "a b"}, "request_id", "invalid_value"),
    "long request id": ({"input": "a", "request_id": "a" * 129}, "request_id", "invalid_value"),
    "timestamps": ({"input": "a", "word_timestamps": True}, "word_timestamps", "invalid_value"),
    "extra as list": ({"input": "a", "extra_params": []}, "extra_params", "invalid_value"),
    "unknown extra": ({"input": "a", "extra_params": {"x": 1}}, "extra_params.x", "invalid_value"),
    "raw base64": ({"input": "a", "ref_audio": "UklGRg==" * 99}, "ref_audio", "bad_reference"),
    "a bare path": ({"input": "a", "ref_audio": "/etc/passwd"}, "ref_audio", "bad_reference"),
    "damaged base64": (
        {"input": "a", "ref_audio": "data:audio/wav;base64,!!!"},
        "ref_audio",
        "bad_reference",
    ),
    "not audio": ({"input": "a", "ref_audio": "data:audio/wav;base64,AAAA"}, "ref_audio", "bad_reference"),
    "short reference": ({"input": "a", "ref_audio": wav_url(tone(0.5))}, "ref_audio", "reference_too_short"),
    "long reference": ({"input": "a", "ref_audio": wav_url(tone(30.5))}, "ref_audio", "reference_too_long"),
    "silent reference": (
        {"input": "a", "ref_audio": wav_url(0 * tone(2))},
        "ref_audio",
        "reference_silent",
    ),
    "two recordings": ({"input": "a", "ref_audio": ["x", "y"]}, "ref_audio", "invalid_value"),
    "reference as number": ({"input": "a", "ref_audio": [4]}, "ref_audio.0", "invalid_value"),
    "transcript alone": ({"input": "a", "ref_text": "hello"}, "ref_text", "invalid_value"),
    "timbre of nobody": ({"input": "a", "x_vector_only_mode": True}, "x_vector_only_mode", "invalid_value"),
    "empty references entry": ({"input": "a", "references": [{}]}, "references.0.audio", "missing_field"),
    "references as text": ({"input": "a", "references": ["x"]}, "references.0", "invalid_value"),
    "reference text as number": (
        {"input": "a", "references": [{"audio": "x", "text": 3}]},
        "references.0.text",
        "invalid_value",
    ),
    "two kinds of reference": (
        {"input": "a", "ref_audio": "data:x", "references": [{"audio": "data:y"}]},
        "references",
        "invalid_value",
    ),
    "embedding of words": (
        {"input": "a", "speaker_embedding": ["x"]},
        "speaker_embedding.0",
        "invalid_value",
    ),
}


@pytest.mark.parametrize(("body", "param", "code"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_bad_body_is_refused_by_name(client: TestClient, body: Any, param: str | None, code: str) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    check(client.post(SPEECH, **sent), 400, "invalid_request_error", code, param)


ROUTES: dict[str, tuple[str, str, int, str, str | None, str | None]] = {
    "unknown route": ("GET", "/v1/nothing", 404, "not_found_error", "route_not_found", None),
    "later route": (
        "POST", "/admin/weights", 501, "not_implemented_error", "not_implemented", None,
    ),
    "voices without a folder": (
        "POST", "/v1/audio/voices", 501, "not_implemented_error", "voices_disabled", None,
    ),
    "unknown voice": ("GET", "/v1/audio/voices/eve", 404, "not_found_error", "voice_not_found", "name"),
    "method": ("DELETE", SPEECH, 405, "invalid_request_error", "method_not_allowed", None),
    "unknown model": ("GET", "/v1/models/other", 404, "not_found_error", "model_not_found", "model"),
    "unknown outcome": (
        "GET", "/v1/audio/speech/speech-0", 404, "not_found_error", "request_not_found", None,
    ),
    "unknown request": (
        "POST", "/v1/requests/speech-0/cancel", 404, "not_found_error", "request_not_found", None,
    ),
    "bad query": (
        "GET", "/v1/audio/voices?legacy=maybe", 400, "invalid_request_error", "invalid_value", "legacy",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "path", "status", "kind", "code", "param"), ROUTES.values(), ids=ROUTES)
def test_every_route_answers_in_the_error_form(
    client: TestClient, method: str, path: str, status: int, kind: str, code: str | None, param: str | None
) -> None:
    check(client.request(method, path), status, kind, code, param)


RAISED: dict[str, tuple[Exception, int, str, str, dict[str, str]]] = {
    "full": (
        errors.Overloaded("the queue is full", retry_after_s=2.2), 503, "overloaded_error", "overloaded",
        {"retry-after": "3"},
    ),
    "full for long": (
        errors.Overloaded("full", retry_after_s=900), 503, "overloaded_error", "overloaded",
        {"retry-after": "30"},
    ),
    "late": (errors.DeadlineExceeded("too late"), 504, "timeout_error", "deadline_exceeded", {}),
    "failed": (errors.RequestFailed("a step failed"), 500, "server_error", "request_failed", {}),
    "worker died": (errors.WorkerDied("worker 0 died"), 500, "server_error", "worker_died", {}),
    "cancelled": (
        errors.Cancelled("cancelled"), 500, "server_error", "cancelled", {"x-should-retry": "false"},
    ),
    "lacking": (
        errors.Unsupported("no such feature"), 501, "not_implemented_error", "not_implemented",
        {"x-should-retry": "false"},
    ),
    "forbidden": (errors.Forbidden("not there"), 403, "permission_error", "forbidden_source", {}),
    "bug": (ZeroDivisionError("/secret/path"), 500, "server_error", "internal_error", {}),
}  # fmt: skip


@pytest.mark.parametrize(("error", "status", "kind", "code", "headers"), RAISED.values(), ids=RAISED)
@pytest.mark.parametrize("mode", ["buffered", "raw", "events"])
@pytest.mark.parametrize("where", ["submit", "first frame"])
def test_failure_before_the_first_audio_is_an_http_error(
    client: TestClient,
    engine: Any,
    error: Exception,
    status: int,
    kind: str,
    code: str,
    headers: dict[str, str],
    mode: str,
    where: str,
) -> None:
    if where == "submit":
        engine.refusal = error
    else:
        engine.fail_at, engine.error = 0, error
    wanted = {"buffered": {"stream": False}, "raw": {}, "events": {"stream_format": "sse"}}[mode]
    response = client.post(SPEECH, json={"input": "hello", **wanted})
    said = check(response, status, kind, code, None)
    assert "secret" not in said["message"]
    assert {name: response.headers.get(name) for name in headers} == headers


def test_unknown_model_is_404(client: TestClient) -> None:
    response = client.post(SPEECH, json={"input": "a", "model": "gpt-9"})
    check(response, 404, "not_found_error", "model_not_found", "model")


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.wav", "https://example.org/a.wav", "file:///etc/passwd"])
def test_places_are_forbidden_whether_or_not_they_exist(client: TestClient, url: str) -> None:
    response = client.post(SPEECH, json={"input": "a", "ref_audio": url})
    check(response, 403, "permission_error", "forbidden_source", "ref_audio")
    response = client.post(SPEECH, json={"input": "a", "references": [{"audio_path": url[7:], "text": "b"}]})
    check(response, 403, "permission_error", "forbidden_source", "references.0.audio_path")


def test_payload_is_never_echoed(client: TestClient) -> None:
    payload = "QUJD" * (5 << 18)  # 5 MiB
    for body in (
        {"input": "a", "ref_audio": payload},
        {"input": "a", "ref_audio": "data:audio/wav;base64," + payload},
        {"input": "a", "response_format": payload},
        {"input": "a", "voice": payload},
        {"input": "a", "model": payload},
        {"input": "a", "seed": payload},
        {"input": "a", "request_id": payload},
    ):
        response = client.post(SPEECH, json=body)
        assert 400 <= response.status_code < 500
        assert len(response.content) < 2048
        assert "QUJD" * 25 not in response.text


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (SPEECH, b" \n", "the body is empty; send a JSON object"),
        (
            SPEECH,
            b'{"input":"a","seed":9223372036854775808}',
            "'seed' must be a whole number from -9223372036854775808 to 9223372036854775807; "
            "got 9223372036854775808",
        ),
        (f"{SPEECH}/batch", b'{"items":null}', "'items' must be a list, each item an object; got null"),
    ],
)
def test_message_names_the_remedy(client: TestClient, path: str, body: bytes, message: str) -> None:
    assert client.post(path, content=body).json()["error"]["message"] == message


def test_message_says_what_came_and_what_was_expected(client: TestClient) -> None:
    said = client.post(SPEECH, json={"input": "a", "speed": 7}).json()["error"]["message"]
    assert said == "'speed' must be a number from 0.25 to 4; got 7"
    said = client.post(SPEECH, json={"input": "a", "response_format": "ogg"}).json()["error"]["message"]
    assert said == "'response_format' must be one of aac, flac, mp3, opus, pcm, wav; got 'ogg'"
    said = client.post(SPEECH, json={"input": "a", "voice": "eve"}).json()["error"]["message"]
    assert said == "voice 'eve' is not known; known voices: ada, lin, nova"
