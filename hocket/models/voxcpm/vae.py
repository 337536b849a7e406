"""Latents to waveform, patch by patch: the decoder of VoxCPM's AudioVAE, and the config of both its halves.

Nothing in the decoder looks ahead, so with the history of every layer kept per stream, audio made in
chunks of any size equals the decode of the whole utterance.
Source: voxcpm 2.0.3: modules/audiovae/audio_vae_v2.py, and audio_vae.py for VoxCPM-0.5B and VoxCPM1.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from hocket.core import Chunk, Declared, Job, StreamPrompt, declared
from hocket.nn.conv import (
    Conv,
    Depthwise,
    Snake,
    causal_conv,
    causal_depthwise,
    causal_upsample,
    convolve,
)

# --- config ------------------------------------------------------------------------------------


class VaeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`audio_vae_config` of VoxCPM-0.5B and VoxCPM1.5. Defaults are the published class's: 0.5B.

    Raises ValueError, which msgspec reports with the key's path, for a layout that is not released.
    """

    encoder_dim: int = 128
    encoder_rates: tuple[int, ...] = (2, 5, 8, 8)
    latent_dim: int = 64
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (8, 8, 5, 2)
    sample_rate: int = 16000  # of recordings
    depthwise: bool = True
    use_noise_block: bool = False

    def __post_init__(self) -> None:
        if not self.depthwise:
            raise ValueError("depthwise is false; only depthwise residual units are served")
        if self.use_noise_block:
            raise ValueError("use_noise_block is true; the decoder is served without noise blocks")
        if self.decoder_dim % 2 ** len(self.decoder_rates):
            raise ValueError(
                f"decoder_dim is {self.decoder_dim}, which cannot be halved for each of decoder_rates"
            )
        made = self.output_rate_hz / self.decoder_hop
        if self.frame_rate_hz != made:
            raise ValueError(
                f"encoder_rates give {self.frame_rate_hz:g} frames a second, decoder_rates take {made:g}"
            )

    @property
    def encoder_hop(self) -> int:
        """Samples of a recording that one frame is made of."""
        return math.prod(self.encoder_rates)

    @property
    def decoder_hop(self) -> int:
        """Samples made of one frame."""
        return math.prod(self.decoder_rates)

    @property
    def frame_rate_hz(self) -> float:
        """Latent frames a second, of which a patch has several."""
        return self.sample_rate / self.encoder_hop

    @property
    def output_rate_hz(self) -> int:
        """Of the sound that the decoder gives."""
        return self.sample_rate

    @property
    def rate_row(self) -> int | None:
        """Which row of the decoder's tables of rates is in force; None: it has no such tables."""
        return None

    @property
    def late(self) -> bool:
        """Whether the encoder's layers of odd stride read one sample less of the present, one more of the
        past."""
        return True

    @property
    def primer_patches(self) -> int:
        """Last patches of a prompt that the published decode of a whole utterance begins with."""
        return 2


class VaeConfigV2(VaeConfig, frozen=True, kw_only=True):
    """`audio_vae_config` of VoxCPM2; see `VaeConfig`."""

    decoder_dim: int = 2048
    decoder_rates: tuple[int, ...] = (8, 6, 5, 2, 2, 2)
    out_sample_rate: int = 48000
    sr_bin_boundaries: tuple[int, ...] | None = (20000, 30000, 40000)
    cond_type: Literal["scale_bias", "scale_bias_init"] = "scale_bias"  # one thing, but for training's start
    cond_out_layer: bool = False

    def __post_init__(self) -> None:
        VaeConfig.__post_init__(self)
        if self.cond_out_layer:
            raise ValueError("cond_out_layer is true; rate conditioning is served without a layer of its own")

    @property
    def output_rate_hz(self) -> int:
        return self.out_sample_rate

    @property
    def rate_row(self) -> int | None:
        if self.sr_bin_boundaries is None:
            return None
        return sum(boundary < self.out_sample_rate for boundary in self.sr_bin_boundaries)

    @property
    def late(self) -> bool:
        return False

    @property
    def primer_patches(self) -> int:
        return 3


# --- weights and state -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnitWeights:
    """A residual unit."""

    snake_in: Snake
    conv: Depthwise  # dilated
    snake_mid: Snake
    mix: Conv  # one tap


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One rate of the waveform stack."""

    tint: tuple[Tensor, Tensor] | None  # [c] each: scale and offset that tell the output rate
    snake: Snake
    widen: Conv  # transposed: `rate` steps for one
    rate: int
    units: list[UnitWeights]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of the decoder, folded as its functions take them."""

    enter: Depthwise
    widen: Conv  # one tap: latent_dim -> decoder_dim
    blocks: list[BlockWeights]
    snake_last: Snake
    last: Conv  # -> 1


@dataclass(slots=True)
class BlockState:
    """What one upsampling block remembers of each stream."""

    widen: Tensor  # [slots, 1, 2 c]
    units: list[Tensor]  # [slots, 6 * dilation, c]


@dataclass(slots=True)
class DecoderState:
    """What the decoder remembers of each stream. Row i is the stream in slot i; row 0 is padding."""

    enter: Tensor  # [slots, 6, latent_dim]
    blocks: list[BlockState]
    last: Tensor  # [slots, 6, c]


def declare_state(w: DecoderWeights) -> DecoderState:
    """The declaration of a `DecoderState`, in the dtype of the weights."""
    dtype = w.widen.taps.dtype

    def past(conv: Conv | Depthwise) -> Tensor:
        channels = conv.taps.shape[1]  # of the input, in both layouts
        kept: Tensor = declared(dtype, "slots", conv.reach, channels)
        return kept

    return DecoderState(
        enter=past(w.enter),
        blocks=[BlockState(past(b.widen), [past(u.conv) for u in b.units]) for b in w.blocks],
        last=past(w.last),
    )


# --- the step ----------------------------------------------------------------------------------


def decode(w: DecoderWeights, s: DecoderState, slots: Tensor, latents: Tensor) -> Tensor:
    """Decode one chunk of each row's stream, going on from where its last chunk ended.

    slots int64 [b]; latents [b, n, latent_dim] -> float32 [b, n * decoder_hop] in [-1, 1]
    """
    x = latents.to(w.widen.taps.dtype).transpose(0, 1)  # [n, b, latent_dim]
    x = causal_depthwise(x, w.enter, s.enter, slots)
    x = convolve(x, w.widen)  # [n, b, decoder_dim]
    for block, state in zip(w.blocks, s.blocks, strict=True):
        x = upsample(x, block, state, slots)  # [t, b, c] -> [rate * t, b, c / 2]
    x = causal_conv(x, w.last, s.last, slots, before=w.snake_last)  # [n * hop, b, 1]
    return x.squeeze(-1).t().float().tanh().contiguous()


def upsample(x: Tensor, w: BlockWeights, s: BlockState, slots: Tensor) -> Tensor:
    """Upsample and refine: x [t, b, c] -> [rate * t, b, c / 2]; histories are written in place."""
    if w.tint is not None:
        scale, offset = w.tint
        x = torch.addcmul(offset, x, scale)
    x = causal_upsample(x, w.widen, w.rate, s.widen, slots, before=w.snake)
    for unit, past in zip(w.units, s.units, strict=True):
        x = refine(x, unit, past, slots)
    return x


def refine(x: Tensor, w: UnitWeights, past: Tensor, slots: Tensor) -> Tensor:
    """A residual unit: x [t, b, c] -> [t, b, c]; past [slots, 6 * dilation, c] is written in place."""
    y = causal_depthwise(x, w.conv, past, slots, before=w.snake_in, after=w.snake_mid)
    return convolve(y, w.mix, residual=x)


# --- the program -------------------------------------------------------------------------------


class VocoderProgram:
    """The stage that turns patches of latents into sound: `hocket.core.StreamingProgram`.

    Its frame is a patch, `patch_size` latent frames, because the stage before makes no less at a time.
    """

    lookahead = 0

    def __init__(self, weights: DecoderWeights, config: VaeConfig, patch_size: int) -> None:
        self.weights, self.config = weights, config
        self.hop = patch_size * config.decoder_hop
        self.rate_hz = config.output_rate_hz
        self.frame = Declared(torch.float32, (patch_size, config.latent_dim))

    def declare(self) -> DecoderState:
        return declare_state(self.weights)

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> StreamPrompt:
        """Go on from a prompt where a recording is continued: its last patches are run first, as many as
        the published decode of a whole utterance has before what it returns."""
        for chunk in arrived.values():
            if "prompt" in chunk.arrays:
                prompt = chunk.arrays["prompt"][-self.config.primer_patches :]  # [n, patch_size, latent_dim]
                prompt = np.ascontiguousarray(prompt, dtype=np.float32)
                key = blake2b(prompt.tobytes(), digest_size=16).digest()
                return StreamPrompt(prime=prompt, prime_key=key)
        return StreamPrompt()

    def step(self, state: DecoderState, slots: Tensor, frames: Tensor) -> Tensor:
        return decode(self.weights, state, slots, frames.flatten(1, 2))

    def prime(self, state: DecoderState, slots: Tensor, frames: Tensor) -> None:
        """All that is run leaves a trace: the prompt's patches are fewer than the decoder looks back."""
        self.step(state, slots, frames)

    def flush(self, state: DecoderState, slots: Tensor) -> Tensor:
        return torch.empty(slots.shape[0], 0, device=slots.device)
