"""What is measured on the sound itself: silence, level, offset, clipping, clicks.

Nothing here knows what was to be said. Levels are in dB of full scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hocket.eval.sound import Sound

_FRAME_S = 0.01
_FLOOR_DB = -60.0  # quieter is silence whatever the speech's level
_BELOW_SPEECH_DB = 35.0  # so far below loud speech is silence: breath and reverberation are, weak /f/ is not

_FULL_SCALE = 0.999
_FLAT = 3  # samples in a row at full scale; a peak that only touches it is one or two

_ORDER = 16  # of the linear prediction: the resonances of a vocal tract at 16 to 24 kHz
_BLOCK_S = 0.04
_CLICK_S = 0.0008  # a click is over by then; the burst of a plosive lasts ten times as long
_NEAR_S = 0.015  # holds a neighbouring glottal pulse of any voice above 67 Hz
_CLICK_RATIO = (
    4.0  # over the strongest neighbour: none in a quarter of an hour of clean speech (docs/eval.md)
)
_CLICK_LEAST = 0.008  # of full scale, after prediction: below it nobody hears it


@dataclass(slots=True, frozen=True)
class Silence:
    """Seconds of silence before the first sound, after the last, and the longest between."""

    leading_s: float
    trailing_s: float
    inner_s: float


def silence(sound: Sound) -> Silence:
    """A sound that is silent throughout is all leading silence."""
    loud = sounding(sound)
    where = np.flatnonzero(loud)
    if not len(where):
        return Silence(sound.seconds, 0.0, 0.0)
    inner = int(np.diff(where).max(initial=1)) - 1
    end = min(sound.seconds, (where[-1] + 1) * _FRAME_S)
    return Silence(float(where[0]) * _FRAME_S, float(sound.seconds - end), inner * _FRAME_S)


def sounding(sound: Sound) -> np.ndarray:
    """bool [frames of 10 ms]: not silent. A frame is judged by its power without its mean."""
    size = max(1, round(_FRAME_S * sound.rate_hz))
    frames = -(-len(sound.samples) // size)
    if not frames:
        return np.zeros(0, bool)
    padded = np.pad(sound.samples, (0, frames * size - len(sound.samples))).reshape(frames, size)
    level = 20 * np.log10(np.maximum(padded.std(axis=1), 1e-9))
    return np.asarray(level > max(_FLOOR_DB, float(np.percentile(level, 95)) - _BELOW_SPEECH_DB))


def dc_offset(sound: Sound) -> float:
    """Mean of the samples, in full scale."""
    return float(sound.samples.mean(dtype=np.float64)) if len(sound.samples) else 0.0


def peak_db(sound: Sound) -> float:
    """Largest absolute sample, in dB below full scale."""
    return 20 * math.log10(max(float(np.abs(sound.samples).max(initial=0.0)), 1e-6))


def clipped(sound: Sound) -> int:
    """Samples in runs of at least three at full scale."""
    if not len(sound.samples):
        return 0
    flat = np.abs(sound.samples) >= _FULL_SCALE
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat, [False]])))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= _FLAT].sum())


def loudness_lufs(sound: Sound) -> float:
    """Integrated loudness by ITU-R BS.1770-4, of one channel; -inf for silence.

    The K-weighting is applied in the frequency domain: loudness asks for power only, not for phase.
    """
    rate = sound.rate_hz
    block, step = round(0.4 * rate), round(0.1 * rate)
    samples = sound.samples.astype(np.float64)
    if len(samples) < block:
        samples = np.pad(samples, (0, block - len(samples)))
    size = len(samples) + rate  # zeros behind: the filter's tail must not wrap around to the start
    hz = np.fft.rfftfreq(size, 1 / rate)
    weighted = np.fft.irfft(np.fft.rfft(samples, size) * _k_weight(hz), size)[: len(samples)]
    total = np.concatenate([[0.0], np.cumsum(weighted**2)])
    starts = np.arange(0, len(samples) - block + 1, step)
    power = (total[starts + block] - total[starts]) / block
    for gate in (-70.0, None):  # absolute, then 10 LU below what passed
        if not len(power):
            return -math.inf
        least = 10 ** ((gate + 0.691) / 10) if gate is not None else power.mean() / 10
        power = power[power > least]
    return -0.691 + 10 * math.log10(power.mean()) if len(power) else -math.inf


def _k_weight(hz: np.ndarray) -> np.ndarray:
    """The gain of the standard's two filters, given there as coefficients at 48 kHz."""
    z = np.exp(-2j * np.pi * np.minimum(hz, 23_999) / 48_000)
    shelf = (1.53512485958697 - 2.69169618940638 * z + 1.19839281085285 * z**2) / (
        1 - 1.69065929318241 * z + 0.73248077421585 * z**2
    )
    high = (1 - 2 * z + z**2) / (1 - 1.99004745483398 * z + 0.99007225036621 * z**2)
    return np.asarray(np.abs(shelf * high))


def clicks(sound: Sound) -> list[float]:
    """Where the sound clicks, in seconds: a jump, a dropped or a stray sample.

    Linear prediction takes the voice away and leaves what it cannot foresee. A click is then a peak of less
    than a millisecond that stands far above everything within 15 ms. Glottal pulses are followed by their
    like, and the burst of a plosive or a fricative is a crowd of peaks, so neither stands alone. A click
    under loud speech, which the ear does not find either, is not found.
    """
    left = np.abs(_unforeseen(sound))
    rate = sound.rate_hz
    own, near, step = max(1, round(_CLICK_S * rate)), round(_NEAR_S * rate), max(1, round(0.003 * rate))
    found: list[float] = []
    for start in range(0, len(left), step):
        at = start + int(left[start : start + step].argmax())
        peak = float(left[at])
        if peak < _CLICK_LEAST:
            continue
        before, after = left[max(0, at - near) : max(0, at - own)], left[at + own + 1 : at + near + 1]
        rest = max(float(before.max(initial=0.0)), float(after.max(initial=0.0)))
        if peak > _CLICK_RATIO * rest and (not found or at / rate - found[-1] > _CLICK_S):
            found.append(at / rate)
    return found


def _unforeseen(sound: Sound) -> np.ndarray:
    """What linear prediction from the samples before leaves, float64 [n]; block by block."""
    x = sound.samples.astype(np.float64)
    half = max(2 * _ORDER, round(_BLOCK_S * sound.rate_hz / 2))
    window = np.hanning(2 * half + 2)[1:-1]
    out = np.zeros(len(x))
    lags = np.abs(np.subtract.outer(np.arange(_ORDER), np.arange(_ORDER)))
    # Half a block before and after, so that every block has a whole window around it.
    padded = np.pad(x, (max(half, _ORDER), 2 * half))
    offset = max(half, _ORDER)
    for start in range(0, len(x), half):
        centre = start + offset
        part = padded[centre - half // 2 : centre - half // 2 + 2 * half] * window
        spectrum = np.abs(np.fft.rfft(part, 4 * half)) ** 2
        power = np.fft.irfft(spectrum)[: _ORDER + 1]
        if power[0] <= 1e-12:
            out[start : start + half] = x[start : start + half]
            continue
        # A little white noise keeps the equations solvable where the sound has no high frequencies.
        matrix = power[lags] + np.eye(_ORDER) * power[0] * 1e-4
        weights = np.concatenate([[1.0], -np.linalg.solve(matrix, power[1:])])
        span = padded[centre - _ORDER : centre + half]
        made = np.convolve(span, weights)[_ORDER : _ORDER + half]
        out[start : start + half] = made[: len(out) - start]
    return out
