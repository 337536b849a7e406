"""Whose voice it is: the embedding of a speaker, and the cosine between two.

The network and its weights are Resemblyzer's (Apache-2.0; GE2E of Wan et al. 2018: three LSTM layers over
mel frames of 1.6 s). Only the file of weights is read from that package, and run here: its own code imports
librosa and a compiled voice detector for what are forty lines. Silence is left out by the level, where
Resemblyzer asks that detector; cosines differ from its own by at most 0.012 (version 0.1.4, 16 recordings).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hocket.errors import Unsupported
from hocket.eval.defects import sounding
from hocket.eval.sound import Sound

_RATE_HZ = 16_000
_WINDOW, _HOP, _MELS = 400, 160, 40  # 25 and 10 ms
_PART = 160  # frames that are heard at once
_STEP = round(_RATE_HZ / 1.3 / _HOP)  # frames from one part to the next
_COVERAGE = 0.75  # of a part that must be there for the last one to count
_LEVEL = 10 ** (-30 / 20)  # RMS that quieter sounds are raised to
_PAUSE = 18  # frames of 10 ms that are kept of a silence on either side
_REMEDY = (
    'similarity needs the weights in the package resemblyzer: pip install "hocket[eval]"; see docs/eval.md'
)


def check() -> Path:
    """Where the weights are. Raises Unsupported if the package is missing."""
    spec = importlib.util.find_spec("resemblyzer")
    if spec is None or spec.origin is None:
        raise Unsupported(_REMEDY, param="--reference-audio")
    return Path(spec.origin).parent / "pretrained.pt"


class Likeness:
    """Embeds voices. Embeddings are float32 [256] of length 1."""

    def __init__(self) -> None:
        import torch  # takes seconds

        state = torch.load(check(), map_location="cpu", weights_only=True)["model_state"]
        self._lstm = torch.nn.LSTM(_MELS, 256, 3, batch_first=True)
        self._linear = torch.nn.Linear(256, 256)
        for name, module in (("lstm.", self._lstm), ("linear.", self._linear)):
            module.load_state_dict({k.removeprefix(name): v for k, v in state.items() if k.startswith(name)})
        self._mel = mel_filters(_RATE_HZ, _WINDOW, _MELS)

    def embed(self, sound: Sound) -> np.ndarray | None:
        """The voice of `sound`; None if it holds less than a tenth of a second that is not silence."""
        import torch  # loaded by now

        samples = _raised(without_pauses(sound))
        if len(samples) < _RATE_HZ // 10:
            return None
        starts = _starts(len(samples))
        samples = np.pad(samples, (0, max(0, (starts[-1] + _PART) * _HOP - len(samples))))
        mel = self._frames(samples)
        parts = torch.from_numpy(np.stack([mel[at : at + _PART] for at in starts]))
        with torch.no_grad():
            hidden = self._lstm(parts)[1][0][-1]
            found = torch.nn.functional.normalize(torch.relu(self._linear(hidden)), dim=1)
        return _unit(found.mean(dim=0).numpy())

    def _frames(self, samples: np.ndarray) -> np.ndarray:
        """Mel powers, float32 [frames, 40], without a logarithm; a frame is centred on its time."""
        padded = np.pad(samples, _WINDOW // 2)
        frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP]
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
        power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2
        return np.asarray(power @ self._mel.T, np.float32)


def mean_voice(voices: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The voice that several recordings share; None if there is none among them."""
    known = [voice for voice in voices if voice is not None]
    return _unit(np.mean(known, axis=0)) if known else None


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of the angle between two vectors [d], -1 to 1."""
    return float(a @ b)


def _unit(voice: np.ndarray) -> np.ndarray:
    return np.asarray(voice / max(float(np.linalg.norm(voice)), 1e-9))


def _raised(samples: np.ndarray) -> np.ndarray:
    rms = float(np.sqrt(np.mean(samples.astype(np.float64) ** 2))) if len(samples) else 0.0
    return samples * np.float32(_LEVEL / rms) if 0 < rms < _LEVEL else samples


def without_pauses(sound: Sound) -> np.ndarray:
    """The samples at 16 kHz without what is further than 180 ms from any sound."""
    sound = Sound(sound.at(_RATE_HZ), _RATE_HZ)
    loud = sounding(sound)
    near = np.convolve(loud, np.ones(2 * _PAUSE + 1), "same")[: len(loud)] > 0.5 if len(loud) else loud
    return sound.samples[np.repeat(near, _RATE_HZ // 100)[: len(sound.samples)]]


def _starts(samples: int) -> list[int]:
    """The first frames of the parts in which so many samples are heard."""
    frames = -(-(samples + 1) // _HOP)
    starts = list(range(0, max(1, frames - _PART + _STEP + 1), _STEP))
    if len(starts) > 1 and (samples - starts[-1] * _HOP) / (_PART * _HOP) < _COVERAGE:
        starts.pop()
    return starts


def mel_filters(rate_hz: int, window: int, mels: int) -> np.ndarray:
    """Triangles of area 1 on Slaney's mel scale, float64 [mels, window / 2 + 1], as librosa makes them."""

    def to_mel(hz: float) -> float:
        return hz * 3 / 200 if hz < 1000 else 15 + 27 * np.log(hz / 1000) / np.log(6.4)

    def to_hz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))

    edges = to_hz(np.linspace(to_mel(0.0), to_mel(rate_hz / 2), mels + 2))
    hz = np.fft.rfftfreq(window, 1 / rate_hz)
    rise = (hz - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - hz) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))[:, None]
