from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from hocket.audio.wav import wav_header
from hocket.errors import InvalidRequest, RequestFailed
from hocket.eval.sound import Sound, parse_wav, read_wav, write_wav
from tests.eval.conftest import RATE_HZ, sound, vowel


def wav(data: bytes, code: int, bits: int, channels: int = 1, *, size: int | None = None) -> bytes:
    width = channels * bits // 8
    head = struct.pack(
        "<4sI4s4sIHHIIHH", b"RIFF", 0, b"WAVE", b"fmt ", 16, code, channels, 8000, 8000 * width, width, bits
    )
    return (
        head
        + b"LIST\x03\x00\x00\x00abc\x00"
        + struct.pack("<4sI", b"data", len(data) if size is None else size)
        + data
    )


HALF = {
    "8 bits": (np.array([192, 64], "u1").tobytes(), 1, 8),
    "16 bits": (np.array([16384, -16384], "<i2").tobytes(), 1, 16),
    "24 bits": (b"\x00\x00\x40\x00\x00\xc0", 1, 24),
    "32 bits": (np.array([2**30, -(2**30)], "<i4").tobytes(), 1, 32),
    "float": (np.array([0.5, -0.5], "<f4").tobytes(), 3, 32),
    "double": (np.array([0.5, -0.5], "<f8").tobytes(), 3, 64),
}


@pytest.mark.parametrize("name", HALF)
def test_every_kind_of_wav_is_read(name: str) -> None:
    found = parse_wav(wav(*HALF[name]), "it")
    assert found.samples.tolist() == [0.5, -0.5]
    assert (found.rate_hz, found.samples.dtype) == (8000, np.float32)


def test_channels_are_averaged() -> None:
    stereo = np.array([[0.5, 0.1], [-0.5, 0.3]], "<f4").tobytes()
    assert parse_wav(wav(stereo, 3, 32, 2), "it").samples == pytest.approx([0.3, -0.1])


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF])
def test_a_header_written_before_the_length_was_known(size: int) -> None:
    data, code, bits = HALF["16 bits"]
    assert len(parse_wav(wav(data, code, bits, size=size), "it").samples) == 2


def test_what_this_server_streams_is_read() -> None:
    assert len(parse_wav(wav_header(24_000, None) + bytes(100), "it").samples) == 50


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a WAV file"), (b"ID3\x04 and so on, an MP3", "not a WAV file"),
        (wav(b"", 1, 16)[:36], "without sound"), (wav(bytes(8), 2, 4), "type 2 with 4 bits"),
        (wav(np.array([np.nan], "<f4").tobytes(), 3, 32), "no numbers"),
    ],
)  # fmt: skip
def test_what_is_no_wav_is_told(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestFailed, match=message):
        parse_wav(data, "it")
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"a\.wav"):
        read_wav(tmp_path / "a.wav")


def test_written_sound_is_read_back(tmp_path: Path) -> None:
    made = sound(vowel(0.1), np.array([1.5, -1.5]))
    write_wav(tmp_path / "a.wav", made)
    found = read_wav(tmp_path / "a.wav")
    assert found.rate_hz == RATE_HZ
    assert found.samples == pytest.approx(np.clip(made.samples, -1, 1), abs=1 / 32768)


def test_resampling_keeps_the_length() -> None:
    assert len(sound(vowel(0.5)).at(16_000)) == 8000
    assert len(Sound(np.zeros(0, np.float32), RATE_HZ).at(16_000)) == 0
