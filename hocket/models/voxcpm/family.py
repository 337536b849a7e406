"""The stages of VoxCPM and how each is loaded.

encoder ──▶ talker ──▶ vocoder ──▶ client
    └──────────────────▲      (the last patches of a recording that is continued prime the vocoder)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.core import CLIENT, ChunkKind, FrontEnd, Stage, StageKind
from hocket.errors import StartupError
from hocket.models.voxcpm.config import read_model_config, read_vae_config
from hocket.models.voxcpm.frontend import VoxCpmFrontEnd
from hocket.models.voxcpm.talker import TalkerProgram
from hocket.models.voxcpm.vae import VocoderProgram
from hocket.models.voxcpm.vae_encoder import EncoderProgram
from hocket.models.voxcpm.vae_weights import load_vae_decoder, load_vae_encoder
from hocket.models.voxcpm.weights import load_talker


@dataclass(frozen=True, slots=True)
class VoxCpm:
    """Implements `hocket.core.Family`."""

    name: str = "voxcpm"
    profile: str = "voxcpm"
    stages: tuple[Stage, ...] = (
        Stage("encoder", StageKind.ONE_SHOT, ChunkKind.CONDITIONING, ("talker", "vocoder")),
        Stage("talker", StageKind.AUTOREGRESSIVE, ChunkKind.LATENTS, ("vocoder",), options=("float8",)),
        Stage("vocoder", StageKind.STREAMING, ChunkKind.PCM, (CLIENT,)),
    )

    def front_end(self, folder: Path) -> FrontEnd:
        return VoxCpmFrontEnd(folder)

    def load(
        self, stage: str, folder: Path, device: torch.device, dtype: torch.dtype, *, float8: bool = False
    ) -> Any:
        config = read_model_config(folder)
        vae = read_vae_config(folder, config)
        if stage == "talker":
            if float8 and device.type == "cuda" and dtype != torch.bfloat16:
                raise StartupError("the talker's weights are float8, which goes with dtype bfloat16 only")
            weights = load_talker(folder, config, device, dtype, float8=float8)
            return TalkerProgram(config, weights, vae.frame_rate_hz / config.patch_size)
        if stage == "vocoder":
            return VocoderProgram(load_vae_decoder(folder, vae, device, dtype), vae, config.patch_size)
        assert stage == "encoder", stage
        return EncoderProgram(load_vae_encoder(folder, vae, device, dtype), vae, config.patch_size, device)

    def used_stages(self, folder: Path) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)


FAMILY = VoxCpm()
