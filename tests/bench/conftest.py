"""A speech server of a few lines whose answers are scripted byte by byte, and time that only jumps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

Answer = Callable[[str, dict[str, Any]], list[bytes]]
"""From the path and the body to the parts of an answer; it ends with the connection if the last is b""."""

PCM = {"Content-Type": "audio/pcm", "X-Sample-Rate": "1000", "X-Channels": "1"}
MODELS = {"object": "list", "data": [{"id": "scripted"}]}


def answer(
    *body: bytes, status: int = 200, headers: dict[str, str] | None = None, chunked: bool = True
) -> list[bytes]:
    """An HTTP answer, in chunks or with its length."""
    head = [f"HTTP/1.1 {status} Whatever", *(f"{k}: {v}" for k, v in (headers or {}).items())]
    if chunked:
        head.append("Transfer-Encoding: chunked")
        parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (*body, b"")]
    else:
        head.append(f"Content-Length: {sum(map(len, body))}")
        parts = list(body)
    return ["\r\n".join([*head, "", ""]).encode(), *parts]


def speak(path: str, body: dict[str, Any]) -> list[bytes]:
    """A tenth of a second of sound for each request."""
    if path == "/version":
        return answer(b'{"version":"1"}', headers={"Server": "scripted"}, chunked=False)
    if path == "/v1/models":
        return answer(json.dumps(MODELS).encode(), chunked=False)
    return answer(bytes(100), bytes(100), headers=PCM)


class FakeServer:
    """Listens on a thread of its own. `answer` may be set at any time."""

    def __init__(self) -> None:
        self.answer: Answer = speak
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._started.wait()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._end.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(fields.get("Content-Length", 0)))
                asked = json.loads(body or b"{}")
                self.requests.append(asked)
                parts = self.answer(head.split()[1], asked)
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                if not parts:
                    await asyncio.Event().wait()  # never answers
                if parts[-1] == b"":
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        writer.close()

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


class VirtualLoop(asyncio.SelectorEventLoop):
    """When nothing is ready, the next timer is: no time passes but by waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            assert timeout is not None, "everyone waits for nobody"
            self.now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self.now


@pytest.fixture
def virtually(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Run a coroutine in virtual time, which the load's clock then shows."""
    loop = VirtualLoop()
    monkeypatch.setattr("hocket.bench.load.time.perf_counter", loop.time)
    yield loop.run_until_complete
    loop.close()
