"""GET from an address that a stranger chose, without becoming the stranger's hand in our network.

A name is resolved once, every address it has is checked, and the connection goes to one of those addresses,
so that a second answer of the name server changes nothing. Each redirect is a new name and is checked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
import urllib.parse
from collections.abc import Collection
from dataclasses import dataclass, field

import httptools

import hocket
from hocket.errors import Forbidden, InvalidRequest, clip

REDIRECTS = 3
TIMEOUT_S = 10.0
_MAX_HEAD = 64 << 10

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Fetcher:
    """hosts: names whose addresses are not checked. timeout_s: for everything, redirects included."""

    def __init__(self, hosts: Collection[str] = (), *, max_bytes: int, timeout_s: float = TIMEOUT_S) -> None:
        self._hosts = frozenset(host.casefold() for host in hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def fetch(self, url: str, *, param: str) -> bytes:
        """The body at `url`. Raises Forbidden for a refused address, else InvalidRequest `bad_reference`."""
        try:
            return await asyncio.wait_for(self._follow(url, param), self._timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise _bad(param, f"did not arrive within {self._timeout_s:g} s") from None

    async def _follow(self, url: str, param: str) -> bytes:
        for _ in range(REDIRECTS + 1):
            target = _target(url, param)
            answer = await self._get(target, param)
            if answer.status not in (301, 302, 303, 307, 308):
                if answer.status != 200:
                    raise _bad(param, f"could not be fetched: its server answered {answer.status}")
                return bytes(answer.body)
            if not answer.location:
                raise _bad(param, "could not be fetched: a redirect leads nowhere")
            url = urllib.parse.urljoin(url, answer.location)
        raise _bad(param, f"is behind more than {REDIRECTS} redirects")

    async def _get(self, target: _Target, param: str) -> _Answer:
        address = await self._resolve(target, param)
        context = ssl.create_default_context() if target.secure else None
        try:
            reader, writer = await asyncio.open_connection(
                address, target.port, ssl=context, server_hostname=target.host if context else None
            )
        except (OSError, ssl.SSLError):
            raise _bad(param, "could not be fetched: its server cannot be reached") from None
        try:
            writer.write(target.request())
            answer = _Answer(self._max_bytes)
            parser = httptools.HttpResponseParser(answer)
            head = 0
            while not answer.complete:
                piece = await reader.read(65536)
                if not piece:
                    break  # a body without a length ends so
                parser.feed_data(piece)
                head += 0 if answer.headers_complete else len(piece)
                if head > _MAX_HEAD or answer.too_large:
                    break
        except (OSError, httptools.HttpParserError):
            raise _bad(param, "could not be fetched: the connection or the answer is broken") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                writer.transport.abort()
        if answer.too_large:
            raise _bad(param, f"is larger than {self._max_bytes >> 20} MiB")
        if not answer.headers_complete or (answer.sized and not answer.complete):
            raise _bad(param, "could not be fetched: the answer is cut short")
        answer.status = parser.get_status_code()
        return answer

    async def _resolve(self, target: _Target, param: str) -> str:
        """One address of the target's host. Any that is not public forbids the host."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(target.host, target.port, type=1)  # SOCK_STREAM
        except (OSError, UnicodeError):
            raise _bad(param, "could not be fetched: its host is not known") from None
        addresses = [str(entry[4][0]) for entry in found]
        if target.host.casefold() not in self._hosts and not all(map(is_public, addresses)):
            raise Forbidden(f"'{param}' leads to an address that this server may not read", param=param)
        return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet, also where an IPv6 address carries an IPv4 one."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return False if ip.ipv4_mapped else is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_loopback)


@dataclass(frozen=True, slots=True)
class _Target:
    host: str
    port: int
    path: str
    secure: bool

    def request(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host.encode("idna").decode()
        if self.port != (443 if self.secure else 80):
            host = f"{host}:{self.port}"
        lines = (
            f"GET {self.path} HTTP/1.1",
            f"Host: {host}",
            f"User-Agent: hocket/{hocket.__version__}",
            "Accept: audio/*, */*;q=0.5",
            "Accept-Encoding: identity",
            "Connection: close",
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _target(url: str, param: str) -> _Target:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
        if parts.scheme not in ("http", "https") or not host or parts.username or parts.password:
            raise ValueError
        host.encode("idna")
    except (ValueError, UnicodeError):
        raise _bad(param, "is not an http(s) URL with a host and without a user") from None
    secure = parts.scheme == "https"
    path = urllib.parse.quote(parts.path or "/", safe="/:@!$&'()*+,;=~%-._")
    if parts.query:
        path += "?" + urllib.parse.quote(parts.query, safe="/:@!$&'()*+,;=~%-._?[]")
    return _Target(host, port or (443 if secure else 80), path, secure)


@dataclass(slots=True)
class _Answer:
    """Filled by the parser."""

    max_bytes: int
    status: int = 0
    location: str = ""
    body: bytearray = field(default_factory=bytearray)
    headers_complete: bool = False
    complete: bool = False
    too_large: bool = False
    sized: bool = False  # it says where it ends

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"location":
            self.location = value.decode("latin-1").strip()
        elif name == b"content-length":
            self.sized = True
            self.too_large |= value.strip().isdigit() and int(value) > self.max_bytes
        elif name == b"transfer-encoding":
            self.sized = True

    def on_headers_complete(self) -> None:
        self.headers_complete = True

    def on_body(self, piece: bytes) -> None:
        if len(self.body) + len(piece) > self.max_bytes:
            self.too_large = True
        else:
            self.body += piece

    def on_message_complete(self) -> None:
        self.complete = True


def _bad(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"'{clip(param)}' {problem}", param=param, code="bad_reference")
