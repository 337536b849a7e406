"""Waveform to speaker vector: a log-mel spectrogram and an ECAPA-TDNN (arXiv 2005.07143).

The vector stands in the talker's prompt as a row, as it is. Activations are time-major, [t, b, c], as in
`hocket.nn.conv`; every convolution sees its input mirrored at both ends.
Source: qwen-tts 0.1.1: core/models/modeling_qwen3_tts.py `Qwen3TTSSpeakerEncoder`, `mel_spectrogram`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.nn.conv import Conv, convolve

# Fixed in the published code, not in its config.
FFT, MEL_HOP, TOP_HZ = 1024, 256, 12000


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """SE-Res2Net: each eighth of the channels sees the one before it convolved."""

    enter: Conv
    parts: list[Conv]  # dilated; one fewer than the channels are cut into
    leave: Conv
    squeeze: Conv
    excite: Conv


@dataclass(frozen=True, slots=True)
class SpeakerWeights:
    """Weights of the speaker encoder, and its mel filters."""

    filters: Tensor  # fp32 [mels, FFT / 2 + 1]
    first: Conv
    blocks: list[BlockWeights]
    merge: Conv
    attend_in: Conv
    attend_out: Conv
    out: Conv


def speaker_vector(w: SpeakerWeights, samples: Tensor) -> Tensor:
    """Vectors of recordings of one length: samples [b, n] at 24 kHz, n >= 1280 -> [b, enc_dim].

    Fewer samples would leave the widest convolution (four steps each way) nothing to mirror.
    """
    x = log_mel(samples, w.filters).to(w.first.taps.dtype)  # [t, b, mels]
    x = F.relu(mirrored(x, w.first))  # [t, b, c]
    seen = []
    for block in w.blocks:
        x = res2net_block(x, block)
        seen.append(x)
    x = F.relu(convolve(torch.cat(seen, dim=-1), w.merge))  # [t, b, 3 c]
    x = weighted_statistics(x, attention(w, x))  # [b, 6 c]
    return convolve(x[None], w.out)[0]


def res2net_block(x: Tensor, w: BlockWeights) -> Tensor:
    """x [t, b, c] -> [t, b, c]"""
    first, *rest = F.relu(convolve(x, w.enter)).chunk(len(w.parts) + 1, dim=-1)
    parts = [first]
    for part, conv in zip(rest, w.parts, strict=True):
        parts.append(F.relu(mirrored(part if len(parts) == 1 else part + parts[-1], conv)))
    y = F.relu(convolve(torch.cat(parts, dim=-1), w.leave))
    gate = convolve(F.relu(convolve(y.mean(0, keepdim=True), w.squeeze)), w.excite).sigmoid()  # [1, b, c]
    return x + y * gate


def attention(w: SpeakerWeights, x: Tensor) -> Tensor:
    """How much each step counts, channel by channel: x [t, b, c] -> [t, b, c], summing to 1 over t."""
    even = torch.full_like(x[:, :1, :1], 1 / x.shape[0])
    whole = weighted_statistics(x, even).expand(x.shape[0], -1, -1)  # [t, b, 2 c]
    hidden = F.relu(convolve(torch.cat([x, whole], dim=-1), w.attend_in)).tanh()
    return convolve(hidden, w.attend_out).softmax(0)


def weighted_statistics(x: Tensor, weight: Tensor) -> Tensor:
    """Mean and deviation over time: x [t, b, c], weight broadcastable to it -> [b, 2 c]."""
    mean = (weight * x).sum(0)
    deviation = (weight * (x - mean).square()).sum(0).clamp(min=1e-12).sqrt()
    return torch.cat([mean, deviation], dim=-1)


def mirrored(x: Tensor, w: Conv) -> Tensor:
    """Convolve x [t, b, c_in] -> [t, b, c_out] with its reflection beyond both ends; odd kernels."""
    edge = w.reach // 2
    return convolve(torch.cat([x[1 : edge + 1].flip(0), x, x[-edge - 1 : -1].flip(0)]), w)


def log_mel(samples: Tensor, filters: Tensor) -> Tensor:
    """samples [b, n] -> fp32 [floor(n / MEL_HOP), b, mels], natural logarithm; always computed in fp32."""
    edge = (FFT - MEL_HOP) // 2
    window = torch.hann_window(FFT, device=samples.device)
    padded = F.pad(samples.float()[:, None], (edge, edge), mode="reflect")[:, 0]
    spectrum = torch.stft(padded, FFT, MEL_HOP, window=window, center=False, return_complex=True)
    magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + 1e-9)  # [b, FFT / 2 + 1, t]
    return (filters @ magnitude).clamp(min=1e-5).log().permute(2, 0, 1)
