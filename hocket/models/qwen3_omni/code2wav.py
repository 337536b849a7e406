"""Code2Wav: codes to waveform, frame by frame; see `hocket.nn.wave`.

Each transposed convolution is cut on both sides, so the sound of a frame ends 555 samples before its last,
which need the next frame: n frames give 1920 n - 555 samples, as one forward over all of them does.
Source: transformers 5.17.0: models/qwen3_omni_moe `Qwen3OmniMoeCode2Wav`, whose `chunked_decode` approximates
this with windows of 300 frames and 25 of context, and loses 555 samples at every seam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.core import Chunk, Declared, Job, StreamPrompt
from hocket.models.qwen3_omni.config import Code2WavConfig
from hocket.nn.wave import WaveShape, WaveState, WaveWeights, declare_wave, waveform, window_transformer

RATE_HZ = 24000  # fixed in the published code, not in its config


def wave_shape(c: Code2WavConfig) -> WaveShape:
    """What `hocket.nn.wave` needs to know of the config."""
    return WaveShape(
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        theta=c.theta,
        window=c.sliding_window,
        eps=c.rms_norm_eps,
        ratios=c.upsampling_ratios,
        rates=c.upsample_rates,
        trimmed=True,
    )


@dataclass(frozen=True, slots=True)
class Code2WavWeights:
    """Weights of the codec, folded as its functions take them."""

    books: Tensor  # [codebooks, codebook_size, d]
    wave: WaveWeights


class Code2WavProgram:
    """The stage that turns frames of codes into sound: `hocket.core.StreamingProgram`."""

    rate_hz = RATE_HZ

    def __init__(self, weights: Code2WavWeights, config: Code2WavConfig) -> None:
        self.weights, self.shape = weights, wave_shape(config)
        self.hop, self.lookahead = self.shape.hop, self.shape.lead
        self.frame = Declared(torch.int32, (config.num_quantizers,))

    def declare(self) -> WaveState:
        return declare_wave(self.weights.wave, self.shape)

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> StreamPrompt:
        return StreamPrompt()

    def step(self, state: WaveState, slots: Tensor, frames: Tensor) -> Tensor:
        start = state.position.index_select(0, slots)  # [b]
        x = embed_mean(self.weights.books, frames).transpose(0, 1)  # [n, b, d]
        x = window_transformer(self.weights.wave, self.shape, x, state, slots)
        return waveform(self.weights.wave, self.shape, state, slots, x, start)

    def prime(self, state: WaveState, slots: Tensor, frames: Tensor) -> None:
        self.step(state, slots, frames)

    def flush(self, state: WaveState, slots: Tensor) -> Tensor:
        """Nothing: what follows the last frame's share would need frames that are not there."""
        return torch.empty(slots.shape[0], 0, device=slots.device)


def embed_mean(books: Tensor, codes: Tensor) -> Tensor:
    """The mean of each frame's entries: books [k, size, d]; codes int32 [b, n, k] -> [b, n, d]."""
    book = torch.arange(books.shape[0], device=codes.device)
    # Added up in fp32 at least, as torch's own mean does in half precision.
    wide = torch.promote_types(books.dtype, torch.float32)
    return books[book, codes.long()].mean(2, dtype=wide).to(books.dtype)
