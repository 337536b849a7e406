"""Sound to bytes: one continuous file per answer, made while the sound is made.

libav encodes; the framing (ADTS, Ogg, the FLAC header) is written here, because libav's muxers hold back
what they have for a page or more and write sizes by seeking. WAV framing is in `hocket.audio.wav`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import struct
import zlib
from typing import Literal

import av
import numpy as np
from av.packet import Packet
from av.stream import Stream
from numpy.typing import NDArray

from hocket.audio.wav import Samples, to_s16, wav_header
from hocket.errors import RequestFailed

Format = Literal["pcm", "wav", "mp3", "opus", "aac", "flac"]

MEDIA_TYPES: dict[Format, str] = {
    "pcm": "audio/pcm",
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
}

_MP3_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
# In the order of ADTS's sampling frequency index.
_AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)
_RATES: dict[Format, tuple[int, ...]] = {"mp3": _MP3_RATES, "aac": _AAC_RATES, "opus": (48000,)}

# PyAV puts a filter graph before each encoder, and libav starts up to 16 threads for each graph, which mono
# sound never uses. Telling libav of one CPU stops that, for the whole process; where a build hides the
# symbol, threads are wasted and nothing else.
with contextlib.suppress(AttributeError):
    ctypes.CDLL(av.logging.__file__).av_cpu_force_count(1)


def output_rate(format: Format, requested: int | None, native: int) -> int:
    """The rate in Hz at which `format` is sent, given the client's wish (or None) and the model's rate.

    Without a wish PCM is 24 000 Hz, since clients play it so, and containers keep the model's rate. A rate
    that the encoder lacks becomes the next higher it has, else its highest; Ogg Opus is always 48 000 Hz.
    """
    rate = requested or (24000 if format == "pcm" else native)
    rates = _RATES.get(format, (rate,))
    return min((r for r in rates if r >= rate), default=max(rates))


class Encoder:
    """Makes one file out of one stream of mono sound; one object serves one answer.

    With `streaming`, `encode` returns the next bytes as soon as the codec has them, and the first bytes hold
    the header and some sound. Without it, wav and flac are held back until `finish`, which then knows the
    length that belongs in their headers; the other formats state no length and are the same in both modes.

    `rate` is the rate in Hz of the samples given, one that `output_rate` returns for the format.
    """

    def __init__(self, format: Format, rate: int, streaming: bool) -> None:
        assert rate in _RATES.get(format, (rate,)), f"{format} cannot be sent at {rate} Hz"
        self._file = _FILES[format](rate)
        self._hold = self._file.sized and not streaming
        self._held: list[bytes] = []
        self._opened = False
        self._samples = 0

    def encode(self, samples: Samples) -> bytes:
        """The bytes that are ready after these samples, perhaps none.

        samples  float32 [n], any n; clipped to ±1
        Raises RequestFailed if a sample is NaN or infinite.
        """
        if not np.isfinite(samples).all():
            raise RequestFailed("the model made a sample that is not a finite number")
        self._samples += len(samples)
        body = self._file.body(samples) if len(samples) else b""
        if self._hold:
            self._held.append(body)
            return b""
        return self._open(None) + body if body else b""

    def finish(self) -> bytes:
        """The rest of the file, with what the codec still held. Called once; nothing may follow."""
        self._held.append(self._file.tail())
        return self._open(self._samples if self._hold else None) + b"".join(self._held)

    def _open(self, samples: int | None) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        return self._file.header(samples)


class _Pcm:
    """Samples alone; also the shape of every format below: a header, bodies, a tail."""

    sized = False  # whether the header states the number of samples

    def __init__(self, rate: int) -> None:
        self.rate = rate

    def header(self, samples: int | None) -> bytes:
        """The start of the file; asked for last, with the number of samples, where that is known."""
        return b""

    def body(self, samples: Samples) -> bytes:
        return to_s16(samples).tobytes()

    def tail(self) -> bytes:
        return b""


class _Wav(_Pcm):
    sized = True

    def header(self, samples: int | None) -> bytes:
        return wav_header(self.rate, samples)


class _Coded(_Pcm):
    """What libav encodes. A codec's packets may follow each other bare, as they do in MP3."""

    codec = "libmp3lame"
    sample_format = "fltp"

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        context = av.CodecContext.create(self.codec, "w")
        assert isinstance(context, av.AudioCodecContext)
        context.sample_rate = rate
        context.format = av.AudioFormat(self.sample_format)
        context.layout = av.AudioLayout("mono")
        context.options = self.options()
        context.open()
        self.context = context

    def options(self) -> dict[str, str]:
        # Without the bit reservoir each frame leaves one frame earlier, and mono at 128k hardly needs it.
        # Quality 7 halves LAME's time; what it gives up is for stereo music at scarce bit rates.
        # There is no Xing frame: libav leaves that to its muxer.
        return {"b": "128k", "reservoir": "0", "compression_level": "7"}

    def body(self, samples: Samples) -> bytes:
        return self.pack(self.packets(samples))

    def tail(self) -> bytes:
        return self.pack(self.packets(None))

    def packets(self, samples: Samples | None) -> list[Packet[Stream]]:
        """What the codec has ready after these samples, of any number, or at the end (None)."""
        if samples is None:
            return self.context.encode(None)
        frame = av.AudioFrame.from_ndarray(self.pcm(samples)[None], self.sample_format, "mono")
        frame.sample_rate = self.rate
        return self.context.encode(frame)

    def pcm(self, samples: Samples) -> NDArray[np.float32] | NDArray[np.int16]:
        return np.clip(samples, -1, 1)

    def pack(self, packets: list[Packet[Stream]]) -> bytes:
        return b"".join(map(bytes, packets))


class _Aac(_Coded):
    """AAC-LC in ADTS."""

    codec = "aac"

    def options(self) -> dict[str, str]:
        # AAC allows 6144 bits in a frame of 1024 samples. `bitexact` keeps libav's version out of the file.
        return {"b": str(min(96_000, 6 * self.rate)), "aac_coder": "fast", "flags": "bitexact"}

    def pack(self, packets: list[Packet[Stream]]) -> bytes:
        return b"".join(self.adts(packet.size) + bytes(packet) for packet in packets)

    def adts(self, size: int) -> bytes:
        """The header of one frame (ISO/IEC 14496-3, 1.A.2.2): MPEG-4, LC, mono, no checksum."""
        fields = 0xFFF1 << 40 | 1 << 38 | _AAC_RATES.index(self.rate) << 34 | 1 << 30
        return (fields | (7 + size) << 13 | 0x7FF << 2).to_bytes(7, "big")  # 0x7FF: variable bit rate


class _Flac(_Coded):
    """Native FLAC with STREAMINFO (RFC 9639, 8.2) as its only metadata."""

    codec = "flac"
    sample_format = "s16"
    sized = True

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        self.md5 = hashlib.md5(usedforsecurity=False)

    def options(self) -> dict[str, str]:
        return {"frame_size": str(self.rate // 25)}  # 40 ms; libav's own choice waits for up to 105

    def header(self, samples: int | None) -> bytes:
        info = bytes(self.context.extradata or b"")  # length and MD5 are zero in it: unknown
        if samples is not None:  # the length is the low 36 bits of the 8 bytes before the MD5
            packed = int.from_bytes(info[10:18], "big") | samples
            info = info[:10] + packed.to_bytes(8, "big") + self.md5.digest()
        return b"fLaC\x80\x00\x00\x22" + info

    def pcm(self, samples: Samples) -> NDArray[np.int16]:
        pcm = to_s16(samples)
        self.md5.update(pcm.data)
        return pcm


class _Opus(_Coded):
    """Ogg Opus (RFC 7845): a page for every call that completes packets, of ten (200 ms) at most."""

    codec = "libopus"
    sample_format = "flt"

    def __init__(self, rate: int) -> None:
        super().__init__(rate)
        self.head = bytes(self.context.extradata or b"")  # OpusHead
        self.skip = int.from_bytes(self.head[10:12], "little")  # samples the decoder drops at the start
        self.samples = 0  # given
        self.position = 0  # samples in the packets of all pages
        self.page_count = 2  # with those of the header, which is asked for after the first body

    def options(self) -> dict[str, str]:
        # Complexity 5 of 10 saves a quarter of the time; at 64k mono the rest buys nothing one hears.
        return {"b": "64k", "compression_level": "5"}

    def header(self, samples: int | None) -> bytes:
        tags = b"OpusTags" + struct.pack("<I6sI", 6, b"hocket", 0)
        return _ogg_page(0, [self.head], granule=0, flags=_OGG_BEGIN) + _ogg_page(1, [tags], granule=0)

    def body(self, samples: Samples) -> bytes:
        self.samples += len(samples)
        return super().body(samples)

    def pack(self, packets: list[Packet[Stream]]) -> bytes:
        return b"".join(self.page(packets[i : i + 10]) for i in range(0, len(packets), 10))

    def tail(self) -> bytes:
        # The last position cuts off what fills the last packet. There are never more than two packets here.
        return self.page(self.packets(None), end=True)

    def page(self, packets: list[Packet[Stream]], end: bool = False) -> bytes:
        self.position += 960 * len(packets)
        self.page_count += 1
        granule, flags = (self.skip + self.samples, _OGG_END) if end else (self.position, 0)
        return _ogg_page(self.page_count - 1, list(map(bytes, packets)), granule, flags)


_FILES: dict[Format, type[_Pcm]] = {
    "pcm": _Pcm,
    "wav": _Wav,
    "mp3": _Coded,
    "opus": _Opus,
    "aac": _Aac,
    "flac": _Flac,
}

_OGG_BEGIN, _OGG_END = 2, 4
_FLIP = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))  # each byte with its bits reversed


def _ogg_page(number: int, packets: list[bytes], granule: int, flags: int = 0) -> bytes:
    """One page of whole packets (RFC 3533, 6); the serial number is fixed, so equal sound is equal bytes."""
    lacing = b"".join(b"\xff" * (len(packet) // 255) + bytes([len(packet) % 255]) for packet in packets)
    head = struct.pack("<4sBBqIIIB", b"OggS", 0, flags, granule, 1, number, 0, len(lacing))
    page = head + lacing + b"".join(packets)
    # Ogg's checksum is zlib's with every bit order reversed and both inversions left out.
    checksum = zlib.crc32(page.translate(_FLIP), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return page[:22] + checksum.to_bytes(4, "big").translate(_FLIP) + page[26:]
