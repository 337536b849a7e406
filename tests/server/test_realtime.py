"""The realtime protocol, as far as it is speech output."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.sync.client import connect

from hocket.errors import RequestFailed

PATH = "/v1/realtime?model=gpt-4o-mini-tts"
HOP = 1920
WAIT_S = 20


@pytest.fixture
def socket(client: TestClient) -> Any:
    with client.websocket_connect(PATH) as socket:
        assert socket.receive_json()["type"] == "session.created"
        yield socket


def say(text: str, **fields: Any) -> dict[str, Any]:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return {"type": "response.create", "response": {"input": [item], **fields}}


def until_done(receive: Callable[[], Any]) -> list[Any]:
    got = [receive()]
    while got[-1]["type"] != "response.done":
        got.append(receive())
    return got


def test_session_shows_its_settings(client: TestClient) -> None:
    with client.websocket_connect(PATH) as socket:
        created = socket.receive_json()
        assert created["session"]["model"] == "fake-tts"
        session = {
            "type": "realtime",
            "output_modalities": ["audio"],
            "audio": {"output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "lin"}},
            "instructions": "softly",
        }
        socket.send_json({"type": "session.update", "session": session})
        updated = socket.receive_json()
        assert updated["type"] == "session.updated"
        assert updated["session"]["audio"]["output"]["voice"] == "lin"
        assert updated["session"]["instructions"] == "softly"


def test_response_is_spoken(socket: Any, engine: Any) -> None:
    socket.send_json(say("Hello there"))
    created, *deltas, transcript, sound, done = until_done(socket.receive_json)
    assert (created["type"], created["response"]["status"]) == ("response.created", "in_progress")
    assert {delta["type"] for delta in deltas} == {"response.output_audio.delta"}
    pieces = [base64.b64decode(delta["delta"]) for delta in deltas]
    assert all(len(piece) % 2 == 0 for piece in pieces)
    assert sum(map(len, pieces)) == 20 * HOP
    assert (transcript["transcript"], sound["type"]) == ("Hello there", "response.output_audio.done")
    assert (done["response"]["id"], done["response"]["status"]) == (created["response"]["id"], "completed")
    assert len({m["item_id"] for m in (*deltas, sound)}) == 1
    assert engine.requests[0].text == "Hello there"


def test_items_of_the_conversation_are_spoken_once(socket: Any, engine: Any) -> None:
    for text in ("One.", "Two."):
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        socket.send_json({"type": "conversation.item.create", "item": item})
        assert socket.receive_json()["type"] == "conversation.item.created"
    socket.send_json({"type": "response.create"})
    until_done(socket.receive_json)
    assert engine.requests[0].text == "One.\nTwo."
    socket.send_json({"type": "response.create"})
    error = socket.receive_json()
    assert (error["type"], error["error"]["code"]) == ("error", "empty_input")


def test_voice_of_one_response(socket: Any, engine: Any) -> None:
    socket.send_json(say("a", audio={"output": {"voice": "lin"}}))
    until_done(socket.receive_json)
    socket.send_json(say("b"))
    until_done(socket.receive_json)
    assert [request.voice for request in engine.requests] == ["lin", "ada"]


def test_cancel(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 2
    with connect(running.url.replace("http", "ws") + PATH) as socket:

        def receive() -> Any:
            return json.loads(socket.recv(WAIT_S))

        receive()
        socket.send(json.dumps(say("hello")))
        assert engine.held.wait(WAIT_S)
        socket.send(json.dumps(say("more")))
        socket.send('{"type":"response.cancel"}')
        got = until_done(receive)
        assert got[-1]["response"]["status"] == "cancelled"
        (error,) = [m["error"] for m in got if m["type"] == "error"]
        assert error["code"] == "conversation_already_has_active_response"
        assert engine.idle.wait(WAIT_S)
        engine.hold_at = -1
        socket.send(json.dumps(say("again")))
        assert until_done(receive)[-1]["response"]["status"] == "completed"


def test_leaving_frees_everything(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 1
    with connect(running.url.replace("http", "ws") + PATH) as socket:
        socket.send(json.dumps(say("hello")))
        assert engine.held.wait(WAIT_S)
    assert engine.idle.wait(WAIT_S)
    assert not engine.open


def test_failure_and_length(socket: Any, engine: Any) -> None:
    engine.fail_at, engine.error = 2, RequestFailed("a step failed")
    socket.send_json(say("a"))
    *_, error, done = until_done(socket.receive_json)
    assert (error["error"]["type"], done["response"]["status"]) == ("server_error", "failed")
    engine.fail_at, engine.finish_reasons = -1, ["length"]
    socket.send_json(say("a"))
    assert until_done(socket.receive_json)[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "invalid_json"),
        ("[]", "invalid_json"),
        ({"type": 5}, "invalid_value"),
        ({"type": "session.shout"}, "unknown_message"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "unsupported_content"),
        ({"type": "response.cancel"}, "response_cancel_not_active"),
        ({"type": "response.create"}, "empty_input"),
        ({"type": "response.create", "response": {"input": [{"content": [{"type": "input_image"}]}]}},
         "unsupported_content"),
        (say("a", audio={"output": {"voice": "eve"}}), "voice_not_found"),
        ({"type": "session.update", "session": {"output_modalities": ["text"]}}, "unsupported_modality"),
        ({"type": "session.update", "session": {"audio": {"output": {"format": {"type": "audio/pcmu"}}}}},
         "unsupported_format"),
        ({"type": "session.update", "session": {"audio": {"output": {"speed": 9}}}}, "invalid_value"),
        ({"type": "session.update", "session": {"audio": {"output": {"voice": "eve"}}}}, "voice_not_found"),
    ],
)  # fmt: skip
def test_errors_leave_the_session_open(socket: Any, message: Any, code: str) -> None:
    socket.send_text(message if isinstance(message, str) else json.dumps(message))
    error = socket.receive_json()
    assert (error["type"], error["error"]["code"]) == ("error", code)
    socket.send_json(say("a"))
    assert until_done(socket.receive_json)[-1]["response"]["status"] == "completed"


def test_unknown_model_is_refused(client: TestClient) -> None:
    with client.websocket_connect("/v1/realtime?model=gpt-9") as socket:
        assert socket.receive_json()["error"]["code"] == "model_not_found"
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
