"""`hocket say`: one text, spoken into a file, a pipe or the loudspeaker."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from hocket.cli.player import Player
from hocket.cli.report import Debug, check_file, note, progress, reports_errors, settings_of
from hocket.errors import InvalidRequest, clip

if TYPE_CHECKING:
    from hocket.audio.encode import Format
    from hocket.core import Chat, Reference
    from hocket.engine.blocking import SyncStream

_FORMATS = ("wav", "mp3", "opus", "aac", "flac", "pcm")
_SUFFIXES = {".ogg": "opus", ".raw": "pcm", **{f".{name}": name for name in _FORMATS}}


@reports_errors
def say(
    text: Annotated[str, typer.Argument(help="What to say; - reads standard input.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="The file to write; - is standard output.")
    ] = None,
    stdout: Annotated[
        bool, typer.Option("--stream-to-stdout", help="The same as -o -: sound as it is made.")
    ] = False,
    play: Annotated[bool, typer.Option("--play", help="Play the sound as it is made.")] = False,
    codes: Annotated[
        Path | None, typer.Option(help="Write the frames too: .npy, int32, one row a frame.")
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option("--format", help=f"One of {', '.join(_FORMATS)}; by default what the file's name says."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder, or name on a hub.")] = None,
    voice: Annotated[str | None, typer.Option(help="A voice of `hocket voices`.")] = None,
    language: Annotated[str | None, typer.Option(help="Name or code; Auto by default.")] = None,
    instructions: Annotated[str | None, typer.Option(help="How to speak, or which voice to design.")] = None,
    ref_audio: Annotated[
        Path | None, typer.Option(help="A recording of the voice to imitate, 1 to 30 s.")
    ] = None,
    ref_text: Annotated[str | None, typer.Option(help="What is said in the recording.")] = None,
    speaker_only: Annotated[
        bool, typer.Option("--speaker-only", help="Imitate the timbre only; needs no --ref-text.")
    ] = False,
    image: Annotated[list[Path] | None, typer.Option(help="A picture that the text is about.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="A recording that the text is about.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A film that the text is about.")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal sound.")] = None,
    max_frames: Annotated[int | None, typer.Option(min=1, help="Most frames to make.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of the text, for a model that answers.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0: no limit.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(min=0)] = None,
    profile: Annotated[str | None, typer.Option(help="Name or path of a profile.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="stage.field=value: a change of the profile.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Speak a text; a model that understands answers it."""
    if text == "-":
        text = sys.stdin.read()
    output = "-" if stdout else output
    if output is None and not play and codes is None:
        output = "out.wav"
    wanted = _format(file_format, output)
    if output not in (None, "-"):
        check_file("-o", str(output))
    if codes is not None:
        check_file("--codes", codes)
    if (ref_text or speaker_only) and ref_audio is None:
        raise InvalidRequest("--ref-text and --speaker-only need --ref-audio, the recording they are about")
    if ref_audio is not None and not ref_text and not speaker_only:
        raise InvalidRequest("--ref-audio needs --ref-text with what it says, or --speaker-only")

    # Imported here: what comes before should not wait for PyTorch.
    from hocket.cli.bundled import bundled_model
    from hocket.core import Sampling, SpeechRequest
    from hocket.engine.blocking import Engine

    request = SpeechRequest(
        text=text,
        voice=voice,
        language=language,
        instructions=instructions,
        reference=_reference(ref_audio, ref_text, speaker_only) if ref_audio else None,
        sampling=Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
        ),
        seed=seed,
        max_frames=max_frames,
    )
    media = {"image": image or [], "audio": audio or [], "video": video or []}
    if any(media.values()):
        request.chat = _chat(text, instructions, media, max_tokens)
        request.text, request.instructions = "", None
    elif max_tokens is not None:
        request.extra["max_tokens"] = max_tokens
    overrides = settings_of(settings or [])
    if model is None:
        model = bundled_model()
    with ExitStack() as stack:
        with progress("loading the model") as show:
            engine = stack.enter_context(Engine(model, profile=profile, overrides=overrides))
            if max_tokens is not None and not engine.info.answers:
                raise InvalidRequest("--max-tokens is for models that answer; this one speaks the text")
            show("speaking")
            began = time.monotonic()
            stream = engine.speak(request, want_codes=codes is not None)
            stack.callback(stream.close)
            summary = _deliver(stream, began, wanted, output, play, show)
        if codes is not None:
            _write_codes(codes, stream)
        if stream.stream.text:
            note(stream.stream.text)
    note(summary)


def _format(asked: str | None, output: str | None) -> Format:
    suffix = Path(output or "").suffix.lower()
    if asked is None and suffix and suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise InvalidRequest(f"-o {clip(output)!r} ends like no format; known: {known}; or give --format")
    name = asked or _SUFFIXES.get(suffix, "wav")
    if name not in _FORMATS:
        raise InvalidRequest(f"--format {clip(name)!r} is not known; known: {', '.join(_FORMATS)}")
    return name  # type: ignore[return-value]  # it is one of them


def _reference(path: Path, text: str | None, speaker_only: bool) -> Reference:
    from hocket.audio.decode import check_reference, decode
    from hocket.core import Reference

    samples, rate_hz = decode(_read(path, "--ref-audio"), param="--ref-audio")
    check_reference(samples, rate_hz, param="--ref-audio")
    return Reference(samples=samples, rate_hz=rate_hz, text=text, speaker_only=speaker_only)


def _chat(text: str, instructions: str | None, media: dict[str, list[Path]], max_tokens: int | None) -> Chat:
    """A user's message about what the files hold, in the order of the options."""
    from hocket.audio.decode import decode
    from hocket.core import Chat, Media, Message
    from hocket.video import decode_film, decode_image

    parts: list[str | Media] = []
    for path in media["image"]:
        parts.append(Media(kind="image", data=decode_image(_read(path, "--image"), param="--image")))
    for path in media["audio"]:
        samples, rate = decode(_read(path, "--audio"), param="--audio", max_seconds=3600)
        parts.append(Media(kind="audio", data=samples, rate_hz=rate))
    for path in media["video"]:
        frames, fps = decode_film(_read(path, "--video"), param="--video")
        parts.append(Media(kind="video", data=frames, rate_hz=fps))
    system = [Message(role="system", parts=[instructions])] if instructions else []
    return Chat(messages=[*system, Message(role="user", parts=[*parts, text])], max_tokens=max_tokens)


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise InvalidRequest(f"{option} {path} cannot be read: {e.strerror}") from e


def _deliver(
    stream: SyncStream, began: float, wanted: Format, output: str | None, play: bool, show: Any
) -> str:
    """Send the sound where it is wanted as it is made. -> what there is to tell about it"""
    from hocket.audio.encode import Encoder, output_rate
    from hocket.audio.resample import Resampler
    from hocket.audio.wav import to_s16

    native_hz = stream.stream.sample_rate_hz
    rate_hz = output_rate(wanted, native_hz, native_hz)
    resampler = Resampler(native_hz, rate_hz)
    encoder = Encoder(wanted, rate_hz, streaming=output == "-")
    first_s, samples = 0.0, 0
    with ExitStack() as stack:
        sink = stack.enter_context(_Sink(output)) if output is not None else None
        player = stack.enter_context(Player(native_hz)) if play else None
        for audio in stream:
            first_s = first_s or time.monotonic() - began
            samples += len(audio.samples)
            if sink is not None:
                sink.write(encoder.encode(resampler.process(audio.samples)))
            if player is not None:
                player.write(to_s16(audio.samples).tobytes())
            show(f"speaking: {samples / native_hz:.1f} s")
        spent_s = time.monotonic() - began
        if sink is not None:
            sink.write(encoder.encode(resampler.finish()) + encoder.finish())
    seconds = samples / native_hz
    parts = [
        f"{seconds:.2f} s of sound",
        f"first after {first_s:.3f} s",
        f"RTF {spent_s / seconds:.3f}" if seconds else "no sound",
        f"seed {stream.stream.seed}",
    ]
    if stream.stream.finish_reason == "length":
        parts.append("cut: the model did not end by itself")
    if output not in (None, "-"):
        parts.append(str(output))
    return " · ".join(parts)


class _Sink:
    """A file that appears under its name when it is whole, or standard output."""

    def __init__(self, output: str) -> None:
        self._path = None if output == "-" else Path(output)
        self._file: BinaryIO = sys.stdout.buffer if self._path is None else self._part().open("wb")

    def _part(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name + ".part")

    def write(self, data: bytes) -> None:
        self._file.write(data)
        if self._path is None:
            self._file.flush()

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._path is None:
            return
        self._file.close()
        if kind is None:
            self._part().replace(self._path)
        else:
            self._part().unlink()


def _write_codes(path: Path, stream: SyncStream) -> None:
    import numpy as np

    with path.open("wb") as file:  # np.save would add .npy to another name
        np.save(file, stream.stream.codes.astype(np.int32))
    note(f"{len(stream.stream.codes)} frames: {path}")
