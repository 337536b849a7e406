"""From a request to a job: a conversation to ids and media, a voice to its id. Needs no weights."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from hocket.core import Chat, Job, Message, ModelInfo, Sampling, SpeechRequest, TextFeed, Voice
from hocket.errors import InvalidRequest, Unsupported, clip
from hocket.models.qwen3_omni.code2wav import RATE_HZ
from hocket.models.qwen3_omni.handoff import (
    FIRST,
    INNER,
    REPETITION_PENALTY,
    TalkerInput,
    talker_positions,
    user_turns,
)
from hocket.models.qwen3_omni.processing import Processor, Reading
from hocket.models.qwen3_omni.prompt import ThinkerInput
from hocket.models.qwen3_omni.stops import Words
from hocket.nn.talker import MAX_TEXT, DrawInput

MAX_FRAMES = 4096
MAX_TOKENS = 2048  # of text, where the client set no limit
MAX_STOP_TEXTS = 16
ANSWERS = ("text", "audio")
DEFAULT_VOICE = "ethan"  # the published code's; the first of the checkpoint's if it has no such voice

N = TypeVar("N", int, float)


class QwenOmniFrontEnd:
    """Implements `hocket.core.FrontEnd`. Raises StartupError when the folder's files are wrong.

    A text without a chat is a user's message that is answered by speech; instructions are the system's.
    `extra` may hold `drops_cut_token` (do not speak the last token of a text that reached its limit, as the
    published code) and, without a chat, `max_tokens` of the answer's text.
    """

    def __init__(self, folder: Path) -> None:
        self.processor = Processor(folder)
        self.config = self.processor.config
        speakers = self.config.talker.speaker_id if self.config.speaks else {}
        names = [name.lower() for name in speakers]
        default = DEFAULT_VOICE if DEFAULT_VOICE in names else names[0] if names else None
        self.info = ModelInfo(
            family="qwen3_omni",
            sample_rate_hz=RATE_HZ,
            frame_rate_hz=12.5,
            codebooks=self.config.talker.num_code_groups if self.config.speaks else 0,
            tasks=("Chat",),
            languages=(),
            voices=tuple(Voice(name, name.title()) for name in names),
            default_voice=default,
            max_frames=MAX_FRAMES,
            clones=False,
            instructions=True,
            streams_text=False,
            reads=("audio", "image", "video"),
            answers=ANSWERS if self.config.speaks else ANSWERS[:1],
            thinks=self.processor.render([Message(role="user", parts=["?"])]).rstrip().endswith("<think>"),
        )
        self._speakers = {name.lower(): id for name, id in speakers.items()}
        self._words = Words(folder)
        self._role = self.processor.encode("<|im_start|>assistant\n")

    # --- FrontEnd -----------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        return self.processor.tokenizer.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Control tokens, and ids that the model has and the tokenizer has not, are left out; tokens that
        stand for something in a text (<think>) are in it."""
        size = self.config.thinker_config.text_config.vocab_size
        for id in ids:
            if not 0 <= id < size:
                raise InvalidRequest(f"token {id} is not in the vocabulary of {size}", param="tokens")
        return b"".join(map(self._words.spelled, ids)).decode(errors="replace")

    def units(self, text: str) -> list[str]:
        return [text]

    def open_text(self, request: SpeechRequest) -> tuple[Job, TextFeed]:
        raise Unsupported("this model answers whole messages only", param="input")

    def prepare(self, request: SpeechRequest) -> Job:
        r = request
        chat = r.chat or self._spoken(r)
        modalities = ANSWERS if chat.modalities is None else tuple(chat.modalities)
        speaks = self._check_modalities(modalities)
        self._check_fields(r)
        reading = self.processor.read(chat.messages, chat.tools, audio_in_video=chat.audio_in_video)
        tokens = self._max_tokens(chat.max_tokens, speaks)
        drops_cut = bool(r.extra.get("drops_cut_token", False))
        _within("max_new_tokens", r.max_frames, 1, MAX_FRAMES)
        heard = sum(c.tokens for c in reading.audio.clips) if reading.audio else 0

        route = ["thinker"]
        inputs = {"thinker": msgspec.msgpack.encode(self._thinker(reading, chat))}
        for stage, media in (("vision", reading.vision), ("audio", reading.audio)):
            if media is not None:
                route.insert(0, stage)
                inputs[stage] = msgspec.msgpack.encode(media)
        if speaks:
            route += ["talker", "code2wav"]
            inputs["talker"] = msgspec.msgpack.encode(self._talker(r, reading, chat, drops_cut))
        return Job(
            id=r.request_id or f"speech-{secrets.token_hex(16)}",
            route=tuple(route),
            inputs=inputs,
            seed=secrets.randbits(63) if r.seed is None else _int64(r.seed),
            max_frames=MAX_FRAMES if r.max_frames is None else r.max_frames,
            limits={"thinker": tokens},
            priority=r.priority,
            timeout_s=r.timeout_s,
            first_chunk_frames=r.first_chunk_frames,
            text_tokens=len(reading.ids) - heard,
            audio_tokens=heard,
        )

    # --- inputs of the stages -------------------------------------------------------------------

    def _thinker(self, reading: Reading, chat: Chat) -> ThinkerInput:
        s = chat.sampling
        _check_sampling(s)
        _check_stops(chat.stops)
        return ThinkerInput(
            ids=reading.ids.astype(np.int32).tobytes(),
            positions=b"" if reading.positions is None else reading.positions.astype(np.float32).tobytes(),
            audio=[(c.key, c.tokens) for c in reading.audio.clips] if reading.audio else [],
            vision=[(p.key, p.tokens) for p in reading.vision.pictures] if reading.vision else [],
            stops=[self.config.im_end_token_id],
            stop_texts=list(chat.stops),
            temperature=_first(s.temperature, 0.0),
            top_k=_first(s.top_k, 0),
            top_p=_first(s.top_p, 1.0),
            repetition_penalty=_first(s.repetition_penalty, 1.0),
        )

    def _talker(self, r: SpeechRequest, reading: Reading, chat: Chat, drops_cut: bool) -> TalkerInput:
        s = r.sampling
        _check_sampling(s)
        given = user_turns(self.config, reading.ids)
        places = talker_positions(self.config, reading.ids, reading.positions, given, chat.audio_in_video)
        return TalkerInput(
            user=reading.ids[given].astype(np.int32).tobytes(),
            role=self._role,
            speaker=self._speaker(r.voice),
            positions=b"" if places is None else places.tobytes(),
            drops_cut=drops_cut,
            first=DrawInput(
                temperature=_first(s.temperature, FIRST.temperature),
                top_k=_first(s.top_k, FIRST.top_k),
                top_p=_first(s.top_p, FIRST.top_p),
            ),
            inner=DrawInput(
                temperature=_first(s.inner_temperature, s.temperature, INNER.temperature),
                top_k=_first(s.inner_top_k, s.top_k, INNER.top_k),
                top_p=_first(s.inner_top_p, s.top_p, INNER.top_p),
            ),
            repetition_penalty=_first(s.repetition_penalty, REPETITION_PENALTY),
        )

    # --- options --------------------------------------------------------------------------------

    def _spoken(self, r: SpeechRequest) -> Chat:
        if not self.config.speaks:
            raise InvalidRequest(
                "this checkpoint only writes text: ask /v1/chat/completions", param="input", code="no_speech"
            )
        if not r.text.strip():
            raise InvalidRequest("input holds nothing to answer", param="input", code="empty_input")
        system = [Message(role="system", parts=[r.instructions])] if r.instructions else []
        tokens = r.extra.get("max_tokens")
        if tokens is not None and not isinstance(tokens, int):
            name = "extra_params.max_tokens"
            raise InvalidRequest(f"{name} must be a whole number, got {clip(tokens)}", param=name)
        messages = [*system, Message(role="user", parts=[r.text])]
        return Chat(messages=messages, modalities=("audio",), max_tokens=tokens)

    def _check_modalities(self, modalities: Sequence[str]) -> bool:
        """Whether sound is asked for."""
        for wanted in modalities:
            if wanted not in self.info.answers:
                known = " and ".join(self.info.answers)
                raise InvalidRequest(
                    f"modalities holds {clip(wanted)!r}; this model answers with {known}",
                    param="modalities",
                    code="unsupported_modality",
                )
        if not modalities:
            raise InvalidRequest("modalities is empty; ask for text, audio or both", param="modalities")
        return "audio" in modalities

    def _check_fields(self, r: SpeechRequest) -> None:
        given = {
            "reference": r.reference is not None,
            "speaker_embedding": r.speaker_embedding is not None,
            "language": r.language is not None and r.language.lower() != "auto",
            "task_type": r.task is not None and r.task != "Chat",
        }
        for name, there in given.items():
            if there:
                param = "ref_audio" if name == "reference" else name
                raise InvalidRequest(f"this model takes no {param}", param=param, code="unsupported_field")
        known = ("drops_cut_token",) if r.chat is not None else ("drops_cut_token", "max_tokens")
        for name in r.extra:
            if name not in known:
                param = f"extra_params.{clip(name)}"
                raise InvalidRequest(f"{param} is not known; known: {', '.join(known)}", param=param)

    def _speaker(self, name: str | None) -> int:
        wanted = (name or "default").lower()
        if wanted == "default":
            wanted = self.info.default_voice or ""
        if wanted not in self._speakers:
            known = ", ".join(sorted(self._speakers))
            raise InvalidRequest(
                f"voice {clip(name)!r} is not known; known voices: {known}",
                param="voice",
                code="voice_not_found",
            )
        return self._speakers[wanted]

    def _max_tokens(self, wanted: int | None, speaks: bool) -> int:
        """Tokens that a text may have: of one that is spoken, no more than the Talker can be told."""
        most = MAX_TEXT if speaks else self.config.thinker_config.text_config.max_position_embeddings
        _within("max_tokens", wanted, 1, most)
        return MAX_TOKENS if wanted is None else wanted


def _check_sampling(s: Sampling) -> None:
    _within("temperature", s.temperature, 0, 10)
    _within("top_p", s.top_p, 0, 1, open_low=True)
    _within("top_k", s.top_k, 0, 1 << 30)
    _within("repetition_penalty", s.repetition_penalty, 0, 10, open_low=True)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_TEXTS:
        raise InvalidRequest(
            f"stop holds {len(stops)} strings; at most {MAX_STOP_TEXTS} are taken", param="stop"
        )
    for at, stop in enumerate(stops):
        if not stop:
            raise InvalidRequest("an empty string ends no text; leave it out", param=f"stop.{at}")


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
