from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hocket.audio.wav import Samples


@pytest.fixture(scope="session")
def tone() -> Callable[[int, float], Samples]:
    """A 440 Hz sine of peak 0.5 with a little noise, from rate and seconds; equal for equal arguments."""

    def make(rate: int, seconds: float) -> Samples:
        time = np.arange(int(rate * seconds)) / rate
        noise = np.random.default_rng(0).normal(0, 0.002, len(time))
        return (0.5 * np.sin(2 * np.pi * 440 * time) + noise).astype(np.float32)

    return make
