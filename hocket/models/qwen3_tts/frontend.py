"""From a request to a job: names to ids, text to tokens, recordings to 24 kHz. Needs no weights."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from hocket.audio.resample import resample
from hocket.core import Job, ModelInfo, Reference, Sampling, SpeechRequest, Voice
from hocket.errors import InvalidRequest, StartupError, clip
from hocket.models.qwen3_tts.codec import CodecInput
from hocket.models.qwen3_tts.config import read_generation_config, read_model_config
from hocket.models.qwen3_tts.prompt import TalkerInput, TextUpdate
from hocket.models.qwen3_tts.reference import ReferenceInput
from hocket.nn.talker import DrawInput
from hocket.text import units
from hocket.tokenizer import TextTokenizer

RATE_HZ = 24000
MAX_FRAMES = 4096
UNIT_WEIGHT = 400  # longer text drifts in timbre and loses words (vllm-omni issue 4711, QwenLM issue 181)
FRAMES_PER_TOKEN = 12  # ceiling where the client set none: a checkpoint misses its end in 0.3-0.7 % of runs
LEAST_CEILING = 192

TASKS = {"base": "Base", "custom_voice": "CustomVoice", "voice_design": "VoiceDesign"}
CODES = {
    "zh": "chinese", "en": "english", "de": "german", "it": "italian", "pt": "portuguese",
    "es": "spanish", "ja": "japanese", "ko": "korean", "fr": "french", "ru": "russian",
}  # fmt: skip


N = TypeVar("N", int, float)


class QwenTtsFrontEnd:
    """Implements `hocket.core.FrontEnd`. Raises StartupError when the folder's files are wrong."""

    def __init__(self, folder: Path) -> None:
        self.config = read_model_config(folder)
        self.generation = read_generation_config(folder)
        self.tokenizer = TextTokenizer(folder)
        talker = self.config.talker_config
        self.variant = self.config.tts_model_type
        if self.variant not in TASKS:
            raise StartupError(
                f"{folder}/config.json: tts_model_type {self.variant!r} is not one of {', '.join(TASKS)}"
            )
        names = list(talker.spk_id)
        self.info = ModelInfo(
            family="qwen3_tts",
            sample_rate_hz=RATE_HZ,
            frame_rate_hz=12.5,
            codebooks=talker.num_code_groups,
            tasks=(TASKS[self.variant],),
            languages=("Auto", *(_title(name) for name in talker.codec_language_id)),
            voices=tuple(Voice(name.lower(), _title(name), self._languages_of(name)) for name in names),
            default_voice=names[0].lower() if names else None,
            max_frames=MAX_FRAMES,
            clones=self.variant == "base",
            # qwen-tts drops the instruction for the 0.6B CustomVoice, which was not trained on any.
            instructions=self.variant == "voice_design"
            or (self.variant == "custom_voice" and self.config.tts_model_size != "0b6"),
            streams_text=True,
        )
        c = self.config
        self._newline = self.tokenizer.encode("\n")
        self._role = [c.im_start_token_id, c.assistant_token_id, *self._newline]

    def _languages_of(self, speaker: str) -> tuple[str, ...]:
        dialect = self.config.talker_config.spk_is_dialect.get(speaker)
        return ("Chinese", _title(dialect)) if isinstance(dialect, str) and dialect else ()

    # --- FrontEnd -----------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def units(self, text: str) -> list[str]:
        return units(text, UNIT_WEIGHT)

    def prepare(self, request: SpeechRequest) -> Job:
        body = self.tokenizer.encode(_spoken(request.text))
        return self._job(request, body, text_open=False)

    def open_text(self, request: SpeechRequest) -> tuple[Job, QwenTextFeed]:
        if request.text_first:
            raise InvalidRequest(
                "text cannot grow when the whole text goes into the prompt; set non_streaming_mode to false",
                param="non_streaming_mode",
            )
        feed = QwenTextFeed(self.tokenizer)
        feed.text = request.text.lstrip()
        ids = feed.take()
        if not ids:
            raise InvalidRequest(
                "a text must begin with at least one whole word", param="input", code="empty_input"
            )
        return self._job(replace(request, text_first=False), ids, text_open=True), feed

    def _job(self, r: SpeechRequest, body: list[int], *, text_open: bool) -> Job:
        self._check_task(r)
        speaker, dialect = self._speaker(r)
        reference, vector = self._reference(r)
        continued = reference is not None and not reference.speaker_only
        ref_body: list[int] = []
        if continued:
            assert reference is not None
            if not (reference.text or "").strip():
                raise InvalidRequest(
                    "ref_text is required to continue a recording; give its transcript, or set "
                    "x_vector_only_mode to imitate the timbre only",
                    param="ref_text",
                    code="ref_text_required",
                )
            ref_body = self.tokenizer.encode(_spoken(reference.text or "", "ref_text"))
            if text_open:
                raise InvalidRequest(
                    "text can grow only with x_vector_only_mode or a preset voice", param="ref_text"
                )
        draws = self._sampling(r.sampling)
        talker = TalkerInput(
            instruct=self._instruct(r.instructions),
            role=self._role,
            tags=self._tags(r.language, dialect),
            speaker=speaker,
            body=body,
            ref_body=ref_body,
            speaker_vector=vector,
            cloned=reference is not None,
            continued=continued,
            text_first=self.variant != "base"
            if r.text_first is None and not text_open
            else bool(r.text_first),
            text_open=text_open,
            first=draws[0],
            inner=draws[1],
            repetition_penalty=draws[2],
        )
        inputs = {
            "talker": msgspec.msgpack.encode(talker),
            "codec": msgspec.msgpack.encode(CodecInput(prime=continued)),
        }
        route: tuple[str, ...] = ("talker", "codec")
        audio_tokens = 0
        if reference is not None:
            samples = np.asarray(resample(reference.samples, reference.rate_hz, RATE_HZ), np.float32)
            inputs["reference"] = msgspec.msgpack.encode(
                ReferenceInput(samples=samples.tobytes(), codes=continued)
            )
            route = ("reference", *route)
            audio_tokens = math.ceil(len(samples) / 1920) if continued else 0
        return Job(
            id=r.request_id or f"speech-{secrets.token_hex(16)}",
            route=route,
            inputs=inputs,
            seed=secrets.randbits(63) if r.seed is None else _int64(r.seed),
            max_frames=self._max_frames(r.max_frames, len(body), text_open),
            priority=r.priority,
            timeout_s=r.timeout_s,
            first_chunk_frames=r.first_chunk_frames,
            text_open=text_open,
            text_tokens=len(body) + len(talker.instruct),
            audio_tokens=audio_tokens,
        )

    # --- options --------------------------------------------------------------------------------

    def _check_task(self, r: SpeechRequest) -> None:
        (task,) = self.info.tasks
        cloning = r.reference is not None or r.speaker_embedding is not None
        wanted = r.task or ("Base" if cloning else task)
        if wanted not in TASKS.values():
            raise InvalidRequest(
                f"task_type {clip(wanted)!r} is not known; known: {', '.join(TASKS.values())}",
                param="task_type",
            )
        if wanted != task:
            given = "task_type" if r.task else "ref_audio" if r.reference else "speaker_embedding"
            raise InvalidRequest(
                f"this checkpoint does {task}, not {wanted}: leave {given} out, or serve one that does",
                param=given,
                code="unsupported_task",
            )
        if task == "Base" and not cloning:
            raise InvalidRequest(
                "this checkpoint clones voices: give ref_audio (with ref_text) or speaker_embedding",
                param="ref_audio",
                code="reference_required",
            )
        if task == "VoiceDesign" and not (r.instructions or "").strip():
            raise InvalidRequest(
                "this checkpoint designs a voice from a description: give it in instructions",
                param="instructions",
                code="instructions_required",
            )
        if r.instructions and not self.info.instructions:
            raise InvalidRequest(
                "this checkpoint takes no instructions", param="instructions", code="unsupported_field"
            )
        if r.extra:
            raise InvalidRequest(
                f"extra_params.{clip(next(iter(r.extra)))} is not known; this family has none",
                param=f"extra_params.{clip(next(iter(r.extra)))}",
            )

    def _speaker(self, r: SpeechRequest) -> tuple[int | None, str | None]:
        """Codec id of the preset speaker and the dialect it speaks."""
        t = self.config.talker_config
        if self.variant != "custom_voice":
            if r.voice and r.voice.lower() != "default":
                raise InvalidRequest(
                    f"voice {clip(r.voice)!r} is not known; this checkpoint has no preset voices",
                    param="voice",
                    code="voice_not_found",
                )
            return None, None
        wanted = (r.voice or "default").lower()
        if wanted == "default":
            wanted = self.info.default_voice or ""
        for name, codec_id in t.spk_id.items():
            if name.lower() == wanted:
                dialect = t.spk_is_dialect.get(name)
                return codec_id, dialect if isinstance(dialect, str) and dialect else None
        known = ", ".join(sorted(t.spk_id)[:20])
        raise InvalidRequest(
            f"voice {clip(r.voice)!r} is not known; known voices: {known}",
            param="voice",
            code="voice_not_found",
        )

    def _reference(self, r: SpeechRequest) -> tuple[Reference | None, bytes]:
        if r.speaker_embedding is None:
            return r.reference, b""
        if r.reference is not None:
            raise InvalidRequest("give ref_audio or speaker_embedding, not both", param="speaker_embedding")
        vector = np.asarray(r.speaker_embedding, np.float32)
        width = self.config.talker_config.hidden_size
        if vector.shape != (width,) or not np.isfinite(vector).all():
            raise InvalidRequest(
                f"speaker_embedding must be {width} finite numbers, got {vector.size}",
                param="speaker_embedding",
            )
        return None, vector.tobytes()

    def _tags(self, language: str | None, dialect: str | None) -> list[int]:
        t = self.config.talker_config
        wanted = (language or "auto").lower().replace(" ", "_")
        wanted = CODES.get(wanted, wanted)
        if wanted != "auto" and wanted not in t.codec_language_id:
            raise InvalidRequest(
                f"language {clip(language)!r} is not known; known: {', '.join(self.info.languages)}",
                param="language",
                code="language_not_found",
            )
        if dialect and wanted in ("auto", "chinese"):
            wanted = dialect
        if wanted == "auto":
            return [t.codec_nothink_id, t.codec_think_bos_id, t.codec_think_eos_id]
        return [t.codec_think_id, t.codec_think_bos_id, t.codec_language_id[wanted], t.codec_think_eos_id]

    def _instruct(self, instructions: str | None) -> list[int]:
        if not instructions:
            return []
        c = self.config
        words = self.tokenizer.encode(f"user\n{instructions}")
        return [c.im_start_token_id, *words, c.im_end_token_id, *self._newline]

    def _sampling(self, s: Sampling) -> tuple[DrawInput, DrawInput, float]:
        g = self.generation
        _within("temperature", s.temperature, 0, 10)
        _within("top_p", s.top_p, 0, 1, open_low=True)
        _within("top_k", s.top_k, 0, 1 << 30)
        _within("repetition_penalty", s.repetition_penalty, 0, 10, open_low=True)
        first = DrawInput(
            temperature=_first(s.temperature, g.temperature if g.do_sample else 0.0),
            top_k=_first(s.top_k, g.top_k),
            top_p=_first(s.top_p, g.top_p),
        )
        inner = DrawInput(
            temperature=_first(
                s.inner_temperature, s.temperature, g.subtalker_temperature if g.subtalker_dosample else 0.0
            ),
            top_k=_first(s.inner_top_k, s.top_k, g.subtalker_top_k),
            top_p=_first(s.inner_top_p, s.top_p, g.subtalker_top_p),
        )
        return first, inner, _first(s.repetition_penalty, g.repetition_penalty)

    def _max_frames(self, wanted: int | None, tokens: int, text_open: bool) -> int:
        """Frames a job may make. As in the reference, N new tokens are N - 1 frames: the last
        drawn id never gets its other codebooks. One frame is the least."""
        if wanted is not None:
            _within("max_new_tokens", wanted, 1, MAX_FRAMES)
            return max(1, wanted - 1)
        return MAX_FRAMES if text_open else min(MAX_FRAMES, max(LEAST_CEILING, FRAMES_PER_TOKEN * tokens))


class QwenTextFeed:
    """Releases tokens that later text cannot change; see `TextTokenizer.settled`."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = ""  # not yet released

    def take(self) -> list[int]:
        ids, self.text = self.tokenizer.settled(self.text)
        return ids

    def add(self, text: str) -> bytes:
        self.text += text
        ids = self.take()
        return msgspec.msgpack.encode(TextUpdate(ids=ids, closed=False)) if ids else b""

    def close(self) -> bytes:
        ids, self.text = self.tokenizer.encode(self.text), ""
        return msgspec.msgpack.encode(TextUpdate(ids=ids, closed=True))


def _spoken(text: str, param: str = "input") -> str:
    """The text as it goes into the template, whose newline would merge with leading blanks."""
    text = text.lstrip()
    if not any(ch.isalnum() for ch in text):
        raise InvalidRequest(
            f"{param} holds nothing to say: no letter or digit", param=param, code="empty_input"
        )
    return text


def _title(name: str | bool | None) -> str:
    return str(name).replace("_", " ").title()


def _first(*values: N | None) -> N:
    return next(v for v in values if v is not None)


def _within(name: str, value: float | int | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        raise InvalidRequest(
            f"{name} must be {'above' if open_low else 'from'} {low} to {high}, got {clip(value)}",
            param=name,
        )


def _int64(seed: int) -> int:
    if not -(1 << 63) <= seed < 1 << 63:
        raise InvalidRequest(f"seed must fit 64 bits, got {clip(seed)}", param="seed")
    return seed
