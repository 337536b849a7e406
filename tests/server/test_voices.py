"""Uploaded voices: the form, the store, and how they are spoken with."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from hocket.audio.encode import Encoder
from hocket.audio.wav import to_s16, wav_header
from hocket.errors import InvalidRequest
from hocket.server.app import create_app
from hocket.server.errors import Refused
from hocket.server.settings import ServerSettings
from hocket.server.voice_store import VoiceRecord, VoiceStore, folded

VOICES = "/v1/audio/voices"
SPEECH = "/v1/audio/speech"


def tone(seconds: float, rate: int = 16000, frequency: float = 200) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    return wav_header(rate, len(samples)) + to_s16(samples).tobytes()


def encoded(file_format: Any) -> bytes:
    encoder = Encoder(file_format, 48000, streaming=False)
    return encoder.encode(tone(2, 48000)) + encoder.finish()


def container(name: str, codec: str) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=name) as file:
        stream = file.add_stream(codec, rate=48000)
        stream.layout = "mono"
        for start in range(0, 96000, 960):
            frame = av.AudioFrame.from_ndarray(tone(2, 48000)[None, start : start + 960], "fltp", "mono")
            frame.sample_rate, frame.pts = 48000, start
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.fixture
def client(app: Callable[..., FastAPI], tmp_path: Path) -> TestClient:
    return TestClient(app(voices_dir=tmp_path / "voices"))


def upload(client: TestClient, name: str = "anna", audio: bytes | None = None, **fields: Any) -> Any:
    data = {"name": name, "consent": "c-1", **fields}
    files = {"audio_sample": ("clip.bin", audio or wav(tone(2)), "text/plain")}
    return client.post(VOICES, data={k: v for k, v in data.items() if v is not None}, files=files)


def test_answer_suits_both_kinds_of_client(client: TestClient) -> None:
    response = upload(client, ref_text="hello", speaker_description="warm", language="English")
    assert response.status_code == 200, response.text
    body = response.json()
    assert list(body) == ["success", "id", "object", "type", "name", "created_at", "voice"]
    assert (body["success"], body["id"], body["object"], body["type"]) == (
        True,
        "anna",
        "audio.voice",
        "audio_sample",
    )
    entry = {
        "name": "anna",
        "consent": "c-1",
        "created_at": body["created_at"],
        "file_size": len(wav(tone(2))),
        "mime_type": "audio/wav",
        "ref_text": "hello",
        "speaker_description": "warm",
        "language": "English",
        "embedding_source": "audio",
        "embedding_dim": None,
    }
    assert body["voice"] == {"id": "anna", "kind": "uploaded", **entry}
    listed = client.get(VOICES).json()
    assert listed["uploaded_voices"] == [entry]
    assert listed["voices"][-1] == {"id": "anna", "name": "anna", "kind": "uploaded"}
    assert client.get(f"{VOICES}?legacy=true").json()["voices"] == ["ada", "lin", "nova", "anna"]
    assert client.get(f"{VOICES}?names_only=true").json() == {"uploaded_voice_names": ["anna"]}
    assert client.get(f"{VOICES}/ANNA").json() == body["voice"]
    assert client.get(f"{VOICES}/ada").json()["kind"] == "builtin"


def test_spoken_with_by_name(client: TestClient, engine: Any) -> None:
    upload(client, "Änna", ref_text="hello")
    upload(client, "ben")
    for body in ({"voice": "ÄNNA"}, {"voice": {"id": "ben"}}, {"voice": "änna", "x_vector_only_mode": True}):
        response = client.post(SPEECH, json={"input": "hi", **body})
        assert response.status_code == 200, response.text
    one, two, three = engine.requests
    np.testing.assert_allclose(one.reference.samples, tone(2), atol=1e-4)
    assert (one.voice, one.reference.rate_hz) == (None, 16000)
    assert (one.reference.text, one.reference.speaker_only) == ("hello", False)
    assert (two.reference.text, two.reference.speaker_only) == (None, True)
    assert three.reference.speaker_only


def test_spoken_with_in_every_route(client: TestClient, engine: Any) -> None:
    upload(client)
    assert (
        client.post(f"{SPEECH}/batch", json={"items": [{"input": "a"}], "voice": "anna"}).status_code == 200
    )
    chat = {"messages": [{"role": "user", "content": "a"}], "audio": {"voice": "anna"}}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    with client.websocket_connect("/v1/audio/speech/stream") as socket:
        socket.send_json({"type": "session.config", "voice": "anna"})
        assert socket.receive_json()["type"] == "session.configured"
        socket.send_json({"type": "input.text", "text": "a"})
        socket.send_json({"type": "input.done"})
        while "bytes" not in socket.receive():
            pass
        assert socket.receive_json()["type"] == "audio.done"
        assert socket.receive_json()["type"] == "session.done"
    with client.websocket_connect("/v1/realtime") as socket:
        socket.receive_json()
        session = {"audio": {"output": {"voice": "anna"}}}
        socket.send_json({"type": "session.update", "session": session})
        assert socket.receive_json()["type"] == "session.updated"
    assert [request.reference is not None for request in engine.requests] == [True] * 3


def test_alias_may_stand_for_an_uploaded_voice_and_gives_way_to_one(
    app: Callable[..., FastAPI], engine: Any, tmp_path: Path
) -> None:
    client = TestClient(app(voices_dir=tmp_path, voice_aliases={"house": "anna"}))
    upload(client)
    upload(client, "alloy")
    for name in ("house", "alloy"):
        client.post(SPEECH, json={"input": "a", "voice": name})
    assert all(request.reference is not None for request in engine.requests)


def test_two_voices_at_once_are_refused(client: TestClient) -> None:
    upload(client)
    embedding = {"input": "a", "voice": "anna", "speaker_embedding": [1.0]}
    response = client.post(SPEECH, json=embedding)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "voice")


def test_model_that_does_not_clone_says_what_it_can(client: TestClient, engine: Any) -> None:
    upload(client)
    engine.info = dataclasses.replace(engine.info, clones=False)
    error = client.post(SPEECH, json={"input": "a", "voice": "anna"}).json()["error"]
    assert (error["param"], error["code"]) == ("voice", "unsupported_task")
    assert "ada, lin, nova" in error["message"]
    assert "Base" in error["message"]


def test_unknown_voice_names_uploaded_ones_too(client: TestClient) -> None:
    upload(client)
    said = client.post(SPEECH, json={"input": "a", "voice": "eve"}).json()["error"]["message"]
    assert said == "voice 'eve' is not known; known voices: anna, ada, lin, nova"


KINDS: dict[str, tuple[Callable[[], bytes], str]] = {
    "wav": (lambda: wav(tone(2, 96000), 96000), "audio/wav"),
    "mp3": (lambda: encoded("mp3"), "audio/mpeg"),
    "flac": (lambda: encoded("flac"), "audio/flac"),
    "opus": (lambda: encoded("opus"), "audio/ogg"),
    "aac": (lambda: encoded("aac"), "audio/aac"),
    "m4a": (lambda: container("mp4", "aac"), "audio/mp4"),
    "webm": (lambda: container("webm", "libopus"), "audio/webm"),
}


@pytest.mark.parametrize(("make", "mime"), KINDS.values(), ids=KINDS)
def test_type_is_decided_by_content(
    client: TestClient, engine: Any, make: Callable[[], bytes], mime: str
) -> None:
    response = upload(client, audio=make())
    assert response.status_code == 200, response.text
    assert response.json()["voice"]["mime_type"] == mime
    client.post(SPEECH, json={"input": "a", "voice": "anna"})
    reference = engine.requests[0].reference
    assert reference.rate_hz == 48000  # the 96 kHz one as well
    assert len(reference.samples) == pytest.approx(96000, abs=4000)


def test_embedding_is_a_voice_too(client: TestClient, engine: Any) -> None:
    data = {"name": "anna", "consent": "c", "speaker_embedding": json.dumps([0.5, -1, 2e-3])}
    response = client.post(VOICES, data=data, files={"x": b""})
    entry = response.json()["voice"]
    assert (entry["embedding_source"], entry["embedding_dim"], entry["mime_type"]) == ("direct", 3, None)
    client.post(SPEECH, json={"input": "a", "voice": "anna"})
    request = engine.requests[0]
    np.testing.assert_allclose(request.speaker_embedding, [0.5, -1, 2e-3], rtol=1e-6)
    assert request.reference is None


BAD: dict[str, tuple[dict[str, Any], bytes | None, int, str, str]] = {
    # what: (fields, audio, status, param, code)
    "no name": ({"name": None}, None, 400, "name", "missing_field"),
    "blank name": ({"name": "  "}, None, 400, "name", "missing_field"),
    "long name": ({"name": "a" * 65}, None, 400, "name", "invalid_name"),
    "very long name": ({"name": "a" * 5000}, None, 400, "name", "too_long"),
    "slash": ({"name": "a/b"}, None, 400, "name", "invalid_name"),
    "backslash": ({"name": "a\\b"}, None, 400, "name", "invalid_name"),
    "nul": ({"name": "a\0b"}, None, 400, "name", "invalid_name"),
    "control": ({"name": "a\x07b"}, None, 400, "name", "invalid_name"),
    "dot": ({"name": "."}, None, 400, "name", "invalid_name"),
    "dots": ({"name": " .. "}, None, 400, "name", "invalid_name"),
    "own speaker": ({"name": "ADA"}, None, 400, "name", "voice_reserved"),
    "default": ({"name": "Default"}, None, 400, "name", "voice_reserved"),
    "no consent": ({"consent": None}, None, 400, "consent", "missing_field"),
    "long consent": ({"consent": "c" * 257}, None, 400, "consent", "too_long"),
    "other type": ({"type": "prompt"}, None, 400, "type", "unsupported_type"),
    "unclear replace": ({"replace": "perhaps"}, None, 400, "replace", "invalid_value"),
    "long text": ({"ref_text": "a" * 5000}, None, 400, "ref_text", "too_long"),
    "both": ({"speaker_embedding": "[1]"}, None, 400, "audio_sample", "invalid_value"),
    "not audio": ({}, b"hello", 415, "audio_sample", "unsupported_audio"),
    "a playlist": ({}, b"#EXTM3U\nfile:///etc/passwd\n", 415, "audio_sample", "unsupported_audio"),
    "short": ({}, wav(tone(0.9)), 400, "audio_sample", "reference_too_short"),
    "long": ({}, wav(tone(30.5)), 400, "audio_sample", "reference_too_long"),
    "silence": ({}, wav(0 * tone(2)), 400, "audio_sample", "reference_silent"),
    "large": ({}, bytes((10 << 20) + 1), 413, "audio_sample", "file_too_large"),
    "larger": ({}, bytes(12 << 20), 413, "audio_sample", "file_too_large"),
}


@pytest.mark.parametrize(("fields", "audio", "status", "param", "code"), BAD.values(), ids=BAD)
def test_bad_upload(
    client: TestClient, fields: dict[str, Any], audio: bytes | None, status: int, param: str, code: str
) -> None:
    response = upload(client, **{"audio": audio, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), response.text
    assert len(response.content) < 2048
    assert client.get(VOICES).json()["uploaded_voices"] == []


def test_folder_that_cannot_be_written_is_one_clear_error(
    app: Callable[..., FastAPI], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    response = upload(TestClient(app(voices_dir=tmp_path / "file")))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, "voices_unwritable")
    assert error["message"] == "the server cannot write its folder of voices: File exists"


@pytest.mark.parametrize(
    "text", ["", "x", "{}", "[]", "[1, null]", "[1e60]", "[NaN]", "[1" + ",1" * 9000 + "]"]
)
def test_bad_embedding(client: TestClient, text: str) -> None:
    data = {"name": "anna", "consent": "c", "speaker_embedding": text}
    response = client.post(VOICES, data=data, files={"x": b""})
    assert response.status_code == 400
    expected = "speaker_embedding" if text else "audio_sample"
    assert response.json()["error"]["param"] == expected


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{}", "application/json"),
        (b"", ""),
        (b"", "multipart/form-data"),
        (b"nothing", "multipart/form-data; boundary=x"),
        (b"--x\r\nbroken", "multipart/form-data; boundary=x"),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--\r\n", "multipart/form-data; boundary=x"),
    ],
)
def test_broken_form(client: TestClient, content: bytes, kind: str) -> None:
    response = client.post(VOICES, content=content, headers={"Content-Type": kind})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] in ("invalid_multipart", "missing_field")


def test_replaced_by_default_and_kept_if_asked(client: TestClient, engine: Any) -> None:
    upload(client)
    refused = upload(client, "ANNA", audio=wav(tone(3)), replace="false")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "voice_exists")
    assert upload(client, "ANNA", audio=wav(tone(3))).status_code == 200
    client.post(SPEECH, json={"input": "a", "voice": "anna"})
    assert len(engine.requests[0].reference.samples) == 3 * 16000
    assert client.get(f"{VOICES}?names_only=true").json() == {"uploaded_voice_names": ["ANNA"]}


def test_deleted(client: TestClient) -> None:
    upload(client)
    response = client.delete(f"{VOICES}/Anna")
    assert (response.status_code, response.json()["object"], response.json()["deleted"]) == (
        200,
        "audio.voice.deleted",
        True,
    )
    for gone in (client.delete(f"{VOICES}/anna"), client.get(f"{VOICES}/anna")):
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "voice_not_found")
    assert client.post(SPEECH, json={"input": "a", "voice": "anna"}).status_code == 400
    builtin = client.delete(f"{VOICES}/ada")
    assert (builtin.status_code, builtin.json()["error"]["code"]) == (400, "voice_builtin")


def test_limits_are_the_owners(app: Callable[..., FastAPI], tmp_path: Path) -> None:
    client = TestClient(app(voices_dir=tmp_path, max_voices=2, consent_required=False))
    assert [upload(client, name, consent=None).status_code for name in "ab"] == [200, 200]
    full = upload(client, "c")
    assert (full.status_code, full.json()["error"]["code"]) == (400, "voice_limit")
    assert upload(client, "a").status_code == 200  # it replaces


def test_two_servers_share_a_folder(engine: Any, tmp_path: Path) -> None:
    settings = ServerSettings(model="org/fake-tts", voices_dir=tmp_path)
    one, two = (TestClient(create_app(engine, settings)) for _ in range(2))
    say = {"input": "a", "voice": "anna"}
    upload(one)
    assert two.post(SPEECH, json=say).status_code == 200
    upload(two, audio=wav(tone(3)))
    one.post(SPEECH, json=say)
    assert [len(r.reference.samples) // 16000 for r in engine.requests] == [2, 3]
    two.delete(f"{VOICES}/anna")
    assert one.post(SPEECH, json=say).status_code == 400
    upload(one)
    again = TestClient(create_app(engine, settings))  # after a restart
    assert again.post(SPEECH, json=say).status_code == 200


# --- the store ---------------------------------------------------------------------------------


def _write(folder: Path, number: int) -> int:
    """Save and replace voices; every read must see a whole one. -> refusals"""
    store, refused = VoiceStore(folder, limit=4), 0
    for turn in range(40):
        data = np.full(1000, number * 100 + turn, np.float32)
        name = f"voice {turn % 6}"
        record = VoiceRecord(name=name, rate_hz=number * 100 + turn, ref_text=f"{number * 100 + turn}")
        try:
            store.save(record, data, replace=turn % 2 == 0)
        except (Refused, InvalidRequest):
            refused += 1
        found = store.find(name)
        if found is not None:
            assert np.all(found.data == found.record.rate_hz)
            assert found.record.ref_text == str(found.record.rate_hz)
        if turn % 7 == 0:
            store.delete(name)
        assert len(store.records()) <= 4
    return refused


def test_processes_that_write_at_once_leave_whole_voices(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert sum(pool.starmap(_write, [(tmp_path, 1), (tmp_path, 2)])) > 0
    assert not list(tmp_path.glob("*.part"))


def test_one_of_two_that_must_not_replace_wins(tmp_path: Path) -> None:
    one, two = VoiceStore(tmp_path, 9), VoiceStore(tmp_path, 9)
    one.save(VoiceRecord(name="Straße"), np.zeros(1, np.float32), replace=False)
    with pytest.raises(Refused):
        two.save(VoiceRecord(name="STRASSE"), np.ones(1, np.float32), replace=False)
    assert two.find("strasse").record.name == "Straße"


@pytest.mark.parametrize("damage", [b"", b"hocketv1", b"hocketv1\xff\xff\xff\xff", b"x" * 99, "cut"])
def test_damaged_file_is_no_voice(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = VoiceStore(tmp_path, 9)
    store.save(VoiceRecord(name="a"), np.zeros(100, np.float32), replace=True)
    store.save(VoiceRecord(name="b"), np.zeros(100, np.float32), replace=True)
    (file,) = [f for f in tmp_path.glob("*.voice") if store._path("a") == f]
    file.write_bytes(file.read_bytes()[:-3] if damage == "cut" else damage)
    assert store.find("a") is None
    assert store.find("b") is not None
    assert "b" in store.names()
    assert "cannot be read" in caplog.text


def test_names_meet_whatever_their_spelling() -> None:
    assert folded(" Änna ") == folded("A\u0308NNA") == "änna"
