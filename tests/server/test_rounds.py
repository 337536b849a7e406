"""Clients that leave, again and again, at every point: nothing of them stays."""

from __future__ import annotations

import gc
import json
import socket
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
from websockets.sync.client import connect

SPEECH = "/v1/audio/speech"
ROUNDS = 200
WAIT_S = 20


class Silent(BaseHTTPRequestHandler):
    """A server of recordings that never sends any."""

    asked = threading.Event()
    stop = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.stop.wait(WAIT_S)

    def log_message(self, *_: Any) -> None:
        pass


def post(url: str, body: dict[str, Any], path: str = SPEECH) -> socket.socket:
    where = urllib.parse.urlsplit(url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((where.hostname, where.port))
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def queued(running: Any, engine: Any) -> None:
    engine.hold_at = 0
    with post(running.url, {"input": "a", "stream": False}):
        assert engine.held.wait(WAIT_S)


def after_the_headers(running: Any, engine: Any) -> None:
    engine.hold_at = 1
    with post(running.url, {"input": "a", "response_format": "wav", "stream_format": "audio"}) as connection:
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        assert engine.held.wait(WAIT_S)


def in_the_middle(running: Any, engine: Any) -> None:
    engine.hold_at = 6
    with post(running.url, {"input": "a", "response_format": "pcm", "stream_format": "sse"}) as connection:
        assert engine.held.wait(WAIT_S)
        assert connection.recv(4096)


def in_the_socket(running: Any, engine: Any) -> None:
    engine.hold_at = 3
    with connect(running.url.replace("http", "ws") + SPEECH + "/stream") as client:
        client.send('{"type":"session.config","split_granularity":"sentence","stream_audio":true}')
        client.send('{"type":"input.text","text":"One. Two. Three. "}')
        assert engine.held.wait(WAIT_S)


def in_the_batch(running: Any, engine: Any) -> None:
    engine.hold_at = 2
    with post(running.url, {"items": [{"input": "a"}] * 4}, SPEECH + "/batch"):
        assert engine.held.wait(WAIT_S)


def during_the_download(running: Any, engine: Any) -> None:
    Silent.asked.clear()
    url = f"http://127.0.0.1:{running.recordings}/a.wav"
    with post(running.url, {"input": "a", "ref_audio": url, "ref_text": "b"}):
        assert Silent.asked.wait(WAIT_S)


LEAVING = [queued, after_the_headers, in_the_middle, in_the_socket, in_the_batch, during_the_download]


@pytest.fixture
def recordings() -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    Silent.stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_rounds_leave_nothing_behind(serve: Callable[..., Any], engine: Any, recordings: int) -> None:
    running = serve(allow_media_url=True, allow_media_hosts=("127.0.0.1",))
    running.recordings = recordings
    serving = running.app.state.serving

    def settle() -> None:
        for _ in range(5000):
            if not engine.open and not serving.requests.running and not serving.sockets:
                return
            running.http.get("/live")
        raise AssertionError("something was left behind")

    memory = []
    for n in range(ROUNDS):
        engine.held.clear()
        LEAVING[n % len(LEAVING)](running, engine)
        settle()
        if n % 50 == 49:
            engine.requests.clear()
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)
    # The first rounds fill caches and pools of threads; what comes after must not grow.
    assert memory[-1] - memory[0] < 8 << 20
    engine.hold_at = -1
    assert running.http.post(SPEECH, json={"input": "a"}).status_code == 200
