"""Clients that go away, requests that are cancelled, streams that are cut: nothing is left behind."""

from __future__ import annotations

import socket
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from prometheus_client import Counter

from hocket.errors import WorkerDied

SPEECH = "/v1/audio/speech"
WAIT_S = 10
MODES = {"buffered": {"stream": False}, "raw": {}, "events": {"stream_format": "sse"}}


def outcomes(running: Any) -> dict[str, float]:
    counter: Counter = running.app.state.serving.metrics._requests
    return {labels[2]: child._value.get() for labels, child in counter._metrics.items()}


def settled(running: Any) -> dict[str, float]:
    """The outcomes once there is one; each question lets the server's loop go on."""
    for _ in range(5000):
        if counts := outcomes(running):
            return counts
        running.http.get("/live")
    return {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frame", [0, 3], ids=["before the headers", "in the middle"])
def test_client_that_leaves_ends_its_request(
    serve: Callable[..., Any], engine: Any, mode: str, frame: int
) -> None:
    running = serve()
    engine.hold_at = frame
    body = {"input": "hello", "response_format": "pcm", **MODES[mode]}
    answer = threading.Thread(target=_ask_and_drop, args=(running.url, body, engine))
    answer.start()
    answer.join(WAIT_S)
    assert engine.idle.wait(WAIT_S)
    assert not engine.open
    assert settled(running) == {"aborted": 1}
    assert not running.app.state.serving.requests.running


def _ask_and_drop(url: str, body: dict[str, Any], engine: Any) -> None:
    """Send a request; close the socket once the engine stands before the frame it holds at."""
    data = msgspec.json.encode(body)
    where = urllib.parse.urlsplit(url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        head = f"POST {SPEECH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        assert engine.held.wait(WAIT_S)


def test_client_that_leaves_while_sending_counts_as_aborted(serve: Callable[..., Any]) -> None:
    running = serve()
    where = urllib.parse.urlsplit(running.url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        running.http.get("/live")
    assert settled(running) == {"aborted": 1}


def test_client_that_takes_no_bytes_counts_as_gone(serve: Callable[..., Any], engine: Any) -> None:
    running = serve(write_timeout_s=0.05)
    engine.samples = np.zeros(4000 * 1920, np.float32)  # 15 MB, more than sockets buffer
    body = b'{"input": "hello", "response_format": "pcm"}'
    where = urllib.parse.urlsplit(running.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((where.hostname, where.port))
        head = f"POST {SPEECH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert settled(running) == {"aborted": 1}


def test_failure_cuts_a_raw_stream(serve: Callable[..., Any], engine: Any) -> None:
    http = serve().http
    engine.fail_at, engine.error = 3, WorkerDied("the worker died")
    with http.stream("POST", SPEECH, json={"input": "hello", "response_format": "pcm"}) as response:
        assert response.status_code == 200
        with pytest.raises(httpx2.RemoteProtocolError):
            for _ in response.iter_raw():
                pass


@pytest.mark.parametrize("mode", MODES)
def test_cancel_before_audio(serve: Callable[..., Any], engine: Any, mode: str) -> None:
    running = serve()
    engine.hold_at = 0
    answers: list[Any] = []
    body = {"input": "hello", "request_id": "mine", **MODES[mode]}
    asking = threading.Thread(
        target=lambda: answers.append(httpx2.post(running.url + SPEECH, json=body, timeout=WAIT_S))
    )
    asking.start()
    assert engine.held.wait(WAIT_S)
    assert running.http.post("/v1/requests/mine/cancel").json() == {"id": "mine", "cancelled": True}
    asking.join(WAIT_S)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (500, "cancelled")
    assert answers[0].headers["x-should-retry"] == "false"
    assert settled(running) == {"aborted": 1}
    assert running.http.post("/v1/requests/mine/cancel").status_code == 404


def test_cancel_in_the_middle_ends_events_with_an_error(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 2
    body = {"input": "hello", "request_id": "mine", "stream_format": "sse", "response_format": "pcm"}
    with running.http.stream("POST", SPEECH, json=body) as response:
        text = response.iter_text()
        next(text)
        assert engine.held.wait(WAIT_S)
        assert httpx2.post(running.url + "/v1/requests/mine/cancel").status_code == 200
        assert '"code":"cancelled","partial_audio":true' in "".join(text)


def test_one_id_may_run_twice_and_is_cancelled_as_one(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 1
    body = {"input": "hello", "response_format": "pcm"}
    head = {"X-Request-Id": "shared"}
    with (
        running.http.stream("POST", SPEECH, json=body, headers=head) as one,
        running.http.stream("POST", SPEECH, json=body, headers=head) as other,
    ):
        assert one.headers["x-request-id"] == other.headers["x-request-id"] == "shared"
        assert len(engine.open) == 2
        assert httpx2.post(running.url + "/v1/requests/shared/cancel").status_code == 200
        for response in (one, other):
            with pytest.raises(httpx2.RemoteProtocolError):
                response.read()


def test_abort_by_a_drain_is_503(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 0
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx2.post(running.url + SPEECH, json={"input": "a"}, timeout=WAIT_S))
    )
    asking.start()
    assert engine.held.wait(WAIT_S)
    running.app.state.serving.draining = True
    (job,) = engine.open
    running.http.post(f"/v1/requests/{job}/cancel")
    asking.join(WAIT_S)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "draining")
    assert answers[0].headers["retry-after"]
