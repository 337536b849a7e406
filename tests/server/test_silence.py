"""Holding back silence: one sentence of specification, one property."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.server.silence import SilenceGate

RATE = 100  # samples a second, so that cases are small


def sound(*parts: tuple[float, int]) -> np.ndarray:
    return np.concatenate([np.full(length, level, np.float32) for level, length in parts])


PARTS = st.lists(st.tuples(st.sampled_from([0.0, 0.5]), st.integers(1, 250)), min_size=1, max_size=6)


@given(PARTS, st.lists(st.integers(0, 400), max_size=8), st.sampled_from([None, 300, 1500]), st.booleans())
def test_cuts_change_nothing(
    parts: list[tuple[float, int]], cuts: list[int], stop_ms: int | None, missed: bool
) -> None:
    whole = sound(*parts)
    once, gate = SilenceGate(RATE, stop_ms), SilenceGate(RATE, stop_ms)
    expected = np.concatenate([once.process(whole), once.finish(missed_end=missed)])
    got = [gate.process(piece) for piece in np.split(whole, sorted(cuts))]
    np.testing.assert_array_equal(np.concatenate([*got, gate.finish(missed_end=missed)]), expected)
    assert gate.ended == once.ended


@pytest.mark.parametrize(
    ("parts", "missed", "length"),
    [
        ([(0.5, 50), (0.0, 300)], True, 150),
        ([(0.5, 50), (0.0, 300)], False, 350),
        ([(0.5, 50), (0.0, 80)], True, 130),
        ([(0.0, 300)], True, 300),
        ([(0.0, 300), (0.5, 1), (0.0, 300)], True, 401),
        ([(0.5, 50), (0.0, 300), (0.5, 1)], True, 351),
    ],
    ids=["long end", "long end that was meant", "short end", "only silence", "late speech", "pause"],
)
def test_only_silence_past_a_second_after_speech_goes(
    parts: list[tuple[float, int]], missed: bool, length: int
) -> None:
    gate = SilenceGate(RATE)
    assert len(gate.process(sound(*parts))) + len(gate.finish(missed_end=missed)) == length


def test_speech_is_never_held() -> None:
    gate = SilenceGate(RATE)
    gate.process(sound((0.5, 10), (0.0, 300)))
    assert len(gate.process(sound((0.5, 10)))) == 210
