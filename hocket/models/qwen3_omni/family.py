"""The stages of Qwen3-Omni and how each is loaded.

audio ───┐
vision ──▶ thinker ──▶ client (text)
              └─▶ talker ──▶ code2wav ──▶ client (sound)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.core import CLIENT, ChunkKind, FrontEnd, Stage, StageKind
from hocket.models.qwen3_omni.audio import AudioProgram
from hocket.models.qwen3_omni.code2wav import Code2WavProgram
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.frontend import QwenOmniFrontEnd
from hocket.models.qwen3_omni.speech_weights import load_code2wav, load_talker
from hocket.models.qwen3_omni.stops import Words
from hocket.models.qwen3_omni.talker import TalkerProgram
from hocket.models.qwen3_omni.thinker import ThinkerProgram
from hocket.models.qwen3_omni.vision import VisionProgram
from hocket.models.qwen3_omni.weights import load_audio, load_thinker, load_vision
from hocket.nn.parallel import WHOLE, Shard

SPEAKING = ("talker", "code2wav")


@dataclass(frozen=True, slots=True)
class QwenOmni:
    """Implements `hocket.core.Family`."""

    name: str = "qwen3_omni"
    profile: str = "qwen3_omni"
    stages: tuple[Stage, ...] = (
        Stage("audio", StageKind.ONE_SHOT, ChunkKind.CONDITIONING, ("thinker",), optional=True),
        Stage("vision", StageKind.ONE_SHOT, ChunkKind.CONDITIONING, ("thinker",), optional=True),
        Stage(
            "thinker",
            StageKind.AUTOREGRESSIVE,
            ChunkKind.TOKENS,
            ("talker", CLIENT),
            options=("shard", "float8"),
        ),
        Stage("talker", StageKind.AUTOREGRESSIVE, ChunkKind.CODES, ("code2wav",), optional=True),
        Stage("code2wav", StageKind.STREAMING, ChunkKind.PCM, (CLIENT,), optional=True),
    )

    def front_end(self, folder: Path) -> FrontEnd:
        return QwenOmniFrontEnd(folder)

    def load(
        self,
        stage: str,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        shard: Shard = WHOLE,
        float8: bool = False,
    ) -> Any:
        config = read_model_config(folder)
        thinker = config.thinker_config
        if stage == "audio":
            return AudioProgram(thinker.audio_config, load_audio(folder, config, device, dtype))
        if stage == "vision":
            return VisionProgram(thinker.vision_config, load_vision(folder, config, device, dtype))
        if stage == "thinker":
            weights = load_thinker(folder, config, device, dtype, float8=float8, shard=shard)
            return ThinkerProgram(config, weights, shard, Words(folder))
        if stage == "talker":
            return TalkerProgram(config, load_talker(folder, config, device, dtype))
        assert stage == "code2wav", stage
        return Code2WavProgram(load_code2wav(folder, config, device, dtype), config.code2wav)

    def used_stages(self, folder: Path) -> tuple[str, ...]:
        speaks = read_model_config(folder).speaks
        return tuple(stage.name for stage in self.stages if speaks or stage.name not in SPEAKING)


FAMILY = QwenOmni()
