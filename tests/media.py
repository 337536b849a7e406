"""Recordings, pictures and films made from a seed: the same numbers on every machine."""

from __future__ import annotations

import numpy as np


def recording(samples: int, seed: int) -> np.ndarray:
    """float32 [samples], 16 kHz: two tones that come and go, and hiss; exact on every machine."""
    t = np.arange(samples)
    hiss = np.random.Philox(key=seed).random_raw(samples)
    saw = ((t * (200 + 10 * seed)) % 16000) / 8000 - 1
    square = np.where((t * 37 * seed) % 16000 < 8000, 0.25, -0.25) * ((t // 3000) % 2)
    return (0.3 * saw + square + ((hiss >> np.uint64(40)) / 2**24 - 0.5) * 0.1).astype(np.float32)


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [h, w, 3]: slopes, stripes and grain; exact on every machine."""
    y, x = np.mgrid[:height, :width]
    grain = (
        np.random.Philox(key=seed)
        .random_raw(height * width * 3)
        .view(np.uint8)[::8]
        .reshape(height, width, 3)
    )
    base = np.stack([x * 255 // width, y * 255 // height, ((x + y * seed) // 9 % 2) * 200], axis=-1)
    return ((base.astype(np.int64) * 3 + grain) // 4).astype(np.uint8)


def film(frames: int, height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [t, h, w, 3]"""
    return np.stack([picture(height, width, seed * 100 + i) for i in range(frames)])
