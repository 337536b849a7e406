"""Streaming layers against torch's own over the whole input, in float64, where only logic can differ."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.nn.conv import (
    ConvNext,
    Snake,
    carry,
    causal_conv,
    causal_convnext,
    causal_depthwise,
    causal_upsample,
    conv_taps,
    convolve,
    depthwise_taps,
    fold,
    interleave,
    snake_beta,
    strided_as_conv,
    transposed_as_conv,
)

C_IN, C_OUT, SLOTS, T = 5, 3, 4, 40
Layer = tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Callable[[Tensor], Tensor], tuple[int, int]]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def plain(k: int, dilation: int) -> Layer:
    weight, bias = draw(C_OUT, C_IN, k), draw(C_OUT)
    w = conv_taps(weight, bias, dilation)

    def whole(x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x, ((k - 1) * dilation, 0)), weight, bias, dilation=dilation)

    return lambda x, past, slots: causal_conv(x, w, past, slots), whole, (w.reach, C_IN)


def depthwise(k: int, dilation: int) -> Layer:
    weight, bias = draw(C_IN, 1, k), draw(C_IN)
    w = depthwise_taps(weight, bias, dilation)

    def whole(x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x, ((k - 1) * dilation, 0)), weight, bias, dilation=dilation, groups=C_IN)

    return lambda x, past, slots: causal_depthwise(x, w, past, slots), whole, (w.reach, C_IN)


def upsampling(rate: int, times: int = 2) -> Layer:
    weight, bias = draw(C_IN, C_OUT, times * rate), draw(C_OUT)
    w = transposed_as_conv(weight, bias, rate)

    def whole(x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, weight, bias, stride=rate)[..., : rate * x.shape[-1]]

    return lambda x, past, slots: causal_upsample(x, w, rate, past, slots), whole, (w.reach, C_IN)


def convnext() -> Layer:
    k, c = 7, C_IN
    depthwise = draw(c, 1, k)
    w = ConvNext(
        taps=depthwise.squeeze(1).t(), bias=draw(c), norm_weight=draw(c), norm_bias=draw(c), eps=1e-6,
        up=draw(2 * c, c), up_bias=draw(2 * c), down=draw(c, 2 * c), down_bias=draw(c),
    )  # fmt: skip

    def whole(x: Tensor) -> Tensor:
        y = F.conv1d(F.pad(x, (k - 1, 0)), depthwise, w.bias, groups=c).transpose(1, 2)
        y = F.layer_norm(y, (c,), w.norm_weight, w.norm_bias, w.eps)
        y = F.linear(F.gelu(F.linear(y, w.up, w.up_bias)), w.down, w.down_bias)
        return x + y.transpose(1, 2)

    return lambda x, past, slots: causal_convnext(x, w, past, slots), whole, (k - 1, c)


LAYERS: dict[str, Layer] = {
    "k7": plain(7, 1),
    "k7 dilation 3": plain(7, 3),
    "k7 dilation 9": plain(7, 9),
    "k3": plain(3, 1),
    "k1": plain(1, 1),
    "depthwise k7": depthwise(7, 1),
    "depthwise k7 dilation 9": depthwise(7, 9),
    "upsample by 8": upsampling(8),
    "upsample by 3": upsampling(3),
    "upsample by 2, no overlap": upsampling(2, times=1),
    "upsample by 2, three deep": upsampling(2, times=3),
    "convnext": convnext(),
}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
cuts = st.lists(st.integers(0, T), max_size=12).map(lambda at: [0, *sorted(set(at) - {0, T}), T])


def stream(layer: Layer, x: Tensor, at: list[int], slots: list[int]) -> Tensor:
    """Run x [b, c, t] cut at `at`, in slots whose rows start at zero -> [b, c_out, t_out]."""
    step, _, (reach, c) = layer
    past = torch.zeros(SLOTS, reach, c, dtype=x.dtype)
    rows = torch.tensor(slots)
    parts = [step(x[..., a:b].permute(2, 0, 1), past, rows) for a, b in pairwise(at)]
    return torch.cat(parts).permute(1, 2, 0)


@each_layer
@settings(deadline=None)
@given(at=cuts)
def test_stream_equals_whole_wherever_it_is_cut(layer: Layer, at: list[int]) -> None:
    x = draw(2, C_IN, T)
    torch.testing.assert_close(stream(layer, x, at, [3, 1]), layer[1](x))


@each_layer
def test_nothing_looks_ahead(layer: Layer) -> None:
    x = draw(1, C_IN, T)
    whole = stream(layer, x, [0, T], [1])
    rate = whole.shape[-1] // T
    for t in (1, 7, 23):
        torch.testing.assert_close(stream(layer, x[..., :t], [0, t], [1]), whole[..., : rate * t])


@each_layer
def test_rows_and_padding_change_nothing(layer: Layer) -> None:
    step, whole, (reach, c) = layer
    x = draw(3, C_IN, T)
    past = torch.zeros(SLOTS, reach, c, dtype=x.dtype)
    warm = step(x[:1, :, :30].permute(2, 0, 1), past, torch.tensor([2]))  # slot 2 has begun, slot 1 has not
    chunk = torch.stack([x[1, :, :10], x[2, :, :10], x[0, :, 30:], x[2, :, :10]]).permute(2, 0, 1)
    y = step(chunk, past, torch.tensor([1, 0, 2, 0]))
    torch.testing.assert_close(y[:, 0].t(), whole(x[1:2, :, :10])[0])
    torch.testing.assert_close(torch.cat([warm[:, 0], y[:, 2]]).t(), whole(x[:1])[0])
    assert not past[3].any()


@pytest.mark.parametrize("t", [1, 2, 3, 8], ids="chunk of {}".format)
def test_past_is_the_last_inputs(t: int) -> None:
    past = torch.arange(6.0).view(2, 3, 1)
    joined = carry(past, torch.tensor([1]), torch.arange(10.0, 10 + t).view(t, 1, 1))
    assert joined.flatten().tolist() == [3, 4, 5, *range(10, 10 + t)]
    assert past.flatten().tolist() == [0, 1, 2, *joined.flatten().tolist()[-3:]]


@pytest.mark.parametrize(("rate", "times"), [(4, 2), (5, 2), (2, 2), (3, 1)])
def test_strided_equals_torch(rate: int, times: int) -> None:
    weight, bias, x = draw(C_OUT, C_IN, times * rate), draw(C_OUT), draw(2, C_IN, 6 * rate)
    padded = F.pad(x, ((times - 1) * rate, 0))
    y = convolve(fold(padded.permute(2, 0, 1), rate), strided_as_conv(weight, bias, rate))
    torch.testing.assert_close(y.permute(1, 2, 0), F.conv1d(padded, weight, bias, stride=rate))


def test_fold_undoes_interleave() -> None:
    x = draw(4, 2, 6)
    assert torch.equal(fold(interleave(x, 3), 3), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    """Against the exact sum of the rounded inputs, the only error is that of the result's own rounding."""
    x, w = draw(30, 2, 16).to(dtype), conv_taps(draw(8, 16, 7).to(dtype), draw(8).to(dtype))
    exact = convolve(x.double(), conv_taps(w.taps.permute(2, 1, 0).double(), w.bias.double()))
    torch.testing.assert_close(convolve(x, w).double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_snake_keeps_the_phase(dtype: torch.dtype) -> None:
    x = torch.linspace(-300, 300, 999).view(111, 1, 9).to(dtype)
    alpha, gain = torch.linspace(0.3, 3, 9), torch.linspace(0.1, 4, 9)
    y = snake_beta(x, Snake(alpha, gain))
    exact = x.double() + gain * (x.double() * alpha).sin().square()
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-4)
