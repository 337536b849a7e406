"""Two results side by side: differences, and how far chance alone would take them.

An interval comes from a bootstrap over time: the steady window is cut into equal blocks, blocks are drawn
again with replacement, and the figure is computed from what they hold. Neighbouring requests share batches
and are not independent; drawing blocks, not requests, keeps an interval from being too narrow. What it
cannot know is how much two runs of the same server differ: a change below `RUN_TO_RUN` is at best a maybe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hocket.bench.metrics import BLOCKS, CONTINUOUS_S, Floats
from hocket.bench.result import LevelResult, Result
from hocket.errors import InvalidRequest

DRAWS = 1000
RUN_TO_RUN = 0.1  # two runs of one server on one machine often differ by as much
RUN_TO_RUN_SHARE = 0.01
_FEWEST = 8  # requests for an interval to mean anything


@dataclass(slots=True, frozen=True)
class Row:
    level: str
    figure: str
    before: float
    after: float
    change: float  # of the relative value; for a share, in points
    low: float  # 95 % interval of `change`
    high: float
    verdict: str  # better, worse, either with maybe, within noise, too few


@dataclass(slots=True, frozen=True)
class _Figure:
    name: str
    of: Callable[[Floats], float]
    column: str  # of `Columns`, or a block total
    more_is_better: bool = False
    share: bool = False


def _rank(q: float) -> Callable[[Floats], float]:
    return lambda values: float(np.percentile(values, q, method="nearest"))


def _mean(values: Floats) -> float:
    return float(values.mean())


FIGURES = (
    _Figure("audio-s/s", _mean, "block_audio_s", more_is_better=True),
    _Figure("req/s", _mean, "block_ended", more_is_better=True),
    _Figure("TTFP mean, ms", _mean, "ttfp_s"),
    _Figure("TTFP P50, ms", _rank(50), "ttfp_s"),
    _Figure("TTFP P99, ms", _rank(99), "ttfp_s"),
    _Figure("smooth start mean, ms", _mean, "smooth_start_s"),
    _Figure("smooth start P99, ms", _rank(99), "smooth_start_s"),
    _Figure("end to end mean, ms", _mean, "e2e_s"),
    _Figure("RTF mean", _mean, "rtf"),
    _Figure("continuity", _mean, "continuous", more_is_better=True, share=True),
)


def compare(before: Result, after: Result, *, seed: int = 0) -> list[Row]:
    """A row for each figure of each level that both have. Raises InvalidRequest if they share none."""
    theirs = {(level.kind, level.load): level for level in after.levels}
    rows = []
    for level in before.levels:
        other = theirs.get((level.kind, level.load))
        if other is not None:
            rows += _rows(level, other, np.random.default_rng(seed))
    if not rows:
        names = [", ".join(level.name for level in r.levels) or "none" for r in (before, after)]
        raise InvalidRequest(f"the results share no level: {names[0]} in the first, {names[1]} in the second")
    return rows


def differences(before: Result, after: Result) -> list[str]:
    """What was asked for differently, which a difference of figures may come from."""
    keys = [key for key in before.work if key not in ("url", "timeout_s")]
    found = [
        f"{key}: {before.work[key]} and {after.work.get(key)}"
        for key in keys
        if before.work[key] != after.work.get(key)
    ]
    for key in ("processor", "gpus"):
        if before.machine.get(key) != after.machine.get(key):
            found.append(f"{key}: {before.machine.get(key)} and {after.machine.get(key)}")
    return found


def _rows(a: LevelResult, b: LevelResult, rng: np.random.Generator) -> list[Row]:
    sides = [_Side(a), _Side(b)]
    if min(side.requests for side in sides) == 0:
        return []
    enough = all(side.requests >= _FEWEST for side in sides)
    draws = [[side.figures(rng.integers(0, BLOCKS, BLOCKS)) for side in sides] for _ in range(DRAWS * enough)]
    values = [side.figures(np.arange(BLOCKS)) for side in sides]
    rows = []
    for n, figure in enumerate(FIGURES):
        before, after = values[0][n], values[1][n]
        change = _change(figure, before, after)
        low = high = float("nan")
        verdict = "too few"
        if enough:
            changes = [_change(figure, one[n], two[n]) for one, two in draws]
            low, high = (float(v) for v in np.nanpercentile(changes, (2.5, 97.5)))
            if low <= 0 <= high:
                verdict = "within noise"
            else:
                verdict = "better" if (change > 0) == figure.more_is_better else "worse"
                if abs(change) < (RUN_TO_RUN_SHARE if figure.share else RUN_TO_RUN):
                    verdict = f"maybe {verdict}"
        scale = 1000 if figure.name.endswith(", ms") else 1
        rows.append(Row(a.name, figure.name, before * scale, after * scale, change, low, high, verdict))
    return rows


def _change(figure: _Figure, before: float, after: float) -> float:
    if figure.share:
        return after - before
    return after / before - 1 if before else float("nan")


class _Side:
    """One result's level, its requests sorted into the blocks of its window."""

    def __init__(self, level: LevelResult) -> None:
        window, table = level.steady.window, level.requests
        due = table.array("due_s")
        length = max(window.length_s, 1e-9) / BLOCKS
        block = np.clip((due - window.start_s) // length, 0, BLOCKS - 1)
        inside = (due >= window.start_s) & (due <= window.end_s)
        self.requests = int(inside.sum())
        self._members = [np.flatnonzero(inside & (block == n)) for n in range(BLOCKS)]
        self._per_request = {
            "ttfp_s": table.array("ttfp_s"),
            "smooth_start_s": table.array("smooth_start_s"),
            "e2e_s": table.array("e2e_s"),
            "rtf": table.array("e2e_s") / np.maximum(table.array("audio_s"), 1e-9),
            "continuous": (table.array("silence_s") <= CONTINUOUS_S).astype(np.float64),
        }
        self._per_block = {
            "block_audio_s": np.asarray(level.block_audio_s) / length,
            "block_ended": np.asarray(level.block_ended) / length,
        }

    def figures(self, chosen: np.ndarray) -> list[float]:
        members = np.concatenate([self._members[n] for n in chosen])
        found = []
        for figure in FIGURES:
            if figure.column in self._per_block:
                found.append(figure.of(self._per_block[figure.column][chosen]))
            else:
                values = self._per_request[figure.column][members]
                found.append(figure.of(values) if len(values) else float("nan"))
        return found
