from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.audio.resample import Resampler, resample
from hocket.audio.wav import Samples

RATES = [8000, 16000, 22050, 24000, 44100, 48000]


def streamed(sound: Samples, rate: int, target: int, cuts: list[int]) -> Samples:
    stream = Resampler(rate, target)
    pieces = np.split(sound, sorted(cuts))
    return np.concatenate([*(stream.process(piece) for piece in pieces), stream.finish()])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RATES), st.sampled_from(RATES), st.integers(0, 6000), st.data())
def test_stream_equals_whole_wherever_it_is_cut(rate: int, target: int, n: int, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, n), max_size=8))
    sound = np.random.default_rng(n).uniform(-1, 1, n).astype(np.float32)
    whole = resample(sound, rate, target)
    made = streamed(sound, rate, target, cuts)
    assert len(made) == len(whole)
    np.testing.assert_allclose(made, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", RATES)
@pytest.mark.parametrize("rate", RATES)
def test_length_and_pitch_are_those_of_the_ratio(rate: int, target: int) -> None:
    sound = np.sin(2 * np.pi * 1000 * np.arange(rate) / rate).astype(np.float32)  # 1 s
    made = resample(sound, rate, target)
    expected = np.sin(2 * np.pi * 1000 * np.arange(target) / target)
    assert made.dtype == np.float32
    assert len(made) == target
    inner = slice(target // 10, -target // 10)  # the filter rings where the sound starts and ends
    np.testing.assert_allclose(made[inner], expected[inner], atol=1e-4)


def test_equal_rates_pass_samples_through() -> None:
    sound = np.random.default_rng(0).uniform(-2, 2, 1000).astype(np.float32)
    assert np.array_equal(streamed(sound, 24000, 24000, [1, 999]), sound)
    assert np.array_equal(resample(sound, 24000, 24000), sound)


@pytest.mark.parametrize(
    ("rate", "target", "lag_ms"),
    [(24000, 48000, 42), (24000, 44100, 42), (22050, 24000, 42), (44100, 24000, 42), (24000, 8000, 75)],
)
def test_output_lags_by_no_more_than_the_docstring_says(rate: int, target: int, lag_ms: int) -> None:
    stream, chunk = Resampler(rate, target), np.zeros(rate // 50, np.float32)  # 20 ms
    given_s = made_s = 0.0
    for _ in range(100):
        given_s += len(chunk) / rate
        made_s += len(stream.process(chunk)) / target
        assert given_s - made_s <= lag_ms / 1000
