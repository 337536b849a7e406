"""Causal convolutions that go on from where each stream's last chunk ended, and the blocks made of them.

Activations are time-major, x [t, b, c]. Any run of time steps is then one contiguous matrix
[steps * b, c], so that a convolution is one matrix product a tap on views of its input, whatever the
dilation and however many streams share the step.

What a stream remembers is a row of an arena [slots, reach, c]: the last `reach` inputs of a
convolution. Zeros are the start of a stream, because published codecs pad with zeros there. Index
tensor `slots` int64 [b] names the rows of a step; 0 is padding and may occur more than once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from hocket.kernels.conv import carry, conv
from hocket.kernels.depthwise import depthwise
from hocket.kernels.snake import snake


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution of stride 1, or a transposed one as its phases (see `transposed_as_conv`)."""

    taps: Tensor  # [k, c_in, c_out]  oldest input first
    bias: Tensor  # [c_out]
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Inputs before the current one that an output depends on."""
        return (self.taps.shape[0] - 1) * self.dilation


@dataclass(frozen=True, slots=True)
class Depthwise:
    """A convolution of stride 1 in which every channel sees itself only."""

    taps: Tensor  # fp32 [k, c]  oldest input first; fp32, so that k products are added up without rounding
    bias: Tensor  # fp32 [c]
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Inputs before the current one that an output depends on."""
        return (self.taps.shape[0] - 1) * self.dilation


@dataclass(frozen=True, slots=True)
class Snake:
    """SnakeBeta's parameters, out of the logarithm. fp32 always: they scale the argument of a sine."""

    alpha: Tensor  # fp32 [c]  angular frequency
    gain: Tensor  # fp32 [c]  1 / beta


@dataclass(frozen=True, slots=True)
class ConvNext:
    """ConvNeXt block (arXiv 2201.03545) with its scale `gamma` folded into the last matrix."""

    taps: Tensor  # fp32 [k, c]  depthwise, see `Depthwise`
    bias: Tensor  # fp32 [c]
    norm_weight: Tensor  # [c]
    norm_bias: Tensor  # [c]
    up: Tensor  # [4 c, c]
    up_bias: Tensor  # [4 c]
    down: Tensor  # [c, 4 c]
    down_bias: Tensor  # [c]
    eps: float


def convolve(joined: Tensor, w: Conv, residual: Tensor | None = None) -> Tensor:
    """Convolve joined [reach + t, b, c_in] -> [t, b, c_out], without padding; then add the residual."""
    return conv(joined, w.taps, w.bias, w.dilation, residual=residual)


def causal_conv(
    x: Tensor,
    w: Conv,
    past: Tensor,
    slots: Tensor,
    before: Snake | None = None,
    after: Snake | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """One chunk x [t, b, c_in] -> [t, b, c_out]; past [slots, reach, c_in] is written in place.

    before, after: activation of the input and of the output. The past holds activated inputs.
    skip int32 [b]: steps at the head of the chunk that lie before the stream's first, and count as zeros.
    """
    return conv(
        carry(past, slots, x, _pair(before), skip), w.taps, w.bias, w.dilation, activation=_pair(after)
    )


def causal_upsample(
    x: Tensor,
    w: Conv,
    rate: int,
    past: Tensor,
    slots: Tensor,
    before: Snake | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """One chunk through a transposed convolution of stride `rate`: x [t, b, c_in] -> [rate * t, b, c_out].

    past [slots, reach, c_in] is written in place. Output after the last input's own `rate` samples is
    not given (it belongs to the next chunk), so that t steps give exactly rate * t. skip: see `causal_conv`.
    """
    return conv(carry(past, slots, x, _pair(before), skip), w.taps, w.bias, w.dilation, rate)


def causal_depthwise(
    x: Tensor,
    w: Depthwise,
    past: Tensor,
    slots: Tensor,
    before: Snake | None = None,
    after: Snake | None = None,
) -> Tensor:
    """One chunk x [t, b, c] -> [t, b, c]; past [slots, reach, c] is written in place.

    before, after: activation of the input and of the output. The past holds activated inputs.
    """
    return depthwise(x, past, slots, w.taps, w.bias, w.dilation, _pair(before), _pair(after))


def _pair(w: Snake | None) -> tuple[Tensor, Tensor] | None:
    return None if w is None else (w.alpha, w.gain)


def interleave(phases: Tensor, rate: int) -> Tensor:
    """Phases of each step in their order in time: [t, b, rate * c] -> [rate * t, b, c]."""
    return phases.unflatten(-1, (rate, -1)).transpose(1, 2).flatten(0, 1)


def snake_beta(x: Tensor, w: Snake) -> Tensor:
    """x + sin(alpha x)^2 / beta, elementwise over x [..., c]; the dtype of x. See `hocket.kernels.snake`."""
    return snake(x, w.alpha, w.gain)


def causal_convnext(x: Tensor, w: ConvNext, past: Tensor, slots: Tensor) -> Tensor:
    """One chunk x [t, b, c] -> [t, b, c]; past [slots, k - 1, c] is written in place."""
    y = depthwise(x, past, slots, w.taps, w.bias)
    y = F.layer_norm(y, y.shape[-1:], w.norm_weight, w.norm_bias, w.eps)
    y = F.gelu(F.linear(y, w.up, w.up_bias))  # [t, b, 4 c]
    return x + F.linear(y, w.down, w.down_bias)


def conv_taps(weight: Tensor, bias: Tensor, dilation: int = 1) -> Conv:
    """From the layout of `torch.nn.Conv1d`, weight [c_out, c_in, k]."""
    return Conv(weight.permute(2, 1, 0).contiguous(), bias.contiguous(), dilation)


def depthwise_taps(weight: Tensor, bias: Tensor, dilation: int = 1) -> Depthwise:
    """From the layout of `torch.nn.Conv1d` with as many groups as channels, weight [c, 1, k]."""
    return Depthwise(weight.squeeze(1).t().contiguous(), bias.contiguous(), dilation)


def transposed_as_conv(weight: Tensor, bias: Tensor, rate: int) -> Conv:
    """A transposed convolution of stride `rate` as a convolution that gives `rate` phases a step.

    weight [c_in, c_out, m * rate] in the layout of `torch.nn.ConvTranspose1d`; bias [c_out].
    Output sample rate * t + p is the sum over j < m of x[t - j] @ weight[:, :, j * rate + p]: m taps of
    [c_in, rate * c_out], with m - 1 inputs to remember where adding up overlaps would need to keep
    (m - 1) * rate outputs.
    """
    c_in, c_out, k = weight.shape
    phases = weight.reshape(c_in, c_out, k // rate, rate).permute(2, 0, 3, 1)  # [m, c_in, rate, c_out]
    taps = phases.flip(0).reshape(k // rate, c_in, rate * c_out)
    return Conv(taps.contiguous(), bias.repeat(rate))


def strided_as_conv(weight: Tensor, bias: Tensor, rate: int) -> Conv:
    """A convolution of stride `rate` as one of stride 1 over steps folded by `fold`.

    weight [c_out, c_in, m * rate] in the layout of `torch.nn.Conv1d`; bias [c_out].
    """
    c_out, c_in, k = weight.shape
    return Conv(weight.permute(2, 1, 0).reshape(k // rate, rate * c_in, c_out).contiguous(), bias)


def fold(x: Tensor, rate: int) -> Tensor:
    """`rate` steps as the channels of one: [rate * t, b, c] -> [t, b, rate * c]; undoes `interleave`."""
    return x.unflatten(0, (-1, rate)).transpose(1, 2).flatten(2)


__all__ = [
    "Conv",
    "ConvNext",
    "Depthwise",
    "Snake",
    "carry",
    "causal_conv",
    "causal_convnext",
    "causal_depthwise",
    "causal_upsample",
    "conv_taps",
    "convolve",
    "depthwise_taps",
    "fold",
    "interleave",
    "snake_beta",
    "strided_as_conv",
    "transposed_as_conv",
]
