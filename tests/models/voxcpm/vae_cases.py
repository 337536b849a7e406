"""The vocoders that tests and oracle share: every released layout of rates, with narrow layers."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.models.voxcpm.vae import VaeConfig, VaeConfigV2


@dataclass(frozen=True)
class Case:
    config: VaeConfig
    patch_size: int
    samples: int  # of the recording; not whole patches
    frames: int  # decoded


CASES = {
    "2": Case(VaeConfigV2(encoder_dim=8, decoder_dim=128, latent_dim=8), 4, 12000, 28),
    # Another row of the rates' tables, and an odd stride in an encoder that pads as VoxCPM2 does.
    "2_24k": Case(
        VaeConfigV2(
            encoder_dim=4, decoder_dim=64, latent_dim=6, decoder_rates=(8, 5, 4, 3, 2), out_sample_rate=24000
        ),
        2,
        3000,
        14,
    ),
    "1.5": Case(
        VaeConfig(
            encoder_dim=4, encoder_rates=(2, 3, 6, 7, 7), latent_dim=8, decoder_dim=64,
            decoder_rates=(7, 7, 6, 3, 2), sample_rate=44100,
        ),
        4,
        20000,
        12,
    ),
    "0.5b": Case(VaeConfig(encoder_dim=8, decoder_dim=64, latent_dim=8), 2, 7000, 24),
}  # fmt: skip
