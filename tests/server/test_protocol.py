"""What comes before a request, or is none: an answer in our form, a closed connection, nothing kept."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient, WebSocketDenialResponse

from hocket.server import protocol

WAIT_S = 10
LIVE = b"GET /live HTTP/1.1\r\nHost: a\r\n"


def exchange(url: str, *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection; what it no longer reads is left."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), WAIT_S) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            pieces = iter(lambda: connection.recv(1 << 16), b"")
            return b"".join(pieces)
        except ConnectionError:  # it closed with bytes of ours unread
            return b""


def told(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: request-" in head.lower()
    assert b"connection: close" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return int(head.split()[1]), error


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x00\x01\xff\r\n\r\n", id="noise"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), id="TLS"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", id="negative length"),
        pytest.param(
            b"POST /v1/audio/speech HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nab",
            id="a chunk of ZZ",
        ),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", id="two lengths"),
    ],
)
def test_what_is_no_http_is_told_so(serve: Callable[..., Any], data: bytes) -> None:
    status, error = told(exchange(serve().url, data))
    assert (status, error["code"]) == (400, "invalid_http")


def test_head_has_a_limit_and_a_body_behind_it_another(serve: Callable[..., Any]) -> None:
    url = serve().url
    header = b"X-Long: " + b"a" * 1000 + b"\r\n"
    post = b"POST /v1/audio/speech HTTP/1.1\r\nConnection: close\r\nContent-Length: 300020\r\n"
    body = b'{"input": "hello!!"}' + b" " * 300_000
    assert exchange(url, post + header * 50 + b"\r\n", body).startswith(b"HTTP/1.1 200 ")
    status, error = told(exchange(url, LIVE + header * 65))
    assert (status, error["code"]) == (431, "head_too_large")
    assert "64 KiB" in error["message"]


def test_trailers_count_as_a_head_does(serve: Callable[..., Any], engine: Any) -> None:
    start = b"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    answer = exchange(serve().url, start, (b"X-Long: " + b"a" * 1000 + b"\r\n") * 1000)
    assert not answer or told(answer)[0] == 431  # what it closes with may be lost: we are still sending
    assert not engine.requests


@pytest.mark.parametrize("sent", [LIVE, b""], ids=["half a head", "nothing"])
def test_head_must_arrive(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.05)
    answer = exchange(serve().url, sent)
    if sent:
        status, error = told(answer)
        assert (status, error["code"], error["type"]) == (408, "head_timeout", "timeout_error")
    else:
        assert answer == b""


def test_noise_behind_a_request_cuts_its_answer_and_never_joins_it(
    serve: Callable[..., Any], engine: Any
) -> None:
    body = b'{"input": "hello", "response_format": "pcm"}'
    engine.hold_at = 3
    head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    where = urlsplit(serve().url)
    with socket.create_connection((where.hostname, where.port), WAIT_S) as connection:
        connection.sendall(head + body)
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"\x00 noise\r\n\r\n")
        answer += b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b"invalid_http" not in answer
    assert not answer.endswith(b"0\r\n\r\n"), "its end is missing: a client's library raises"
    assert engine.idle.wait(WAIT_S)


def test_websocket_without_a_route_says_which_there_are(app: Callable[..., FastAPI]) -> None:
    client = TestClient(app())
    with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect("/v1/audio/speach"):
        pass
    assert denied.value.status_code == 404
    error = denied.value.json()["error"]
    assert error["code"] == "route_not_found"
    assert "/v1/audio/speech/stream" in error["message"]
