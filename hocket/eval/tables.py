"""A result as tables for a terminal: totals, the teacher's beside them, and the worst utterances."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from hocket.eval.judge import Utterance
from hocket.eval.result import Result, Totals

_Cell = Callable[[Totals], str]


def totals_table(columns: Sequence[tuple[str, Totals]]) -> Table:
    """Totals side by side, one column each."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, of in _LINES:
        cells = [of(found) for _, found in columns]
        if any(cells):
            table.add_row(name, *cells)
    return table


def result_columns(result: Result) -> list[tuple[str, Totals]]:
    """The columns of a result: what was spoken, and its teacher if there was one."""
    columns = [("spoken", result.totals)]
    return columns if result.teacher_totals is None else [*columns, ("teacher", result.teacher_totals)]


def _rate(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _wer(t: Totals) -> str:
    return f"{_rate(t.wer)} ({100 * (t.wer_low or 0):.1f} – {_rate(t.wer_high)})" if t.wer is not None else ""


def _kinds(t: Totals) -> str:
    return f"{t.substituted} / {t.inserted} / {t.deleted}" if t.wer is not None else ""


def _pair(one: str, two: str, form: str) -> _Cell:
    def cell(t: Totals) -> str:
        values = [getattr(t, name) for name in (one, two)]
        return "" if None in values else " / ".join(format(value, form) for value in values)

    return cell


def _count(name: str) -> _Cell:
    return lambda t: str(getattr(t, name)) if t.utterances > t.failures else ""


def _silences(t: Totals) -> str:
    if t.leading_s is None:
        return ""
    return f"{t.leading_s:.2f} / {t.trailing_s:.2f} / {t.inner_s:.2f} / {t.silence_most_s:.2f}"


_LINES: tuple[tuple[str, _Cell], ...] = (
    ("utterances", lambda t: str(t.utterances)),
    ("failures", lambda t: str(t.failures)),
    ("seconds of sound", lambda t: f"{t.seconds:,.1f}"),
    ("word errors (95 % interval)", _wer),
    ("  substituted / inserted / deleted", _kinds),
    ("  utterances with any", lambda t: _rate(t.wrong_utterances, 0)),
    ("similarity mean / least", _pair("similarity", "similarity_least", ".3f")),
    ("words / syllables a second", _pair("words_per_s", "syllables_per_s", ".2f")),
    ("silence before / after / inner / most, s", _silences),
    ("length over expected mean / most", _pair("length_ratio", "length_ratio_most", ".2f")),
    ("missed ends", lambda t: str(t.missed_ends)),
    ("utterances that repeat words", _count("looped")),
    ("utterances that leave words out", _count("dropped")),
    ("utterances with clicks", _count("clicking")),
    ("utterances that clip", _count("clipping")),
    ("loudness mean / spread, LUFS", _pair("loudness_lufs", "loudness_spread", ".1f")),
    ("DC offset, most", lambda t: "" if t.dc_offset_most is None else f"{t.dc_offset_most:.4f}"),
)


def worst_table(utterances: Sequence[Utterance]) -> Table:
    """What is wrong with each, and what was heard with its errors marked."""
    table = Table(box=None, header_style="bold", pad_edge=False, show_edge=False)
    table.add_column("worst", no_wrap=True)
    table.add_column("errors", justify="right", no_wrap=True)
    table.add_column("also", no_wrap=True)
    key = Text("heard: [written→heard], [+inserted], [−left out]")
    table.add_column(key, overflow="fold")
    for one in utterances:
        name = one.name if one.seed is None else f"{one.name} seed {one.seed}"
        errors = "" if one.heard is None else f"{one.errors} of {one.words}"
        text = one.failure or _shortened(one.aligned or one.text)
        table.add_row(name, errors, ", ".join(faults(one)), Text(text))
    return table


def faults(one: Utterance) -> list[str]:
    """What is wrong with an utterance besides misheard words, each in a word or three."""
    found = []
    if one.failure:
        found.append("failed")
    if one.missed_end:
        found.append(
            {
                "limit": "cut by a limit",
                "long": f"{one.length_ratio:.1f} × too long",
                "after": f"{one.after_s:.1f} s of noise behind",
            }[one.missed_end]
        )
    if one.looped:
        found.append(f"repeats {one.looped}")
    if one.dropped:
        found.append(f"leaves out {one.dropped}")
    if one.clicks:
        found.append(f"{len(one.clicks)} click{'s' * (len(one.clicks) > 1)}")
    if one.clipped:
        found.append("clips")
    return found


def _shortened(text: str, most: int = 240) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
