"""Sounds made by arithmetic: a voice that says nothing, good enough for everything but words."""

from __future__ import annotations

import numpy as np

from hocket.eval.sound import Sound

RATE_HZ = 24_000


def resonator(x: np.ndarray, hz: float, width_hz: float, rate_hz: int) -> np.ndarray:
    """One formant: a pole pair, as an impulse response long enough to have died away."""
    t = np.arange(round(0.06 * rate_hz)) / rate_hz
    response = np.exp(-np.pi * width_hz * t) * np.sin(2 * np.pi * hz * t)
    return np.convolve(x, response)[: len(x)]


def vowel(seconds: float, pitch_hz: float = 120.0, rate_hz: int = RATE_HZ, level: float = 0.3) -> np.ndarray:
    """Glottal pulses, a little irregular, through three formants."""
    rng = np.random.default_rng(7)
    n = round(seconds * rate_hz)
    pulses = np.zeros(n)
    at = 0.0
    while at < n:
        pulses[int(at)] = 1 + 0.1 * rng.standard_normal()
        at += rate_hz / pitch_hz * (1 + 0.01 * rng.standard_normal())
    x = pulses
    for hz, width in ((700, 90), (1200, 110), (2600, 160)):
        x = resonator(x, hz, width, rate_hz)
    fade = np.minimum(1, np.arange(n)[::-1] / (0.03 * rate_hz))  # a voice that is cut off clicks
    return level * x / np.abs(x).max() * fade


def plosive(seconds: float = 0.03, rate_hz: int = RATE_HZ, level: float = 0.3, seed: int = 3) -> np.ndarray:
    """The burst of a /t/: noise that begins at once and dies within some 10 ms."""
    rng = np.random.default_rng(seed)
    n = round(seconds * rate_hz)
    x = rng.standard_normal(n) * np.exp(-np.arange(n) / (0.008 * rate_hz))
    return level * x / np.abs(x).max()


def hiss(seconds: float, rate_hz: int = RATE_HZ, level: float = 0.1) -> np.ndarray:
    rng = np.random.default_rng(11)
    return level * rng.standard_normal(round(seconds * rate_hz)) / 4


def quiet(seconds: float, rate_hz: int = RATE_HZ) -> np.ndarray:
    """Room noise at -80 dB of full scale."""
    return 1e-4 * np.random.default_rng(5).standard_normal(round(seconds * rate_hz))


def sound(*parts: np.ndarray, rate_hz: int = RATE_HZ) -> Sound:
    return Sound(np.concatenate(parts).astype(np.float32), rate_hz)
