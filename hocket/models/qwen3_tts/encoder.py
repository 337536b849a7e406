"""Waveform to codes: the encoder half of the 12 Hz codec, run once over a whole reference recording.

A SEANet of causal convolutions, a transformer and a residual quantiser, as in Mimi.
Activations are time-major, [t, b, c], as in `hocket.nn.conv`.
Source: transformers 4.57.3: models/mimi/modeling_mimi.py, as qwen-tts 0.1.1 uses it
(core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py `Qwen3TTSTokenizerV2Encoder`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.models.qwen3_tts.config import EncoderConfig
from hocket.nn.attention import attend
from hocket.nn.conv import Conv, convolve, fold
from hocket.nn.rotary import apply_rotary, rotary_tables


@dataclass(frozen=True, slots=True)
class StageWeights:
    """A residual unit, then the convolution that lowers the rate."""

    narrow: Conv  # c -> c / 2
    restore: Conv  # c / 2 -> c, one tap
    down: Conv  # strided: c -> 2 c
    rate: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A transformer layer. The published layer scales are folded into `out` and `down`."""

    norm_in: Tensor  # [d]
    norm_in_bias: Tensor
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, d]
    out: Tensor  # [d, heads * head_dim]
    norm_mlp: Tensor  # [d]
    norm_mlp_bias: Tensor
    up: Tensor  # [f, d]
    down: Tensor  # [d, f]


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Weights of the codec's encoder."""

    first: Conv  # 1 -> c
    stages: list[StageWeights]
    last: Conv  # -> d
    layers: list[LayerWeights]
    halve: Conv  # strided by 2
    semantic: Tensor  # [d_book, d]
    acoustic: Tensor  # [d_book, d]
    books: Tensor  # fp32 [codebooks, size, d_book]  the first is the semantic one


def encode(w: EncoderWeights, c: EncoderConfig, samples: Tensor) -> Tensor:
    """Codes of recordings of one length: samples [b, n] -> int32 [b, ceil(n / hop), codebooks]."""
    return quantise(w, embed(w, c, samples)).transpose(0, 1).contiguous()


def embed(w: EncoderWeights, c: EncoderConfig, samples: Tensor) -> Tensor:
    """What the quantiser sees: samples [b, n] -> [t, b, d]."""
    x = samples.t().unsqueeze(-1).to(w.first.taps.dtype)  # [n, b, 1]
    windows = F.pad(x, (0, 0, 0, 0, w.first.reach, 0)).unfold(0, w.first.reach + 1, 1)  # [n, b, 1, k]
    x = windows.flatten(2) @ w.first.taps.flatten(0, 1) + w.first.bias  # [n, b, c]
    for stage in w.stages:
        y = causal(F.elu(x), stage.narrow)
        x = x + causal(F.elu(y), stage.restore)
        x = causal(F.elu(x), stage.down, stage.rate)  # [t, b, c] -> [ceil(t / rate), b, 2 c]
    x = causal(F.elu(x), w.last)  # [t, b, d]
    x = transform(w, c, x)
    # The published code repeats the edge here and pads with zeros everywhere else.
    return causal(x, w.halve, 2, repeat_edge=True)


def causal(x: Tensor, w: Conv, rate: int = 1, *, repeat_edge: bool = False) -> Tensor:
    """Convolve a whole recording: x [t, b, c_in] -> [ceil(t / rate), b, c_out]; a strided `w` is folded."""
    before, after = w.reach * rate, -x.shape[0] % rate
    if repeat_edge:
        edges = [x[:1].expand(before, -1, -1), x, x[-1:].expand(after, -1, -1)]
        return convolve(fold(torch.cat(edges), rate), w)
    return convolve(fold(F.pad(x, (0, 0, 0, 0, before, after)), rate), w)


def transform(w: EncoderWeights, c: EncoderConfig, x: Tensor) -> Tensor:
    """x [t, b, d] -> [t, b, d]. Every step attends to all before it: the window of 250 in the published
    config is used by FlashAttention only."""
    t = x.shape[0]
    position = torch.arange(t, device=x.device)
    cos, sin = rotary_tables(c.head_dim, c.rope_theta, position, x.dtype)  # [t, 1, head_dim]
    mask = position <= position[:, None]  # [t, t]
    x = x.transpose(0, 1)  # [b, t, d]
    for layer in w.layers:
        a = F.layer_norm(x, x.shape[-1:], layer.norm_in, layer.norm_in_bias, c.norm_eps)
        qkv = F.linear(a, layer.qkv).unflatten(-1, (-1, c.head_dim))
        q, k, v = qkv.split((c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads), dim=2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        x = x + F.linear(attend(q, k.transpose(1, 2), v.transpose(1, 2), mask).flatten(2), layer.out)
        a = F.layer_norm(x, x.shape[-1:], layer.norm_mlp, layer.norm_mlp_bias, c.norm_eps)
        x = x + F.linear(F.gelu(F.linear(a, layer.up)), layer.down)
    return x.transpose(0, 1)


def quantise(w: EncoderWeights, x: Tensor) -> Tensor:
    """x [t, b, d] -> int32 [t, b, codebooks]. The acoustic books see x, not what the semantic one leaves."""
    codes = [nearest(F.linear(x, w.semantic).float(), w.books[0])]
    rest = F.linear(x, w.acoustic).float()
    for book in w.books[1:]:
        codes.append(nearest(rest, book))
        rest = rest - book[codes[-1]]
    return torch.stack(codes, dim=-1).int()


def nearest(x: Tensor, book: Tensor) -> Tensor:
    """Which entry of book [size, d] is nearest to each of x [..., d]; fp32, for near ties decide codes."""
    return torch.cdist(x.flatten(0, -2), book).argmin(-1).unflatten(0, x.shape[:-1])
