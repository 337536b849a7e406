"""Several texts in one request; tokens."""

from __future__ import annotations

import base64
import threading
import wave
from collections.abc import Callable
from io import BytesIO
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from hocket.errors import Overloaded, RequestFailed

BATCH = "/v1/audio/speech/batch"
HOP = 1920
WAIT_S = 10


def test_items_share_what_they_do_not_set(client: TestClient, engine: Any) -> None:
    items = [{"input": "one"}, {"input": "two", "voice": "ada", "speed": None, "response_format": "pcm"}]
    response = client.post(BATCH, json={"items": items, "voice": "lin", "seed": 5, "speed": 2})
    assert response.status_code == 200
    body = response.json()
    assert body["id"] == response.headers["x-request-id"]
    assert body["id"].startswith("speech-batch-")
    assert (body["total"], body["succeeded"], body["failed"]) == (2, 2, 0)
    one, two = body["results"]
    assert list(one) == [
        "index", "status", "audio_data", "media_type", "format", "finish_reason", "usage",
    ]  # fmt: skip
    assert (one["index"], one["status"], one["format"], one["media_type"]) == (
        0,
        "success",
        "wav",
        "audio/wav",
    )
    with wave.open(BytesIO(base64.b64decode(one["audio_data"]))) as file:
        assert file.getnframes() == 10 * HOP // 2
    assert len(base64.b64decode(two["audio_data"])) == 10 * HOP
    assert two["media_type"] == "audio/pcm"
    asked = {request.text: request for request in engine.requests}
    assert {text: request.voice for text, request in asked.items()} == {"one": "lin", "two": "ada"}
    assert all(request.seed == 5 for request in engine.requests)
    assert client.get(f"/v1/audio/speech/{body['id']}-1").json()["finish_reason"] == "stop"


def test_bad_items_do_not_spoil_the_others(client: TestClient) -> None:
    items = [{"input": ""}, {"input": "a"}, {"input": "b", "speed": "fast"}, 5, {"voice": "ada"}]
    response = client.post(BATCH, json={"items": items})
    assert response.status_code == 200
    body = response.json()
    assert (body["total"], body["succeeded"], body["failed"]) == (5, 1, 4)
    assert [result["index"] for result in body["results"]] == list(range(5))
    bad = [result for result in body["results"] if result["status"] == "error"]
    assert [result["error_detail"]["param"] for result in bad] == [
        "items.0.input", "items.2.speed", "items.3", "items.4.input",
    ]  # fmt: skip
    for result in bad:
        assert list(result) == ["index", "status", "error", "error_detail"]
        assert result["error"] == result["error_detail"]["message"]
        assert list(result["error_detail"]) == ["message", "type", "param", "code"]


def test_nothing_but_bad_items_is_an_error(client: TestClient) -> None:
    response = client.post(BATCH, json={"items": [{"input": ""}, {}]})
    assert (response.status_code, response.json()["failed"]) == (400, 2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "items"),
        ({"items": []}, "items"),
        ({"items": 3}, "items"),
        ({"items": [{}], "speed": 9}, "speed"),
    ],
)
def test_bad_batch_is_refused(client: TestClient, body: Any, param: str) -> None:
    response = client.post(BATCH, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_number_of_items_is_limited(app: Callable[..., FastAPI]) -> None:
    client = TestClient(app(max_batch_items=3))
    assert client.post(BATCH, json={"items": [{"input": "a"}] * 3}).status_code == 200
    response = client.post(BATCH, json={"items": [{"input": "a"}] * 4})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_items")


def test_item_that_fails_inside_is_told_and_a_full_queue_is_503(client: TestClient, engine: Any) -> None:
    engine.fail_at, engine.error = 0, RequestFailed("a step failed")
    response = client.post(BATCH, json={"items": [{"input": "a"}]})
    assert (response.status_code, response.json()["results"][0]["error_detail"]["type"]) == (
        200,
        "server_error",
    )
    engine.refusal = Overloaded("full", retry_after_s=3)
    response = client.post(BATCH, json={"items": [{"input": "a"}]})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")


def test_client_that_leaves_ends_all_items(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 2

    def ask() -> None:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(running.url + BATCH, json={"items": [{"input": "a"}] * 3}, timeout=0.5)

    asking = threading.Thread(target=ask)
    asking.start()
    assert engine.held.wait(WAIT_S)
    asking.join(WAIT_S)
    assert engine.idle.wait(WAIT_S)
    assert not running.app.state.serving.requests.running


def test_batch_is_cancelled_as_one(serve: Callable[..., Any], engine: Any) -> None:
    running = serve()
    engine.hold_at = 0
    answers: list[Any] = []
    body = {"items": [{"input": "a"}, {"input": "b"}]}
    head = {"X-Request-Id": "mine"}
    asking = threading.Thread(
        target=lambda: answers.append(
            httpx2.post(running.url + BATCH, json=body, headers=head, timeout=WAIT_S)
        )
    )
    asking.start()
    assert engine.held.wait(WAIT_S)
    for _ in range(1000):
        if len(engine.open) == 2:
            break
        running.http.get("/live")
    assert running.http.post("/v1/requests/mine/cancel").status_code == 200
    asking.join(WAIT_S)
    assert [r["error_detail"]["code"] for r in answers[0].json()["results"]] == ["cancelled"] * 2


# --- tokens ------------------------------------------------------------------------------------


def test_tokens_there_and_back(client: TestClient) -> None:
    got = client.post("/tokenize", json={"model": "tts-1", "prompt": "abc"}).json()
    assert got == {"tokens": [97, 98, 99], "count": 3}
    assert client.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "abc"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 100_001}, 400, "prompt"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1 << 31]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens.0"),
    ],
)
def test_bad_tokens(client: TestClient, path: str, body: Any, status: int, param: str) -> None:
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
