"""WAV framing of mono 16-bit PCM: the sample conversion, the header, a writer for files.

Compressed formats are in `hocket.audio.encode`; reading is in `hocket.audio.decode`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Samples: TypeAlias = NDArray[np.float32]
"""Mono sound, float32 [n], full scale at ±1."""

_UNKNOWN = 0xFFFFFFFF  # what streamed WAV carries in place of a size; readers then read to the end


def to_s16(samples: Samples) -> NDArray[np.int16]:
    """Samples clipped to ±1, times 32767, rounded half to even. float32 [n] -> int16 [n], little-endian."""
    return np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2")


def wav_header(rate: int, samples: int | None) -> bytes:
    """The 44 bytes before `samples` mono s16 samples, or before a stream of unknown length (None)."""
    data = _UNKNOWN if samples is None else 2 * samples
    riff = _UNKNOWN if samples is None else 36 + data
    form = (b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", *form, b"data", data)


def write_wav(path: str | Path, samples: Samples, rate: int) -> None:
    """Write float32 [n] as a mono 16-bit file, replacing what is at `path`."""
    Path(path).write_bytes(wav_header(rate, len(samples)) + to_s16(samples).tobytes())
