"""A result: what was judged, how, and what came of it; its totals; and gates on them."""

from __future__ import annotations

import datetime
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hocket import results
from hocket.eval.judge import Utterance

SCHEMA = "hocket-eval/1"
_DRAWS = 2000  # of the bootstrap
_ROUNDING = 0.001  # of full scale


class Totals(msgspec.Struct):
    """Of the utterances that were spoken. None where nothing was measured.

    Shares and rates are fractions; `low` and `high` bound the 95 % interval of the word error rate.
    """

    utterances: int = 0
    failures: int = 0
    seconds: float = 0.0
    words: int = 0
    substituted: int = 0
    inserted: int = 0
    deleted: int = 0
    wer: float | None = None
    wer_low: float | None = None
    wer_high: float | None = None
    wrong_utterances: float | None = None  # share with any error
    similarity: float | None = None
    similarity_least: float | None = None
    words_per_s: float | None = None
    syllables_per_s: float | None = None
    leading_s: float | None = None  # medians
    trailing_s: float | None = None
    inner_s: float | None = None
    silence_most_s: float | None = None
    length_ratio: float | None = None
    length_ratio_most: float | None = None
    missed_ends: int = 0
    looped: int = 0  # utterances, here and below
    dropped: int = 0
    clicking: int = 0
    clipping: int = 0
    loudness_lufs: float | None = None
    loudness_spread: float | None = None
    dc_offset_most: float | None = None


class Verdict(msgspec.Struct):
    """A gate: its option, its limit and the figure in the option's unit; None: nothing was measured."""

    gate: str
    limit: float
    value: float | None
    holds: bool
    told: str


class Result(msgspec.Struct):
    schema: str
    created: str
    command: str
    hocket: str
    machine: dict[str, Any]
    target: dict[str, Any]
    asked: dict[str, Any]
    interrupted: bool = False
    totals: Totals = msgspec.field(default_factory=Totals)
    teacher_totals: Totals | None = None
    gates: list[Verdict] = []
    utterances: list[Utterance] = []
    teacher: list[Utterance] = []


def new_result(
    command: Sequence[str], version: str, target: dict[str, Any], asked: Mapping[str, Any]
) -> Result:
    """A result without utterances; `version` is this program's."""
    return Result(
        schema=SCHEMA,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        command=results.command_line(command),
        hocket=version,
        machine={"system": platform.platform(), "python": sys.version.split()[0]},
        target=target,
        asked=dict(asked),
    )


def totals(utterances: Sequence[Utterance]) -> Totals:
    """The figures of all utterances together; rates are over those that succeeded."""
    good = [u for u in utterances if not u.failure]
    found = Totals(
        utterances=len(utterances),
        failures=len(utterances) - len(good),
        missed_ends=sum(bool(u.missed_end) for u in utterances),
    )
    if not good:
        return found
    found.seconds = sum(u.seconds for u in good)
    found.looped, found.dropped = sum(bool(u.looped) for u in good), sum(bool(u.dropped) for u in good)
    found.clicking, found.clipping = sum(bool(u.clicks) for u in good), sum(bool(u.clipped) for u in good)
    heard = [u for u in good if u.heard is not None and u.words]
    if heard:
        _words(found, heard)
    alike = [u.similarity for u in good if u.similarity is not None]
    if alike:
        found.similarity, found.similarity_least = float(np.mean(alike)), min(alike)
    loud = [u.loudness_lufs for u in good if u.loudness_lufs is not None]
    if loud:
        found.loudness_lufs, found.loudness_spread = float(np.mean(loud)), float(np.std(loud))
    for name in ("words_per_s", "syllables_per_s"):
        rates = [value for u in good if (value := getattr(u, name))]
        setattr(found, name, float(np.mean(rates)) if rates else None)
    for name in ("leading_s", "trailing_s", "inner_s"):
        setattr(found, name, float(np.median([getattr(u, name) for u in good])))
    found.silence_most_s = max(max(u.leading_s, u.trailing_s, u.inner_s) for u in good)
    ratios = [u.length_ratio for u in good if not math.isnan(u.length_ratio)]
    if ratios:
        found.length_ratio, found.length_ratio_most = float(np.mean(ratios)), max(ratios)
    found.dc_offset_most = max(abs(u.dc_offset) for u in good)
    return found


def _words(found: Totals, heard: Sequence[Utterance]) -> None:
    """Errors over words of all utterances together; the interval by drawing utterances again."""
    found.words = sum(u.words for u in heard)
    found.substituted = sum(u.substituted for u in heard)
    found.inserted = sum(u.inserted for u in heard)
    found.deleted = sum(u.deleted for u in heard)
    errors, words = np.array([u.errors for u in heard]), np.array([u.words for u in heard])
    found.wer = float(errors.sum() / words.sum())
    drawn = np.random.default_rng(0).integers(len(heard), size=(_DRAWS, len(heard)))
    rates = errors[drawn].sum(axis=1) / words[drawn].sum(axis=1)
    found.wer_low, found.wer_high = (float(v) for v in np.percentile(rates, [2.5, 97.5]))
    found.wrong_utterances = float((errors > 0).mean())


def worst(utterances: Sequence[Utterance], count: int = 10) -> list[Utterance]:
    """Those with something wrong, the worst first: not spoken, without end, then by errors."""

    def badness(u: Utterance) -> tuple[Any, ...]:
        wer = 0.0 if math.isnan(u.wer) else u.wer
        return bool(u.failure), bool(u.missed_end), wer, u.looped, len(u.clicks), u.clipped

    wrong = [u for u in utterances if any(badness(u))]
    return sorted(wrong, key=badness, reverse=True)[:count]


# --- gates -------------------------------------------------------------------------------------


class _Gate(NamedTuple):
    of: Callable[[Totals], float | None]
    least: bool = False  # the limit is a lower bound
    unit: str = ""
    scale: float = 1.0  # from the figure to the option's unit


_GATES = {
    "--max-wer": _Gate(lambda t: t.wer, unit=" %", scale=100.0),
    "--min-similarity": _Gate(lambda t: t.similarity, least=True),
    "--max-missed": _Gate(lambda t: t.missed_ends),
    "--max-length-ratio": _Gate(lambda t: t.length_ratio_most),
    "--max-clicking": _Gate(lambda t: t.clicking),
    "--max-clipping": _Gate(lambda t: t.clipping),
    "--max-looped": _Gate(lambda t: t.looped),
    "--max-dropped": _Gate(lambda t: t.dropped),
    "--max-failures": _Gate(lambda t: t.failures),
}


def judge_gates(totals: Totals, limits: Mapping[str, float | None]) -> list[Verdict]:
    """Each gate that was set: its figure, and whether it holds. A figure that nobody measured does not."""
    found = []
    for option, limit in limits.items():
        if limit is None:
            continue
        gate = _GATES[option]
        value = gate.of(totals)
        if value is None or (totals.utterances == totals.failures and option != "--max-failures"):
            value, holds, shown = None, False, "nothing was measured"
        else:
            value *= gate.scale
            holds = value >= limit if gate.least else value <= limit
            shown = f"{value:.4g}{gate.unit}"
        told = f"{shown}, {'least' if gate.least else 'most'} {limit:g}{gate.unit}"
        found.append(Verdict(option, limit, value, holds, told))
    return found


# --- two results -------------------------------------------------------------------------------


def same_sounds(one: Result, two: Result) -> tuple[int, int]:
    """How many utterances both have, and how many of them sound alike.

    Equal codes give sounds that differ by rounding (a batch is summed in another order, by up to 1e-4 of full
    scale); other codes change the level of some tenth of a second by much more than `_ROUNDING`.
    """
    other = {(u.name, u.seed): u for u in two.utterances if not u.failure}
    both = [(u, other[u.name, u.seed]) for u in one.utterances if not u.failure and (u.name, u.seed) in other]
    return len(both), sum(_alike(a, b) for a, b in both)


def _alike(a: Utterance, b: Utterance) -> bool:
    if abs(a.seconds - b.seconds) > 1e-3 or len(a.envelope) != len(b.envelope):
        return False
    return bool(np.allclose(a.envelope, b.envelope, rtol=0, atol=_ROUNDING))


def wer_change(one: Result, two: Result) -> tuple[float, float, float] | None:
    """The word error rate of `two` less that of `one` over the utterances of both, and its 95 % interval."""
    other = {(u.name, u.seed): u for u in two.utterances if u.heard is not None}
    pairs = [
        (u, other[u.name, u.seed])
        for u in one.utterances
        if u.heard is not None and (u.name, u.seed) in other
    ]
    if not pairs:
        return None
    table = np.array([(a.errors, a.words, b.errors, b.words) for a, b in pairs], float)

    def change(rows: np.ndarray) -> Any:
        sums = rows.sum(axis=-2)
        return sums[..., 2] / sums[..., 3] - sums[..., 0] / sums[..., 1]

    drawn = np.random.default_rng(0).integers(len(pairs), size=(_DRAWS, len(pairs)))
    low, high = np.percentile(change(table[drawn]), [2.5, 97.5])
    return float(change(table)), float(low), float(high)


def load(path: Path) -> Result:
    """The result in `path`. Raises InvalidRequest if it holds none."""
    return results.load(path, Result, SCHEMA)
