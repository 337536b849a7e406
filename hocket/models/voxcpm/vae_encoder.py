"""Waveform to latents: the encoder of VoxCPM's AudioVAE, run once over whole recordings of a voice.

Activations are time-major, [t, b, c], as in `hocket.nn.conv`.
Source: voxcpm 2.0.3: modules/audiovae/audio_vae_v2.py and audio_vae.py; for padding, model/voxcpm2.py
`_encode_wav`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import Chunk, Item, Job
from hocket.models.voxcpm.vae import UnitWeights, VaeConfig, refine
from hocket.nn.conv import Conv, Snake, convolve, fold, snake_beta

STAGE = "encoder"  # under which a job carries an `EncoderInput`


class EncoderInput(msgspec.Struct):
    """What a job tells the encoder: recordings as float32 [n], mono, at `VaeConfig.sample_rate`, n >= 1."""

    reference: bytes = b""  # whose voice is to be imitated
    prompt: bytes = b""  # which is to be continued


@dataclass(frozen=True, slots=True)
class DownWeights:
    """Residual units, then the convolution that lowers the rate."""

    units: list[UnitWeights]
    snake: Snake
    down: Conv  # strided: c -> 2 c
    rate: int


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Weights of the encoder, folded as its functions take them."""

    first: Conv  # 1 -> c
    blocks: list[DownWeights]
    last: Conv  # -> latent_dim


def encode(w: EncoderWeights, c: VaeConfig, samples: Tensor) -> Tensor:
    """Latents of recordings of one length: samples [b, n] -> [b, ceil(n / encoder_hop), latent_dim]."""
    x = F.pad(samples, (0, -samples.shape[1] % c.encoder_hop))
    x = x.t().unsqueeze(-1).to(w.first.taps.dtype)  # [n, b, 1]
    windows = before(x, w.first.reach).unfold(0, w.first.reach + 1, 1)  # [n, b, 1, k]
    x = windows.flatten(2) @ w.first.taps.flatten(0, 1) + w.first.bias  # [n, b, c]
    rows = torch.arange(x.shape[1], device=x.device)
    for block in w.blocks:
        for unit in block.units:
            x = refine(x, unit, x.new_zeros(x.shape[1], unit.conv.reach, x.shape[2]), rows)
        late = block.rate % 2 if c.late else 0
        x = F.pad(snake_beta(x, block.snake), (0, 0, 0, 0, block.rate + late, -late))
        x = convolve(fold(x, block.rate), block.down)  # [t, b, c] -> [t / rate, b, 2 c]
    return convolve(before(x, w.last.reach), w.last).transpose(0, 1)


def before(x: Tensor, zeros: int) -> Tensor:
    """So many steps of silence, then x [t, b, c]."""
    return F.pad(x, (0, 0, 0, 0, zeros, 0))


def patches_of(samples: int, config: VaeConfig, patch_size: int) -> int:
    """How many patches a recording of so many samples becomes."""
    return -(-samples // (patch_size * config.encoder_hop))


class EncoderProgram:
    """The stage that reads recordings: `hocket.core.OneShotProgram`."""

    def __init__(
        self, weights: EncoderWeights, config: VaeConfig, patch_size: int, device: torch.device
    ) -> None:
        self.weights, self.config, self.patch_size, self.device = weights, config, patch_size, device

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Item:
        """Recordings share a batch where they become equally many patches."""
        data = job.inputs[STAGE]
        asked = msgspec.msgpack.decode(data, type=EncoderInput)
        reference, prompt = (
            patches_of(len(recording) // 4, self.config, self.patch_size)
            for recording in (asked.reference, asked.prompt)
        )
        key = blake2b(data, digest_size=16).digest()
        return Item(value=asked, bucket=reference << 32 | prompt, cache_key=key)

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[dict[str, np.ndarray]]:
        """{"reference", "prompt": float32 [n, patch_size, latent_dim]} for each, where there is one.

        A reference is padded at its end, a prompt at its beginning: what is spoken next goes on from its
        last sample.
        """
        asked: list[EncoderInput] = [item.value for item in items]
        results: list[dict[str, np.ndarray]] = [{} for _ in asked]
        for name, recordings, left in (
            ("reference", [a.reference for a in asked], False),
            ("prompt", [a.prompt for a in asked], True),
        ):
            if not recordings[0]:  # as in all of the bucket
                continue
            samples = torch.from_numpy(np.stack([self._padded(r, left) for r in recordings]))
            latents = encode(self.weights, self.config, samples.to(self.device))
            patches = latents.float().unflatten(1, (-1, self.patch_size)).cpu().numpy()
            for result, latent in zip(results, patches, strict=True):
                result[name] = latent
        return results

    def _padded(self, recording: bytes, left: bool) -> np.ndarray:
        samples = np.frombuffer(recording, np.float32)
        missing = -len(samples) % (self.patch_size * self.config.encoder_hop)
        return np.pad(samples, (missing, 0) if left else (0, missing))
