"""Pictures of a result: latency distributions, throughput over load, packets against playback.

matplotlib comes with the extra `hocket[bench]` and is imported only to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.bench.metrics import AUDIBLE_S
from hocket.bench.result import LevelResult, Packets, Result
from hocket.results import check_plots, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_WAIT, _PLAY, _SILENCE, _PACKET = "#c9ced6", "#7fb3a6", "#c8453b", "#22313f"
_LINES = ("#1f6f8b", "#d98324")  # two series of one panel, told apart by those who see no colour as well


def draw(result: Result, folder: Path) -> list[Path]:
    """Write the pictures of `result`. -> their paths"""
    check_plots("bench")
    from matplotlib.figure import Figure  # an optional dependency

    levels = [level for level in result.levels if level.steady.requests]
    if not levels:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in (("latency", _latency), ("throughput", _throughput), ("waterfall", _waterfall)):
        figure = Figure(dpi=150, layout="constrained")
        picture(figure, levels)
        path = folder / f"bench-{name}.png"
        figure.savefig(path, metadata={"Software": None})
        paths.append(path)
    return paths


def _scale(axis: Axis, values: Sequence[np.ndarray]) -> None:
    """From zero where all of it can be seen so, in powers where not."""
    from matplotlib.ticker import LogLocator, NullLocator  # an optional dependency

    every = np.concatenate([np.asarray(v, np.float64) for v in values])
    axes = axis.axes
    across = axis is axes.xaxis
    limits, scale = (axes.set_xlim, axes.set_xscale) if across else (axes.set_ylim, axes.set_yscale)
    if every.max() < 8 * every.min():
        limits(0, 1.08 * every.max())
    else:
        scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        limits(every.min() / 1.2, 1.2 * every.max())
    axis.set_major_formatter("{x:g}")


def _shades(count: int) -> Any:
    from matplotlib import colormaps  # an optional dependency

    return colormaps["viridis"](np.linspace(0.05, 0.85, count))


def _latency(figure: Figure, levels: list[LevelResult]) -> None:
    """Share of requests whose wait was at most x."""
    figure.set_size_inches(9, 3.6)
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for axes, column, title in zip(
        panels, ("ttfp_s", "smooth_start_s"), ("Time to first packet", "Smooth start"), strict=True
    ):
        for level, shade in zip(levels, _shades(len(levels)), strict=True):
            values = np.sort(1000 * _inside(level, column))
            axes.step(
                values,
                np.arange(1, len(values) + 1) / len(values),
                where="post",
                color=shade,
                label=level.name,
            )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(0, 1.02)
        plain(axes, "ms", "share of requests" if column == "ttfp_s" else "")
    columns = ("ttfp_s", "smooth_start_s")
    _scale(panels[0].xaxis, [1000 * _inside(level, c) for level in levels for c in columns])
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")


def _inside(level: LevelResult, column: str) -> np.ndarray:
    due = level.requests.array("due_s")
    window = level.steady.window
    return level.requests.array(column)[(due >= window.start_s) & (due <= window.end_s)]


def _throughput(figure: Figure, levels: list[LevelResult]) -> None:
    """What more load brings, and what it costs."""
    figure.set_size_inches(9, 3.6)
    left, right = figure.subplots(1, 2)
    loads = [level.load for level in levels]
    unit = {"closed": "clients", "arrivals": "requests due a second", "listeners": "listeners"}[
        levels[0].kind
    ]
    rates = [level.steady.audio_s_per_s for level in levels]
    left.plot(loads, rates, marker="o", color=_LINES[0])
    for load, rate in zip(loads, rates, strict=True):
        left.annotate(
            f"{rate:.3g}", (load, rate), (0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    left.set_title("Sound made, audio seconds a second", loc="left", fontsize=10)
    left.set_ylim(0, 1.15 * max(rates))
    for column, name, colour in zip(
        ("ttfp_s", "smooth_start_s"), ("TTFP", "smooth start"), _LINES, strict=True
    ):
        for q, dashes in ((50, "-"), (99, "--")):
            values = [np.percentile(1000 * _inside(level, column), q, method="nearest") for level in levels]
            # Where both are equal, the wide line is seen under the narrow one.
            marker, width = ("o", 1.5) if column == "ttfp_s" else ("s", 4)
            line = right.plot(loads, values, dashes, marker=marker, color=colour, label=f"{name} P{q}")[0]
            line.set(linewidth=width, zorder=3 - width / 4, markersize=4 + width)
    right.set_title("Wait of a listener, ms", loc="left", fontsize=10)
    _scale(right.yaxis, [line.get_ydata() for line in right.get_lines()])
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.xaxis.minorticks_off()
        plain(axes, unit, "")


def _waterfall(figure: Figure, levels: list[LevelResult]) -> None:
    """Neighbouring requests of the highest level: waiting, playing, silent, and each packet's arrival."""
    level = levels[-1]
    sample = level.sample
    figure.set_size_inches(9, 1.2 + 0.26 * len(sample))
    axes = figure.subplots()
    origin = min((one.due_s for one in sample), default=0.0)
    for row, one in enumerate(sample):
        _bar(axes, row, one, origin)
    axes.set_ylim(len(sample) - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_title(f"{level.name}: requests against what their listeners hear", loc="left", fontsize=10)
    for colour, label in ((_WAIT, "waits for the first packet"), (_PLAY, "plays"), (_SILENCE, "runs dry")):
        axes.barh([-5], [0], color=colour, label=label)
    axes.plot([], [], "|", color=_PACKET, markersize=7, label="packet arrives")
    plain(axes, "s", "")
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _bar(axes: Axes, row: int, one: Packets, origin: float) -> None:
    due = one.due_s - origin
    times = np.asarray(one.times_s) - origin
    axes.barh(row, times[0] - due, left=due, height=0.62, color=_WAIT)
    playing = times[0]
    for at, seconds in zip(times, one.audio_s, strict=True):
        if at - playing >= AUDIBLE_S:
            axes.barh(row, at - playing, left=playing, height=0.62, color=_SILENCE)
        playing = max(playing, at)
        axes.barh(row, seconds, left=playing, height=0.62, color=_PLAY, linewidth=0)
        playing += seconds
    axes.plot(times, np.full(len(times), row), "|", color=_PACKET, markersize=5, markeredgewidth=0.7)
