from __future__ import annotations

import hashlib
import io
import os
import struct
import sys
import wave
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.audio.decode import decode
from hocket.audio.encode import MEDIA_TYPES, Encoder, Format, output_rate
from hocket.audio.wav import Samples, to_s16, wav_header
from hocket.errors import RequestFailed

Tone = Callable[[int, float], Samples]
FORMATS: list[Format] = list(MEDIA_TYPES)
LOSSLESS: list[Format] = ["pcm", "wav", "flac"]
# What one encoder frame holds, at the rate `output_rate` gives for 24 000.
FRAME = {"mp3": 576, "opus": 960, "aac": 1024}


def encoded(format: Format, sound: Samples, rate: int, streaming: bool, cut: int | list[int]) -> list[bytes]:
    """The bytes of each call, `finish` last. `cut` is the length of a chunk, or the places between chunks."""
    cuts = list(range(cut, len(sound), cut)) if isinstance(cut, int) else sorted(cut)
    encoder = Encoder(format, rate, streaming)
    return [*(encoder.encode(piece) for piece in np.split(sound, cuts)), encoder.finish()]


def decoded(format: Format, data: bytes, rate: int) -> Samples:
    if format == "pcm":
        pcm: Samples = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)
        return pcm
    sound, found = decode(data, param="file")
    assert found == rate
    return sound


@pytest.mark.parametrize("rate", [8000, 22050, 24000, 44100, 48000])
@pytest.mark.parametrize("format", FORMATS)
def test_streamed_and_buffered_files_decode_to_the_same_sound(format: Format, rate: int, tone: Tone) -> None:
    rate = output_rate(format, rate, rate)
    sound = tone(rate, 0.7)
    streamed = b"".join(encoded(format, sound, rate, True, rate // 50))
    buffered = b"".join(encoded(format, sound, rate, False, rate // 10))
    a, b = decoded(format, streamed, rate), decoded(format, buffered, rate)
    assert np.array_equal(a, b)
    if format in LOSSLESS:
        assert np.array_equal(a * 32768, to_s16(sound))


@pytest.mark.parametrize("format", ["mp3", "opus", "aac"])
def test_lossy_files_hold_all_of_the_sound(format: Format, tone: Tone) -> None:
    rate = output_rate(format, None, 24000)
    sound = tone(rate, 1.0)
    made = decoded(format, b"".join(encoded(format, sound, rate, True, 1000)), rate)
    # mp3 and aac cannot say how much of the first and the last frame is padding; opus can.
    delay = {"mp3": 1105, "opus": 0, "aac": 1024}[format]
    assert len(sound) <= len(made) <= len(sound) + delay + FRAME[format]
    error = made[delay:][: len(sound)][200:-200] - sound[: len(made) - delay][200:-200]
    assert np.sqrt(np.mean(error**2)) < 0.02


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=12, deadline=None)
@given(n=st.integers(1, 15000), data=st.data())
def test_the_sound_does_not_depend_on_how_it_is_cut(format: Format, n: int, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, n), max_size=6))
    streaming = data.draw(st.booleans())
    rate = output_rate(format, None, 24000)
    sound = np.random.default_rng(n).uniform(-0.5, 0.5, n).astype(np.float32)
    whole = b"".join(encoded(format, sound, rate, streaming, []))
    pieces = b"".join(encoded(format, sound, rate, streaming, cuts))
    if format == "opus":  # its pages end where the calls do
        assert np.array_equal(decoded(format, whole, rate), decoded(format, pieces, rate))
        assert len(decoded(format, whole, rate)) == n
    else:
        assert whole == pieces


@pytest.mark.parametrize(
    ("format", "first_ms"), [("pcm", 20), ("wav", 20), ("opus", 20), ("flac", 40), ("mp3", 60), ("aac", 100)]
)
def test_bytes_come_as_early_as_the_codec_allows(format: Format, first_ms: int, tone: Tone) -> None:
    rate = output_rate(format, None, 24000)
    pieces = encoded(format, tone(rate, 1.0), rate, True, rate // 50)
    first = next(index for index, piece in enumerate(pieces) if piece)
    assert (first + 1) * 20 <= first_ms
    period = {"mp3": 2, "aac": 3, "flac": 2}.get(format, 1)  # 20 ms calls that complete a frame
    assert all(any(pieces[i : i + period]) for i in range(first, len(pieces) - period))
    if format in ("wav", "flac", "opus"):
        assert len(pieces[first]) > 200  # the header does not go out alone


@pytest.mark.parametrize("format", ["wav", "flac"])
def test_buffered_files_with_sizes_come_at_the_end(format: Format, tone: Tone) -> None:
    *calls, end = encoded(format, tone(24000, 0.5), 24000, False, 1000)
    assert not any(calls)
    assert end


@pytest.mark.parametrize("format", FORMATS)
def test_equal_sound_gives_equal_bytes(format: Format, tone: Tone) -> None:
    rate = output_rate(format, None, 24000)
    sound = tone(rate, 0.3)
    assert encoded(format, sound, rate, True, 777) == encoded(format, sound, rate, True, 777)


@pytest.mark.parametrize("format", FORMATS)
def test_samples_beyond_full_scale_are_clipped(format: Format, tone: Tone) -> None:
    rate = output_rate(format, None, 24000)
    sound = tone(rate, 0.2) * 4
    assert encoded(format, sound, rate, True, 999) == encoded(format, np.clip(sound, -1, 1), rate, True, 999)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_samples_that_are_not_finite_fail_the_request(format: Format, value: float) -> None:
    with pytest.raises(RequestFailed):
        Encoder(format, output_rate(format, None, 24000), True).encode(np.array([0, value], np.float32))


@pytest.mark.parametrize("format", FORMATS)
def test_no_sound_gives_a_header_at_most(format: Format) -> None:
    encoder = Encoder(format, output_rate(format, None, 24000), True)
    assert encoder.encode(np.zeros(0, np.float32)) == b""
    end = encoder.finish()
    assert end[:4] == {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS"}.get(format, b"")


def test_streamed_wav_is_one_header_and_the_samples(tone: Tone) -> None:
    sound = tone(24000, 0.2)
    data = b"".join(encoded("wav", sound, 24000, True, 100))
    assert data == wav_header(24000, None) + to_s16(sound).tobytes()


def test_buffered_wav_opens_in_the_standard_library(tone: Tone) -> None:
    data = b"".join(encoded("wav", tone(24000, 0.2), 24000, False, 100))
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (1, 24000, 4800)
    assert len(data) == 44 + 2 * 4800


@pytest.mark.parametrize("streaming", [True, False])
def test_flac_states_length_and_md5_when_it_can(streaming: bool, tone: Tone) -> None:
    sound = tone(24000, 0.5)
    data = b"".join(encoded("flac", sound, 24000, streaming, 1000))
    assert data[:8] == b"fLaC\x80\x00\x00\x22"
    packed = int.from_bytes(data[18:26], "big")  # rate 20 bits, channels - 1 3, bits - 1 5, samples 36
    assert (packed >> 44, packed >> 41 & 7, packed >> 36 & 31) == (24000, 0, 15)
    assert packed & (1 << 36) - 1 == (0 if streaming else len(sound))
    assert data[26:42] == (bytes(16) if streaming else hashlib.md5(to_s16(sound).tobytes()).digest())


@pytest.mark.parametrize(
    ("rate", "kbps"), [(8000, 64), (16000, 128), (22050, 128), (24000, 128), (44100, 128), (48000, 128)]
)
@pytest.mark.parametrize("streaming", [True, False])
def test_mp3_is_frames_of_one_bit_rate_without_a_xing_frame(
    rate: int, kbps: int, streaming: bool, tone: Tone
) -> None:
    data = b"".join(encoded("mp3", tone(rate, 0.5), rate, streaming, 1000))
    assert not any(tag in data for tag in (b"Xing", b"Info", b"ID3"))
    mpeg1 = rate >= 32000
    kbps_of = [0, 32, 40, 48, 56, 64, 80, 96, 112, 128] if mpeg1 else [*range(0, 64, 8), *range(64, 129, 16)]
    at = 0
    while at < len(data):
        sync, rates = int.from_bytes(data[at : at + 2], "big"), data[at + 2]
        assert sync >> 5 == 0x7FF
        assert kbps_of[rates >> 4] == kbps
        at += (144 if mpeg1 else 72) * kbps * 1000 // rate + (rates >> 1 & 1)
    assert at == len(data)


@pytest.mark.parametrize("rate", [8000, 22050, 24000, 48000])
def test_aac_is_adts_frames_end_to_end(rate: int, tone: Tone) -> None:
    data = b"".join(encoded("aac", tone(rate, 0.5), rate, True, 1000))
    at = frames = 0
    while at < len(data):
        assert data[at : at + 2] == b"\xff\xf1"
        at += int.from_bytes(data[at + 3 : at + 6], "big") >> 5 & 0x1FFF
        frames += 1
    assert at == len(data)
    assert frames == -(-rate // 2 // 1024) + 1  # and one of encoder delay


class Page(NamedTuple):
    flags: int
    granule: int
    number: int
    packets: list[bytes]


def pages_of(data: bytes) -> list[Page]:
    """Every page of an Ogg file, its checksum proven bit by bit."""
    pages, at = [], 0
    while at < len(data):
        head = struct.unpack_from("<4sBBqIIIB", data, at)
        magic, version, flags, granule, serial, number, checksum, count = head
        assert (magic, version, serial) == (b"OggS", 0, 1)
        lacing = data[at + 27 : at + 27 + count]
        end = at + 27 + count + sum(lacing)
        crc = 0
        for byte in data[at : at + 22] + bytes(4) + data[at + 26 : end]:
            crc ^= byte << 24
            for _ in range(8):
                crc = (crc << 1 ^ (0x104C11DB7 if crc >> 31 else 0)) & 0xFFFFFFFF
        assert crc == checksum
        packets, start, size = [], at + 27 + count, 0
        for lace in lacing:
            size += lace
            if lace < 255:
                packets.append(data[start : start + size])
                start, size = start + size, 0
        assert size == 0  # every packet ends on its page
        pages.append(Page(flags, granule, number, packets))
        at = end
    return pages


@pytest.mark.parametrize("chunk", [100, 960, 3840, 48000])
@pytest.mark.parametrize("n", [1, 647, 648, 649, 960, 9600, 9700])
def test_ogg_pages_are_short_and_the_last_states_the_exact_end(n: int, chunk: int, tone: Tone) -> None:
    data = b"".join(encoded("opus", tone(48000, 1.0)[:n], 48000, True, chunk))
    pages = pages_of(data)
    head, tags, *body = pages
    assert [page.number for page in pages] == list(range(len(pages)))
    assert [page.flags for page in pages] == [2, *[0] * (len(pages) - 2), 4]
    assert (head.granule, tags.granule) == (0, 0)
    assert tags.packets == [b"OpusTags\x06\x00\x00\x00hocket\x00\x00\x00\x00"]
    magic, version, channels, skip, rate = struct.unpack("<8sBBHI", head.packets[0][:16])
    assert (magic, version, channels, rate) == (b"OpusHead", 1, 1, 48000)
    assert body[-1].granule == skip + n
    position = 0
    for page in body[:-1]:
        assert 1 <= len(page.packets) <= 10  # 20 ms each
        position += 960 * len(page.packets)
        assert page.granule == position
    assert position < skip + n <= position + 960 * len(body[-1].packets)


@pytest.mark.parametrize(
    ("format", "requested", "native", "expected"),
    [
        ("pcm", None, 44100, 24000),
        ("pcm", 44100, 24000, 44100),
        ("wav", None, 22050, 22050),
        ("wav", None, 44100, 44100),
        ("wav", 8000, 24000, 8000),
        ("flac", None, 48000, 48000),
        ("mp3", None, 24000, 24000),
        ("mp3", None, 23000, 24000),
        ("mp3", None, 96000, 48000),
        ("mp3", 11025, 24000, 11025),
        ("opus", None, 24000, 48000),
        ("opus", 16000, 24000, 48000),
        ("aac", None, 44100, 44100),
        ("aac", None, 40000, 44100),
    ],
)
def test_output_rate(format: Format, requested: int | None, native: int, expected: int) -> None:
    assert output_rate(format, requested, native) == expected


def test_every_format_has_a_media_type() -> None:
    assert MEDIA_TYPES == {
        "pcm": "audio/pcm",
        "wav": "audio/wav",
        "mp3": "audio/mpeg",
        "opus": "audio/ogg",
        "aac": "audio/aac",
        "flac": "audio/flac",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_encoders_start_no_threads(tone: Tone) -> None:
    before = len(os.listdir("/proc/self/task"))
    encoders = [Encoder(format, output_rate(format, None, 24000), True) for format in FORMATS]
    for encoder in encoders:
        encoder.encode(tone(24000, 0.2))
    assert len(os.listdir("/proc/self/task")) == before
