"""Mel filter banks."""

from __future__ import annotations

import numpy as np


def mel_filters(rate_hz: int, fft: int, mels: int, top_hz: float) -> np.ndarray:
    """Triangles of equal area on Slaney's mel scale, 0 to top_hz -> float32 [mels, fft / 2 + 1].

    Slaney's scale is linear below 1 kHz (200/3 Hz a mel) and logarithmic above (27 mels to 6.4 kHz).
    Equal to librosa 0.11.0 `filters.mel`, its defaults, and to transformers 5.17.0 `mel_filter_bank` with
    both of its options "slaney".
    """
    knee_hz, hz_per_mel, log_step = 1000.0, 200.0 / 3, np.log(6.4) / 27
    knee = knee_hz / hz_per_mel
    mel = np.linspace(0.0, knee + np.log(top_hz / knee_hz) / log_step, mels + 2)
    hz = np.where(mel < knee, mel * hz_per_mel, knee_hz * np.exp(log_step * (mel - knee)))
    bins = np.fft.rfftfreq(fft, 1 / rate_hz)
    rising = (bins - hz[:-2, None]) / np.diff(hz)[:-1, None]
    falling = (hz[2:, None] - bins) / np.diff(hz)[1:, None]
    triangles: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * (2 / (hz[2:] - hz[:-2]))[:, None]
    return triangles.astype(np.float32)
