"""What the network is given; and where its weights are installed, that it tells voices apart."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from hocket.errors import Unsupported
from hocket.eval import likeness
from hocket.eval.likeness import Likeness, cosine, mean_voice, mel_filters, without_pauses
from hocket.eval.sound import read_wav
from tests.eval.conftest import quiet, sound, vowel

DATA = Path(__file__).parents[1] / "data"
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("resemblyzer") is None, reason="the package resemblyzer is not installed"
)


def test_mel_filters_are_slaneys() -> None:
    """Figures of librosa.filters.mel(sr=16000, n_fft=400, n_mels=40), librosa 0.11.0."""
    filters = mel_filters(16_000, 400, 40)
    assert filters.shape == (40, 201)
    at = [(0, 1), (0, 2), (10, 22), (20, 47), (30, 94), (39, 190), (39, 200)]
    known = [0.007390209, 0.012404521, 0.000525031, 0.000677599, 0.00335, 0.001215154, 0]
    assert [filters[where] for where in at] == pytest.approx(known, abs=1e-6)
    assert filters.sum(axis=1) * 40 == pytest.approx(1, abs=0.2)  # triangles of area 1 in Hz, bins of 40 Hz
    assert (np.diff(filters.argmax(axis=1)) >= 1).all()


def test_long_pauses_are_left_out() -> None:
    paused = sound(quiet(1.0), vowel(0.5), quiet(2.0), vowel(0.5), quiet(1.0))
    assert len(without_pauses(paused)) / 16_000 == pytest.approx(1.0 + 4 * 0.18, abs=0.15)


def test_mean_voice_has_length_one_and_skips_what_is_silent() -> None:
    a, b = np.eye(4)[0], np.eye(4)[1]
    mean = mean_voice([a, None, b])
    assert mean is not None
    assert mean == pytest.approx([0.7071, 0.7071, 0, 0], abs=1e-4)
    assert cosine(mean, a) == pytest.approx(0.7071, abs=1e-4)
    assert mean_voice([None]) is None


def test_missing_weights_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install \"hocket\[eval\]\""):
        likeness.check()


@needs_weights
def test_voices_are_told_apart() -> None:
    ear = Likeness()
    spoken = read_wav(DATA / "weasels.wav")
    half = len(spoken.samples) // 2
    first, second = (
        ear.embed(sound(part, rate_hz=spoken.rate_hz)) for part in np.split(spoken.samples, [half])
    )
    other = ear.embed(sound(vowel(2.0)))
    assert first is not None
    assert second is not None
    assert other is not None
    assert cosine(first, second) > 0.65 > cosine(first, other)
    assert ear.embed(sound(np.zeros(24_000))) is None
