"""The audio tower: recordings to rows of the Thinker's prompt, 13 a second.

Mel features are cut into chunks of a second, each convolved for itself; attention sees all within a window of
eight chunks and nothing outside, so windows of any recordings run together.

Features as transformers 5.17.0: models/whisper/feature_extraction_whisper.py gives a single recording; the
tower as models/qwen3_omni_moe `Qwen3OmniMoeAudioEncoder`. That pads a recording's last chunk to the longest
chunk of its batch, and biases let padding leak into the last row; here the batch is always the recording.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import Chunk, Item, Job
from hocket.models.qwen3_omni.config import AudioConfig
from hocket.models.qwen3_omni.prompt import AudioInput, Clip
from hocket.models.qwen3_omni.tower import KEPT_BYTES, Affine, Kept
from hocket.nn.attention import attend
from hocket.nn.staging import to_device, to_host

# Fixed by preprocessor_config.json of every released checkpoint; `read_media_config` checks them.
RATE_HZ, FFT, HOP, TOP_HZ = 16000, 400, 160, 8000.0
EPS = 1e-5  # of LayerNorm; fixed in the published code, not in its config
SHORTEST = FFT // 2 + 1  # samples: fewer leave nothing to mirror at the ends
CONVOLVED_TOGETHER = 64  # chunks: each takes 6 MB a channel hundred in fp32


@dataclass(frozen=True, slots=True)
class AudioLayerWeights:
    """A pre-norm transformer layer."""

    norm_in: Affine  # [d]
    qkv: Affine  # [3 d, d]
    out: Affine  # [d, d]
    norm_mlp: Affine  # [d]
    up: Affine  # [f, d]
    down: Affine  # [d, f]


@dataclass(frozen=True, slots=True)
class AudioWeights:
    """Weights of the tower, and its mel filters."""

    filters: Tensor  # fp32 [mels, FFT / 2 + 1]
    convs: list[Affine]  # three of 3 x 3, stride 2
    enter: Tensor  # [d, channels * mels / 8]
    layers: list[AudioLayerWeights]
    norm: Affine  # [d]
    leave_in: Affine  # [d, d]
    leave_out: Affine  # [out, d]


class AudioProgram:
    """The stage that hears: `hocket.core.OneShotProgram`."""

    def __init__(self, config: AudioConfig, weights: AudioWeights) -> None:
        self.config, self.w = config, weights
        self.device = weights.filters.device
        self._kept: Kept[Clip] = Kept(KEPT_BYTES)

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> Item:
        """Jobs of any lengths run together."""
        return Item(value=msgspec.msgpack.decode(job.inputs["audio"], type=AudioInput).clips, bucket=0)

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[dict[str, np.ndarray]]:
        """{"rows": [n, out]} for each: all its recordings', one behind the other; see `to_host`."""
        clips: list[Clip] = [clip for item in items for clip in item.value]
        rows = iter(self._kept.get(clips, lambda clip: clip.key, self._encode))
        return [{"rows": np.concatenate([next(rows) for _ in item.value])} for item in items]

    def _encode(self, clips: list[Clip]) -> list[np.ndarray]:
        samples = [to_device(np.frombuffer(clip.samples, np.float32).copy(), self.device) for clip in clips]
        mels = [log_mel(x, self.w.filters) for x in samples]
        return [to_host(rows) for rows in encode(self.w, self.config, mels)]


def log_mel(samples: Tensor, filters: Tensor) -> Tensor:
    """samples fp32 [n], 16 kHz, n >= SHORTEST -> fp32 [mels, n // HOP]; always computed in fp32."""
    window = torch.hann_window(FFT, device=samples.device)
    spectrum = torch.stft(samples, FFT, HOP, window=window, return_complex=True)[:, :-1]
    power = (spectrum.abs() ** 2).contiguous()  # [FFT / 2 + 1, t]
    mel = (filters @ power).clamp(min=1e-10).log10()
    return (torch.maximum(mel, mel.max() - 8.0) + 4.0) / 4.0


def encode(w: AudioWeights, c: AudioConfig, mels: Sequence[Tensor]) -> list[Tensor]:
    """Rows of recordings: mels fp32 [mels, t], any lengths -> [c.tokens(t), out] each."""
    lengths = [c.tokens(mel.shape[1]) for mel in mels]
    rows = torch.cat(_convolve_all(w, c, mels)).split(lengths)  # [n, d] each
    window = c.chunk_tokens * (c.n_window_infer // c.chunk)
    parts = [part for x in rows for part in x.split(window)]
    x = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)  # [windows, longest, d]
    sizes = to_device([len(part) for part in parts], x.device)
    seen = torch.arange(x.shape[1], device=x.device) < sizes[:, None]  # [windows, longest]
    for layer in w.layers:
        x = _layer(layer, c, x, seen[:, None, None])
    x = x[seen]  # [n, d], in order: windows lie one behind the other
    x = w.leave_out(F.gelu(w.leave_in(w.norm.norm(x, EPS))))
    return list(x.split(lengths))


def _convolve_all(w: AudioWeights, c: AudioConfig, mels: Sequence[Tensor]) -> list[Tensor]:
    """Chunks of all recordings, in order, after the convolutions: [tokens, d] each.

    A recording's last chunk is padded to a whole one with zeros; one shorter than a chunk is not padded.
    """
    chunks: list[Tensor] = [chunk for mel in mels for chunk in mel.split(c.chunk, dim=1)]
    tokens = [c.tokens(chunk.shape[1]) for chunk in chunks]
    alone = [mel.shape[1] < c.chunk for mel in mels for _ in mel.split(c.chunk, dim=1)]
    done: list[Tensor] = [chunks[0]] * len(chunks)
    for i, chunk in enumerate(chunks):
        if alone[i]:
            done[i] = _convolve(w, chunk[None])[0]
    whole = [i for i in range(len(chunks)) if not alone[i]]
    for start in range(0, len(whole), CONVOLVED_TOGETHER):
        some = whole[start : start + CONVOLVED_TOGETHER]
        padded = torch.stack([F.pad(chunks[i], (0, c.chunk - chunks[i].shape[1])) for i in some])
        for i, x in zip(some, _convolve(w, padded), strict=True):
            done[i] = x[: tokens[i]]
    return done


def _convolve(w: AudioWeights, mel: Tensor) -> Tensor:
    """Chunks [b, mels, t] as pictures of one colour -> [b, t / 8, d], positions counted in each chunk."""
    x = mel[:, None].to(w.enter.dtype)
    for conv in w.convs:
        x = F.gelu(F.conv2d(x, conv.weight, conv.bias, stride=2, padding=1))  # [b, channels, mels, t] / 2
    x = F.linear(x.permute(0, 3, 1, 2).flatten(2), w.enter)
    return x + _sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)


def _sinusoids(length: int, d: int, device: torch.device) -> Tensor:
    """fp32 [length, d]: sines, then cosines, of frequencies from 1 down to 1e-4."""
    step = math.log(10000) / (d // 2 - 1)
    frequency = torch.exp(-step * torch.arange(d // 2, device=device).float())
    angle = torch.arange(length, device=device)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def _layer(w: AudioLayerWeights, c: AudioConfig, x: Tensor, mask: Tensor) -> Tensor:
    """x [windows, n, d], mask bool [windows, 1, 1, n] -> [windows, n, d]"""
    qkv = w.qkv(w.norm_in.norm(x, EPS))
    q, k, v = qkv.unflatten(-1, (3, c.encoder_attention_heads, -1)).unbind(2)  # [windows, n, heads, head_dim]
    a = attend(q, k.transpose(1, 2), v.transpose(1, 2), mask).flatten(2)
    x = x + w.out(a)
    x = x + w.down(F.gelu(w.up(w.norm_mlp.norm(x, EPS))))
    if x.dtype is torch.float16:  # as published: some channels pass what the format holds
        most = torch.finfo(x.dtype).max - 1000
        x = x.clamp(-most, most)
    return x
