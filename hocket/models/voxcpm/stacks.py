"""MiniCPM4 decoder layers, as both language models, the local encoder and the diffusion have them, and LoRA.

No bias, no norm per head, rotation in fp32. Where `use_mup` says so, what a layer adds is scaled by depth;
that is folded into the matrices. So are the weights of the norms before the gated MLP and, in the short
stacks, before attention: what is left of such a norm is one factor a row, and kernels that come after the
product apply it, which saves two launches a layer. Numerics follow voxcpm 2.0.3: modules/minicpm4/model.py
and modules/layers/lora.py.

Several LoRAs (arXiv 2106.09685) are one pair of matrices: the ranks of all stand side by side, and a row of
the batch keeps those of its own LoRA. So a batch may mix them, and a row without one multiplies by zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.attention import whole_attention
from hocket.kernels.float8 import Rounded, multiply, round_rows, round_rows_torch, silu_mul_round
from hocket.kernels.linear import silu_mul
from hocket.nn.norm import rms_norm
from hocket.nn.transformer import BlockWeights, Shape, decoder_layer


@dataclass(frozen=True, slots=True)
class Lora:
    """All LoRAs of one matrix, or of k matrices of one input that are stacked into one."""

    down: Tensor  # [k * ranks, in]   ranks: the sum over LoRAs
    up: Tensor  # [out, k * ranks]    scaled by alpha / r; zeros where a LoRA leaves the matrix alone

    def add(self, y: Tensor, x: Tensor, share: Tensor) -> Tensor:
        """y [m, out] plus what each row's own LoRA makes of x [m, in]; share [m, ranks] is 1 or 0."""
        inner = F.linear(x, self.down).unflatten(-1, (-1, share.shape[-1])) * share[:, None]
        return y + F.linear(inner.flatten(-2), self.up)


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection with bias, and the LoRAs of it."""

    weight: Tensor  # [out, in]
    bias: Tensor  # [out]
    lora: Lora | None = None

    def __call__(self, x: Tensor, share: Tensor | None) -> Tensor:
        """x [m, in] -> [m, out]; share [m, ranks] says whose LoRA each row has, None: there are none."""
        y = F.linear(x, self.weight, self.bias)
        return y if self.lora is None or share is None else self.lora.add(y, x, share)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, and the LoRAs of its attention's matrices.

    There is no `weights.norm_mlp`, and in a short stack `weights.norm_in` is one.
    """

    weights: BlockWeights
    qkv: Lora | None = None
    out: Lora | None = None

    def __call__(
        self, s: Shape, x: Tensor, attend: Callable[[Tensor], Tensor], share: Tensor | None
    ) -> Tensor:
        """A layer of a language model. See `hocket.nn.transformer.decoder_layer`; x may be overwritten.

        Kernels that take norm, gate and residual along pay for one row only: on an H200 a layer of VoxCPM2's
        language models takes 53 us with them and 57 without, but 75 and 57 with two rows, and a layer of its
        diffusion, of 22 rows, 53 and 40.
        """
        w = self.weights
        if x.shape[0] == 1 and share is None:
            return decoder_layer(w, s, x, attend)
        normed = rms_norm(x, w.norm_in, s.eps)
        qkv = F.linear(normed, w.qkv)
        if self.qkv is not None and share is not None:
            qkv = self.qkv.add(qkv, normed, share)
        return self._rest(s, x, attend(qkv), share)

    def whole(
        self, s: Shape, x: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, share: Tensor | None
    ) -> Tensor:
        """A layer of a short stack, for tokens first … first + count only: x [b, n, d], which may be
        overwritten -> [b, count, d]. Of the other tokens keys and values are all that is needed.

        share [b * n, ranks].
        """
        w, (b, n, _), width = self.weights, x.shape, s.heads * s.head_dim
        every, here = x.flatten(0, 1), share
        if count == n:
            y = every
            qkv = F.linear(every, w.qkv)
            if self.qkv is not None and share is not None:
                qkv = self.qkv.add(qkv, every, share)
            q, kv = qkv[:, :width], qkv[:, width:]
        else:
            y = x[:, first : first + count].flatten(0, 1).contiguous()
            q, kv = F.linear(y, w.qkv[:width]), F.linear(every, w.qkv[width:])
            if share is not None:  # of the tokens kept: all of a sequence have the same
                here = share.unflatten(0, (b, -1))[:, :count].flatten(0, 1)
            if self.qkv is not None and share is not None and here is not None:
                q = Lora(self.qkv.down, self.qkv.up[:width]).add(q, y, here)
                kv = Lora(self.qkv.down, self.qkv.up[width:]).add(kv, every, share)
        q, kv = q.unflatten(0, (b, -1)), kv.unflatten(0, (b, -1))
        a = whole_attention(q, kv, cos, sin, first, x, s.eps).flatten(0, 1)
        return self._rest(s, y, a, here).unflatten(0, (b, -1))

    def _rest(self, s: Shape, x: Tensor, a: Tensor, share: Tensor | None) -> Tensor:
        """What follows attention's result a [m, heads * head_dim]: x [m, d], overwritten -> [m, d]."""
        w = self.weights
        x = x.addmm_(a, w.out.t())
        if self.out is not None and share is not None:
            x = self.out.add(x, a, share)
        return x.addmm_(silu_mul(F.linear(x, w.gate_up), x, s.eps), w.down.t())


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of one shape and the norm behind them."""

    layers: list[Layer]
    norm: Tensor  # [d]
    shape: Shape
    small: list[SmallLayer] | None = None  # of a short stack, in place of the layers' matrices


@dataclass(frozen=True, slots=True)
class SmallLayer:
    """Matrices of a layer of a short stack in eight bits; see `in_float8`."""

    qkv: Rounded
    out: Rounded
    gate_up: Rounded
    down: Rounded


def run_whole(
    w: Stack, x: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, share: Tensor | None
) -> Tensor:
    """Short sequences x [b, n, d] through a stack in which every token sees every other -> normalised hidden
    [b, count, d] of tokens first … first + count. x may be overwritten.

    cos, sin fp32 [n, head_dim]; share [b * n, ranks], equal for all tokens of a sequence.
    """
    if w.small is not None:
        return _run_small(w, x, first, count, cos, sin, share)
    n = x.shape[1]
    for layer in w.layers[:-1]:
        x = layer.whole(w.shape, x, 0, n, cos, sin, share)
    return rms_norm(w.layers[-1].whole(w.shape, x, first, count, cos, sin, share), w.norm, w.shape.eps)


def in_float8(w: Stack) -> Stack:
    """A short stack whose products are those of float8_e4m3fn, with a scale for each row of either factor.

    On an H200 VoxCPM2's diffusion takes less time so from 32 streams on (9.7 ms in place of 11.7 at 64), more
    below. With random weights a patch then errs by 0.079 of its norm, in bfloat16 by 0.038.
    """
    small, layers = [], []
    for layer in w.layers:
        v = layer.weights
        small.append(SmallLayer(*map(round_rows_torch, (v.qkv, v.out, v.gate_up, v.down))))
        gone = v.down.new_empty(0)
        layers.append(replace(layer, weights=replace(v, qkv=gone, out=gone, gate_up=gone, down=gone)))
    return replace(w, small=small, layers=layers)


def _run_small(
    w: Stack, x: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, share: Tensor | None
) -> Tensor:
    """`run_whole` of a stack with `small`. What a product adds is added where its sum is rounded next."""
    assert w.small is not None
    s, dtype, (b, n, _) = w.shape, x.dtype, x.shape
    width, x = s.heads * s.head_dim, x.flatten(0, 1)
    added: Tensor | None = None
    for layer, matrices in zip(w.layers, w.small, strict=True):
        qkv = multiply(round_rows(x, added, s.eps), matrices.qkv, dtype)
        if layer.qkv is not None and share is not None:
            qkv = layer.qkv.add(qkv, rms_norm(x, layer.weights.norm_in, s.eps), share)
        qkv = qkv.unflatten(0, (b, n))
        begin, m = (first, count) if layer is w.layers[-1] else (0, n)
        if m < n:  # of the other tokens keys and values are all that is needed
            x = x.unflatten(0, (b, n))[:, begin : begin + m].flatten(0, 1).contiguous()
            share = None if share is None else share.unflatten(0, (b, n))[:, :m].flatten(0, 1)
        q, kv = qkv[:, begin : begin + m, :width], qkv[..., width:]
        a = whole_attention(q, kv, cos, sin, begin).flatten(0, 1)
        added = multiply(round_rows(a), matrices.out, dtype)
        if layer.out is not None and share is not None:
            added = layer.out.add(added, a, share)
        gate_up = multiply(round_rows(x, added, s.eps), matrices.gate_up, dtype)
        added = multiply(silu_mul_round(gate_up), matrices.down, dtype)
    assert added is not None
    return rms_norm(x.add_(added), w.norm, s.eps).unflatten(0, (b, count))


def per_token(share: Tensor | None, tokens: int) -> Tensor | None:
    """share [b, ranks] of sequences -> [b * tokens, ranks] of their tokens."""
    return None if share is None else share.repeat_interleave(tokens, dim=0)


def long_rope(
    head_dim: int, theta: float, factor: Tensor, scale: float, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of LongRoPE (arXiv 2402.13753): position int [...] -> fp32 [..., head_dim] each.

    factor fp32 [head_dim / 2] divides the position of each pair, before the frequency multiplies it, as the
    published tables are made; scale multiplies the tables.
    """
    even = torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32)
    angle = position[..., None].float() * (1.0 / factor) * (1.0 / theta ** (even / head_dim))
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos() * scale, angle.sin() * scale
