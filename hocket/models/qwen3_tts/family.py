"""The stages of Qwen3-TTS and how each is loaded.

reference ──▶ talker ──▶ codec ──▶ client
    └──────────────────▲      (reference codes prime the codec)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.core import CLIENT, ChunkKind, FrontEnd, Stage, StageKind
from hocket.models.qwen3_tts.codec import CodecProgram
from hocket.models.qwen3_tts.config import CODEC_FOLDER, load_codec_config, read_model_config
from hocket.models.qwen3_tts.frontend import QwenTtsFrontEnd
from hocket.models.qwen3_tts.reference import load_reference
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.models.qwen3_tts.weights import load_codec_decoder, load_talker


@dataclass(frozen=True, slots=True)
class QwenTts:
    """Implements `hocket.core.Family`."""

    name: str = "qwen3_tts"
    profile: str = "qwen3_tts"
    stages: tuple[Stage, ...] = (
        Stage("reference", StageKind.ONE_SHOT, ChunkKind.CONDITIONING, ("talker", "codec")),
        Stage("talker", StageKind.AUTOREGRESSIVE, ChunkKind.CODES, ("codec",)),
        Stage("codec", StageKind.STREAMING, ChunkKind.PCM, (CLIENT,)),
    )

    def front_end(self, folder: Path) -> FrontEnd:
        return QwenTtsFrontEnd(folder)

    def load(self, stage: str, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
        if stage == "talker":
            config = read_model_config(folder)
            return TalkerProgram(config, load_talker(folder, config, device, dtype))
        if stage == "codec":
            codec = folder / CODEC_FOLDER
            return CodecProgram(load_codec_decoder(codec, device, dtype), load_codec_config(codec))
        assert stage == "reference", stage
        return load_reference(folder, device, dtype)

    def used_stages(self, folder: Path) -> tuple[str, ...]:
        clones = read_model_config(folder).tts_model_type == "base"
        return tuple(stage.name for stage in self.stages if clones or stage.name != "reference")


FAMILY = QwenTts()
