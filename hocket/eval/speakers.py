"""What speaks: a function from an item and a seed to a sound. Here: a server over HTTP, and recordings.

A model in this process is the command line's to wrap (`hocket.cli.eval`).
"""

from __future__ import annotations

import base64
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hocket.errors import InvalidRequest, RequestFailed, StartupError, clip
from hocket.eval.sound import Sound, parse_wav, read_wav
from hocket.eval.texts import Item


@dataclass(slots=True, frozen=True)
class Spoken:
    sound: Sound
    finish: str = ""  # "stop", "length": cut by a limit; "": not known


RUNAWAY = "generation_runaway"  # hocket's code for a model that did not end, and not at a second try either

Speak = Callable[[Item, int | None], Spoken]
"""Raises RequestFailed, or another HocketError, where nothing could be said."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Server:
    """A server with OpenAI's `POST /v1/audio/speech`, asked for whole WAV files. Use from any thread."""

    url: str
    model: str | None = None
    voice: str | None = None
    api_key: str | None = None
    max_frames: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of the body; None takes one out
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{clip(self.url)!r} is not an address such as http://127.0.0.1:8000")

    def __call__(self, item: Item, seed: int | None) -> Spoken:
        """Sends the recording of an item too, unless a voice was named."""
        body: dict[str, Any] = {"input": item.text, "model": self.model, "response_format": "wav"}
        body |= {"voice": self.voice, "seed": seed, "max_new_tokens": self.max_frames}
        if item.reference is not None and self.voice is None:
            body |= {"ref_audio": _data_url(item.reference), "ref_text": item.said}
        body |= self.extra
        data = msgspec.json.encode({name: value for name, value in body.items() if value is not None})
        sound, headers = self._ask("/v1/audio/speech", data)
        kind = headers.get("Content-Type", "")
        if kind.startswith(("application/json", "text/")):
            raise RequestFailed(
                f"status 200 with {clip(kind)} instead of sound: {clip(sound.decode('utf-8', 'replace'))}"
            )
        return Spoken(parse_wav(sound, "the answer"), headers.get("X-Finish-Reason", ""))

    def about(self) -> dict[str, Any]:
        """What the server says of itself. Raises StartupError if nothing answers at the address."""
        found: dict[str, Any] = {"url": self.url}
        for name, path in (("version", "/version"), ("models", "/v1/models")):
            try:
                found[name] = msgspec.json.decode(self._ask(path, None)[0])
            except msgspec.DecodeError:
                continue
            except RequestFailed as error:
                if error.code == "no_connection":
                    raise StartupError(f"{self.url} {error.message}; is the server running?") from error
        return found

    def _ask(self, path: str, data: bytes | None) -> tuple[bytes, Mapping[str, str]]:
        headers = {"User-Agent": "hocket-eval", "Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        base = self.url.rstrip("/").removesuffix("/v1")
        request = urllib.request.Request(base + path, data, headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout_s) as answer:
                return answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                told, code = _reason(error.read())
            raise RequestFailed(f"HTTP {error.code}: {told}", code=code) from error
        except (http.client.HTTPException, TimeoutError, urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise RequestFailed(
                f"does not answer: {clip(str(reason) or type(error).__name__)}", code="no_connection"
            ) from error


def _reason(body: bytes) -> tuple[str, str | None]:
    """Message and code of an error in OpenAI's form, else the beginning of the body."""
    try:
        error = msgspec.json.decode(body)["error"]
        return clip(error["message"], 200), str(error["code"]) if error.get("code") else None
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return clip(body[:400].decode("utf-8", "replace"), 200), None


def _data_url(recording: Path) -> str:
    kind = {".mp3": "mpeg", ".flac": "flac", ".ogg": "ogg", ".opus": "ogg"}.get(recording.suffix, "wav")
    return f"data:audio/{kind};base64,{base64.b64encode(recording.read_bytes()).decode()}"


def file_name(item: Item, seed: int | None, *, several: bool) -> str:
    """NAME.wav, or NAME-sSEED.wav where each item is spoken with several seeds."""
    return f"{item.name}-s{seed}.wav" if several else f"{item.name}.wav"


def recordings(files: Mapping[str, Path]) -> Speak:
    """Sounds made before, by the items' names."""

    def speak(item: Item, seed: int | None) -> Spoken:
        file = files[item.name]
        if not file.is_file():
            raise RequestFailed(f"there is no file {file}")
        return Spoken(read_wav(file))

    return speak
