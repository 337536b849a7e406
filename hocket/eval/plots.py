"""Pictures of a result: word errors, length against text, silence.

matplotlib comes with the extra `hocket[eval]` and is imported only to draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hocket.eval.judge import Utterance
from hocket.eval.normal import syllables
from hocket.eval.result import Result
from hocket.results import check_plots, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SPOKEN, _TEACHER, _BAD = "#1f6f8b", "#d98324", "#c8453b"


def draw(result: Result, folder: Path) -> list[Path]:
    """Write the pictures of `result`. -> their paths"""
    check_plots("eval")
    from matplotlib.figure import Figure  # an optional dependency

    spoken = [u for u in result.utterances if not u.failure]
    teacher = [u for u in result.teacher if not u.failure]
    if not spoken:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in (("errors", _errors), ("length", _length), ("silence", _silence)):
        if name == "errors" and all(u.heard is None for u in spoken):
            continue
        figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
        picture(figure, spoken, teacher)
        path = folder / f"eval-{name}.png"
        figure.savefig(path, metadata={"Software": None})
        paths.append(path)
    return paths


def _series(spoken: list[Utterance], teacher: list[Utterance]) -> list[tuple[str, str, list[Utterance]]]:
    both = [("spoken", _SPOKEN, spoken), ("teacher", _TEACHER, teacher)]
    return [one for one in both if one[2]]


def _errors(figure: Figure, spoken: list[Utterance], teacher: list[Utterance]) -> None:
    """How many utterances have how many errors, and errors against length: long texts must not be worse."""
    left, right = figure.subplots(1, 2)
    series = [
        (n, c, [u for u in us if u.heard is not None and u.words]) for n, c, us in _series(spoken, teacher)
    ]
    most = max(max((100 * u.wer for u in us), default=0.0) for _, _, us in series)
    edges = np.linspace(0, max(20.0, min(most, 150.0)), 21)
    for at, (name, colour, us) in enumerate(series):
        share, _ = np.histogram([min(100 * u.wer, edges[-1]) for u in us], edges)
        width = np.diff(edges)[0] / (len(series) + 0.3)
        left.bar(edges[:-1] + (at + 0.5) * width, share / len(us), width, color=colour, label=name)
        right.scatter(
            [u.words for u in us], [100 * u.wer for u in us], 14, color=colour, label=name, alpha=0.7
        )
    left.set_title("Word errors of an utterance", loc="left", fontsize=10)
    right.set_title("Word errors against length", loc="left", fontsize=10)
    plain(left, "%, those beyond in the last bar" if most > edges[-1] else "%", "share of utterances")
    plain(right, "words written", "%")
    right.set_ylim(bottom=-0.02 * max(most, 20))
    left.legend(frameon=False, fontsize=8)


def _length(figure: Figure, spoken: list[Utterance], teacher: list[Utterance]) -> None:
    """Seconds against text, and the rate of speech: a missed end or a lost part stands out."""
    left, right = figure.subplots(1, 2)
    for name, colour, us in reversed(_series(spoken, teacher)):
        left.scatter(
            [syllables(u.text) for u in us], [u.seconds for u in us], 14, color=colour, label=name, alpha=0.7
        )
    bad = [u for u in spoken if u.missed_end]
    if bad:
        xy = [syllables(u.text) for u in bad], [u.seconds for u in bad]
        left.scatter(*xy, 60, facecolors="none", edgecolors=_BAD, label="missed end")
    rates = [
        (n, c, [u.syllables_per_s for u in us if u.syllables_per_s]) for n, c, us in _series(spoken, teacher)
    ]
    every = [rate for _, _, values in rates for rate in values]
    if every:
        edges = np.linspace(0, max(8.0, 1.02 * max(every)), 25)
        for name, colour, values in rates:
            right.hist(values, edges, color=colour, alpha=0.6, label=name)
    left.set_title("Length", loc="left", fontsize=10)
    right.yaxis.get_major_locator().set_params(integer=True)
    right.set_title("Rate of speech without the silence around it", loc="left", fontsize=10)
    plain(left, "syllables written, about", "s")
    plain(right, "syllables a second", "utterances")
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)


def _silence(figure: Figure, spoken: list[Utterance], teacher: list[Utterance]) -> None:
    """Share of utterances whose silence is at most x."""
    panels = figure.subplots(1, 3, sharey=True)
    titles = {"leading_s": "Silence before", "inner_s": "Longest inside", "trailing_s": "Silence after"}
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for at, (label, colour, us) in enumerate(_series(spoken, teacher)):
            values = np.sort([1000 * getattr(u, name) for u in us])
            width = 4 - 2.5 * at  # where both are equal, the wide line is seen under the narrow one
            axes.step(
                values,
                np.arange(1, len(values) + 1) / len(values),
                where="post",
                color=colour,
                label=label,
                linewidth=width,
            )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        plain(axes, "ms", "share of utterances" if axes is panels[0] else "")
    panels[-1].legend(frameon=False, fontsize=8, loc="lower right")
