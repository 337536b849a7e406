"""MiniCPM4 decoder layers, as both language models, the local encoder and the diffusion have them, and LoRA.

No bias, no norm per head, rotation in fp32. Where `use_mup` says so, what a layer adds is scaled by depth;
that is folded into the matrices. Numerics follow voxcpm 2.0.3: modules/minicpm4/model.py and
modules/layers/lora.py.

Several LoRAs (arXiv 2106.09685) are one pair of matrices: the ranks of all stand side by side, and a row of
the batch keeps those of its own LoRA. So a batch may mix them, and a row without one multiplies by zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.attention import whole_attention
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
    """One decoder layer, and the LoRAs of its attention's matrices."""

    weights: BlockWeights
    qkv: Lora | None = None
    out: Lora | None = None

    def __call__(
        self, s: Shape, x: Tensor, attend: Callable[[Tensor], Tensor], share: Tensor | None
    ) -> Tensor:
        """See `hocket.nn.transformer.decoder_layer`; x may be overwritten.

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

    def ending(
        self, s: Shape, x: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, share: Tensor | None
    ) -> Tensor:
        """The last layer of a whole sequence, for tokens first … first + count only: x [b, n, d] ->
        [b * count, d]. Of the other tokens keys and values are all that is needed."""
        w, b, width = self.weights, x.shape[0], s.heads * s.head_dim
        # Of the tokens kept: all of a sequence have the same.
        here = None if share is None else share.unflatten(0, (b, -1))[:, :count].flatten(0, 1)
        every = rms_norm(x.flatten(0, 1), w.norm_in, s.eps)
        kept = every.unflatten(0, (b, -1))[:, first : first + count].flatten(0, 1)
        q, kv = F.linear(kept, w.qkv[:width]), F.linear(every, w.qkv[width:])
        if self.qkv is not None and share is not None and here is not None:
            q = Lora(self.qkv.down, self.qkv.up[:width]).add(q, kept, here)
            kv = Lora(self.qkv.down, self.qkv.up[width:]).add(kv, every, share)
        a = whole_attention(q.unflatten(0, (b, -1)), kv.unflatten(0, (b, -1)), cos, sin, first).flatten(0, 1)
        y = x[:, first : first + count].flatten(0, 1).contiguous()
        return self._rest(s, y, a, here)

    def _rest(self, s: Shape, x: Tensor, a: Tensor, share: Tensor | None) -> Tensor:
        """What follows attention's result a [m, heads * head_dim]: x [m, d], overwritten -> [m, d]."""
        w = self.weights
        x = x.addmm_(a, w.out.t())
        if self.out is not None and share is not None:
            x = self.out.add(x, a, share)
        gated = silu_mul(F.linear(rms_norm(x, w.norm_mlp, s.eps), w.gate_up))
        return x.addmm_(gated, w.down.t())


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of one shape and the norm behind them."""

    layers: list[Layer]
    norm: Tensor  # [d]
    shape: Shape


def run_whole(
    w: Stack, x: Tensor, first: int, count: int, cos: Tensor, sin: Tensor, share: Tensor | None
) -> Tensor:
    """Short sequences x [b, n, d] through a stack in which every token sees every other -> normalised hidden
    [b, count, d] of tokens first … first + count. x may be overwritten.

    cos, sin fp32 [n, head_dim]; share [b * n, ranks], equal for all tokens of a sequence.
    """
    b, n, width = x.shape[0], x.shape[1], w.shape.heads * w.shape.head_dim

    def attend(qkv: Tensor) -> Tensor:
        qkv = qkv.unflatten(0, (b, n))
        return whole_attention(qkv[..., :width], qkv[..., width:], cos, sin, 0).flatten(0, 1)

    x = x.flatten(0, 1)
    for layer in w.layers[:-1]:
        x = layer(w.shape, x, attend, share)
    y = w.layers[-1].ending(w.shape, x.unflatten(0, (b, n)), first, count, cos, sin, share)
    return rms_norm(y, w.norm, w.shape.eps).unflatten(0, (b, count))


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
