"""Faster and slower speech: the length asked for, the pitch kept, no seam, wherever the stream is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.audio.stretch import Stretch

RATE = 24000
SPEEDS = [0.25, 0.5, 0.8, 1.25, 1.5, 2.0, 3.0, 4.0]


def stretched(sound: np.ndarray, speed: float, cuts: list[int] = []) -> np.ndarray:  # noqa: B006  not changed
    stretch = Stretch(RATE, speed)
    made = [stretch.process(piece) for piece in np.split(sound, sorted(cuts))]
    return np.concatenate([*made, stretch.finish()])


def tone(seconds: float, frequency: float = 220.0) -> np.ndarray:
    t = np.arange(int(RATE * seconds)) / RATE
    return (0.5 * np.sin(2 * np.pi * frequency * t)).astype(np.float32)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 9000),
    st.floats(0.25, 4.0),
    st.lists(st.integers(0, 9000), max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_stream_equals_whole_wherever_it_is_cut(
    length: int, speed: float, cuts: list[int], seed: int
) -> None:
    sound = np.random.default_rng(seed).uniform(-1, 1, length).astype(np.float32)
    whole = stretched(sound, speed)
    assert len(whole) == round(length / speed)
    np.testing.assert_array_equal(stretched(sound, speed, cuts), whole)


@pytest.mark.parametrize("speed", SPEEDS)
def test_length_is_exact_whatever_the_rest(speed: float) -> None:
    for length in range(3000, 4500, 17):
        assert len(stretched(tone(1)[:length], speed, [length // 2])) == round(length / speed)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("frequency", [110.0, 220.0, 450.0])
def test_pitch_stays_and_there_is_no_seam(speed: float, frequency: float) -> None:
    made = stretched(tone(2, frequency), speed)
    spectrum = np.abs(np.fft.rfft(made * np.hanning(len(made))))
    assert spectrum.argmax() * RATE / len(made) == pytest.approx(frequency, rel=0.01)
    inside = made[: -RATE // 10]
    steepest = 2 * np.pi * frequency / RATE * 0.5
    assert np.abs(np.diff(inside)).max() < 1.05 * steepest
    assert np.abs(made).max() <= 0.5 + 1e-6


def test_speed_one_is_the_same_sound() -> None:
    sound = tone(0.3)
    np.testing.assert_array_equal(stretched(sound, 1.0, [100, 4000]), sound)


def test_silence_stays_silence() -> None:
    assert not stretched(np.zeros(RATE, np.float32), 1.7).any()


def test_output_lags_by_little() -> None:
    stretch = Stretch(RATE, 1.5)
    assert len(stretch.process(tone(0.08))) > 0  # one codec frame of 80 ms gives sound at once
