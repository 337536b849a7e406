"""Speech made faster or slower at the same pitch, as a stream.

Overlap-add of half-overlapping windows, each taken where the sound best continues what was last written:
WSOLA (Verhelst and Roelands, ICASSP 1993, doi:10.1109/ICASSP.1993.319366).
"""

from __future__ import annotations

import numpy as np

from hocket.audio.wav import Samples

# A window holds two periods of a low voice (67 Hz); the search reaches over one period of all but the lowest.
_WINDOW_S = 0.03
_SEARCH_S = 0.008

_NONE = np.zeros(0, np.float32)


class Stretch:
    """Converts one stream of mono sound to `speed` times its tempo; one object serves one stream.

    Where the chunks are cut changes nothing. Output lags by 53 ms of input, and `finish` gives the
    rest: n samples become round(n / speed) in all. Speed 1 passes through.

        input    ....[  window k-1  ]....        at about k * hop * speed, moved by up to `search`
                           [  window k  ]....
        output   [  window k-1  ]                at k * hop exactly; neighbours overlap by half
                        [  window k  ]
    """

    def __init__(self, rate_hz: int, speed: float) -> None:
        self.speed = speed
        self._hop = round(rate_hz * _WINDOW_S / 2)
        self._search = round(rate_hz * _SEARCH_S)
        # Periodic Hann: half-overlapping copies add up to 1.
        rise = 0.5 - 0.5 * np.cos(np.pi * np.arange(self._hop) / self._hop)
        self._rise: Samples = rise.astype(np.float32)
        self._input = _NONE  # from sample `_start` of the stream on
        self._start = 0
        self._received = 0
        self._written = 0
        self._frame = 0  # number of the next window
        self._last = 0  # where in the input the last window was taken
        self._tail = _NONE  # its second half, not yet written

    def process(self, chunk: Samples) -> Samples:
        """The output that is ready after `chunk`. float32 [n] of any n -> float32 [m], m may be 0."""
        if self.speed == 1:
            return chunk
        self._received += len(chunk)
        self._input = np.concatenate([self._input, chunk])
        return self._write(self._received)

    def finish(self) -> Samples:
        """The rest of the output, float32 [m]; the stream ends here."""
        if self.speed == 1:
            return _NONE
        wanted = round(self._received / self.speed)
        end = max(self._received, self._reach(wanted // self._hop))
        self._input = np.concatenate([self._input, np.zeros(end - self._received, np.float32)])
        missing = wanted - self._written
        return self._write(end)[:missing]

    def _reach(self, frame: int) -> int:
        """Samples of input that window `frame` needs: what choosing it may look at, the last window's
        continuation included, and what its hop of output stands for."""
        return max(self._place(frame) + self._search + 3 * self._hop, self._place(frame + 1))

    def _place(self, frame: int) -> int:
        """Where in the input the speed asks for window `frame`."""
        return round(frame * self._hop * self.speed)

    def _write(self, available: int) -> Samples:
        """The output of all windows that `available` samples of input allow."""
        made = []
        while self._reach(self._frame) <= available:
            made.append(self._next())
        keep = min(self._last + self._hop, self._place(self._frame) - self._search)
        if keep > self._start:
            self._input, self._start = self._input[keep - self._start :], keep
        output = np.concatenate(made) if made else _NONE
        self._written += len(output)
        return output

    def _next(self) -> Samples:
        """One hop of output: the second half of the last window under the first half of the next."""
        at = self._best() if self._frame else 0
        window = self._input[at - self._start : at - self._start + 2 * self._hop]
        first, second = window[: self._hop], window[self._hop :]
        output = first if self._frame == 0 else self._tail + first * self._rise
        self._tail = second * (1 - self._rise)
        self._last = at
        self._frame += 1
        return output

    def _best(self) -> int:
        """Where, around the place that the speed asks for, the sound is most like what follows the last
        window."""
        width = 2 * self._hop
        place = self._place(self._frame)
        low, high = max(0, place - self._search), place + self._search
        follow = self._last + self._hop - self._start
        wanted = self._input[follow : follow + width]
        around = self._input[low - self._start : high + width - self._start].astype(np.float64)
        likeness = np.correlate(around, wanted.astype(np.float64), "valid")
        energy = np.cumsum(np.concatenate([[0.0], around * around]))
        # The small constant keeps silence from being searched by rounding errors.
        return low + int(np.argmax(likeness / np.sqrt(energy[width:] - energy[:-width] + 1e-6)))
