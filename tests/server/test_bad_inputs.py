"""Bad inputs on every route: 4xx in the one form, nothing of a payload in it, nothing left running.

The fields of a speech request have a table of their own in test_errors.py, uploads in test_voices.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

SPEECH, BATCH, CHAT = "/v1/audio/speech", "/v1/audio/speech/batch", "/v1/chat/completions"
VOICES = "/v1/audio/voices"
PAYLOAD = "QUJD" * 50_000
DATA_URL = f"data:audio/wav;base64,{PAYLOAD}"
DEEP = b'{"x":' + b"[" * 50_000
USER = [{"role": "user", "content": "hello"}]
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n' % (name.encode(), more)
    return head + value + b"\r\n"


BAD: dict[str, tuple[str, str, Any, int]] = {
    # what: (method, path, body, status); bytes are sent as they are, all else as JSON
    "speech: a payload as text field": ("POST", SPEECH, {"input": "a", "language": 5, "x": PAYLOAD}, 400),
    "speech: payload as model": ("POST", SPEECH, {"input": "a", "model": PAYLOAD}, 404),
    "speech: payload as task": ("POST", SPEECH, {"input": "a", "stream_format": PAYLOAD}, 400),
    "speech: payload as a key of extra": ("POST", SPEECH, {"input": "a", "extra_params": {PAYLOAD: 1}}, 400),
    "speech: payload as reference": ("POST", SPEECH, {"input": "a", "ref_audio": DATA_URL}, 400),
    "speech: payload as host": ("POST", SPEECH, {"input": "a", "ref_audio": f"http://{PAYLOAD}/"}, 403),
    "speech: payload as path": ("POST", SPEECH, {"input": "a", "ref_audio": f"file:///{PAYLOAD}"}, 403),
    "speech: payload as bare path": (
        "POST", SPEECH, {"input": "a", "references": [{"audio_path": PAYLOAD, "text": "b"}]}, 403,
    ),
    "speech: another scheme": ("POST", SPEECH, {"input": "a", "ref_audio": "ftp://example.org/a.wav"}, 400),
    "speech: gopher": ("POST", SPEECH, {"input": "a", "ref_audio": "gopher://127.0.0.1:25/_x"}, 400),
    "speech: data of a text": ("POST", SPEECH, {"input": "a", "ref_audio": "data:text/plain,hi"}, 400),
    "speech: nul in the voice": ("POST", SPEECH, {"input": "a", "voice": "a\0b"}, 400),
    "speech: nul in the language": ("POST", SPEECH, {"input": "a", "language": "a\0b"}, 400),
    "speech: lone surrogate in a field": ("POST", SPEECH, b'{"input":"a","ref_text":"\\ud83d"}', 400),
    "speech: huge exponent": ("POST", SPEECH, b'{"input":"a","temperature":1e400}', 400),
    "speech: minus infinity": ("POST", SPEECH, b'{"input":"a","speed":-Infinity}', 400),
    "speech: key twice, last one bad": ("POST", SPEECH, b'{"input":"a","input":5}', 400),
    "speech: byte order mark": ("POST", SPEECH, b'\xef\xbb\xbf{"input":"a"}', 400),
    "speech: utf-16": ("POST", SPEECH, '{"input":"a"}'.encode("utf-16"), 400),
    "speech: gzip": ("POST", SPEECH, b"\x1f\x8b\x08\x00", 400),
    "speech: form instead of JSON": ("POST", SPEECH, b"input=a&voice=ada", 400),
    "speech: a million spaces": ("POST", SPEECH, b" " * 1_000_000, 400),
    "speech: path with a percent": ("GET", f"{SPEECH}/%00%ff", None, 404),
    "speech: long id": ("GET", f"{SPEECH}/{'a' * 4000}", None, 404),
    "speech: put": ("PUT", SPEECH, {"input": "a"}, 405),
    "speech: get": ("GET", SPEECH, None, 405),
    "cancel: unknown": ("POST", "/v1/requests/%2e%2e/cancel", None, 404),
    "cancel: get": ("GET", "/v1/requests/a/cancel", None, 405),
    "batch: not json": ("POST", BATCH, b"[", 400),
    "batch: deep": ("POST", BATCH, DEEP, 400),
    "batch: no items": ("POST", BATCH, {"items": []}, 400),
    "batch: items is text": ("POST", BATCH, {"items": PAYLOAD}, 400),
    "batch: too many": ("POST", BATCH, {"items": [{"input": "a"}] * 33}, 400),
    "batch: shared speed": ("POST", BATCH, {"items": [{"input": "a"}], "speed": 99}, 400),
    "batch: only bad items": (
        "POST", BATCH, {"items": [{"input": "a", "ref_audio": DATA_URL}, PAYLOAD]}, 400,
    ),
    "chat: not json": ("POST", CHAT, b"hello", 400),
    "chat: deep": ("POST", CHAT, DEEP, 400),
    "chat: no messages": ("POST", CHAT, {}, 400),
    "chat: messages is text": ("POST", CHAT, {"messages": PAYLOAD}, 400),
    "chat: role is a number": ("POST", CHAT, {"messages": [{"role": 1, "content": "a"}]}, 400),
    "chat: content is an object": ("POST", CHAT, {"messages": [{"role": "user", "content": {}}]}, 400),
    "chat: part without a type": ("POST", CHAT, {"messages": [{"role": "user", "content": [{}]}]}, 400),
    "chat: audio part": (
        "POST", CHAT,
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": PAYLOAD}]}]},
        400,
    ),
    "chat: payload as voice": ("POST", CHAT, {"messages": USER, "audio": {"voice": PAYLOAD}}, 400),
    "chat: payload as format": ("POST", CHAT, {"messages": USER, "audio": {"format": PAYLOAD}}, 400),
    "chat: audio is text": ("POST", CHAT, {"messages": USER, "audio": "wav"}, 400),
    "chat: stream is text": ("POST", CHAT, {"messages": USER, "stream": "yes"}, 400),
    "chat: text alone": ("POST", CHAT, {"messages": USER, "modalities": ["text"]}, 400),
    "chat: no choices": ("POST", CHAT, {"messages": USER, "n": 0}, 400),
    "chat: negative tokens": ("POST", CHAT, {"messages": USER, "max_tokens": -1}, 400),
    "chat: unknown model": ("POST", CHAT, {"messages": USER, "model": "gpt-9"}, 404),
    "voices: json": ("POST", VOICES, {"name": "anna"}, 400),
    "voices: nothing": ("POST", VOICES, b"", 400),
    "voices: unknown": ("GET", f"{VOICES}/nobody", None, 404),
    "voices: payload as name": ("GET", f"{VOICES}/{'QUJD' * 500}", None, 404),
    "voices: nul as name": ("GET", f"{VOICES}/%00", None, 404),
    "voices: broken utf-8 as name": ("DELETE", f"{VOICES}/%ff%fe", None, 404),
    "voices: dots": ("DELETE", f"{VOICES}/%2e%2e", None, 404),
    "voices: delete a speaker": ("DELETE", f"{VOICES}/Ada", None, 400),
    "voices: delete the default": ("DELETE", f"{VOICES}/default", None, 400),
    "voices: bad flag": ("GET", f"{VOICES}?legacy={'QUJD' * 500}", None, 400),
    "voices: patch": ("PATCH", VOICES, None, 405),
    "models: unknown": ("GET", "/v1/models/a/b/c", None, 404),
    "models: payload": ("GET", f"/v1/models/{'QUJD' * 500}", None, 404),
    "tokenize: nothing": ("POST", "/tokenize", {}, 400),
    "tokenize: a list": ("POST", "/tokenize", {"prompt": [1]}, 400),
    "tokenize: deep": ("POST", "/tokenize", DEEP, 400),
    "detokenize: payload": ("POST", "/detokenize", {"tokens": PAYLOAD}, 400),
    "detokenize: huge": ("POST", "/detokenize", {"tokens": [10**30]}, 400),
    "admin: level": ("POST", "/admin/sleep", {"level": "deep"}, 400),
    "admin: not json": ("POST", "/admin/sleep", b"{", 400),
    "admin: unknown": ("POST", "/admin/reboot", None, 404),
    "admin: get": ("GET", "/admin/drain", None, 405),
    "ws: as http": ("GET", f"{SPEECH}/stream", None, 404),
    "realtime: as http": ("GET", "/v1/realtime", None, 404),
    "nothing there": ("GET", "/v1/" + "QUJD" * 500, None, 404),
    "double slash": ("GET", "//v1//models", None, 404),
    "dots in the path": ("GET", "/v1/models/../../etc/passwd", None, 404),
}  # fmt: skip


def test_table_is_long_enough() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize(("method", "path", "body", "status"), BAD.values(), ids=BAD)
def test_bad_input(
    app: Callable[..., FastAPI],
    engine: Any,
    tmp_path: Path,
    method: str,
    path: str,
    body: Any,
    status: int,
) -> None:
    client = TestClient(app(voices_dir=tmp_path))
    sent = {} if body is None else {"content": body if isinstance(body, bytes) else json.dumps(body)}
    response = client.request(method, path, **sent)
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 2048
    assert "QUJD" * 25 not in response.text
    answer = response.json()
    errors = [answer["error"]] if "error" in answer else [r["error_detail"] for r in answer["results"]]
    for error in errors:
        assert list(error) == ["message", "type", "param", "code"]
        assert 0 < len(error["message"]) <= 1000
        assert "Traceback" not in error["message"]
    assert response.headers["x-request-id"]
    assert not engine.open
    assert not client.app.state.serving.requests.running
    assert client.get("/health").status_code == 200


FORMS: dict[str, bytes] = {
    "no end": part("name", b"anna"),
    "no name": part("", b"anna") + b"--x--\r\n",
    "no headers": b"--x\r\n\r\nhello\r\n--x--\r\n",
    "name as file": part("name", b"anna", b'; filename="a"') + b"--x--\r\n",
    "audio as text": part("name", b"anna") + part("consent", b"c") + part("audio_sample", b"QUJD" * 5000)
    + b"--x--\r\n",
    "name not utf-8": part("name", b"\xff\xfe") + part("consent", b"c") + b"--x--\r\n",
    "thousand fields": b"".join(part(f"f{n}", b"a") for n in range(1000)) + b"--x--\r\n",
    "ten files": b"".join(part(f"f{n}", b"a", b'; filename="a"') for n in range(10)) + b"--x--\r\n",
    "long field": part("ref_text", b"QUJD" * (1 << 19)) + b"--x--\r\n",
    "other boundary": b"--y\r\nhello\r\n--y--\r\n",
    "binary": bytes(range(256)) * 20,
}  # fmt: skip


@pytest.mark.parametrize("content", FORMS.values(), ids=FORMS)
def test_bad_form(app: Callable[..., FastAPI], tmp_path: Path, content: bytes) -> None:
    response = TestClient(app(voices_dir=tmp_path)).post(VOICES, content=content, headers=FORM)
    assert 400 <= response.status_code < 500, response.text
    assert list(response.json()["error"]) == ["message", "type", "param", "code"]
    assert "QUJD" * 25 not in response.text
    assert not list(tmp_path.glob("*.voice"))
