"""Bytes to pictures: images and films as RGB arrays, checked before a model sees them.

The type is decided by the content. Images are decoded by Pillow, as the published processors do; films by
libav, frame by frame, and only the frames that will be looked at are kept.
Everything raised here is `InvalidRequest`, naming the field the picture came from.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from PIL import Image, ImageSequence

from hocket.container import open_container
from hocket.errors import InvalidRequest

FILM_HZ = 2.0  # frames a second that are looked at
FEWEST_FRAMES, MOST_FRAMES = 4, 768
MOST_PIXELS = 64 << 20  # of an image, or of one frame

_IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg"
_CODECS = "h264,hevc,vp8,vp9,av1,libdav1d,mpeg4,mpeg2video,mjpeg"


def chosen_frames(total: int, rate_hz: float) -> tuple[np.ndarray, float]:
    """Which of a film's frames are looked at, and their rate: FILM_HZ at most, evenly spread, even in number.

    As qwen-omni-utils 0.0.9. A film that is slow and short enough is looked at whole.
    """
    if rate_hz <= FILM_HZ and total <= MOST_FRAMES:
        return np.arange(total), rate_hz
    wanted = min(max(total / rate_hz * FILM_HZ, FEWEST_FRAMES), MOST_FRAMES, total)
    count = max(2, int(wanted) // 2 * 2) if total > 1 else 1
    # In fp32, as torch.linspace gives them: the frame nearest to each of `count` points.
    step = np.float32(total - 1) / np.float32(max(count - 1, 1))
    at = np.arange(count, dtype=np.float32)
    half = count // 2
    points = np.where(at < half, at * step, np.float32(total - 1) - (count - 1 - at) * step)
    return np.round(points).astype(np.int64), count / total * rate_hz


def decode_image(data: bytes, *, param: str) -> np.ndarray:
    """uint8 [h, w, 3]: the first picture of a file; what is transparent is white.

    Raises InvalidRequest `bad_media` when the bytes are no picture, or one of more than MOST_PIXELS.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_IMAGES)
            if image.width * image.height > MOST_PIXELS:
                raise _bad(f"{param} has {image.width} x {image.height} pixels; too many", param)
            first = next(iter(ImageSequence.Iterator(image)))
            rgb = _on_white(first)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _bad(
            f"{param} cannot be decoded; accepted are png, jpeg, webp, gif, bmp, tiff", param
        ) from error
    return np.array(rgb)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def decode_film(data: bytes, *, param: str) -> tuple[np.ndarray, float]:
    """The frames of a film that are looked at, uint8 [t, h, w, 3], and their rate; see `chosen_frames`.

    Raises InvalidRequest `bad_media` when the bytes are no film.
    """
    try:
        with open_container(io.BytesIO(data), _CONTAINERS, _CODECS) as first:
            total, rate = _measure(first, param)
        wanted, rate = chosen_frames(total, rate)
        with open_container(io.BytesIO(data), _CONTAINERS, _CODECS) as second:
            frames = _frames(second, set(wanted.tolist()))
    except av.FFmpegError as error:
        raise _bad(
            f"{param} cannot be decoded; accepted are mp4, mov, webm, mkv, avi, mpeg", param
        ) from error
    if not frames:
        raise _bad(f"{param} holds no picture", param)
    last = frames[max(frames)]  # stands in where a damaged file has fewer frames than packets
    return np.stack([frames.get(i, last) for i in wanted.tolist()]), rate


def _track(container: InputContainer, param: str) -> Any:
    stream = next(iter(container.streams.video), None)
    if stream is None or getattr(stream.codec_context, "name", None) not in _CODECS.split(","):
        raise _bad(f"{param} has no picture track of a known type", param)
    if stream.codec_context.width * stream.codec_context.height > MOST_PIXELS:
        raise _bad(f"{param} has too many pixels a frame", param)
    return stream


def _measure(container: InputContainer, param: str) -> tuple[int, float]:
    """Frames and frames a second, from the packets: what containers say of themselves is often missing."""
    stream = _track(container, param)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    total = sum(1 for packet in container.demux(stream) if packet.size)
    if total == 0 or not 0.01 <= rate <= 1000:
        raise _bad(f"{param} holds no picture, or has an absurd frame rate", param)
    return total, rate


def _frames(container: InputContainer, wanted: set[int]) -> dict[int, np.ndarray]:
    """The wanted frames by number."""
    found: dict[int, np.ndarray] = {}
    for number, frame in enumerate(container.decode(video=0)):
        if number in wanted:
            found[number] = frame.to_ndarray(format="rgb24")
        if len(found) == len(wanted):
            break
    return found


def _bad(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="bad_media")
