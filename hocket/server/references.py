"""Reference recordings, from wherever a request says they are: one loader for every way in.

A locator is a data: URL; with the owner's leave an http(s) URL; or a file below the media folder. What it
leads to is checked and decoded in a thread, and kept by the hash of its bytes, so that a recording that many
requests carry is decoded once. (It is encoded once by the engine, which goes by the decoded samples.)
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import urllib.parse
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hocket.audio.decode import check_reference, decode, parse_data_url
from hocket.audio.wav import Samples
from hocket.core import Reference
from hocket.errors import Forbidden, InvalidRequest, clip
from hocket.server.fetch import Fetcher
from hocket.server.settings import ServerSettings

MAX_BYTES = 10 << 20
_KEPT_BYTES = 64 << 20  # of decoded samples

Offload = Callable[..., Awaitable[Any]]


class References:
    """Loads recordings by the owner's rules."""

    def __init__(self, settings: ServerSettings, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = settings.media_dir and Path(settings.media_dir)
        self._max_bytes = max_bytes
        self._fetcher = (
            Fetcher(settings.allow_media_hosts, max_bytes=max_bytes) if settings.allow_media_url else None
        )
        self._kept: OrderedDict[bytes, tuple[Samples, int]] = OrderedDict()
        self._lock = threading.Lock()

    async def load(
        self,
        locator: str,
        *,
        param: str,
        offload: Offload,
        text: str | None = None,
        speaker_only: bool = False,
        paths: bool = False,
    ) -> Reference:
        """The recording at `locator`, checked.

        param: the field it came in, for messages. offload: runs a call in a thread. paths: whether a bare
        path is a locator too. Raises InvalidRequest for a bad recording, Forbidden for a forbidden place.
        """
        data = await self.read(locator, param=param, offload=offload, paths=paths)
        samples, rate = await offload(self.decode, data, param)
        return Reference(samples=samples, rate_hz=rate, text=text, speaker_only=speaker_only)

    async def read(
        self, locator: str, *, param: str, offload: Offload, kind: str = "audio", paths: bool = False
    ) -> bytes:
        """The bytes at `locator`, which lead to something of `kind`; see `load`."""
        scheme = locator[:8].lower()
        data: bytes
        if scheme.startswith("data:"):
            data = await offload(self._from_data, locator, param, kind)
        elif scheme.startswith(("http://", "https://")):
            if self._fetcher is None:
                raise _forbidden(param, kind)
            data = await self._fetcher.fetch(locator, param=param)
        elif scheme.startswith("file:"):
            data = await offload(self._read, _path_of(locator, param, kind), param, kind)
        elif paths:
            data = await offload(self._read, locator, param, kind)
        else:
            raise InvalidRequest(
                f"'{param}' is not a locator: send data:{kind}/…;base64,…; bare base64 is not accepted",
                param=param,
                code="bad_reference",
            )
        return data

    def decode(self, data: bytes, param: str) -> tuple[Samples, int]:
        """The sound in a file's bytes and its rate in Hz, checked. For a thread."""
        key = hashlib.blake2b(data, digest_size=32).digest()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        samples, rate = decode(data, param=param)
        check_reference(samples, rate, param=param)
        samples.setflags(write=False)  # several requests read it
        with self._lock:
            self._kept[key] = samples, rate
            while sum(s.nbytes for s, _ in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return samples, rate

    def _from_data(self, url: str, param: str, kind: str) -> bytes:
        return parse_data_url(url, param=param, max_bytes=self._max_bytes, kind=kind)

    def _read(self, name: str, param: str, kind: str) -> bytes:
        """The file `name` below the media folder. One message for all that may not be read, there or not."""
        if self._folder is None or "\0" in name:
            raise _forbidden(param, kind)
        try:
            root = self._folder.resolve(strict=True)
            path = (root / name).resolve(strict=True)
            if not path.is_relative_to(root):
                raise _forbidden(param, kind)
            # A pipe would block the open, and a link put there since would lead away.
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
            with os.fdopen(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise _forbidden(param, kind)
                data = file.read(self._max_bytes + 1)
        except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
            raise _forbidden(param, kind) from None
        if len(data) > self._max_bytes:
            problem = f"'{param}' names a file of more than {self._max_bytes >> 20} MiB"
            raise InvalidRequest(problem, param=param, code="bad_reference")
        return data


def _path_of(url: str, param: str, kind: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        raise _forbidden(param, kind) from None
    if parts.netloc.lower() not in ("", "localhost"):
        raise _forbidden(param, kind)
    return urllib.parse.unquote(parts.path)


def _forbidden(param: str, kind: str) -> Forbidden:
    return Forbidden(
        f"'{clip(param)}' names a place that this server may not read; send a data:{kind}/…;base64,… URL",
        param=param,
    )
