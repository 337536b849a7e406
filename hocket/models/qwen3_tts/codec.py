"""Codes to waveform, frame by frame: the streaming half of the 12 Hz codec.

Nothing in the decoder looks ahead, so with the history of every layer kept per stream, audio made in
chunks of any size equals the decode of the whole utterance. See `hocket.nn.wave`.
Source: qwen-tts 0.1.1: core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py, whose `chunked_decode`
approximates this with windows of 300 frames and 25 of context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import Chunk, Declared, Job, StreamPrompt, declared
from hocket.models.qwen3_tts.config import CodecConfig, DecoderConfig
from hocket.nn.conv import Conv, causal_conv
from hocket.nn.wave import WaveShape, WaveState, WaveWeights, declare_wave, waveform, window_transformer

CONV_FRAMES = 16  # the convolutions look 10 frames back


class CodecInput(msgspec.Struct):
    """What a job tells the codec."""

    prime: bool  # go on from the reference's codes, so that the voice does not start from silence


def wave_shape(c: DecoderConfig) -> WaveShape:
    """What `hocket.nn.wave` needs to know of the config."""
    return WaveShape(
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        theta=c.rope_theta,
        window=c.sliding_window,
        eps=c.rms_norm_eps,
        ratios=c.upsampling_ratios,
        rates=c.upsample_rates,
        trimmed=False,
    )


# --- weights and state -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CodecWeights:
    """Weights of the codec's decoder, folded as its functions take them."""

    books: Tensor  # [codebooks, codebook_size, codebook_dim]  entries after their output projection
    pre_conv: Conv
    enter: Tensor  # [d, latent]
    enter_bias: Tensor
    leave: Tensor  # [latent, d]
    leave_bias: Tensor
    wave: WaveWeights


@dataclass(slots=True)
class CodecState:
    """What the decoder remembers of each stream. Row i is the stream in slot i; row 0 is padding."""

    pre_conv: Tensor  # [slots, 2, codebook_dim]
    wave: WaveState


# --- the step ----------------------------------------------------------------------------------


def latents(w: CodecWeights, shape: WaveShape, s: CodecState, slots: Tensor, codes: Tensor) -> Tensor:
    """The part with a long memory, one row a frame: codes int32 [b, n, codebooks] -> [n, b, latent]."""
    x = dequantise(w.books, codes).transpose(0, 1)  # [n, b, codebook_dim]
    x = causal_conv(x, w.pre_conv, s.pre_conv, slots)  # [n, b, latent]
    x = F.linear(x, w.enter, w.enter_bias)  # [n, b, d]
    x = window_transformer(w.wave, shape, x, s.wave, slots)
    return F.linear(x, w.leave, w.leave_bias)


def dequantise(books: Tensor, codes: Tensor) -> Tensor:
    """Sum the entries of each frame: books [k, size, d]; codes int32 [b, n, k] -> [b, n, d]."""
    book = torch.arange(books.shape[0], device=codes.device)
    # Added up in fp32 at least: the sum then hardly depends on the order of the codebooks.
    wide = torch.promote_types(books.dtype, torch.float32)
    return books[book, codes.long()].sum(2, dtype=wide).to(books.dtype)


# --- the program -------------------------------------------------------------------------------


class CodecProgram:
    """The stage that turns frames of codes into sound: `hocket.core.StreamingProgram`."""

    lookahead = 0

    def __init__(self, weights: CodecWeights, config: CodecConfig) -> None:
        self.weights, self.shape = weights, wave_shape(config.decoder_config)
        self.hop = config.decode_upsample_rate
        self.rate_hz = config.output_sample_rate
        self.frame = Declared(torch.int32, (config.decoder_config.num_quantizers,))

    def declare(self) -> CodecState:
        w = self.weights
        past: Tensor = declared(w.books.dtype, "slots", w.pre_conv.reach, w.pre_conv.taps.shape[1])
        return CodecState(pre_conv=past, wave=declare_wave(w.wave, self.shape))

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> StreamPrompt:
        """Ask for the reference's codes to be run first where the job continues a recording."""
        asked = msgspec.msgpack.decode(job.inputs["codec"], type=CodecInput)
        if not asked.prime or "reference" not in arrived:
            return StreamPrompt()
        codes = np.ascontiguousarray(arrived["reference"].arrays["codes"], dtype=np.int32)  # [t, codebooks]
        return StreamPrompt(prime=codes, prime_key=blake2b(codes.tobytes(), digest_size=16).digest())

    def step(self, state: CodecState, slots: Tensor, frames: Tensor) -> Tensor:
        x = latents(self.weights, self.shape, state, slots, frames)
        return waveform(self.weights.wave, self.shape, state.wave, slots, x)

    def prime(self, state: CodecState, slots: Tensor, frames: Tensor) -> None:
        """Only the last frames leave a trace in the convolutions, which do 98 % of the work."""
        x = latents(self.weights, self.shape, state, slots, frames)
        waveform(self.weights.wave, self.shape, state.wave, slots, x[-CONV_FRAMES:])

    def flush(self, state: CodecState, slots: Tensor) -> Tensor:
        return torch.empty(slots.shape[0], 0, device=slots.device)
