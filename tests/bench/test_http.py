from __future__ import annotations

from typing import Any

import pytest

from hocket.audio.wav import wav_header
from hocket.bench import http
from hocket.bench.http import Client, Exchange
from hocket.bench.load import settle
from hocket.bench.metrics import Trace
from hocket.errors import InvalidRequest
from tests.bench.conftest import PCM, FakeServer, answer


async def ask(server: FakeServer, **options: Any) -> tuple[Trace, Exchange]:
    client = Client(server.url, **options)
    exchange = await client.request("POST", "/v1/audio/speech", b"{}")
    await client.close()
    trace = Trace(0.0, 0.0)
    settle(trace, exchange, 24_000)
    return trace, exchange


SOUND = bytes(range(200))
WAV = wav_header(22_050, None)
ANSWERS = {
    "chunked": (answer(SOUND[:3], SOUND[3:], headers=PCM), 2000.0),
    "with its length": (answer(SOUND, headers=PCM, chunked=False), 2000.0),
    "until the connection closes": (
        [b"HTTP/1.1 200 OK\r\nX-Channels: 2\r\n\r\n", SOUND, b""],
        96_000.0,
    ),
    "no rate given": (answer(SOUND, headers={"Content-Type": "application/octet-stream"}), 48_000.0),
    "other rate header": (answer(SOUND, headers={"X-Audio-Sample-Rate": "16000"}), 32_000.0),
    "wav": (answer(WAV + SOUND), 44_100.0),
    "wav whose header comes in pieces": (
        answer(WAV[:3], WAV[3:30], WAV[30:] + SOUND[:5], SOUND[5:]),
        44_100.0,
    ),
}


@pytest.mark.parametrize(("parts", "bytes_per_s"), ANSWERS.values(), ids=ANSWERS)
async def test_sound_is_counted_however_it_is_sent(
    server: FakeServer, parts: list[bytes], bytes_per_s: float
) -> None:
    server.answer = lambda *_: parts
    trace, _ = await ask(server)
    assert (trace.failure, sum(trace.sizes), trace.bytes_per_s) == ("", len(SOUND), bytes_per_s)
    assert trace.sent <= trace.times[0] <= trace.ended


ERROR = b'{"error":{"message":"full","code":"overloaded"}}'
FAILURES = {
    "refused": (answer(ERROR, status=503, headers={"Retry-After": "7"}, chunked=False), "HTTP 503", "full"),
    "bad request": (answer(b'{"detail":"no such voice"}', status=400), "HTTP 400", "no such voice"),
    "not JSON": (answer(b"<h1>oops</h1>", status=500), "HTTP 500", "<h1>oops</h1>"),
    "cut in a chunk": ([*answer(SOUND, headers=PCM)[:2], b""], "cut short", "by the server"),
    "cut before its length": (
        [answer(SOUND, chunked=False)[0], SOUND[:9], b""], "cut short", "by the server",
    ),
    "closed without an answer": ([b""], "closed", "by the server"),
    "events": (
        answer(b"event: x\n\n", headers={"Content-Type": "text/event-stream"}),
        "not audio", "text/event-stream: event: x",
    ),
    "json with status 200": (
        answer(ERROR, headers={"Content-Type": "application/json"}), "not audio", "application/json: full",
    ),
    "nothing": (answer(headers=PCM), "no audio", ""),
    "not HTTP": ([b"SSH-2.0-x\r\n\r\n", b""], "protocol", ""),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "failure", "detail"), FAILURES.values(), ids=FAILURES)
async def test_failure_has_a_kind_and_a_reason(
    server: FakeServer, parts: list[bytes], failure: str, detail: str
) -> None:
    server.answer = lambda *_: parts
    trace, _ = await ask(server)
    assert trace.failure == failure
    assert detail in trace.detail
    assert trace.retry_after_s == (7.0 if failure == "HTTP 503" else None)


async def test_silent_server_times_out(server: FakeServer) -> None:
    server.answer = lambda *_: []
    trace, _ = await ask(server, timeout_s=0.02)
    assert (trace.failure, trace.detail) == ("timeout", "after 0.02 s")


async def test_nobody_there_is_a_failure_not_an_exception(server: FakeServer) -> None:
    server.stop()
    trace, _ = await ask(server)
    assert trace.failure == "no connection"


async def test_connection_is_used_again_and_replaced_when_it_has_gone(server: FakeServer) -> None:
    client = Client(server.url)
    for _ in range(3):
        assert not (await client.request("POST", "/v1/audio/speech", b"{}")).failure
    assert server.connections == 1
    # The server closes after its next answer, which the client cannot know in time.
    gone = [answer(SOUND, headers=PCM, chunked=False), [b""], answer(SOUND, headers=PCM)]
    server.answer = lambda *_: gone.pop(0)
    for _ in range(2):
        assert not (await client.request("POST", "/v1/audio/speech", b"{}")).failure
    assert server.connections == 2
    await client.close()


async def test_request_names_its_key_and_its_host(server: FakeServer) -> None:
    client = Client(server.url + "/v1/", api_key="secret")
    await client.request("GET", "/v1/models")
    await client.close()
    (head,) = server.heads
    assert head.startswith("GET /v1/models HTTP/1.1\r\n")
    assert f"Host: {server.url.removeprefix('http://')}\r\n" in head
    assert "Authorization: Bearer secret\r\n" in head


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:b"])
def test_address_is_checked(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an address such as"):
        Client(url)


class Wire:
    """A transport that goes nowhere."""

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None: ...


async def test_packet_has_the_time_its_bytes_left_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 1.5, 2.0, 2.25, 3.0))
    monkeypatch.setattr(http.time, "perf_counter", lambda: next(times))
    client = Client("http://a")
    connection = http._Connection(client)
    connection.connection_made(Wire())
    exchange = Exchange()
    connection.begin(exchange, b"")
    script = [
        answer(headers=PCM)[0],  # headers are no sound
        b"4\r\nabcd\r\n2\r\nef\r\n",  # two chunks in one read are one packet
        b"8\r\nabc",  # half a chunk is what it is
        b"defgh\r\n",
        b"0\r\n\r\n",
    ]
    for data in script:
        connection.data_received(data)
    assert exchange.times.tolist() == [1.5, 2.0, 2.25]
    assert exchange.sizes.tolist() == [6, 3, 5]
    assert (exchange.ended, exchange.failure) == (3.0, "")
    assert client.idle == [connection]
