"""More requests than the server can take: refused at once, in order, and forgotten."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest

from hocket.engine.client import AsyncEngine
from hocket.errors import Overloaded
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings

SPEECH = "/v1/audio/speech"
POSTS, SPREAD_S = 1000, 2.0
WAITING, SLOTS, FRAMES = 32, 2, 5
BODY = {"input": "Good morning.", "seed": 1, "max_new_tokens": FRAMES + 1, "response_format": "pcm"}


async def post(url: str, body: dict[str, Any], wait_s: float) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers, body."""
    await asyncio.sleep(wait_s)
    where = urllib.parse.urlsplit(url)
    data = json.dumps({**body, "stream": False}).encode()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST {SPEECH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    top, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, content


@pytest.fixture
def url(listener: Any, checkpoint: Callable[..., Path]) -> Any:
    small = {f"stages.{s}.{f}": str(SLOTS) for s in ("talker", "codec") for f in ("slots", "max_batch")}
    engine = AsyncEngine(
        checkpoint(variant="custom_voice", never_ends=True),
        overrides=small,
        processes=False,
        max_waiting=WAITING,
    )
    listener.run(engine.start())
    listener.app = create_app(engine, ServerSettings(model="tiny"))
    yield listener.url
    listener.run(engine.close())


async def test_thousand_posts_in_two_seconds(url: str, listener: Any) -> None:
    engine = listener.app.state.serving.engine
    status, _, alone = await post(url, BODY, 0)
    assert (status, len(alone)) == (200, 2 * 1920 * FRAMES)
    before = psutil.Process().memory_info().rss
    answers = await asyncio.gather(*(post(url, BODY, n * SPREAD_S / POSTS) for n in range(POSTS)))
    counts = Counter(status for status, _, _ in answers)
    assert set(counts) == {200, 503}
    assert counts[200] >= WAITING + SLOTS
    assert counts[503] >= 100
    for status, headers, content in answers:
        if status == 200:
            assert len(content) == len(alone)
            assert headers["x-output-tokens"] == str(FRAMES)
        else:
            assert 1 <= int(headers["retry-after"]) <= 30
            assert json.loads(content)["error"]["code"] == "queue_full"
    # Two thousand sockets and their buffers come and go; what must not grow is what each request leaves.
    assert psutil.Process().memory_info().rss - before < 96 << 20
    assert engine.status().running == engine.status().waiting == 0
    assert not listener.app.state.serving.requests.running
    async with httpx2.AsyncClient(base_url=url) as http:
        assert (await http.get("/health")).json() == {"status": "healthy"}
        assert (await http.get("/ready")).status_code == 200
        ids = {headers["x-request-id"] for _, headers, _ in answers}
        assert len(ids) == POSTS
    again = np.frombuffer((await post(url, BODY, 0))[2], "<i2").astype(int)
    # The codec's chunks follow the clock, and so does the last bit of a sum.
    np.testing.assert_allclose(again, np.frombuffer(alone, "<i2"), rtol=0, atol=1)
    for _ in range(200):
        slots = [s.slots_used for stages in engine.status().stages.values() for s in stages]
        if not any(slots):
            return
        await asyncio.sleep(0.05)  # the next heartbeat
    raise AssertionError("slots are still held")


def test_full_queue_refuses_before_a_reference_is_read(
    serve: Callable[..., Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = serve()
    engine.refusal = Overloaded("the queue is full", code="queue_full")
    read = threading.Event()
    monkeypatch.setattr(running.app.state.serving.references, "decode", lambda *_: read.set())
    body = {"input": "a", "ref_text": "b", "ref_audio": "data:audio/wav;base64,AAAA"}
    for path, sent in (
        (SPEECH, body),
        (f"{SPEECH}/batch", {"items": [body]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **body}),
    ):
        response = running.http.post(path, json=sent)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert not read.is_set()
