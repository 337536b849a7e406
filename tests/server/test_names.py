"""Names of models and voices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from starlette.testclient import TestClient

from hocket.core import Voice
from hocket.errors import InvalidRequest
from hocket.server.names import OPENAI_VOICES, find_voice


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, "ada"), ("", "ada"), ("default", "ada"), ("Default", "ada"),
        ("LIN", "lin"), ("Nova", "nova"),
        ("alloy", "ada"), ("ash", "lin"), ("ballad", "nova"), ("Coral", "ada"),
        ("mine", "lin"), ("echo", "nova"), ("house", "ada"),
    ],
)  # fmt: skip
def test_voice_order_is_speaker_then_alias(engine: Any, wanted: str | None, found: str) -> None:
    aliases = {"mine": "Lin", "ECHO": "nova", "nova": "ada", "house": "alloy"}
    assert find_voice(wanted, engine.info, aliases) == found


def test_openai_names_stand_for_the_default_where_there_are_no_speakers(engine: Any) -> None:
    info = dataclasses.replace(engine.info, voices=(), default_voice=None)
    assert {find_voice(name, info, {}) for name in OPENAI_VOICES} == {None}


def test_unknown_voice_names_the_first_twenty(engine: Any) -> None:
    info = dataclasses.replace(engine.info, voices=tuple(Voice(f"v{i}", f"V{i}") for i in range(30)))
    with pytest.raises(InvalidRequest, match=r"known voices: v0, v1, .*v19 and 10 more$"):
        find_voice("nobody", info, {})


@pytest.mark.parametrize("name", [None, "fake-tts", "org/fake-tts", "tts-1", "tts-1-hd", "gpt-4o-mini-tts"])
def test_model_has_several_names(client: TestClient, name: str | None) -> None:
    assert client.post("/v1/audio/speech", json={"input": "a", "model": name}).status_code == 200
    if name is not None:
        assert client.get(f"/v1/models/{name}").json()["id"] == "fake-tts"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/audio/models"])
def test_models_are_listed_in_both_shapes(client: TestClient, path: str) -> None:
    listed = client.get(path).json()
    (entry,) = listed["data"]
    assert listed["object"] == "list"
    assert listed["models"] == [{"id": "fake-tts", "name": "fake-tts"}]
    assert (entry["object"], entry["owned_by"], entry["family"]) == ("model", "hocket", "fake")
    assert (entry["tasks"], entry["sample_rate"], entry["languages"]) == (
        ["CustomVoice"],
        24000,
        ["Auto", "English"],
    )
    assert entry["capabilities"]["voice_cloning"] is True


def test_voices_are_listed(client: TestClient) -> None:
    listed = client.get("/v1/audio/voices").json()
    assert listed["voices"][0] == {"id": "ada", "name": "Ada", "kind": "builtin", "languages": ["English"]}
    assert listed["data"] == listed["voices"]
    assert listed["uploaded_voices"] == []
    assert client.get("/v1/audio/voices?legacy=true").json()["voices"] == ["ada", "lin", "nova"]
    assert client.get("/v1/audio/voices?names_only=true").json() == {"uploaded_voice_names": []}
