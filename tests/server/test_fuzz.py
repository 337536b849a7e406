"""Requests made up from our own OpenAPI document: whatever comes, an answer of ours and no stuck slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis makes up the requests")

# What a build may lack, and what a full or sleeping server says, are answers too.
_EXPECTED = {501, 503}
_ENDS = ("/admin/drain", "/admin/sleep")  # nothing would be served after these
_REAL = ("/admin/profile/start", "/admin/profile/stop")  # the engine here is a fake


def test_made_up_requests_get_an_answer_of_ours(
    app: Callable[..., FastAPI], engine: Any, tmp_path: Path
) -> None:
    engine.frames = 2
    served = app(voices_dir=tmp_path, max_voices=4, max_input_chars=2000)
    document = schemathesis.openapi.from_asgi("/openapi.json", served).exclude(path=[*_ENDS, *_REAL])
    seen: Counter[str] = Counter()

    def check(case: Any) -> None:
        response = case.call()
        status = response.status_code
        where = f"{case.method} {case.path}"
        seen[f"{where} {status // 100}xx"] += 1
        assert status < 500 or status in _EXPECTED, (where, response.text[:500])
        assert response.headers["x-request-id"]
        if status >= 400 and not response.text.startswith('{"id"'):  # a batch of bad items has its results
            assert len(response.content) < 4096
            assert {"message", "type", "param", "code"} == set(response.json()["error"])
        assert not engine.open

    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        limits = settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        limits(given(operation.as_strategy())(check))()
    spoken = [name for name in seen if name.endswith("2xx")]
    assert "POST /v1/audio/speech 4xx" in seen
    assert len(spoken) > 8
