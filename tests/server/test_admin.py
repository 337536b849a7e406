"""Routes of whoever runs the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

SPEECH = "/v1/audio/speech"
WAIT_S = 10


def test_drain_lets_what_runs_end(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 2
    with running.http.stream("POST", SPEECH, json={"input": "a", "response_format": "pcm"}) as response:
        assert httpx2.post(running.url + "/admin/drain").json() == {"status": "draining", "running": 1}
        refused = httpx2.post(running.url + SPEECH, json={"input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx2.get(running.url + "/ready").status_code == 503
        engine.release()
        assert len(response.read()) == 20 * 1920


def test_requests_are_listed(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 1
    body = {"input": "a", "response_format": "pcm", "request_id": "mine"}
    with running.http.stream("POST", SPEECH, json=body) as response:
        listed = httpx2.get(running.url + "/admin/requests").json()
        (entry,) = listed["data"]
        assert (entry["id"], entry["group"], entry["endpoint"], entry["state"]) == (
            "mine",
            None,
            "speech",
            "speaking",
        )
        assert entry["audio_seconds"] == 0.08
        engine.release()
        response.read()
    assert httpx2.get(running.url + "/admin/requests").json()["data"] == []


def test_sleep_waits_for_what_runs_and_wake_brings_it_back(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 1
    slept: list[Any] = []
    with running.http.stream("POST", SPEECH, json={"input": "a", "response_format": "pcm"}) as response:
        sleeping = threading.Thread(
            target=lambda: slept.append(httpx2.post(running.url + "/admin/sleep", json={"level": 1}))
        )
        sleeping.start()
        while (ready := httpx2.get(running.url + "/ready")).status_code == 200:
            pass
        assert ready.json()["status"] == "asleep"
        refused = httpx2.post(running.url + SPEECH, json={"input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
        assert refused.headers["retry-after"]
        assert not slept
        engine.release()
        response.read()
    sleeping.join(WAIT_S)
    assert slept[0].json() == {"status": "asleep", "level": 1}
    assert engine.state.ready is False
    assert running.http.post("/admin/wake").json() == {"status": "ready"}
    assert running.http.post(SPEECH, json={"input": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 200), (b"{}", 200), (b'{"level": 2}', 501), (b'{"level": 3}', 400), (b"x", 400)],
)
def test_level_of_sleep(client: TestClient, body: bytes, status: int) -> None:
    assert client.post("/admin/sleep", content=body).status_code == status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/admin/loras"),
        ("DELETE", "/admin/loras/a"),
        ("POST", "/admin/weights"),
    ],
)
def test_what_is_not_built_says_so(client: TestClient, method: str, path: str) -> None:
    response = client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (501, "not_implemented")
    assert response.headers["x-should-retry"] == "false"


def test_admin_key(app: Callable[..., FastAPI]) -> None:
    client = TestClient(app(api_keys=("k",), admin_keys=("a",)))
    assert client.get("/admin/requests", headers={"X-API-Key": "k"}).status_code == 401
    assert client.get("/admin/requests", headers={"X-API-Key": "a"}).status_code == 200
    client = TestClient(app(api_keys=("k",)))
    assert client.post("/admin/drain").status_code == 401
    assert client.get("/admin/requests", headers={"X-API-Key": "k"}).status_code == 200
