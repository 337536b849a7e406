"""Codes to waveform, frame by frame: the streaming half of the 12 Hz codec.

Nothing in the decoder looks ahead, so with the history of every layer kept per stream, audio made in
chunks of any size equals the decode of the whole utterance.
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
from hocket.nn.attention import attend
from hocket.nn.conv import (
    Conv,
    ConvNext,
    Snake,
    carry,
    causal_conv,
    causal_convnext,
    causal_upsample,
    convolve,
    interleave,
)
from hocket.nn.norm import rms_norm
from hocket.nn.rotary import apply_rotary, rotary_tables

CONV_FRAMES = 16  # the convolutions look 10 frames back


class CodecInput(msgspec.Struct):
    """What a job tells the codec."""

    prime: bool  # go on from the reference's codes, so that the voice does not start from silence


# --- weights and state -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A transformer layer. The published layer scales are folded into `out` and `down`."""

    norm_in: Tensor  # [d]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, d]
    out: Tensor  # [d, heads * head_dim]
    norm_mlp: Tensor  # [d]
    gate_up: Tensor  # [2 f, d]  gate rows first
    down: Tensor  # [d, f]


@dataclass(frozen=True, slots=True)
class UnitWeights:
    """A residual unit of the waveform stack."""

    snake_in: Snake
    conv: Conv  # dilated
    snake_mid: Snake
    mix: Conv  # one tap


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One rate of the waveform stack."""

    snake: Snake
    widen: Conv  # transposed: `rate` steps for one
    units: list[UnitWeights]


@dataclass(frozen=True, slots=True)
class CodecWeights:
    """Weights of the codec's decoder, folded as its functions take them."""

    books: Tensor  # [codebooks, codebook_size, codebook_dim]  entries after their output projection
    pre_conv: Conv
    enter: Tensor  # [d, latent]
    enter_bias: Tensor
    layers: list[LayerWeights]
    norm: Tensor  # [d]
    leave: Tensor  # [latent, d]
    leave_bias: Tensor
    widen: list[Conv]  # transposed, kernel = stride
    refine: list[ConvNext]
    first: Conv
    blocks: list[BlockWeights]
    snake_last: Snake
    last: Conv


@dataclass(slots=True)
class BlockState:
    """What one upsampling block remembers of each stream."""

    widen: Tensor  # [slots, 1, 2 c]
    units: list[Tensor]  # [slots, 6 * dilation, c]


@dataclass(slots=True)
class CodecState:
    """What the decoder remembers of each stream. Row i is the stream in slot i; row 0 is padding."""

    position: Tensor  # int32 [slots]  frames decoded
    pre_conv: Tensor  # [slots, 2, codebook_dim]
    kv: list[Tensor]  # [slots, window - 1, 2 * kv_heads * head_dim]  rotated keys, then values; one a layer
    refine: list[Tensor]  # [slots, 6, latent]
    first: Tensor  # [slots, 6, latent]
    blocks: list[BlockState]
    last: Tensor  # [slots, 6, c]


# --- the step ----------------------------------------------------------------------------------


def decode(w: CodecWeights, c: DecoderConfig, s: CodecState, slots: Tensor, codes: Tensor) -> Tensor:
    """Decode one chunk of each row's stream, going on from where its last chunk ended.

    slots int64 [b]; codes int32 [b, n, codebooks] -> float32 [b, n * hop] in [-1, 1]
    """
    return sound(w, c, s, slots, latents(w, c, s, slots, codes))


def latents(w: CodecWeights, c: DecoderConfig, s: CodecState, slots: Tensor, codes: Tensor) -> Tensor:
    """The part with a long memory, one row a frame: codes int32 [b, n, codebooks] -> [n, b, latent]."""
    x = dequantise(w.books, codes).transpose(0, 1)  # [n, b, codebook_dim]
    x = causal_conv(x, w.pre_conv, s.pre_conv, slots)  # [n, b, latent]
    return transform(w, c, x, s, slots)


def sound(w: CodecWeights, c: DecoderConfig, s: CodecState, slots: Tensor, x: Tensor) -> Tensor:
    """The part that costs, whose memory is short: [n, b, latent] -> float32 [b, n * hop] in [-1, 1]."""
    for rate, widen, refine, past in zip(c.upsampling_ratios, w.widen, w.refine, s.refine, strict=True):
        x = interleave(convolve(x, widen), rate)  # [2 n, b, latent], then [4 n, b, latent]
        x = causal_convnext(x, refine, past, slots)
    x = causal_conv(x, w.first, s.first, slots)  # [4 n, b, decoder_dim]
    for rate, block, state in zip(c.upsample_rates, w.blocks, s.blocks, strict=True):
        x = waveform_block(x, block, rate, state, slots)  # [t, b, c] -> [rate * t, b, c / 2]
    x = causal_conv(x, w.last, s.last, slots, before=w.snake_last)  # [n * hop, b, 1]
    return x.squeeze(-1).t().float().clamp(-1, 1).contiguous()


def dequantise(books: Tensor, codes: Tensor) -> Tensor:
    """Sum the entries of each frame: books [k, size, d]; codes int32 [b, n, k] -> [b, n, d]."""
    book = torch.arange(books.shape[0], device=codes.device)
    # Added up in fp32 at least: the sum then hardly depends on the order of the codebooks.
    wide = torch.promote_types(books.dtype, torch.float32)
    return books[book, codes.long()].sum(2, dtype=wide).to(books.dtype)


def transform(w: CodecWeights, c: DecoderConfig, x: Tensor, s: CodecState, slots: Tensor) -> Tensor:
    """The windowed transformer: x [n, b, latent] -> [n, b, latent]."""
    n, window = x.shape[0], c.sliding_window
    start = s.position.index_select(0, slots)  # [b]
    s.position.index_copy_(0, slots, start + n)
    position = start + torch.arange(n, device=x.device, dtype=torch.int32)[:, None]  # [n, b]
    cos, sin = rotary_tables(c.head_dim, c.rope_theta, position, x.dtype)
    mask = window_mask(start, n, window)

    x = F.linear(x, w.enter, w.enter_bias)  # [n, b, d]
    for layer, past in zip(w.layers, s.kv, strict=True):
        a = rms_norm(x, layer.norm_in, c.rms_norm_eps)
        qkv = F.linear(a, layer.qkv).unflatten(-1, (-1, c.head_dim))  # [n, b, heads + 2 kv_heads, head_dim]
        qk, v = qkv.tensor_split((c.num_attention_heads + c.num_key_value_heads,), dim=2)
        q, k = apply_rotary(qk, cos, sin).tensor_split((c.num_attention_heads,), dim=2)
        seen = carry(past, slots, torch.cat([k, v], dim=2).flatten(2))  # [window - 1 + n, b, ...]
        k, v = seen.unflatten(-1, (2, -1, c.head_dim)).permute(2, 1, 3, 0, 4)  # [b, kv_heads, m, head_dim]
        a = attend(q.transpose(0, 1), k, v, mask).flatten(2).transpose(0, 1)  # [n, b, heads * head_dim]
        x = x + F.linear(a, layer.out)
        gate, up = F.linear(rms_norm(x, layer.norm_mlp, c.rms_norm_eps), layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(rms_norm(x, w.norm, c.rms_norm_eps), w.leave, w.leave_bias)


def window_mask(start: Tensor, n: int, window: int) -> Tensor:
    """What each of n new frames may see of the window - 1 + n frames that end with them.

    start int32 [b], frames before the chunk -> bool [b, 1, n, window - 1 + n]. Frame i sees `window`
    frames, itself the last; those before the stream's first are hidden.
    """
    key = torch.arange(window - 1 + n, device=start.device)
    ago = torch.arange(n, device=start.device)[:, None] + window - 1 - key  # [n, m]  0: itself
    within = (ago >= 0) & (ago < window)
    begun = key >= window - 1 - start[:, None, None, None]  # [b, 1, 1, m]
    return within & begun


def waveform_block(x: Tensor, w: BlockWeights, rate: int, s: BlockState, slots: Tensor) -> Tensor:
    """Upsample by `rate` and refine: x [t, b, c] -> [rate * t, b, c / 2]; histories are written in place."""
    x = causal_upsample(x, w.widen, rate, s.widen, slots, before=w.snake)
    for unit, past in zip(w.units, s.units, strict=True):
        y = causal_conv(x, unit.conv, past, slots, before=unit.snake_in, after=unit.snake_mid)
        x = convolve(y, unit.mix, residual=x)
    return x


# --- the program -------------------------------------------------------------------------------


class CodecProgram:
    """The stage that turns frames of codes into sound: `hocket.core.StreamingProgram`."""

    lookahead = 0

    def __init__(self, weights: CodecWeights, config: CodecConfig) -> None:
        self.weights, self.config = weights, config.decoder_config
        self.hop = config.decode_upsample_rate
        self.rate_hz = config.output_sample_rate
        self.frame = Declared(torch.int32, (self.config.num_quantizers,))

    def declare(self) -> CodecState:
        w, c, dtype = self.weights, self.config, self.weights.books.dtype

        def past(conv: Conv) -> Tensor:
            kept: Tensor = declared(dtype, "slots", conv.reach, conv.taps.shape[1])
            return kept

        pair = 2 * c.num_key_value_heads * c.head_dim
        return CodecState(
            position=declared(torch.int32, "slots"),
            pre_conv=past(w.pre_conv),
            kv=[declared(dtype, "slots", c.sliding_window - 1, pair) for _ in w.layers],
            refine=[declared(dtype, "slots", r.taps.shape[0] - 1, c.latent_dim) for r in w.refine],
            first=past(w.first),
            blocks=[BlockState(past(b.widen), [past(u.conv) for u in b.units]) for b in w.blocks],
            last=past(w.last),
        )

    def begin(self, job: Job, arrived: Mapping[str, Chunk]) -> StreamPrompt:
        """Ask for the reference's codes to be run first where the job continues a recording."""
        asked = msgspec.msgpack.decode(job.inputs["codec"], type=CodecInput)
        if not asked.prime or "reference" not in arrived:
            return StreamPrompt()
        codes = np.ascontiguousarray(arrived["reference"].arrays["codes"], dtype=np.int32)  # [t, codebooks]
        return StreamPrompt(prime=codes, prime_key=blake2b(codes.tobytes(), digest_size=16).digest())

    def step(self, state: CodecState, slots: Tensor, frames: Tensor) -> Tensor:
        return decode(self.weights, self.config, state, slots, frames)

    def prime(self, state: CodecState, slots: Tensor, frames: Tensor) -> None:
        """Only the last frames leave a trace in the convolutions, which do 98 % of the work."""
        x = latents(self.weights, self.config, state, slots, frames)
        sound(self.weights, self.config, state, slots, x[-CONV_FRAMES:])

    def flush(self, state: CodecState, slots: Tensor) -> Tensor:
        return torch.empty(slots.shape[0], 0, device=slots.device)
