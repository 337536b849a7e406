"""Text in, sound out over a WebSocket."""

from __future__ import annotations

import json
import threading
import wave
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from websockets import InvalidStatus, Subprotocol
from websockets.sync.client import connect

from hocket.errors import Overloaded, RequestFailed
from hocket.server import body as body_module

PATH = "/v1/audio/speech/stream"
HOP = 1920
WAIT_S = 20


class Talk:
    """One connection from the client's side."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.heard: list[Any] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send_json({"type": kind, **fields})

    def next(self) -> Any:
        message = self.socket.receive()
        if message["type"] == "websocket.close":
            raise WebSocketDisconnect(message["code"])
        return message["bytes"] if message.get("bytes") is not None else json.loads(message["text"])

    def configure(self, **fields: Any) -> dict[str, Any]:
        self.send("session.config", **fields)
        answer = self.next()
        assert answer["type"] == "session.configured", answer
        return answer

    def until(self, kind: str) -> list[Any]:
        """All messages up to the first of that type."""
        got: list[Any] = []
        while not (got and isinstance(got[-1], dict) and got[-1]["type"] == kind):
            got.append(self.next())
        return got

    def say(self, *pieces: str) -> list[Any]:
        for piece in pieces:
            self.send("input.text", text=piece)
        self.send("input.done")
        return self.until("session.done")

    def closed(self) -> int:
        with pytest.raises(WebSocketDisconnect) as closed:
            self.next()
        return closed.value.code


@pytest.fixture
def talk(client: TestClient) -> Any:
    with client.websocket_connect(PATH) as socket:
        yield Talk(socket)


def kinds(messages: list[Any]) -> list[str]:
    return ["bytes" if isinstance(message, bytes) else message["type"] for message in messages]


def units(messages: list[Any]) -> list[str]:
    return [m["sentence_text"] for m in messages if isinstance(m, dict) and m["type"] == "audio.start"]


def test_utterance_is_one_file_by_default(talk: Talk) -> None:
    configured = talk.configure()
    assert configured["session_id"].startswith("speech-")
    assert configured == {
        "type": "session.configured",
        "session_id": configured["session_id"],
        "response_format": "wav",
        "sample_rate": 24000,
        "stream_audio": False,
        "split_granularity": "none",
    }
    start, data, done, end = talk.say("Hello. ", "How are you?")
    with wave.open(BytesIO(data)) as file:
        assert file.getnframes() == 10 * HOP
    unit = {"id": f"{configured['session_id']}-0-0", "utterance_index": 0, "sentence_index": 0}
    assert start == {
        "type": "audio.start",
        **unit,
        "sentence_text": "Hello. How are you?",
        "format": "wav",
        "sample_rate": 24000,
    }
    assert done == {
        "type": "audio.done",
        **unit,
        "total_bytes": len(data),
        "error": False,
        "finish_reason": "stop",
    }
    assert end == {"type": "session.done", "utterance_index": 0, "total_sentences": 1}


def test_chunks_are_pcm_by_default(talk: Talk) -> None:
    assert talk.configure(stream_audio=True)["response_format"] == "pcm"
    messages = talk.say("Hello.")
    assert kinds(messages) == ["audio.start", *["bytes"] * 10, "audio.done", "session.done"]
    assert sum(len(m) for m in messages if isinstance(m, bytes)) == messages[-2]["total_bytes"] == 20 * HOP


@pytest.mark.parametrize("file_format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_any_format_may_be_streamed_at_any_speed(talk: Talk, file_format: str) -> None:
    talk.configure(stream_audio=True, response_format=file_format, speed=2)
    messages = talk.say("Hello.")
    assert kinds(messages).count("bytes") > 1
    if file_format == "pcm":
        assert messages[-2]["total_bytes"] == 10 * HOP


def test_config_may_be_nested(talk: Talk, engine: Any) -> None:
    talk.send("session.config", session={"voice": "lin", "split_granularity": "sentence"})
    assert talk.next()["split_granularity"] == "sentence"
    talk.say("Hello.")
    assert engine.requests[0].voice == "lin"


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        ("none", ["Dr. Who paid $3.50, twice; ok? Yes! 你好，朋友。再见"]),
        ("sentence", ["Dr. Who paid $3.50, twice; ok? ", "Yes! ", "你好，朋友。", "再见"]),
        ("clause", ["Dr. Who paid $3.50, ", "twice; ", "ok? ", "Yes! ", "你好，", "朋友。", "再见"]),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 100])
def test_units_do_not_depend_on_the_messages(
    talk: Talk, granularity: str, expected: list[str], step: int
) -> None:
    talk.configure(split_granularity=granularity)
    text = "".join(expected)
    messages = talk.say(*(text[i : i + step] for i in range(0, len(text), step)))
    assert units(messages) == expected
    assert messages[-1]["total_sentences"] == len(expected)
    assert kinds(messages) == ["audio.start", "bytes", "audio.done"] * len(expected) + ["session.done"]


def test_unit_is_spoken_before_the_text_is_complete(talk: Talk) -> None:
    talk.configure(split_granularity="sentence")
    talk.send("input.text", text="Hello. ")
    assert kinds(talk.until("audio.done")) == ["audio.start", "bytes", "audio.done"]
    assert units(talk.say("Bye")) == ["Bye"]


def test_two_units_at_most_are_in_the_engine(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 0
    with connect(running.url.replace("http", "ws") + PATH) as socket:
        socket.send('{"type":"session.config","split_granularity":"sentence","stream_audio":true}')
        socket.recv()
        socket.send('{"type":"input.text","text":"One. Two. Three. Four. "}')
        socket.send('{"type":"input.done"}')
        for _ in range(200):
            running.http.get("/live")
        assert [request.text for request in engine.requests] == ["One. ", "Two. "]
        engine.release()
        messages = [socket.recv() for _ in range(4 * 12 + 1)]
    texts = [json.loads(m) for m in messages if isinstance(m, str)]
    assert [m["sentence_text"] for m in texts if m["type"] == "audio.start"] == [
        "One. ", "Two. ", "Three. ", "Four. ",
    ]  # fmt: skip


def test_utterances_follow_each_other(talk: Talk) -> None:
    talk.configure()
    for text in ("One.", "Two.", "Three."):
        talk.send("input.text", text=text)
        talk.send("input.done")
    messages = [m for _ in range(3) for m in talk.until("session.done")]
    assert units(messages) == ["One.", "Two.", "Three."]
    assert [m["utterance_index"] for m in messages if not isinstance(m, bytes)] == [
        0, 0, 0, 1, 1, 1, 2, 2, 2,
    ]  # fmt: skip


def test_config_is_for_the_time_between_utterances(talk: Talk, engine: Any) -> None:
    talk.configure()
    talk.send("input.text", text="One. ")
    talk.send("session.config", voice="lin")
    error = talk.next()
    assert (error["type"], error["code"]) == ("error", "utterance_open")
    assert list(error) == ["type", "message", "error_type", "param", "code"]
    talk.say("Two.")
    talk.configure(voice="lin")
    talk.say("Three.")
    assert [request.voice for request in engine.requests] == ["ada", "lin"]


def test_live_is_one_request_whose_text_grows(talk: Talk, engine: Any) -> None:
    talk.configure(split_granularity="live", stream_audio=True)
    engine.samples = None
    talk.send("input.text", text="Hel")
    talk.send("input.text", text="lo ")
    (start,) = talk.until("audio.start")
    assert start["sentence_text"] == "Hello "
    assert isinstance(talk.next(), bytes)
    talk.send("input.text", text="out there")
    assert [type(talk.next()) for _ in range(2)] == [bytes, bytes]
    messages = talk.say()
    assert kinds(messages) == [*["bytes"] * 7, "audio.done", "session.done"]
    assert len(engine.requests) == 1


def test_short_live_text_is_spoken_at_its_end(talk: Talk, engine: Any) -> None:
    talk.configure(split_granularity="live")
    assert units(talk.say("Hi")) == ["Hi"]
    assert engine.requests[0].text_first is False


@pytest.mark.parametrize("granularity", ["none", "sentence", "clause", "live"])
def test_nothing_to_say_is_said(talk: Talk, granularity: str) -> None:
    talk.configure(split_granularity=granularity)
    for pieces in ((), ("... ", "!?")):
        error, done = talk.say(*pieces)
        assert (error["code"], done["total_sentences"]) == ("empty_input", 0)
    assert units(talk.say("a.")) == ["a."]


# --- cancelling and leaving --------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["none", "sentence", "live"])
@pytest.mark.parametrize("streams", [True, False])
def test_cancel_stops_the_utterance_and_the_connection_goes_on(
    serve: Callable[..., Any], engine: Any, granularity: str, streams: bool
) -> None:
    running = serve()
    engine.hold_at = 2
    with connect(running.url.replace("http", "ws") + PATH) as socket:

        def send(kind: str, **fields: Any) -> None:
            socket.send(json.dumps({"type": kind, **fields}))

        def until(kind: str) -> list[Any]:
            got: list[Any] = []
            while not (got and isinstance(got[-1], dict) and got[-1]["type"] == kind):
                message = socket.recv(WAIT_S)
                got.append(message if isinstance(message, bytes) else json.loads(message))
            return got

        send("session.config", split_granularity=granularity, stream_audio=streams)
        until("session.configured")
        send("input.text", text="One two three. Four five. Six. Seven. ")
        if granularity == "none":
            send("input.done")
        assert engine.held.wait(WAIT_S)
        send("input.cancel")
        messages = until("session.done")
        assert kinds(messages).count("bytes") == (2 if streams else 0)
        done, end = messages[-2:]
        assert (done["type"], done["cancelled"], done["finish_reason"]) == ("audio.done", True, "cancelled")
        assert end["cancelled"] is True
        assert engine.idle.wait(WAIT_S)
        engine.hold_at = -1
        send("input.text", text="Again.")
        send("input.done")
        assert units(until("session.done")) == ["Again."]
    assert not running.app.state.serving.requests.running


def test_cancel_ends_what_waits_too(talk: Talk, engine: Any) -> None:
    talk.configure()
    engine.hold_at = 0
    for _ in range(3):
        talk.send("input.text", text="Hello.")
        talk.send("input.done")
    talk.until("audio.start")
    talk.send("input.cancel")
    messages = [m for _ in range(3) for m in talk.until("session.done")]
    assert kinds(messages) == ["audio.done", "session.done", "session.done", "session.done"]
    talk.send("input.cancel")  # with nothing to cancel
    engine.hold_at = -1
    assert units(talk.say("a")) == ["a"]


@pytest.mark.parametrize("granularity", ["none", "sentence", "live"])
@pytest.mark.parametrize("at", [0, 3])
def test_client_that_leaves_frees_everything(
    serve: Callable[..., Any], engine: Any, granularity: str, at: int
) -> None:
    running = serve()
    engine.hold_at = at
    with connect(running.url.replace("http", "ws") + PATH) as socket:
        config = {"type": "session.config", "split_granularity": granularity, "stream_audio": True}
        socket.send(json.dumps(config))
        socket.send('{"type":"input.text","text":"One two three four. Five. Six. "}')
        if granularity == "none":
            socket.send('{"type":"input.done"}')
        assert engine.held.wait(WAIT_S)
    assert engine.idle.wait(WAIT_S)
    serving = running.app.state.serving
    for _ in range(5000):
        if not serving.requests.running and not serving.sockets:
            return
        running.http.get("/live")
    raise AssertionError("something was left behind")


def test_close_is_clean(talk: Talk) -> None:
    talk.configure()
    talk.send("session.close")
    assert talk.closed() == 1000


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"type": "input.text", "text": "a"}, "type", "no_config"),
        ({"type": "session.config", "voice": "nobody"}, "voice", "voice_not_found"),
        ({"type": "session.config", "session": {"speed": 9}}, "speed", "invalid_value"),
        ({"type": "session.config", "split_granularity": "word"}, "split_granularity", "invalid_value"),
        ({"type": "session.config", "model": "other"}, "model", "model_not_found"),
        ({"type": "session.config", "word_timestamps": True}, "word_timestamps", "invalid_value"),
        ({"type": "session.config", "ref_audio": "UklGRg=="}, "ref_audio", "bad_reference"),
        (
            {"type": "session.config", "split_granularity": "live", "non_streaming_mode": True},
            "non_streaming_mode", "invalid_value",
        ),
        ({"type": 5}, "type", "invalid_value"),
        ([], None, "invalid_json"),
    ],
)  # fmt: skip
def test_error_before_the_first_config_closes(talk: Talk, message: Any, param: str, code: str) -> None:
    talk.socket.send_text(json.dumps(message))
    error = talk.next()
    assert (error["type"], error["param"], error["code"]) == ("error", param, code)
    assert talk.closed() == 1008


@pytest.mark.parametrize(
    ("sent", "param", "code"),
    [
        ('{"type": "input.shout"}', "type", "unknown_message"),
        ('{"type": "input.text"}', "text", "missing_field"),
        ('{"type": "input.text", "text": 5}', "text", "invalid_value"),
        ('{"type": "input.text", "text": "a\\u0000"}', "text", "invalid_value"),
        ('{"type": "session.config", "speed": 9}', "speed", "invalid_value"),
        ("{", None, "invalid_json"),
        ("5", None, "invalid_json"),
        (b"{}", None, "invalid_message"),
    ],
)
def test_error_later_leaves_the_connection_open(
    talk: Talk, sent: str | bytes, param: str | None, code: str
) -> None:
    talk.configure()
    talk.socket.send_bytes(sent) if isinstance(sent, bytes) else talk.socket.send_text(sent)
    error = talk.next()
    assert (error["type"], error["param"], error["code"]) == ("error", param, code)
    assert units(talk.say("a")) == ["a"]


@pytest.mark.parametrize("at", [0, 2])
def test_unit_that_fails_is_told_and_the_others_are_spoken(talk: Talk, engine: Any, at: int) -> None:
    talk.configure(split_granularity="sentence", stream_audio=True)
    engine.fail_at, engine.error = at, RequestFailed("a step failed")
    talk.send("input.text", text="One. ")
    messages = talk.until("audio.done")
    assert kinds(messages) == ["audio.start", *["bytes"] * at, "error", "audio.done"]
    assert (messages[-1]["error"], messages[-1]["finish_reason"]) == (True, None)
    assert messages[-2].get("partial_audio") == (True if at else None)
    assert messages[-2].get("action") == ("discard" if at else None)
    engine.fail_at = -1
    assert units(talk.say("Two.")) == ["Two."]


def test_full_queue_is_an_error_of_the_unit(talk: Talk, engine: Any) -> None:
    talk.configure()
    engine.refusal = Overloaded("the queue is full", code="queue_full")
    assert kinds(talk.say("a")) == ["audio.start", "error", "audio.done", "session.done"]


# --- limits ------------------------------------------------------------------------------------


def test_long_message_closes(talk: Talk) -> None:
    talk.configure()
    talk.send("input.text", text="ä" * (64 << 10))  # exactly the limit
    talk.send("input.text", text="a" * ((128 << 10) + 1))
    assert talk.next()["code"] == "message_too_large"
    assert talk.closed() == 1009


@pytest.mark.parametrize("granularity", ["none", "live", "sentence"])
def test_long_utterance_is_refused(talk: Talk, engine: Any, granularity: str) -> None:
    talk.configure(split_granularity=granularity)
    engine.hold_at = 0
    for _ in range(4):
        talk.send("input.text", text="a" * (64 << 10))
    talk.send("input.text", text="a")
    while (message := talk.next())["type"] != "error":
        pass
    assert message["code"] == "input_too_long"


@pytest.mark.parametrize("configured", [True, False])
def test_idle_connection_is_closed(app: Callable[..., FastAPI], configured: bool) -> None:
    limits = {"ws_idle_s": 0.05, "ws_config_s": 10} if configured else {"ws_config_s": 0.05}
    with TestClient(app(**limits)).websocket_connect(PATH) as socket:
        talk = Talk(socket)
        if configured:
            talk.configure()
        assert talk.next()["code"] == "idle_timeout"
        assert talk.closed() == (1000 if configured else 1008)


def test_connection_that_is_heard_is_not_idle(serve: Callable[..., Any], engine: Any) -> None:
    running = serve(ws_idle_s=0.05)
    engine.hold_at = 1
    with connect(running.url.replace("http", "ws") + PATH) as socket:
        socket.send('{"type":"session.config"}')
        socket.send('{"type":"input.text","text":"a"}')
        socket.send('{"type":"input.done"}')
        threading.Event().wait(0.3)
        engine.release()
        messages = []
        while not messages or messages[-1] != "session.done":
            message = socket.recv(WAIT_S)
            messages.append("bytes" if isinstance(message, bytes) else json.loads(message)["type"])
    assert messages == ["session.configured", "audio.start", "bytes", "audio.done", "session.done"]


def test_number_of_connections_is_limited_and_shown(app: Callable[..., FastAPI]) -> None:
    client = TestClient(app(max_ws=1))
    with client.websocket_connect(PATH):
        assert 'hocket_ws_connections{model="fake-tts"} 1.0' in client.get("/metrics").text
        with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect(PATH):
            pass
        assert refused.value.status_code == 503
        assert refused.value.headers["retry-after"] == "5"
        assert refused.value.json()["error"]["code"] == "too_many_connections"
    assert 'hocket_ws_connections{model="fake-tts"} 0.0' in client.get("/metrics").text


def test_utterances_that_wait_are_limited(talk: Talk, engine: Any) -> None:
    talk.configure()
    engine.hold_at = 0
    for _ in range(17):
        talk.send("input.text", text="a")
        talk.send("input.done")
    while (message := talk.next())["type"] != "error":
        pass
    assert message["code"] == "too_many_utterances"


# --- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [PATH, "/v1/realtime"])
@pytest.mark.parametrize(
    ("headers", "protocols", "chosen"),
    [
        ({"Authorization": "Bearer k"}, None, None),
        ({"X-API-Key": "k"}, None, None),
        ({}, ["realtime", "openai-insecure-api-key.k"], "realtime"),
        ({}, ["openai-insecure-api-key.k"], None),
    ],
)
def test_key_in_a_header_or_a_protocol(
    app: Callable[..., FastAPI], path: str, headers: Any, protocols: Any, chosen: str | None
) -> None:
    client = TestClient(app(api_keys=("k",)))
    with client.websocket_connect(path, headers=headers, subprotocols=protocols) as socket:
        assert socket.accepted_subprotocol == chosen


@pytest.mark.parametrize("path", [PATH, "/v1/realtime", PATH + "?api_key=k&key=k"])
@pytest.mark.parametrize("protocols", [None, ["openai-insecure-api-key.x"], ["k"]])
def test_connection_without_the_key_is_refused(
    app: Callable[..., FastAPI], path: str, protocols: Any
) -> None:
    client = TestClient(app(api_keys=("k",)))
    with (
        pytest.raises(WebSocketDenialResponse) as refused,
        client.websocket_connect(path, subprotocols=protocols),
    ):
        pass
    assert refused.value.status_code == 401
    assert refused.value.json()["error"]["code"] == "invalid_api_key"


def test_refusal_reaches_a_real_client(serve: Callable[..., Any]) -> None:
    running = serve(api_keys=("k",))
    url = running.url.replace("http", "ws") + PATH
    with pytest.raises(InvalidStatus) as refused:
        connect(url)
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
    protocols = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.k")]
    with connect(url, subprotocols=protocols) as socket:
        assert socket.subprotocol == "realtime"


def test_large_config_is_read_off_the_event_loop(
    serve: Callable[..., Any], listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serve()
    threads: set[int] = set()
    real = body_module.decode

    def decode(body: Any, kind: Any) -> Any:
        if len(body) > 1 << 20:
            threads.add(threading.get_ident())
        return real(body, kind)

    monkeypatch.setattr(body_module, "decode", decode)

    async def thread() -> int:
        return threading.get_ident()

    with connect(running.url.replace("http", "ws") + PATH) as socket:
        reference = "data:audio/wav;base64," + "AAAA" * (1 << 19)
        socket.send(json.dumps({"type": "session.config", "ref_audio": reference}))
        assert json.loads(socket.recv(WAIT_S))["code"] == "bad_reference"
    assert threads
    assert listener.run(thread()) not in threads


def test_nothing_is_taken_in_while_draining(client: TestClient) -> None:
    client.app.state.serving.draining = True
    with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect(PATH):
        pass
    assert (refused.value.status_code, refused.value.json()["error"]["code"]) == (503, "draining")
