"""The body of a speech request: its fields, and how they become a `SpeechRequest`.

What a single model can do is for its front end to judge; here is what holds for every model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from anyio import to_thread
from msgspec import Meta, Struct

from hocket.audio.encode import Format, output_rate
from hocket.core import Chat, ModelInfo, Reference, Sampling, SpeechRequest
from hocket.errors import InvalidRequest, clip
from hocket.server.names import check_model, find_voice, is_speaker
from hocket.server.serving import Serving
from hocket.server.settings import ServerSettings
from hocket.server.voice_store import StoredVoice

Rate = Literal[8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000]
Mode = Literal["buffered", "raw", "events"]

_INT64 = 1 << 63


class VoiceRef(Struct):
    id: str


class ReferencePart(Struct):
    """One recording. `audio` takes a locator as `ref_audio` does; `audio_path` a path as well."""

    audio_path: str | None = None
    audio: str | None = None
    text: str | None = None


class SpeechOptions(Struct, kw_only=True):
    """How to speak. Fields that are null or left out take the model's or the server's default."""

    model: Annotated[str | None, Meta(description="A name of the model served.")] = None
    voice: Annotated[str | VoiceRef | None, Meta(description="A name of GET /v1/audio/voices.")] = None
    speaker: Annotated[str | VoiceRef | None, Meta(description="The same as `voice`.")] = None
    instructions: Annotated[str | None, Meta(description="How to speak.")] = None
    response_format: Annotated[Format | None, Meta(description="mp3 by default.")] = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0, description="Tempo; the pitch stays.")] | None = None
    stream_format: Literal["audio", "sse"] | None = None

    stream: bool | None = None
    sample_rate: Annotated[Rate | None, Meta(description="Output rate in Hz.")] = None
    task_type: Annotated[str | None, Meta(description="CustomVoice, VoiceDesign or Base.")] = None
    language: Annotated[str | None, Meta(description="Name or code; Auto by default.")] = None
    ref_audio: Annotated[
        str | list[str] | None,
        Meta(description="The voice to imitate: data:audio/…;base64,…, or http(s): or file: if allowed."),
    ] = None
    ref_text: Annotated[str | None, Meta(description="What is said in `ref_audio`.")] = None
    references: list[ReferencePart] | None = None
    x_vector_only_mode: Annotated[bool | None, Meta(description="Imitate the timbre only.")] = None
    speaker_embedding: list[float] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 30, description="Frames.")] | None = None
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10, description="0 is greedy.")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30, description="0 or -1: no limit.")] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    initial_codec_chunk_frames: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    non_streaming_mode: Annotated[bool | None, Meta(description="All text before the first frame.")] = None
    word_timestamps: bool | None = None
    extra_params: dict[str, Any] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")] | None = None
    stop_at_silence_ms: Annotated[int, Meta(ge=1, le=60_000)] | None = None


class SpeechBody(SpeechOptions, kw_only=True):
    """POST /v1/audio/speech: a text, and how to speak it."""

    input: Annotated[str, Meta(description="The text to speak.")]


@dataclass(slots=True)
class Plan:
    """What to ask of the engine, and how to send what it gives."""

    request: SpeechRequest
    mode: Mode
    format: Format
    rate_hz: int  # of the answer
    speed: float
    stop_at_silence_ms: int | None
    ignored: tuple[str, ...]  # fields the model has no use for
    silence: bool  # answer with a little silence: there is nothing to say
    retries_runaway: bool  # try another seed, once, if the model does not end by itself


async def plan(
    body: SpeechBody, accept: str, info: ModelInfo, serving: Serving, chat: Chat | None = None
) -> Plan:
    """The plan for `body`, given the client's Accept header. Raises InvalidRequest naming the field.

    With a `chat` that is answered; the body's input and its options of drawing are then not read.
    """
    settings = serving.settings
    check_model(body.model, settings)
    request = SpeechRequest(text=body.input, chat=chat)
    silence = chat is None and check_input(body.input, settings)
    ignored = []
    if body.instructions and len(body.instructions) > settings.max_instructions_chars:
        limit = settings.max_instructions_chars
        problem = f"has {len(body.instructions)} characters; at most {limit} are accepted"
        raise _invalid("instructions", problem, "too_long")
    for name in ("instructions", "ref_text", "language", "task_type", "model"):
        _check_text(name, getattr(body, name))
    if body.instructions and info.instructions:
        request.instructions = body.instructions
    elif body.instructions:
        ignored.append("instructions")
    if body.language and body.language.casefold() == "auto" and not info.languages:
        ignored.append("language")
    else:
        request.language = body.language
    if body.word_timestamps:
        raise _invalid("word_timestamps", "needs an aligner, which this server does not have; leave it out")

    request.task = body.task_type
    await _choose_voice(request, body, info, serving)
    if chat is None:
        request.sampling = sampling(body)
    request.seed = body.seed
    request.max_frames = body.max_new_tokens
    request.text_first = body.non_streaming_mode
    request.first_chunk_frames = body.initial_codec_chunk_frames or 0
    request.priority = body.priority or 0
    request.timeout_s = settings.request_timeout_s
    request.extra = body.extra_params or {}

    file_format = body.response_format or settings.default_format
    rate = body.sample_rate
    if rate is None and settings.pcm_native_rate:
        rate = info.sample_rate_hz  # type: ignore[assignment]  # any rate a model has
    mode = _mode(body, file_format, accept)
    return Plan(
        request=request,
        mode=mode,
        format=file_format,
        rate_hz=output_rate(file_format, rate, info.sample_rate_hz),
        speed=1.0 if body.speed is None else body.speed,
        stop_at_silence_ms=body.stop_at_silence_ms,
        ignored=tuple(ignored),
        silence=silence,
        retries_runaway=mode == "buffered"
        and chat is None
        and body.seed is None
        and body.max_new_tokens is None,
    )


class Drawing(Protocol):
    """Fields that say how something is drawn, as the API names them."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    repetition_penalty: float | None


def sampling(body: Drawing) -> Sampling:
    """The body's options of drawing."""
    return Sampling(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        repetition_penalty=body.repetition_penalty,
    )


def _mode(body: SpeechBody, file_format: Format, accept: str) -> Mode:
    """Whether the answer is one piece, a stream of bytes, or events."""
    if body.stream_format == "sse":
        return "events"
    if body.stream is False:
        return "buffered"
    if body.stream_format == "audio":
        return "raw"
    if body.stream:
        named = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
        raw = any(name.startswith("audio/") or name == "application/octet-stream" for name in named)
        return "raw" if raw and "text/event-stream" not in named else "events"
    # Early sound costs nothing to a client that reads to the end, but sizes in a file's header need the end.
    return "buffered" if file_format in ("wav", "flac") else "raw"


def check_input(text: str, settings: ServerSettings) -> bool:
    """Whether there is nothing to say and the owner wants silence for that."""
    if len(text) > settings.max_input_chars:
        problem = f"has {len(text)} characters; at most {settings.max_input_chars} are accepted"
        raise _invalid("input", problem, "input_too_long")
    _check_text("input", text)
    if any(character.isalnum() for character in text):
        return False
    if settings.empty_input == "silence":
        return True
    raise _invalid("input", "holds nothing to say: no letter and no digit", "empty_input")


def _check_text(param: str, text: str | None) -> None:
    if text and "\0" in text:
        raise _invalid(param, "holds a NUL character; remove it")


def _voice_name(body: SpeechBody) -> str | None:
    voice, speaker = (part.id if isinstance(part, VoiceRef) else part for part in (body.voice, body.speaker))
    if voice and speaker and voice.casefold() != speaker.casefold():
        raise _invalid("speaker", "is not the same as 'voice'; give one of them")
    return voice or speaker


# --- voices ------------------------------------------------------------------------------------


async def _choose_voice(request: SpeechRequest, body: SpeechBody, info: ModelInfo, serving: Serving) -> None:
    """Set the request's voice: a speaker of the model, a stored recording, or one that came along."""
    name = _voice_name(body)
    _check_text("voice", name)
    locator, text, param = _locator(body)
    voice = await lookup(name, info, serving)
    if isinstance(voice, StoredVoice):
        if locator is not None or body.speaker_embedding is not None:
            other = param if locator is not None else "speaker_embedding"
            raise _invalid("voice", f"names an uploaded voice, and '{other}' gives another; give one of them")
        _use_stored(request, voice, text, body, info)
        return
    request.voice = voice
    request.speaker_embedding = body.speaker_embedding
    if locator is not None:
        request.reference = await serving.references.load(
            locator,
            param=param,
            offload=serving.offload,
            text=text,
            speaker_only=bool(body.x_vector_only_mode),
            paths=param.endswith("audio_path"),
        )
    elif text:
        raise _invalid("ref_text", "is given without 'ref_audio'; give both or neither")
    elif body.x_vector_only_mode and body.speaker_embedding is None:
        raise _invalid("x_vector_only_mode", "needs a voice: give 'ref_audio' or 'speaker_embedding'")


async def lookup(name: str | None, info: ModelInfo, serving: Serving) -> StoredVoice | str | None:
    """What `name` stands for: a stored voice, the id of a speaker, or None for the model's default."""
    aliases = serving.settings.voice_aliases
    if serving.voices is None or is_speaker(name, info):
        return find_voice(name, info, aliases)
    return await to_thread.run_sync(find_voice, name, info, aliases, serving.voices)


def _use_stored(
    request: SpeechRequest, voice: StoredVoice, text: str | None, body: SpeechBody, info: ModelInfo
) -> None:
    record = voice.record
    if not info.clones:
        known = ", ".join(speaker.id for speaker in info.voices[:20]) or "none"
        message = (
            f"voice '{clip(record.name)}' is a recording, and this model does not clone: it has the voices "
            f"{known}; a model with task Base can speak with it"
        )
        raise InvalidRequest(message, param="voice", code="unsupported_task")
    if record.embedding_source == "direct":
        request.speaker_embedding = voice.data.tolist()
        return
    said = text or record.ref_text
    only = body.x_vector_only_mode if body.x_vector_only_mode is not None else not said
    request.reference = Reference(samples=voice.data, rate_hz=record.rate_hz, text=said, speaker_only=only)
    if request.language is None and (record.language or "").casefold() in map(str.casefold, info.languages):
        request.language = record.language


def _locator(body: SpeechBody) -> tuple[str | None, str | None, str]:
    """The reference's locator, its transcript, and the field it came in. Empty strings count as absent."""
    many, param = body.ref_audio, "ref_audio"
    audio = many[0] if isinstance(many, list) and many else many if isinstance(many, str) else None
    text = body.ref_text
    count = len(many) if isinstance(many, list) else 1
    if body.references:
        part = body.references[0]
        name = "audio" if part.audio else "audio_path"
        other, other_text = part.audio or part.audio_path, part.text
        if not other:
            raise _invalid("references.0.audio", "is required: a locator of a recording", "missing_field")
        if (audio and audio != other) or (text and text != other_text):
            raise _invalid("references", "is not the same as 'ref_audio' and 'ref_text'; give one form")
        audio, text, param, count = other, other_text, f"references.0.{name}", len(body.references)
    if count > 1:
        raise _invalid(param.partition(".")[0], f"holds {count} recordings; this model takes one")
    return audio or None, text or None, param


def _invalid(param: str, problem: str, code: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"'{param}' {problem}", param=param, code=code)
