"""From a request to a job: text to tokens, recordings to the encoder's rate. Needs no weights."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hocket.audio.resample import resample
from hocket.core import Job, ModelInfo, SpeechRequest, TextFeed
from hocket.errors import InvalidRequest, clip
from hocket.models.voxcpm.config import read_model_config, read_vae_config
from hocket.models.voxcpm.patches import MAX_STEPS
from hocket.models.voxcpm.prompt import TalkerInput
from hocket.models.voxcpm.tokenizer import TextTokenizer
from hocket.models.voxcpm.vae_encoder import EncoderInput, patches_of
from hocket.models.voxcpm.weights import lora_names
from hocket.text import units

MAX_PATCHES = 4096
PATCHES_PER_TOKEN = 6  # ceiling where the client set none, and ten more: the published rule for a bad case
LEAST = 2  # of the published code: a stop counts from the fourth patch on
# A minute or so. Longer text loses level and words; once cut, a text without a recording changes its voice.
UNIT_WEIGHT = 1000

EXTRA = ("cfg_value", "inference_timesteps", "min_len", "clone_mode", "lora")
MODES = ("reference", "continuation", "both")
_BRACKETS = str.maketrans("", "", "()（）")


class VoxCpmFrontEnd:
    """Implements `hocket.core.FrontEnd`. Raises StartupError when the folder's files are wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_model_config(folder)
        self.vae = read_vae_config(folder, self.config)
        self.tokenizer = TextTokenizer(folder)
        self.loras = lora_names(folder)
        v2 = self.config.v2
        self.max_patches = min(MAX_PATCHES, self.config.max_length)
        self.info = ModelInfo(
            family="voxcpm",
            sample_rate_hz=self.vae.output_rate_hz,
            frame_rate_hz=self.vae.frame_rate_hz / self.config.patch_size,
            codebooks=0,
            tasks=("Base", "VoiceDesign") if v2 else ("Base",),
            languages=(),
            voices=(),
            default_voice=None,
            max_frames=self.max_patches,
            clones=True,
            instructions=v2,
            streams_text=False,
        )

    # --- FrontEnd -----------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        for id in ids:
            if not 0 <= id < self.tokenizer.size:
                raise InvalidRequest(
                    f"token {id} is not one of the vocabulary's {self.tokenizer.size} ids", param="tokens"
                )
        return self.tokenizer.decode(ids)

    def units(self, text: str) -> list[str]:
        return units(text, UNIT_WEIGHT)

    def open_text(self, request: SpeechRequest) -> tuple[Job, TextFeed]:
        raise InvalidRequest(
            "text cannot grow: this model reads all of it before it speaks; send it in sentences",
            param="input",
        )

    def prepare(self, request: SpeechRequest) -> Job:
        r = request
        self._check_fields(r)
        extra = r.extra
        said, recordings, mode = self._voice(r)
        text = self._described(r, mode) + _spoken(r.text)
        target = self.tokenizer.encode(text)
        talker = TalkerInput(
            ids=self.tokenizer.encode(said + text) if said else target,
            reference=bool(recordings.reference),
            continued=bool(recordings.prompt),
            guidance=_number("cfg_value", extra.get("cfg_value", 2.0), 0, 10),
            steps=int(
                _number("inference_timesteps", extra.get("inference_timesteps", 10), 2, MAX_STEPS, whole=True)
            ),
            temperature=_number(
                "temperature", 1.0 if r.sampling.temperature is None else r.sampling.temperature, 0, 10
            ),
            least=int(_number("min_len", extra.get("min_len", LEAST), 0, self.max_patches, whole=True)),
            lora=self._lora(extra.get("lora")),
        )
        inputs = {"talker": msgspec.msgpack.encode(talker)}
        route: tuple[str, ...] = ("talker", "vocoder")
        patches = sum(
            patches_of(len(samples) // 4, self.vae, self.config.patch_size)
            for samples in (recordings.reference, recordings.prompt)
        )
        if patches:
            inputs["encoder"] = msgspec.msgpack.encode(recordings)
            route = ("encoder", *route)
        rows = len(talker.ids) + 1 + patches + (2 if talker.reference else 0)
        return Job(
            id=r.request_id or f"speech-{secrets.token_hex(16)}",
            route=route,
            inputs=inputs,
            seed=secrets.randbits(63) if r.seed is None else _int64(r.seed),
            max_frames=self._max_patches(r.max_frames, len(target), rows),
            priority=r.priority,
            timeout_s=r.timeout_s,
            first_chunk_frames=r.first_chunk_frames,
            text_tokens=len(talker.ids),
            audio_tokens=patches,
        )

    # --- options --------------------------------------------------------------------------------

    def _check_fields(self, r: SpeechRequest) -> None:
        """Refuse what this family has no use for, naming the field."""
        if r.task and r.task not in self.info.tasks:
            raise InvalidRequest(
                f"this checkpoint does {', '.join(self.info.tasks)}, not {clip(r.task)}",
                param="task_type",
                code="unsupported_task",
            )
        if r.voice and r.voice.lower() != "default":
            raise InvalidRequest(
                f"voice {clip(r.voice)!r} is not known; this checkpoint has no preset voices",
                param="voice",
                code="voice_not_found",
            )
        s = r.sampling
        language = None if (r.language or "auto").casefold() == "auto" else r.language
        for param, value, remedy in (
            ("language", language, "leave it out: the model hears the language from the text"),
            ("speaker_embedding", r.speaker_embedding, "give a recording in ref_audio"),
            ("top_k", s.top_k, "leave it out: no codes are drawn"),
            ("top_p", s.top_p, "leave it out: no codes are drawn"),
            ("repetition_penalty", s.repetition_penalty, "leave it out: no codes are drawn"),
            (
                "non_streaming_mode",
                r.text_first is False or None,
                "leave it out: the text always comes first",
            ),
            ("instructions", None if self.info.instructions else r.instructions, "leave them out"),
        ):
            if value is not None:
                raise InvalidRequest(
                    f"{param} is not supported by this checkpoint; {remedy}",
                    param=param,
                    code="unsupported_field",
                )
        for name in r.extra:
            if name not in EXTRA:
                raise InvalidRequest(
                    f"extra_params.{clip(name)} is not known; known: {', '.join(EXTRA)}",
                    param=f"extra_params.{clip(name)}",
                )

    def _voice(self, r: SpeechRequest) -> tuple[str, EncoderInput, str]:
        """The transcript to go on from, recordings for the encoder, and the mode; all empty without one."""
        asked = r.extra.get("clone_mode")
        if asked is not None and asked not in MODES:
            raise InvalidRequest(
                f"extra_params.clone_mode must be one of {', '.join(MODES)}, got {clip(asked)!r}",
                param="extra_params.clone_mode",
            )
        if r.reference is None:
            if asked is not None:
                raise InvalidRequest("clone_mode needs a recording; give it in ref_audio", param="ref_audio")
            return "", EncoderInput(), ""
        said = _one_line(r.reference.text or "")
        mode = asked or ("continuation" if said.strip() and not r.reference.speaker_only else "reference")
        if mode != "reference" and not said.strip():
            raise InvalidRequest(
                f"ref_text is required for clone_mode {mode}; give the recording's transcript",
                param="ref_text",
                code="ref_text_required",
            )
        if mode != "continuation" and not self.config.v2:
            raise InvalidRequest(
                "this checkpoint clones by going on from a recording only; give its transcript in ref_text",
                param="ref_text",
                code="ref_text_required",
            )
        samples = np.asarray(
            resample(r.reference.samples, r.reference.rate_hz, self.vae.sample_rate), np.float32
        ).tobytes()
        if not samples:
            raise InvalidRequest("ref_audio holds no sound", param="ref_audio")
        return (
            "" if mode == "reference" else said,
            EncoderInput(
                reference=b"" if mode == "continuation" else samples,
                prompt=b"" if mode == "reference" else samples,
            ),
            mode,
        )

    def _described(self, r: SpeechRequest, mode: str) -> str:
        """The description of a voice or style, as it stands before the text."""
        description = _one_line(r.instructions or "").translate(_BRACKETS).strip()
        if not description:
            return ""
        if mode in ("continuation", "both"):
            raise InvalidRequest(
                "instructions do not go with a recording that is continued; leave them out, or set "
                "clone_mode to reference",
                param="instructions",
            )
        return f"({description})"

    def _lora(self, name: Any) -> str:
        if name is None:
            return ""
        if name not in self.loras:
            known = ", ".join(self.loras) or "none; put folders under lora beside the weights"
            raise InvalidRequest(
                f"extra_params.lora {clip(name)!r} is not known; known: {known}", param="extra_params.lora"
            )
        return str(name)

    def _max_patches(self, wanted: int | None, tokens: int, rows: int) -> int:
        """Patches a job may make. Where the client set no limit it is one that fits behind the prompt."""
        if wanted is not None:
            return int(_number("max_new_tokens", wanted, 1, self.max_patches, whole=True))
        room = max(1, self.config.max_length - rows + 1)
        return min(self.max_patches, PATCHES_PER_TOKEN * tokens + 10, room)


def _one_line(text: str) -> str:
    """As the published wrapper has it: every run of blanks and line feeds is one blank."""
    return re.sub(r"\s+", " ", text)


def _spoken(text: str) -> str:
    text = _one_line(text)
    if not any(ch.isalnum() for ch in text):
        raise InvalidRequest(
            "input holds nothing to say: no letter or digit", param="input", code="empty_input"
        )
    return text


def _number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> float:
    """`value` if it lies within low … high. Options that come with a model are fields of `extra_params`."""
    param = f"extra_params.{name}" if name in EXTRA else name
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise InvalidRequest(
            f"{param} must be {kind} from {low:g} to {high:g}, got {clip(value)}", param=param
        )
    return float(value)


def _int64(seed: int) -> int:
    if not -(1 << 63) <= seed < 1 << 63:
        raise InvalidRequest(f"seed must fit 64 bits, got {clip(seed)}", param="seed")
    return seed
