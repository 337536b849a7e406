"""Bytes to sound: reference audio of any common type as mono float32, checked before a model sees it.

The type is decided by the content. Fetching from a URL or a path, with its access rules, is the server's.
Everything raised here is `InvalidRequest`, naming the field the audio came from.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from pathlib import Path

import av
import numpy as np
from av import AudioFrame
from av.container import InputContainer

from hocket.audio.wav import Samples
from hocket.container import open_container
from hocket.errors import InvalidRequest

_CONTAINERS = "wav,mp3,flac,ogg,aac,mov,matroska"
_CODECS = {"mp3", "mp3float", "flac", "opus", "libopus", "vorbis", "libvorbis", "aac", "alac"}
_CODECS |= {"pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_alaw"}
_CODECS |= {"pcm_mulaw", "pcm_s16be", "pcm_s24be", "pcm_s32be"}

_TYPES = "wav, mp3, flac, ogg/opus, aac/m4a, webm"

_PIECE = 256 << 10  # characters, a multiple of four

_DATA_URL = re.compile(r"data:(audio|image|video)/[^,]{1,120};base64,", re.IGNORECASE)


def parse_data_url(url: str, *, param: str, max_bytes: int = 10 << 20, kind: str = "audio") -> bytes:
    """The bytes in a `data:audio/…;base64,…` URL; `kind` may be image or video as well.

    The size is checked before anything is decoded. Raises InvalidRequest `bad_reference` when it is over
    `max_bytes`, when the base64 is damaged, and for any other string, bare base64 included.
    """
    start = _DATA_URL.match(url)
    if start is None or start[1].lower() != kind:
        raise _bad(f"{param} is not a data:{kind}/…;base64,… URL; bare base64 is not accepted", param)
    size = (len(url) - start.end()) * 3 // 4 - url[-2:].count("=")
    if size > max_bytes:
        raise _bad(f"{param} holds {size} bytes of {kind}; at most {max_bytes} are accepted", param)
    # In pieces: decoding holds the interpreter, and megabytes at once would hold it for tens of milliseconds.
    pieces = [url[at : at + _PIECE] for at in range(start.end(), len(url), _PIECE)]
    try:
        if any("=" in piece[-2:] for piece in pieces[:-1]):
            raise binascii.Error("padding before the end")
        return b"".join(base64.b64decode(piece.encode("ascii"), validate=True) for piece in pieces)
    except (binascii.Error, UnicodeEncodeError):
        raise _bad(f"{param} is a data URL whose base64 is damaged", param) from None


def decode(source: bytes | Path, *, param: str, max_seconds: float = 31.0) -> tuple[Samples, int]:
    """The sound in a file's bytes, or in the file at a path, and its rate in Hz.

    Takes wav, mp3, flac, ogg (Opus, Vorbis), aac, m4a and webm, with any number of channels.
    -> float32 [n], the mean of the channels, and the rate. Decoding stops at `max_seconds`, so that a small
    file cannot expand without limit; n is then exactly that long.

    Raises InvalidRequest `bad_reference` when the bytes are not such a file, are damaged or hold no sound,
    and OSError when a path cannot be opened.
    """
    try:
        with (
            io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file,
            open_container(file, _CONTAINERS, ",".join(sorted(_CODECS))) as container,
        ):
            return _read(container, param, max_seconds)
    except av.FFmpegError as error:
        raise _bad(f"{param} cannot be decoded; accepted are whole files of type {_TYPES}", param) from error


def check_reference(
    samples: Samples, rate: int, *, param: str, min_seconds: float = 1.0, max_seconds: float = 30.0
) -> None:
    """Accept a reference of mono float32 [n] at `rate` Hz, or raise InvalidRequest.

    `reference_too_short`, `reference_too_long` (decode past `max_seconds` to tell), or `reference_silent`:
    NaN or infinite samples, or nothing that moves more than -60 dBFS from its mean, as when clipped flat.
    """
    seconds = len(samples) / rate
    wanted = f"{min_seconds:g} to {max_seconds:g} s are accepted"
    if seconds < min_seconds:
        message = f"{param} lasts {seconds:.2f} s; {wanted}"
        raise InvalidRequest(message, param=param, code="reference_too_short")
    if seconds > max_seconds:
        message = f"{param} lasts longer than {max_seconds:g} s; {wanted}"
        raise InvalidRequest(message, param=param, code="reference_too_long")
    if not np.isfinite(samples).all():
        message = f"{param} holds samples that are not finite numbers"
        raise InvalidRequest(message, param=param, code="reference_silent")
    if np.abs(samples - samples.mean()).max() < 1e-3:
        raise InvalidRequest(f"{param} holds only silence", param=param, code="reference_silent")


def content_hash(samples: Samples, rate: int) -> str:
    """The identity of a sound, 64 hex digits: equal for equal samples and rate, whatever file held them."""
    digest = hashlib.blake2b(rate.to_bytes(4, "little"), digest_size=32)
    digest.update(np.ascontiguousarray(samples, "<f4").data)
    return digest.hexdigest()


def _read(container: InputContainer, param: str, max_seconds: float) -> tuple[Samples, int]:
    stream = next(iter(container.streams.audio), None)
    # A codec unknown to libav has no context.
    codec = getattr(stream.codec_context, "name", None) if stream is not None else None
    if stream is None or codec not in _CODECS:
        raise _bad(f"{param} has no audio track of type {_TYPES}", param)
    chunks: list[Samples] = []
    rate, samples = 0, 0
    try:
        for frame in container.decode(stream):
            rate = rate or frame.sample_rate
            if frame.sample_rate != rate or not 1000 <= rate <= 384_000:
                raise _bad(f"{param} has a sample rate that is absurd or changes midway", param)
            chunks.append(_mono(frame))
            samples += frame.samples
            if samples >= max_seconds * rate:
                break
    except av.FFmpegError:
        # MP3 has no container to say where the sound ends, and files with a tail of other bytes are common.
        if not samples or codec not in ("mp3", "mp3float"):
            raise
    if not samples:
        raise _bad(f"{param} holds no sound", param)
    return np.concatenate(chunks)[: int(max_seconds * rate)], rate


def _mono(frame: AudioFrame) -> Samples:
    """The mean of the channels, float32 [n]. libav scales integers by the power of two of their width."""
    pcm = frame.to_ndarray()
    if not frame.format.is_planar:
        pcm = pcm.reshape(-1, frame.layout.nb_channels).T
    with np.errstate(over="ignore", invalid="ignore"):  # check_reference refuses the result
        mono: Samples = pcm.mean(axis=0, dtype=np.float32)
    if pcm.dtype.kind in "iu":
        mono /= 2 ** (8 * pcm.itemsize - 1)
    if pcm.dtype.kind == "u":  # 8 bits, with silence at 128
        mono -= 1
    return mono


def _bad(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="bad_reference")
