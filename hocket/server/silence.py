"""Silence at the end of speech: held back until it is known whether anything follows.

A model that misses its end goes on in silence, or in noise. What it should not have said cannot be unsent,
but silence can wait: up to a second passes at once, the rest only when speech comes again.
"""

from __future__ import annotations

import numpy as np

from hocket.audio.wav import Samples

LEVEL = 1e-3  # -60 dBFS: what stays below is silence
PASSED_S = 1.0  # silence that is part of speech

_NONE = np.zeros(0, np.float32)


class SilenceGate:
    """Passes one stream of mono sound on, and holds back silence after speech past `PASSED_S`.

    With `stop_ms` the stream ends where that much silence has followed speech: `ended` is then True, and
    the rest is dropped. Silence before any speech passes. Where the chunks are cut changes nothing in what
    comes out in the end.
    """

    def __init__(self, rate_hz: int, stop_ms: int | None = None) -> None:
        self.ended = False
        self._passed = int(PASSED_S * rate_hz)
        self._stop = None if stop_ms is None else max(1, stop_ms * rate_hz // 1000)
        self._held: list[Samples] = []
        self._spoken = False
        self._silent = 0  # samples of silence since the last speech, held ones included

    def process(self, samples: Samples) -> Samples:
        """float32 [n] -> float32 [m]: what may be heard now."""
        if self.ended:
            return _NONE
        loud = np.flatnonzero(np.abs(samples) >= LEVEL)
        if self._stop is not None:
            cut = self._end(loud, len(samples))
            if cut is not None:
                self.ended = True
                samples, loud = samples[:cut], loud[loud < cut]
        if not len(loud):
            return self._hold(samples) if self._spoken else samples
        self._spoken = True
        speech = [*self._held, samples[: loud[-1] + 1]]
        self._held, self._silent = [], 0
        return np.concatenate([*speech, self._hold(samples[loud[-1] + 1 :])])

    def finish(self, *, missed_end: bool) -> Samples:
        """What was held; nothing if the model missed its end, since it is then not part of the speech."""
        held = [] if missed_end else self._held
        self._held = []
        return np.concatenate(held) if held else _NONE

    def _end(self, loud: np.ndarray, length: int) -> int | None:
        """The sample of this chunk at which silence after speech has lasted `stop`; None: it has not."""
        assert self._stop is not None
        starts = np.concatenate([[-self._silent] if self._spoken else [], loud + 1])  # of each silence
        ends = np.concatenate([loud if self._spoken else loud[1:], [length] if len(starts) else []])
        enough = np.flatnonzero(ends - starts >= self._stop)
        return int(starts[enough[0]]) + self._stop if len(enough) else None

    def _hold(self, silence: Samples) -> Samples:
        passed = max(0, self._passed - self._silent)
        self._silent += len(silence)
        if len(silence) > passed:
            self._held.append(silence[passed:])
        return silence[:passed]
