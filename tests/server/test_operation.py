"""Health, readiness, metrics: what an operator and a load balancer see."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import hocket
from hocket.engine.fleet import Transfers
from hocket.engine.messages import StageStatus
from hocket.errors import Overloaded, RequestFailed

SPEECH = "/v1/audio/speech"


def value(client: TestClient, name: str, **labels: str) -> float:
    """One sample of /metrics; 0 if it has not been made yet."""
    wanted = {"model": "fake-tts", **labels}
    for line in client.get("/metrics").text.splitlines():
        found = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
        if found and found[1] == name and dict(re.findall(r'(\w+)="([^"]*)"', found[2])) == wanted:
            return float(found[3])
    return 0.0


def test_what_answers_here(client: TestClient) -> None:
    assert client.get("/").json() == {"name": "hocket", "version": hocket.__version__}
    assert client.get("/version").json() == {"version": hocket.__version__}
    assert client.get("/live").json() == {"status": "live"}


def test_ready_follows_the_engine_and_the_drain(client: TestClient, app: Any, engine: Any) -> None:
    assert client.get("/ready").json() == {"status": "ready", "stages": {"talker": {"replicas": 1}}}
    engine.state.ready = False
    response = client.get("/ready")
    assert (response.status_code, response.json()["status"]) == (503, "loading")
    assert list(response.json()["error"]) == ["message", "type", "param", "code"]
    assert response.headers["retry-after"]
    engine.state.ready = True
    client.app.state.serving.draining = True
    assert client.get("/ready").json()["status"] == "draining"


@pytest.mark.parametrize(
    ("path", "body"), [(SPEECH, {"input": "a"}), ("/v1/models", None), ("/v1/audio/voices", None)]
)
@pytest.mark.parametrize("why", ["loading", "draining"])
def test_nothing_is_accepted_before_or_after(
    client: TestClient, engine: Any, path: str, body: Any, why: str
) -> None:
    engine.state.ready = why != "loading"
    client.app.state.serving.draining = why == "draining"
    response = client.request("POST" if body else "GET", path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, why)
    assert response.headers["retry-after"] == "5"


def test_health_is_the_workers_word_and_progress(client: TestClient, engine: Any) -> None:
    assert client.get("/health").json() == {"status": "healthy"}
    engine.state.stages = {"codec": [StageStatus(stage="codec", idle_for_s=31)]}
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == "stage codec has work but has finished no step for 31 s"
    engine.state.stages = {}
    engine.state.healthy, engine.state.reason = False, "worker 0 died"
    assert client.get("/health").json()["reason"] == "worker 0 died"


def test_requests_are_counted_by_how_they_end(client: TestClient, engine: Any) -> None:
    client.post(SPEECH, json={"input": "a"})
    engine.finish_reasons = ["length"]
    client.post(SPEECH, json={"input": "a"})
    client.post(SPEECH, json={"input": ""})
    client.post(SPEECH, json={"input": "a", "speed": 9})
    engine.refusal = Overloaded("full")
    client.post(SPEECH, json={"input": "a"})
    engine.refusal = None
    engine.fail_at, engine.error = 2, RequestFailed("a step failed")
    client.post(SPEECH, json={"input": "a", "stream_format": "sse"})
    engine.fail_at = 0
    client.post(SPEECH, json={"input": "a"})

    def count(outcome: str) -> float:
        return value(client, "hocket_requests_total", endpoint="speech", outcome=outcome)

    counts = {
        outcome: count(outcome) for outcome in ("ok", "length", "invalid", "rejected", "error", "aborted")
    }
    assert counts == {"ok": 1, "length": 1, "invalid": 2, "rejected": 1, "error": 2, "aborted": 0}


def test_audio_is_measured(client: TestClient) -> None:
    for wanted in ({}, {"stream": False}, {"stream_format": "sse"}):
        client.post(SPEECH, json={"input": "hello", **wanted})
    assert value(client, "hocket_audio_seconds_total") == pytest.approx(2.4)
    assert value(client, "hocket_output_frames_total") == 30
    assert value(client, "hocket_input_tokens_total") == 15
    for name in ("first_audio_seconds", "request_seconds", "rtf", "underrun_seconds"):
        assert value(client, f"hocket_{name}_count") == 3
    assert value(client, "hocket_continuity_ok_total") == 3


def test_stages_are_shown(client: TestClient, engine: Any) -> None:
    engine.state.restarts, engine.state.waiting = 2, 5
    first = StageStatus(
        stage="talker", slots_used=1, slots_total=4, steps=10, step_seconds=0.5, rows=25, graph_steps=8,
        queued=4, queue_seconds=1.5,
    )  # fmt: skip
    engine.state.transfers = {"codec": Transfers(30, 0.06)}
    second = StageStatus(
        stage="talker", slots_used=2, slots_total=4, preemptions=3, prefix_hits=6, cache_hits=7
    )
    engine.state.stages = {"talker": [first, second]}
    one, two = {"stage": "talker", "replica": "0"}, {"stage": "talker", "replica": "1"}
    assert value(client, "hocket_stage_restarts_total") == 2
    assert value(client, "hocket_requests_waiting") == 5
    assert (value(client, "hocket_slots_used", **one), value(client, "hocket_slots_used", **two)) == (1, 2)
    assert value(client, "hocket_slots_total", **one) == 4
    assert value(client, "hocket_stage_step_seconds_sum", **one) == 0.5
    assert value(client, "hocket_stage_step_seconds_count", **one) == 10
    assert value(client, "hocket_stage_batch_size_sum", **one) == 25
    assert value(client, "hocket_graph_replays_total", **one) == 8
    assert value(client, "hocket_eager_steps_total", **one) == 2
    assert value(client, "hocket_queue_seconds_sum", **one) == 1.5
    assert value(client, "hocket_queue_seconds_count", **one) == 4
    assert value(client, "hocket_chunk_transfer_seconds_sum", stage="codec") == 0.06
    assert value(client, "hocket_chunk_transfer_seconds_count", stage="codec") == 30
    assert value(client, "hocket_preemptions_total", **two) == 3
    assert value(client, "hocket_prefix_hits_total", **two) == 6
    assert value(client, "hocket_reference_cache_hits_total", **two) == 7


def test_two_servers_in_one_process_count_apart(app: Callable[..., FastAPI]) -> None:
    one, other = TestClient(app()), TestClient(app())
    one.post(SPEECH, json={"input": "a"})
    assert value(one, "hocket_audio_seconds_total") > value(other, "hocket_audio_seconds_total") == 0
