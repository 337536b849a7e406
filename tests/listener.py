"""An HTTP server in a thread, for any application."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn

from hocket.server.protocol import Protocol

T = TypeVar("T")


class Listener:
    """Serves `app`, which may be changed at any time: starting a server takes longer than most tests."""

    def __init__(self) -> None:
        self.app: Any = None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `hocket serve` does
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._answer, http=Protocol, log_level="critical", lifespan="off", interface="asgi3"
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._started.wait()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._started.set()
        await self._server.serve(sockets=[self._socket])

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
