"""Sample-rate conversion with soxr's HQ filter, whole or as a stream; both give the same samples."""

from __future__ import annotations

import numpy as np
import soxr

from hocket.audio.wav import Samples


class Resampler:
    """Converts one stream of mono sound from `rate` to `target` Hz; one object serves one stream.

    The filter's state lives here, so chunks join without a seam. Output lags by up to 42 ms of sound (75 ms
    for ratios of three), which `finish` returns. Equal rates pass samples through.
    """

    def __init__(self, rate: int, target: int) -> None:
        self._soxr = None if rate == target else soxr.ResampleStream(rate, target, 1, "float32", "HQ")

    def process(self, chunk: Samples) -> Samples:
        """The output that is ready after `chunk`. float32 [n] of any n -> float32 [m], m may be 0."""
        return self._run(chunk, last=False)

    def finish(self) -> Samples:
        """The rest of the output, float32 [m]; the stream ends here, and is called once."""
        return self._run(np.zeros(0, np.float32), last=True)

    def _run(self, chunk: Samples, last: bool) -> Samples:
        if self._soxr is None:
            return chunk
        made: Samples = self._soxr.resample_chunk(chunk, last)
        return made


def resample(samples: Samples, rate: int, target: int) -> Samples:
    """All of `samples` at `target` Hz. float32 [n] -> float32 [round(n * target / rate)].

    Same filter as librosa's default `soxr_hq`.
    """
    if rate == target:
        return samples
    made: Samples = soxr.resample(samples, rate, target, "HQ")
    return made
