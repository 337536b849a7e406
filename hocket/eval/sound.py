"""A mono sound and its rate, from WAV bytes and to them.

Servers that stream a WAV do not know its length when they write its header: sizes there are upper bounds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr

from hocket.errors import InvalidRequest, RequestFailed

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


@dataclass(slots=True, frozen=True)
class Sound:
    samples: np.ndarray  # float32 [n], mono, in [-1, 1]
    rate_hz: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate_hz

    def at(self, rate_hz: int) -> np.ndarray:
        """The samples at another rate, float32."""
        if rate_hz == self.rate_hz or not len(self.samples):
            return self.samples
        made: np.ndarray = soxr.resample(self.samples, self.rate_hz, rate_hz, "HQ")
        return made


def parse_wav(data: bytes, name: str) -> Sound:
    """The sound of a WAV file: PCM of 8 to 32 bits or float, the mean of its channels.

    Raises RequestFailed, naming `name`, if `data` is no such file or holds samples that are no numbers.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise RequestFailed(f"{name} is not a WAV file: it begins with {data[:12]!r}")
    at, layout = 12, None
    while at + 8 <= len(data):
        kind, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        at += 8
        if kind == b"fmt " and at + 16 <= len(data):
            code, channels, rate_hz, _, _, bits = struct.unpack_from("<HHIIHH", data, at)
            if code == _EXTENSIBLE and at + 26 <= len(data):
                (code,) = struct.unpack_from("<H", data, at + 24)
            layout = (code, channels, rate_hz, bits)
        elif kind == b"data":
            if layout is None:
                break
            end = at + size if size else len(data)
            return Sound(_samples(data[at:end], *layout, name), layout[2])
        at += size + size % 2
    raise RequestFailed(f"{name} is a WAV file without sound")


def _samples(data: bytes, code: int, channels: int, rate_hz: int, bits: int, name: str) -> np.ndarray:
    if (code, bits) not in _TYPES or not channels or not rate_hz:
        raise RequestFailed(
            f"{name} is a WAV file of type {code} with {bits} bits; accepted: PCM of 8, 16, 24, 32; float"
        )
    width = bits // 8
    data = data[: len(data) // (width * channels) * width * channels]
    if bits == 24:  # widened to 32 bits, with zeros below
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        raw = wide.view("<i4")[:, 0]
    else:
        raw = np.frombuffer(data, _TYPES[code, bits])
    samples = raw.astype(np.float32)
    if code == _PCM:
        samples = np.float32(2.0 ** (1 - 8 * raw.itemsize)) * (samples - (128 if bits == 8 else 0))
    if not np.isfinite(samples).all():
        raise RequestFailed(f"{name} holds samples that are no numbers")
    return samples.reshape(-1, channels).mean(axis=1).astype(np.float32)


_TYPES = {
    (_PCM, 8): "u1", (_PCM, 16): "<i2", (_PCM, 24): "", (_PCM, 32): "<i4", (_FLOAT, 32): "<f4",
    (_FLOAT, 64): "<f8",
}  # fmt: skip


def read_wav(path: Path) -> Sound:
    """Raises InvalidRequest if it is no WAV file, OSError if it cannot be read."""
    try:
        return parse_wav(path.read_bytes(), str(path))
    except RequestFailed as error:
        raise InvalidRequest(error.message) from error


def write_wav(path: Path, sound: Sound) -> None:
    """A WAV file of 16 bits, which is what listening takes."""
    pcm = np.clip(np.rint(sound.samples * 32768), -32768, 32767).astype("<i2").tobytes()
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(pcm), b"WAVE", b"fmt ", 16, _PCM, 1, sound.rate_hz,
        2 * sound.rate_hz, 2, 16, b"data", len(pcm),
    )  # fmt: skip
    path.write_bytes(head + pcm)
