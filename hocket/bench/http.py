"""The HTTP client: few instructions between the socket and the clock.

HTTP/1.1 on an asyncio protocol and httptools, which the server already needs. A packet's time is read when
its bytes leave the socket, before anything is parsed; its size counts sound only, without HTTP framing or a
WAV header. Connections are kept and used again. No redirects, no proxies, no compression: a load generator
has no use for what could hide time.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from array import array
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools

from hocket.errors import InvalidRequest, clip

_HEAD = 64 * 1024  # bytes kept of a body that is not sound
_WAV_HEAD = 4096  # a header longer than this is none


class Exchange:
    """One request and its answer, as far as it has come."""

    def __init__(self, *, sound: bool = True) -> None:
        self.times = array("d")
        self.sizes = array("q")
        self.status = 0
        self.headers: dict[str, str] = {}
        self.head = b""  # of a body that is not sound, or a WAV header that is not yet whole
        self.ended = 0.0
        self.failure = ""
        self.detail = ""
        self.layout: tuple[int, int, int] | None = None  # rate, channels, bits, of a WAV header
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sound = sound
        self._in_header: bool | None = None  # unknown until the first bytes

    def take(self, data: bytes, now: float) -> None:
        """Bytes of the body that came at `now`."""
        if self.status != 200 or not self._sound or self._is_text:
            self.head += data[: _HEAD - len(self.head)]
            return
        if self._in_header is None or self._in_header:
            data = self.head + data
            self.head = b""
            self._in_header = len(data) < 4 or data.startswith(b"RIFF")
            if self._in_header:
                data = self._after_header(data)
        if data:
            if self.times and self.times[-1] == now:  # more of the same read
                self.sizes[-1] += len(data)
            else:
                self.times.append(now)
                self.sizes.append(len(data))

    @property
    def _is_text(self) -> bool:
        kind = self.headers.get("content-type", "")
        return kind.startswith(("application/json", "text/"))

    def _after_header(self, data: bytes) -> bytes:
        start = data.find(b"data", 12)
        if start < 0 or len(data) < start + 8:
            if len(data) > _WAV_HEAD:
                self.end("not audio", "a WAV file without a data chunk", time.perf_counter())
            self.head = data
            return b""
        channels, rate = struct.unpack_from("<HI", data, 22)
        (bits,) = struct.unpack_from("<H", data, 34)
        self.layout = (rate, channels, bits)
        self._in_header = False
        return data[start + 8 :]

    def end(self, failure: str, detail: str, now: float) -> None:
        if not self.done.done():
            self.failure, self.detail, self.ended = failure, detail, now
            self.done.set_result(None)


class _Connection(asyncio.Protocol):
    def __init__(self, client: Client) -> None:
        self.client = client
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.closed = False
        self._now = 0.0

    def begin(self, exchange: Exchange, message: bytes) -> None:
        assert self.transport is not None
        self.exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._sized = False
        self.transport.write(message)

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # a stream's

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self.exchange is None:
            self.drop()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._finish("protocol", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._now = time.perf_counter()
        self.closed = True
        if self.exchange is not None:
            if self.exchange.status and not self._sized:
                self._finish("", "")  # a body without a length ends with the connection
            else:
                self._finish("cut short" if self.exchange.status else "closed", str(error or "by the server"))

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        key = name.decode("latin-1").lower()
        self._sized |= key in ("content-length", "transfer-encoding")
        self.exchange.headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self.exchange is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self.exchange.status = status

    def on_body(self, data: bytes) -> None:
        assert self.exchange is not None
        self.client.bytes_in += len(data)
        self.exchange.take(data, self._now)

    def on_message_complete(self) -> None:
        if self.exchange is not None and self.exchange.status:
            self._finish("", "", reusable=self._sized and self._parser.should_keep_alive())

    def _finish(self, failure: str, detail: str, *, reusable: bool = False) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        exchange.end(failure, detail, self._now)
        if reusable and not self.closed:
            self.client.idle.append(self)
        else:
            self.drop()

    def drop(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Requests to one server, over as many connections as are needed at once."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        """Raises InvalidRequest if `url` is not http(s)://host[:port][/path]; a path may end in /v1."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidRequest(
                f"{clip(url)!r} is not an address such as http://127.0.0.1:8000", param="URL"
            )
        self.timeout_s = timeout_s
        self.bytes_in = 0
        self.idle: list[_Connection] = []
        self.running: dict[Exchange, _Connection | None] = {}
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "User-Agent: hocket-bench",
            "Accept: */*",
            "Accept-Encoding: identity",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(lines)

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Exchange:
        """One exchange, whole or failed; nothing is raised but cancellation."""
        lines = [f"{method} {self._base}{path} HTTP/1.1", self._headers]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        message = "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")
        exchange = Exchange(sound=method == "POST")
        self.running[exchange] = None
        timer = asyncio.get_running_loop().call_later(self.timeout_s, self._stop, exchange, "timeout")
        try:
            while not exchange.done.done():
                connection, used = await self._connection(exchange)
                if connection is None:
                    break
                self.running[exchange] = connection
                connection.begin(exchange, message)
                await exchange.done
                if exchange.failure == "closed" and used:
                    # The server let an idle connection go just as it was taken: nobody saw the request.
                    exchange.failure = exchange.detail = ""
                    exchange.done = asyncio.get_running_loop().create_future()
        finally:
            timer.cancel()
            del self.running[exchange]
        return exchange

    async def _connection(self, exchange: Exchange) -> tuple[_Connection | None, bool]:
        """A connection, and whether it was used before; None if the exchange ended while it was sought."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.closed:
                return connection, True
        loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(
            loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._tls)
        )
        either: set[asyncio.Future[Any]] = {opening, exchange.done}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            return None, False
        error = opening.exception()
        if error is not None:
            reason = getattr(error, "strerror", None) or str(error)
            exchange.end("no connection", reason, time.perf_counter())
            return None, False
        connection = opening.result()[1]
        if exchange.done.done():
            connection.drop()
            return None, False
        return connection, False

    def _stop(self, exchange: Exchange, failure: str) -> None:
        connection = self.running[exchange]
        if connection is not None:
            connection.exchange = None
            connection.drop()
        exchange.end(
            failure, f"after {self.timeout_s:g} s" if failure == "timeout" else "", time.perf_counter()
        )

    def stop(self, failure: str) -> None:
        """End what runs, as failed in this way."""
        for exchange in list(self.running):
            self._stop(exchange, failure)

    async def close(self) -> None:
        """End what runs and leave no connection, which a loop that closes would wait for."""
        self.stop("interrupted")
        while self.idle:
            self.idle.pop().drop()
        await asyncio.sleep(0)
