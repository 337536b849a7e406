"""Planted faults are found, and speech alone shows none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hocket.eval.defects import clicks, clipped, dc_offset, loudness_lufs, peak_db, silence
from hocket.eval.sound import Sound, read_wav
from tests.eval.conftest import RATE_HZ, hiss, plosive, quiet, sound, vowel

DATA = Path(__file__).parents[1] / "data"


def test_silence_around_and_inside() -> None:
    found = silence(sound(quiet(0.2), vowel(0.5), quiet(0.31), vowel(0.4), quiet(0.13)))
    assert found.leading_s == pytest.approx(0.2, abs=0.011)
    assert found.inner_s == pytest.approx(0.31, abs=0.05)  # the vowel dies away
    assert found.trailing_s == pytest.approx(0.13, abs=0.05)


def test_silence_does_not_depend_on_level_or_offset() -> None:
    loud = sound(quiet(0.2), vowel(0.5), quiet(0.3))
    soft = Sound(loud.samples * np.float32(0.1), RATE_HZ)
    shifted = Sound(loud.samples + np.float32(0.05), RATE_HZ)
    assert silence(soft).leading_s == silence(loud).leading_s == silence(shifted).leading_s


@pytest.mark.parametrize("samples", [0, 1, 100, 24_000])
def test_nothing_but_silence_leads(samples: int) -> None:
    found = silence(Sound(np.zeros(samples, np.float32), RATE_HZ))
    assert (found.leading_s, found.trailing_s, found.inner_s) == (samples / RATE_HZ, 0, 0)


def test_clipping_is_a_flat_top_not_a_touch() -> None:
    loud = vowel(0.5)
    loud = loud / np.abs(loud).max()
    assert clipped(sound(loud)) == 0
    cut = np.clip(4 * loud, -1, 1)
    assert clipped(sound(cut)) > 50


def test_offset_and_peak() -> None:
    assert dc_offset(sound(vowel(0.5) + 0.1)) == pytest.approx(0.1, abs=0.02)
    assert peak_db(sound(vowel(0.5, level=0.5))) == pytest.approx(-6.02, abs=0.01)


@pytest.mark.parametrize("rate_hz", [16_000, 24_000, 48_000])
def test_loudness_of_the_standards_test_tone(rate_hz: int) -> None:
    """ITU-R BS.1770: a 0 dB sine of 997 Hz in one channel reads -3.01."""
    tone = np.sin(2 * np.pi * 997 * np.arange(3 * rate_hz) / rate_hz)
    assert loudness_lufs(sound(tone, rate_hz=rate_hz)) == pytest.approx(-3.01, abs=0.01)


def test_loudness_leaves_pauses_out() -> None:
    tone = 0.1 * np.sin(2 * np.pi * 997 * np.arange(2 * RATE_HZ) / RATE_HZ)
    alone, paused = loudness_lufs(sound(tone)), loudness_lufs(sound(tone, quiet(3), tone))
    assert paused == pytest.approx(alone, abs=0.6)
    assert loudness_lufs(sound(np.zeros(RATE_HZ))) == -np.inf


SPEECH = {
    "a vowel": (vowel(1.0),),
    "a high voice": (vowel(1.0, pitch_hz=260),),
    "a low voice": (vowel(1.0, pitch_hz=75),),
    "plosives": (*[part for seed in range(6) for part in (quiet(0.08), plosive(seed=seed), vowel(0.12))],),
    "a sibilant": (vowel(0.2), hiss(0.2), vowel(0.2)),
    "a hard onset": (quiet(0.3), vowel(0.5), quiet(0.3)),
    "silence": (np.zeros(RATE_HZ),),
    "too short to say": (vowel(0.01),),
}


@pytest.mark.parametrize("name", SPEECH)
def test_speech_does_not_click(name: str) -> None:
    assert clicks(sound(*SPEECH[name])) == []


@pytest.mark.parametrize("name", ["weasels.wav", "please_hold.wav"])
def test_recorded_speech_does_not_click(name: str) -> None:
    assert clicks(read_wav(DATA / name)) == []


def stray(x: np.ndarray, at: int) -> np.ndarray:
    x[at] += 0.25
    return x


def jump(x: np.ndarray, at: int) -> np.ndarray:
    x[at:] += 0.2 * np.exp(-np.arange(len(x) - at) / 300)
    return x


@pytest.mark.parametrize("plant", [stray, jump])
@pytest.mark.parametrize("where", ["in a pause", "in a vowel"])
def test_planted_click_is_found(plant: Callable[..., np.ndarray], where: str) -> None:
    clean = np.concatenate([vowel(0.5), quiet(0.2), vowel(0.5)])
    seconds = 0.6 if where == "in a pause" else 0.2523
    found = clicks(sound(plant(clean.copy(), round(seconds * RATE_HZ))))
    assert found == [pytest.approx(seconds, abs=0.001)]


def test_clicks_are_found_in_recorded_speech() -> None:
    spoken = read_wav(DATA / "weasels.wav")
    found, planted = 0, np.linspace(0.2, 2.7, 21)
    for seconds in planted:
        at = round(float(seconds) * spoken.rate_hz)
        x = stray(spoken.samples.copy(), at)
        found += any(abs(c - seconds) < 0.002 for c in clicks(Sound(x, spoken.rate_hz)))
    assert found >= 0.75 * len(planted)
