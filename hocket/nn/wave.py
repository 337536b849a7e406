"""From one row a frame to sound: a transformer over a window, then causal convolutions that upsample.

The decoder of the 12 Hz codecs, frame by frame. What a later sample depends on is kept per stream, so sound
made in chunks of any size equals the decode of the whole utterance.
Sources: qwen-tts 0.1.1: core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py, and transformers 5.17.0:
models/qwen3_omni_moe `Qwen3OmniMoeCode2Wav`, which cuts its transposed convolutions on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.core import declared
from hocket.nn.attention import attend
from hocket.nn.checkpoint import Reader
from hocket.nn.conv import (
    Conv,
    ConvNext,
    Snake,
    carry,
    causal_conv,
    causal_convnext,
    causal_upsample,
    conv_taps,
    convolve,
    interleave,
    transposed_as_conv,
)
from hocket.nn.norm import rms_norm
from hocket.nn.rotary import apply_rotary, rotary_tables

# --- weights and state -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaveShape:
    """What the weights do not say of themselves."""

    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    window: int  # frames that a frame sees, itself the last
    eps: float
    ratios: tuple[int, ...]  # upsampling before the waveform stack
    rates: tuple[int, ...]  # ... and in its blocks
    trimmed: bool  # the first `rate` outputs of each block's transposed convolution are no part of the stream

    @property
    def hop(self) -> int:
        """Samples a frame."""
        return math.prod(self.ratios) * math.prod(self.rates)

    @property
    def lead(self) -> int:
        """Samples that `waveform` gives before those of a stream begin; as many never come at its end."""
        lead = 0
        for rate in self.rates if self.trimmed else ():
            lead = (lead + 1) * rate
        return lead


@dataclass(frozen=True, slots=True)
class WindowLayer:
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
class WaveWeights:
    """Weights of the whole, folded as its functions take them."""

    layers: list[WindowLayer]
    norm: Tensor  # [d]
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
class WaveState:
    """What is remembered of each stream. Row i is the stream in slot i; row 0 is padding."""

    position: Tensor  # int32 [slots]  frames decoded
    kv: list[Tensor]  # [slots, window - 1, 2 * kv_heads * head_dim]  rotated keys, then values; one a layer
    refine: list[Tensor]  # [slots, 6, latent]
    first: Tensor  # [slots, 6, latent]
    blocks: list[BlockState]
    last: Tensor  # [slots, 6, c]


def declare_wave(w: WaveWeights, shape: WaveShape) -> WaveState:
    """The declaration of a `WaveState`, in the dtype of the weights."""
    dtype = w.norm.dtype

    def past(conv: Conv) -> Tensor:
        kept: Tensor = declared(dtype, "slots", conv.reach, conv.taps.shape[1])
        return kept

    pair = 2 * shape.kv_heads * shape.head_dim
    return WaveState(
        position=declared(torch.int32, "slots"),
        kv=[declared(dtype, "slots", shape.window - 1, pair) for _ in w.layers],
        refine=[declared(dtype, "slots", r.taps.shape[0] - 1, r.taps.shape[1]) for r in w.refine],
        first=past(w.first),
        blocks=[BlockState(past(b.widen), [past(u.conv) for u in b.units]) for b in w.blocks],
        last=past(w.last),
    )


# --- the step ----------------------------------------------------------------------------------


def window_transformer(w: WaveWeights, shape: WaveShape, x: Tensor, s: WaveState, slots: Tensor) -> Tensor:
    """x [n, b, d], one row a frame -> normalised [n, b, d]; advances the streams' positions."""
    n = x.shape[0]
    start = s.position.index_select(0, slots)  # [b]
    s.position.index_copy_(0, slots, start + n)
    position = start + torch.arange(n, device=x.device, dtype=torch.int32)[:, None]  # [n, b]
    cos, sin = rotary_tables(shape.head_dim, shape.theta, position, x.dtype)
    mask = window_mask(start, n, shape.window)

    for layer, past in zip(w.layers, s.kv, strict=True):
        a = rms_norm(x, layer.norm_in, shape.eps)
        qkv = F.linear(a, layer.qkv).unflatten(
            -1, (-1, shape.head_dim)
        )  # [n, b, heads + 2 kv_heads, head_dim]
        qk, v = qkv.tensor_split((shape.heads + shape.kv_heads,), dim=2)
        q, k = apply_rotary(qk, cos, sin).tensor_split((shape.heads,), dim=2)
        seen = carry(past, slots, torch.cat([k, v], dim=2).flatten(2))  # [window - 1 + n, b, ...]
        k, v = seen.unflatten(-1, (2, -1, shape.head_dim)).permute(
            2, 1, 3, 0, 4
        )  # [b, kv_heads, m, head_dim]
        a = attend(q.transpose(0, 1), k, v, mask).flatten(2).transpose(0, 1)  # [n, b, heads * head_dim]
        x = x + F.linear(a, layer.out)
        gate, up = F.linear(rms_norm(x, layer.norm_mlp, shape.eps), layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    return rms_norm(x, w.norm, shape.eps)


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


def waveform(
    w: WaveWeights, shape: WaveShape, s: WaveState, slots: Tensor, x: Tensor, start: Tensor | None = None
) -> Tensor:
    """The part that costs, whose memory is short: [n, b, latent] -> float32 [b, n * hop] in [-1, 1].

    start int32 [b]: frames of each stream before these; for trimmed shapes, whose first `lead` samples of
    a stream mean nothing.
    """
    for rate, widen, refine, past in zip(shape.ratios, w.widen, w.refine, s.refine, strict=True):
        x = interleave(convolve(x, widen), rate)  # [2 n, b, latent], then [4 n, b, latent]
        x = causal_convnext(x, refine, past, slots)
    x = causal_conv(x, w.first, s.first, slots)  # [4 n, b, decoder_dim]
    steps, lead, skip = math.prod(shape.ratios), 0, None
    for rate, block, state in zip(shape.rates, w.blocks, s.blocks, strict=True):
        x = causal_upsample(x, block.widen, rate, state.widen, slots, before=block.snake, skip=skip)
        if shape.trimmed:
            assert start is not None
            steps, lead = steps * rate, (lead + 1) * rate
            skip = (lead - start * steps).clamp(min=0)  # [b]
        for unit, past in zip(block.units, state.units, strict=True):
            y = causal_conv(x, unit.conv, past, slots, before=unit.snake_in, after=unit.snake_mid, skip=skip)
            x = convolve(y, unit.mix, residual=x)  # [rate * t, b, c / 2]
    x = causal_conv(x, w.last, s.last, slots, before=w.snake_last, skip=skip)  # [n * hop, b, 1]
    return x.squeeze(-1).t().float().clamp(-1, 1).contiguous()


# --- reading -----------------------------------------------------------------------------------


def read_wave(r: Reader, shape: WaveShape, layers: int) -> WaveWeights:
    """The weights under a reader's prefix; published checkpoints of this decoder agree on the names."""
    last = len(shape.rates) + 1
    return WaveWeights(
        layers=[_layer(r.under(f"pre_transformer.layers.{i}")) for i in range(layers)],
        norm=r("pre_transformer.norm.weight"),
        widen=[read_transposed(r, f"upsample.{i}.0.conv", rate) for i, rate in enumerate(shape.ratios)],
        refine=[_convnext(r.under(f"upsample.{i}.1")) for i in range(len(shape.ratios))],
        first=read_conv(r, "decoder.0.conv"),
        blocks=[_block(r.under(f"decoder.{i}.block"), rate) for i, rate in enumerate(shape.rates, 1)],
        snake_last=_snake(r, f"decoder.{last}"),
        last=read_conv(r, f"decoder.{last + 1}.conv"),
    )


def read_conv(r: Reader, name: str, dilation: int = 1) -> Conv:
    """The convolution `name`, stored as `torch.nn.Conv1d` has it."""
    return conv_taps(r(f"{name}.weight"), r(f"{name}.bias"), dilation)


def read_transposed(r: Reader, name: str, rate: int) -> Conv:
    """The transposed convolution `name`, stored as `torch.nn.ConvTranspose1d` has it."""
    return transposed_as_conv(r(f"{name}.weight"), r(f"{name}.bias"), rate)


def _layer(r: Reader) -> WindowLayer:
    attention_scale = r.wide("self_attn_layer_scale.scale")[:, None]
    mlp_scale = r.wide("mlp_layer_scale.scale")[:, None]
    return WindowLayer(
        norm_in=r("input_layernorm.weight"),
        qkv=r.stacked("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=r.round(attention_scale * r.wide("self_attn.o_proj.weight")),
        norm_mlp=r("post_attention_layernorm.weight"),
        gate_up=r.stacked("mlp.gate_proj", "mlp.up_proj"),
        down=r.round(mlp_scale * r.wide("mlp.down_proj.weight")),
    )


def _convnext(r: Reader) -> ConvNext:
    gamma = r.wide("gamma")
    return ConvNext(
        taps=r.wide("dwconv.conv.weight").squeeze(1).t().contiguous(),
        bias=r.wide("dwconv.conv.bias"),
        norm_weight=r("norm.weight"),
        norm_bias=r("norm.bias"),
        up=r("pwconv1.weight"),
        up_bias=r("pwconv1.bias"),
        down=r.round(gamma[:, None] * r.wide("pwconv2.weight")),
        down_bias=r.round(gamma * r.wide("pwconv2.bias")),
        eps=1e-6,  # fixed in the published code, not in its config
    )


def _block(r: Reader, rate: int) -> BlockWeights:
    return BlockWeights(
        snake=_snake(r, "0"),
        widen=read_transposed(r, "1.conv", rate),
        units=[
            UnitWeights(
                snake_in=_snake(r, f"{i}.act1"),
                conv=read_conv(r, f"{i}.conv1.conv", dilation),
                snake_mid=_snake(r, f"{i}.act2"),
                mix=read_conv(r, f"{i}.conv2.conv"),
            )
            for i, dilation in ((2, 1), (3, 3), (4, 9))  # fixed in the published code, not in its config
        ],
    )


def _snake(r: Reader, name: str) -> Snake:
    """Published as logarithms; the 1e-9 is the published guard against division by zero."""
    return Snake(r.wide(f"{name}.alpha").exp(), 1.0 / (r.wide(f"{name}.beta").exp() + 1e-9))
