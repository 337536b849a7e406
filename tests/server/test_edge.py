"""What holds for every route: ids, keys, cross-origin rules, sizes, slashes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

SPEECH = "/v1/audio/speech"


@pytest.mark.parametrize("given", ["a", "A-1.b:c_d", "x" * 128])
def test_own_request_id_is_kept(client: TestClient, engine: Any, given: str) -> None:
    response = client.post(SPEECH, json={"input": "a"}, headers={"X-Request-Id": given})
    assert response.headers["x-request-id"] == given
    assert engine.requests[0].request_id == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ä", "a/b"])
def test_unfit_request_id_is_replaced(client: TestClient, given: str) -> None:
    response = client.post(SPEECH, json={"input": "a"}, headers={"X-Request-Id": given.encode("latin-1")})
    assert len(response.headers["x-request-id"]) == len("speech-") + 32


def test_id_in_the_body_wins(client: TestClient) -> None:
    response = client.post(SPEECH, json={"input": "a", "request_id": "b"}, headers={"X-Request-Id": "h"})
    assert response.headers["x-request-id"] == "b"


@pytest.mark.parametrize("path", ["/", "/version", "/v1/models", "/nothing", "/metrics", "/ready"])
def test_every_answer_has_an_id(client: TestClient, path: str) -> None:
    assert client.get(path).headers["x-request-id"].startswith("request-")


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/audio/voices/", "/health/", "/v1/models/fake-tts//"])
def test_slash_at_the_end_is_no_redirect(client: TestClient, path: str) -> None:
    assert client.get(path, follow_redirects=False).status_code == 200


def test_head_is_get_without_a_body(serve: Callable[..., Any]) -> None:
    http = serve().http
    for path in ("/live", "/v1/models", "/", "/nothing"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-length"] == str(len(get.content))


def test_speech_with_a_slash(client: TestClient) -> None:
    assert client.post(SPEECH + "/", json={"input": "a"}, follow_redirects=False).status_code == 200


@pytest.mark.parametrize(
    ("path", "listings", "status"),
    [
        ("/", False, 200), ("/live", False, 200), ("/ready", False, 200), ("/health", False, 200),
        ("/v1/models", False, 401), ("/v1/audio/models", False, 401), ("/v1/audio/voices", False, 401),
        ("/v1/models", True, 200), ("/v1/audio/models", True, 200), ("/v1/audio/voices", True, 200),
        ("/v1/models/fake-tts", True, 401), ("/version", True, 401), ("/metrics", True, 401),
        ("/openapi.json", True, 401), ("/nothing", True, 401),
    ],
)  # fmt: skip
def test_what_is_open_without_a_key(
    app: Callable[..., FastAPI], path: str, listings: bool, status: int
) -> None:
    response = TestClient(app(api_keys=("k1",), public_listings=listings)).get(path)
    assert response.status_code == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer k1"}, 200),
        ({"Authorization": "bearer  k2"}, 200),
        ({"X-API-Key": "k2"}, 200),
        ({"Authorization": "Bearer k3"}, 401),
        ({"Authorization": "Basic k1"}, 401),
        ({"Authorization": "k1"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"X-API-Key": "ä".encode("latin-1")}, 401),
    ],
)
def test_any_key_opens(app: Callable[..., FastAPI], headers: dict[str, Any], status: int) -> None:
    client = TestClient(app(api_keys=("k1", "k2")))
    assert client.post(SPEECH, json={"input": "a"}, headers=headers).status_code == status


def test_metrics_take_the_admin_key_if_there_is_one(app: Callable[..., FastAPI]) -> None:
    client = TestClient(app(api_keys=("k",), admin_keys=("a",)))
    assert client.get("/metrics", headers={"X-API-Key": "k"}).status_code == 401
    assert client.get("/metrics", headers={"X-API-Key": "a"}).status_code == 200
    assert client.get("/v1/models", headers={"X-API-Key": "a"}).status_code == 401


def test_cross_origin_is_off_by_default(client: TestClient) -> None:
    response = client.get("/live", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


def test_cross_origin_for_the_origins_named(app: Callable[..., FastAPI]) -> None:
    client = TestClient(app(cors_origins=("https://a.example",), api_keys=("k",)))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = client.options(SPEECH, headers={"Origin": "https://a.example", **ask})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-credentials" not in allowed.headers
    assert client.options(SPEECH, headers={"Origin": "https://b.example", **ask}).status_code == 400
    refused = client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_large_body_is_refused_before_and_while_it_is_read(app: Callable[..., FastAPI]) -> None:
    client = TestClient(app(max_body_mib=1))
    big = b'{"input": "' + b"a" * (1 << 20) + b'"}'

    def pieces() -> Any:
        yield big

    for content in (big, pieces()):
        response = client.post(SPEECH, content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_slow_body_is_refused(serve: Callable[..., Any]) -> None:
    running = serve(body_timeout_s=0.05)
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_timeout"' in answer


def test_openapi_describes_the_body(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    body = document["paths"][SPEECH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/SpeechBody"}
    schema = document["components"]["schemas"]["SpeechBody"]
    assert schema["required"] == ["input"]
    speed = schema["properties"]["speed"]["anyOf"][0]
    assert (speed["type"], speed["minimum"], speed["maximum"]) == ("number", 0.25, 4.0)
    assert "Error" in document["components"]["schemas"]
    assert "HTTPValidationError" not in str(document["paths"])
