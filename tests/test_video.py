"""Pictures and films: what is decoded, what is looked at, what is refused."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hocket import video
from hocket.errors import InvalidRequest
from hocket.video import FILM_HZ, MOST_FRAMES, chosen_frames, decode_film, decode_image


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Without detail that a lossy format would change much."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y + seed * 40) % 256], -1).astype(np.uint8)


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def film(frames: int, rate: int, *, codec: str = "libx264rgb", container: str = "mp4") -> bytes:
    """Frame i is of brightness i."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        track = out.add_stream(codec, rate=rate, options={"qp": "0"} if "264" in codec else {})
        track.height, track.width = 48, 64
        track.pix_fmt = "rgb24" if codec == "libx264rgb" else "yuv420p"
        for i in range(frames):
            pixels = np.full((48, 64, 3), i % 250, np.uint8)
            out.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(track.encode())
    return file.getvalue()


# --- which frames ------------------------------------------------------------------------------


@given(st.integers(2, 5000), st.floats(0.5, 120))
def test_chosen_frames_are_those_of_torch(total: int, rate: float) -> None:
    chosen, own = chosen_frames(total, rate)
    if rate <= FILM_HZ and total <= MOST_FRAMES:
        assert (chosen.tolist(), own) == (list(range(total)), rate)
        return
    wanted = torch.linspace(0, total - 1, len(chosen)).round().long().tolist()
    assert chosen.tolist() == wanted
    assert len(chosen) % 2 == 0
    assert own == pytest.approx(len(chosen) / (total / rate))
    again, same = chosen_frames(len(chosen), own)  # whoever thins twice thins once
    assert (again.tolist(), same) == (list(range(len(chosen))), pytest.approx(own))


@pytest.mark.parametrize(
    ("total", "rate", "count"),
    [(75, 25.0, 6), (10, 25.0, 4), (3, 30.0, 2), (1, 30.0, 1), (90_000, 25.0, 768), (20, 1.0, 20)],
    ids=["3 s", "a blink", "three frames", "one", "an hour", "slow"],
)
def test_so_many_frames_are_looked_at(total: int, rate: float, count: int) -> None:
    assert len(chosen_frames(total, rate)[0]) == count


# --- images ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF"])
def test_pixels_are_the_files(file_format: str) -> None:
    pixels = picture(20, 30)
    np.testing.assert_array_equal(
        decode_image(saved(Image.fromarray(pixels), file_format), param="x"), pixels
    )


def test_jpeg_is_decoded_as_pillow_does() -> None:
    data = saved(Image.fromarray(picture(20, 30)), "JPEG", quality=80)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data, param="x"), wanted)


def test_what_is_transparent_is_white() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0] = (10, 20, 30, 255)
    pixels[1, 1] = (0, 0, 0, 128)
    for file_format in ("PNG", "WEBP"):
        options = {"lossless": True, "exact": True} if file_format == "WEBP" else {}
        made = decode_image(saved(Image.fromarray(pixels), file_format, **options), param="x")
        assert made.tolist() == [[[10, 20, 30], [255] * 3], [[255] * 3, [127] * 3]]
    gray = Image.fromarray(np.array([[0, 200]], np.uint8))
    gray.info["transparency"] = 0
    made = decode_image(saved(gray, "PNG", transparency=0), param="x")
    assert made.tolist() == [[[255] * 3, [200] * 3]]


def test_of_a_moving_picture_the_first_is_taken() -> None:
    pages = [Image.fromarray(np.full((4, 4), shade, np.uint8)) for shade in (40, 200)]
    data = saved(pages[0], "GIF", save_all=True, append_images=pages[1:])
    assert decode_image(data, param="x")[0, 0].tolist() == [40] * 3


@pytest.mark.parametrize(
    "data",
    [b"", b"nothing", saved(Image.fromarray(picture(20, 30)), "PNG")[:-40], b"\x89PNG\r\n\x1a\n" + bytes(40)],
    ids=["empty", "text", "cut", "damaged"],
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="field cannot be decoded") as refused:
        decode_image(data, param="field")
    assert (refused.value.param, refused.value.code) == ("field", "bad_media")


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "MOST_PIXELS", 599)
    with pytest.raises(InvalidRequest, match="30 x 20 pixels"):
        decode_image(saved(Image.fromarray(picture(20, 30)), "PNG"), param="x")
    with pytest.raises(InvalidRequest, match="too many pixels"):
        decode_film(film(4, 2), param="x")


# --- films -------------------------------------------------------------------------------------


def test_frames_of_a_film_are_the_chosen_ones() -> None:
    frames, rate = decode_film(film(75, 25), param="x")
    chosen, _ = chosen_frames(75, 25.0)
    assert (frames.shape, frames.dtype, rate) == ((6, 48, 64, 3), np.uint8, 2.0)
    np.testing.assert_array_equal(frames[:, 0, 0, 0], chosen)


@pytest.mark.parametrize(
    ("codec", "container"),
    [("libx264", "mov"), ("libvpx-vp9", "webm"), ("mpeg4", "avi"), ("mpeg2video", "mpeg")],
)
def test_common_films_are_read(codec: str, container: str) -> None:
    frames, rate = decode_film(film(50, 25, codec=codec, container=container), param="x")
    assert (len(frames), rate) == (4, pytest.approx(2.0, rel=0.03))
    assert np.ptp(frames[0]) <= 4
    assert frames[-1].mean() > frames[0].mean()


@pytest.mark.parametrize("data", [b"", b"nothing", film(10, 2)[:200]], ids=["empty", "text", "cut"])
def test_what_is_no_film_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_film(data, param="field")
    assert (refused.value.param, refused.value.code) == ("field", "bad_media")


def test_a_recording_is_no_film() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        track = out.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        out.mux(track.encode(frame))
        out.mux(track.encode())
    with pytest.raises(InvalidRequest, match="no picture track"):
        decode_film(file.getvalue(), param="field")
