from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import pytest

from hocket.audio.decode import check_reference, content_hash, decode, parse_data_url
from hocket.audio.encode import Encoder
from hocket.audio.wav import Samples, to_s16, wav_header
from hocket.errors import InvalidRequest

Tone = Callable[[int, float], Samples]


class Kind(NamedTuple):
    container: str
    codec: str
    error: float  # RMS, for a sine of peak 0.5
    slack: int = 0  # samples of padding that the container does not declare


KINDS = {
    "wav": Kind("wav", "pcm_s16le", 1e-4),
    "wav-u8": Kind("wav", "pcm_u8", 5e-3),
    "wav-s24": Kind("wav", "pcm_s24le", 1e-6),
    "wav-s32": Kind("wav", "pcm_s32le", 1e-6),
    "wav-f32": Kind("wav", "pcm_f32le", 1e-6),
    "wav-f64": Kind("wav", "pcm_f64le", 1e-6),
    "wav-mulaw": Kind("wav", "pcm_mulaw", 2e-2),
    "mp3": Kind("mp3", "libmp3lame", 3e-2, 1),
    "flac": Kind("flac", "flac", 1e-4),
    "ogg-opus": Kind("ogg", "libopus", 3e-2),
    "ogg-flac": Kind("ogg", "flac", 1e-4),
    "aac": Kind("adts", "aac", 3e-2, 2048),
    "m4a": Kind("ipod", "aac", 3e-2, 2048),
    "m4a-alac": Kind("ipod", "alac", 1e-4),
    "webm": Kind("webm", "libopus", 3e-2, 960),
}


def file_of(kind: Kind, channels: Samples, rate: int, picture: bool = False) -> bytes:
    """A file of float32 [channels, n], with cover art if asked."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind.container) as container:
        stream = container.add_stream(kind.codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono" if len(channels) == 1 else "stereo"
        if picture:
            art = container.add_stream("png", width=16, height=16, pix_fmt="rgb24")
            image = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), "rgb24")
            container.mux([*art.encode(image), *art.encode(None)])
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), "fltp", stream.layout.name)
        frame.sample_rate, frame.pts = rate, 0
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_type_decodes_to_the_mean_of_its_channels(
    kind: Kind, rate: int, channels: int, tone: Tone
) -> None:
    if kind.codec == "libopus":
        rate = 48000 if rate in (22050, 44100) else rate  # rates Opus does not take
    sound = tone(rate, 0.5)
    sides = np.stack([sound, np.zeros_like(sound)])[:channels]
    made, found = decode(file_of(kind, sides, rate), param="ref_audio")
    assert found == (48000 if kind.codec == "libopus" else rate)  # Opus always decodes at 48 kHz
    assert made.dtype == np.float32
    expected = tone(found, 0.5) / channels
    assert 0 <= len(made) - len(expected) <= kind.slack + (kind.codec == "libopus")
    # Padding at the front, where a container does not declare it, shifts the sound.
    delay = 1024 if kind.container == "adts" else 0
    inner = slice(len(expected) // 8, -len(expected) // 8)
    error = made[delay:][: len(expected)][inner] - expected[: len(made) - delay][inner]
    assert np.sqrt(np.mean(error**2)) < kind.error


@pytest.mark.parametrize("kind", ["mp3", "flac"])
def test_cover_art_is_passed_over(kind: str, tone: Tone) -> None:
    sound = tone(44100, 0.5)
    made, _ = decode(file_of(KINDS[kind], sound[None], 44100, picture=True), param="ref_audio")
    assert abs(len(made) - len(sound)) <= KINDS[kind].slack


def test_tags_need_not_be_utf_8(tone: Tone) -> None:
    sound = to_s16(tone(24000, 0.5)).tobytes()
    name = b"INAM\x04\0\0\0Fr\xfc\0"  # Latin-1
    data = wav_header(24000, len(sound) // 2) + sound + b"LIST\x10\0\0\0INFO" + name
    made, _ = decode(data, param="ref_audio")
    assert len(made) == 12000


def test_a_path_is_read_like_its_bytes(tmp_path: Path, tone: Tone) -> None:
    data = file_of(KINDS["flac"], tone(16000, 0.5)[None], 16000)
    path = tmp_path / "http:name.mp3"  # neither a protocol nor an extension counts
    path.write_bytes(data)
    (a, rate_a), (b, rate_b) = decode(path, param="audio"), decode(data, param="audio")
    assert np.array_equal(a, b)
    assert rate_a == rate_b == 16000


def test_streamed_wav_with_unknown_sizes_is_read_to_its_end(tone: Tone) -> None:
    sound = tone(24000, 0.5)
    made, rate = decode(wav_header(24000, None) + to_s16(sound).tobytes(), param="ref_audio")
    assert rate == 24000
    assert np.array_equal(made * 32768, to_s16(sound))


def test_a_small_file_cannot_expand_without_limit() -> None:
    encoder = Encoder("flac", 8000, False)
    for _ in range(10):
        encoder.encode(np.zeros(8000 * 60, np.float32))
    bomb = encoder.finish()
    assert len(bomb) < 250_000  # ten minutes
    made, rate = decode(bomb, param="ref_audio", max_seconds=31)
    assert len(made) == 31 * rate


def test_mp3_may_be_followed_by_other_bytes(tone: Tone) -> None:
    data = file_of(KINDS["mp3"], tone(24000, 0.5)[None], 24000)
    for tail in (bytes(700), b"TAG" + bytes(125), np.random.default_rng(0).bytes(700)):
        made, _ = decode(data + tail, param="ref_audio")
        assert abs(len(made) - 12000) <= 1152


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x02\0\0\0\x90wS\xde"
GIF = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
JUNK = {
    "empty": b"",
    "one byte": b"R",
    "zeros": bytes(50_000),
    "ones": b"\xff" * 50_000,
    "noise": np.random.default_rng(0).bytes(100_000),
    "text": b"The quick brown fox jumps over the lazy dog.\n" * 500,
    "json": b'{"error": {"message": "not found"}}' * 100,
    "html": b"<!doctype html><html><body>404</body></html>" * 50,
    "png": PNG,
    "gif": GIF,
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    "wav header alone": wav_header(24000, 0),
    "wav of rate 0": wav_header(0, 100) + bytes(200),
    "wav of rate 4 GHz": wav_header(2**31 - 1, 100) + bytes(200),
}


@pytest.mark.parametrize("data", JUNK.values(), ids=JUNK)
def test_what_is_not_audio_is_an_invalid_request(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    for source in (data, tmp_path / "file"):
        with pytest.raises(InvalidRequest) as raised:
            decode(source, param="references.0.audio")
        assert raised.value.code == "bad_reference"
        assert raised.value.param == "references.0.audio"
        assert len(raised.value.message) < 200


@pytest.mark.parametrize("kind", ["aiff-pcm_s16be", "avi-mp3", "wav-adpcm_ms"])
def test_types_outside_the_list_are_refused(kind: str, tone: Tone) -> None:
    container, codec = kind.split("-")
    codec = "libmp3lame" if codec == "mp3" else codec
    with pytest.raises(InvalidRequest):
        decode(file_of(Kind(container, codec, 0), tone(24000, 0.5)[None], 24000), param="ref_audio")


def test_video_without_sound_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25, width=16, height=16, pix_fmt="yuv420p")
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame(16, 16, "yuv420p")))
        container.mux(stream.encode(None))
    with pytest.raises(InvalidRequest, match="no audio track"):
        decode(file.getvalue(), param="ref_audio")


def sound_or_code(data: bytes) -> Samples | str:
    try:
        return decode(data, param="ref_audio")[0]
    except InvalidRequest as error:
        return str(error.code)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_file_cut_short_gives_its_start_or_an_invalid_request(kind: Kind, tone: Tone) -> None:
    rate = 48000
    data = file_of(kind, tone(rate, 0.5)[None], rate)
    whole, _ = decode(data, param="ref_audio")
    for part in range(0, 20):
        made = sound_or_code(data[: len(data) * part // 20])
        assert made == "bad_reference" if isinstance(made, str) else 0 < len(made) <= len(whole)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_damaged_bytes_give_sound_or_an_invalid_request(kind: Kind, tone: Tone) -> None:
    data = file_of(kind, tone(48000, 0.2)[None], 48000)
    random = np.random.default_rng(1)
    for damage in (1, 4, 16, 64) * 5:
        broken = np.frombuffer(data, np.uint8).copy()
        within = len(broken) if damage > 8 else min(len(broken), 300)  # few bytes: hit the header
        broken[random.integers(0, within, damage)] = random.integers(0, 256, damage)
        made = sound_or_code(broken.tobytes())
        assert made == "bad_reference" if isinstance(made, str) else len(made) > 0


RATE = 16000


def code_of(samples: Samples) -> str | None:
    try:
        check_reference(samples, RATE, param="ref_audio")
    except InvalidRequest as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("seconds", "code"),
    [
        (0.0, "reference_too_short"),
        (0.99, "reference_too_short"),
        (1.0, None),
        (30.0, None),
        (30.01, "reference_too_long"),
    ],
)
def test_a_reference_lasts_1_to_30_seconds(seconds: float, code: str | None, tone: Tone) -> None:
    assert code_of(tone(RATE, seconds)) == code


def test_a_family_may_set_other_limits(tone: Tone) -> None:
    check_reference(tone(RATE, 0.5), RATE, param="ref_audio", min_seconds=0.5)
    with pytest.raises(InvalidRequest, match=r"0\.5 to 2 s are accepted"):
        check_reference(tone(RATE, 3), RATE, param="ref_audio", min_seconds=0.5, max_seconds=2)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.25, np.nan, np.inf])
def test_a_reference_that_never_moves_is_silent(value: float) -> None:
    assert code_of(np.full(2 * RATE, value, np.float32)) == "reference_silent"


def test_a_reference_of_noise_at_the_last_bit_is_silent() -> None:
    noise = np.random.default_rng(0).uniform(-1, 1, 2 * RATE).astype(np.float32)
    assert code_of(noise * np.float32(2**-15)) == "reference_silent"
    assert code_of(noise * np.float32(0.01)) is None


def test_one_sample_that_is_not_a_number_refuses_the_reference(tone: Tone) -> None:
    sound = tone(RATE, 2)
    sound[100] = np.nan
    made, _ = decode(file_of(KINDS["wav-f32"], sound[None], RATE), param="ref_audio")
    assert code_of(made) == "reference_silent"


@pytest.mark.parametrize(
    "prefix", ["data:audio/wav;base64,", "DATA:audio/mpeg;BASE64,", "data:audio/ogg;codecs=opus;base64,"]
)
def test_data_url_gives_its_bytes(prefix: str) -> None:
    for n in range(20):
        data = bytes(range(n))
        assert parse_data_url(prefix + base64.b64encode(data).decode(), param="ref_audio") == data


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:audio/wav,abc",
        "data:audio/wav;base64",
        "data:image/png;base64,QUJD",
        "data:audio/wav;base64,QUJ",
        "data:audio/wav;base64,QU*D",
        "data:audio/wav;base64,QUJDé",
        "data:audio/wav;base64,QUJD\nQUJD",
        "http://example.com/a.wav",
        "/etc/passwd",
    ],
)
def test_other_strings_are_a_bad_reference(url: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_data_url(url, param="ref_audio")
    assert (raised.value.code, raised.value.param) == ("bad_reference", "ref_audio")


@pytest.mark.parametrize("prefix", ["", "data:audio/wav;base64,!", "data:audio/" + "x" * 1000 + ";base64,"])
def test_the_message_never_repeats_the_payload(prefix: str) -> None:
    payload = base64.b64encode(b"secret" * 10_000).decode()
    with pytest.raises(InvalidRequest) as raised:
        parse_data_url(prefix + payload, param="ref_audio")
    assert payload[:8] not in raised.value.message
    assert len(raised.value.message) < 200


def test_the_size_is_checked_to_the_byte_before_decoding() -> None:
    for n in range(90, 110):
        url = "data:audio/wav;base64," + base64.b64encode(bytes(n)).decode()
        if n <= 100:
            assert len(parse_data_url(url, param="ref_audio", max_bytes=100)) == n
        else:
            with pytest.raises(InvalidRequest, match="at most 100"):
                parse_data_url(url, param="ref_audio", max_bytes=100)
    with pytest.raises(InvalidRequest, match="at most 100"):  # not even looked at
        parse_data_url("data:audio/wav;base64," + "*" * 1000, param="ref_audio", max_bytes=100)


def test_hash_is_of_the_sound_and_its_rate(tone: Tone) -> None:
    sound = tone(RATE, 1)
    flac, wav = (decode(file_of(KINDS[kind], sound[None], RATE), param="x") for kind in ("flac", "wav"))
    assert content_hash(*flac) == content_hash(*wav)
    assert content_hash(sound, RATE) != content_hash(sound, RATE + 1)
    assert content_hash(sound, RATE) != content_hash(sound[:-1], RATE)
    assert content_hash(sound[::2], RATE) == content_hash(sound[::2].copy(), RATE)
    assert content_hash(np.zeros(1, np.float32), 1) == content_hash(np.zeros(1, np.float32), 1)
    assert len(content_hash(sound, RATE)) == 64
