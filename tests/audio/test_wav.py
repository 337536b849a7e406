from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from hocket.audio.wav import to_s16, wav_header, write_wav


def test_streamed_header_is_the_44_bytes_of_the_contract() -> None:
    assert wav_header(24000, None) == (
        b"RIFF\xff\xff\xff\xffWAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00"
        b"\xc0\x5d\x00\x00\x80\xbb\x00\x00\x02\x00\x10\x00data\xff\xff\xff\xff"
    )


def test_buffered_header_has_true_sizes() -> None:
    header = wav_header(48000, 1000)
    assert len(header) == 44
    assert header[4:8] == (36 + 2000).to_bytes(4, "little")
    assert header[40:44] == (2000).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 0),
        (1.0, 32767),
        (-1.0, -32767),
        (3.0, 32767),
        (-3.0, -32767),
        (0.5, 16384),  # 16383.5, half to even
        (-0.5, -16384),
        (1.5 / 32767, 2),
        (2.5 / 32767, 2),
        (0.4 / 32767, 0),
    ],
)
def test_samples_are_clipped_scaled_and_rounded_half_to_even(value: float, expected: int) -> None:
    assert to_s16(np.array([value], np.float32)).tolist() == [expected]


def test_written_file_opens_in_the_standard_library(tmp_path: Path) -> None:
    sound = np.linspace(-1, 1, 999, dtype=np.float32)
    write_wav(tmp_path / "a.wav", sound, 22050)
    with wave.open(str(tmp_path / "a.wav")) as file:
        shape = (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes())
        assert shape == (1, 2, 22050, 999)
        assert file.readframes(999) == to_s16(sound).tobytes()
