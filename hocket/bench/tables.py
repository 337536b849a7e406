"""A result, and two, as tables for a terminal: figures down, levels across."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from hocket.bench.compare import Row
from hocket.bench.metrics import Spread, Summary
from hocket.bench.result import LevelResult, Result

SUSTAINED = 0.99  # share of requests heard in one go, for listeners to count as sustained
_BUSY = 0.7  # of a core: above it the client may hold the server back


def result_table(result: Result) -> Table:
    """The figures of a run, one column a level."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for level in result.levels:
        table.add_column(level.name + (" (cut)" if level.interrupted else ""), justify="right", no_wrap=True)
    for name, of in _LINES:
        cells = [of(level) for level in result.levels]
        if any(cells):
            table.add_row(name, *cells)
    return table


def _number(value: float) -> str:
    """Three figures or more, never an exponent."""
    if math.isnan(value):
        return "–"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def _ranks(of: Callable[[Summary], Spread | None], *names: str) -> Callable[[LevelResult], str]:
    def cell(level: LevelResult) -> str:
        found = of(level.steady)
        return "" if found is None else " / ".join(_number(getattr(found, name)) for name in names)

    return cell


def _audio_rate(level: LevelResult) -> str:
    whole = _number(level.whole.audio_s_per_s)
    return f"{_number(level.steady.audio_s_per_s)} ({whole})"


def _request_rate(level: LevelResult) -> str:
    return f"{_number(level.steady.req_s)} ({_number(level.whole.req_s)})"


def _underruns(level: LevelResult) -> str:
    found = level.steady
    if not found.requests:
        return ""
    return f"{found.underruns} in {found.underrun_share:.1%} of requests"


def _failures(level: LevelResult) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in level.whole.failures.items()) or "0"


def _listeners(level: LevelResult) -> str:
    return f"{level.steady.listeners_served} of {level.load:g}" if level.kind == "listeners" else ""


def _client(level: LevelResult) -> str:
    busy = f"{level.client.cpu_share:.0%} of a core"
    return busy if level.client.processes == 1 else f"{busy} × {level.client.processes}"


_LINES: tuple[tuple[str, Callable[[LevelResult], str]], ...] = (
    ("requests in the window (all)", lambda level: f"{level.steady.requests} ({level.whole.requests})"),
    ("req/s (whole run)", _request_rate),
    ("audio-s/s (whole run)", _audio_rate),
    ("in flight, mean", lambda level: _number(level.steady.in_flight)),
    ("audio each, s", _ranks(lambda s: s.audio_each, "mean")),
    ("TTFP mean, ms", _ranks(lambda s: s.ttfp, "mean")),
    ("  P50 / P90 / P99", _ranks(lambda s: s.ttfp, "p50", "p90", "p99")),
    ("smooth start mean, ms", _ranks(lambda s: s.smooth_start, "mean")),
    ("  P50 / P90 / P99", _ranks(lambda s: s.smooth_start, "p50", "p90", "p99")),
    ("packet gap P50 / P99, ms", _ranks(lambda s: s.gap, "p50", "p99")),
    ("  worst of a request, mean", _ranks(lambda s: s.worst_gap, "mean")),
    ("end to end mean, ms", _ranks(lambda s: s.e2e, "mean")),
    ("  P50 / P90 / P99", _ranks(lambda s: s.e2e, "p50", "p90", "p99")),
    ("RTF mean", _ranks(lambda s: s.rtf, "mean")),
    ("  P50 / P90 / P99", _ranks(lambda s: s.rtf, "p50", "p90", "p99")),
    ("underruns", _underruns),
    ("  silence mean / P99 / worst, ms", _ranks(lambda s: s.silence, "mean", "p99", "max")),
    ("  longest at once P99, ms", _ranks(lambda s: s.longest_silence, "p99")),
    ("continuity", lambda level: f"{level.steady.continuity:.1%}" if level.steady.requests else ""),
    ("listeners served throughout", _listeners),
    ("failures", _failures),
    ("client", _client),
)


def remarks(result: Result) -> Iterator[str]:
    """What a reader of the table must know."""
    for level in result.levels:
        window = level.steady.window
        span = f"{window.start_s:.2f} to {window.end_s:.2f} s of {level.wall_s:.2f}"
        yield f"{level.name}: window {span}; {window.rule}"
        for kind, detail in level.examples.items():
            yield f"{level.name}: {kind}, the first: {detail or 'nothing more is known'}"
        if level.whole.retry_after_s is not None:
            least, most = level.whole.retry_after_s
            yield f"{level.name}: refusals asked to come back after {least:g} to {most:g} s"
        if level.unfinished:
            yield f"{level.name}: {level.unfinished} requests were cut off and are not counted"
        if level.client.cpu_share > _BUSY:
            yield (
                f"{level.name}: this client used {level.client.cpu_share:.0%} of a core and may be what was "
                "measured; take --processes"
            )
    listening = [level for level in result.levels if level.kind == "listeners"]
    if listening:
        held = [level.load for level in listening if _sustained(level)]
        tried = ", ".join(f"{level.load:g}" for level in listening)
        best = f"{max(held):g}" if held else "none"
        yield f"live listeners sustained: {best} of {tried} (continuity ≥ {SUSTAINED:.0%}, no failure)"


def _sustained(level: LevelResult) -> bool:
    return not level.whole.failures and level.steady.requests > 0 and level.steady.continuity >= SUSTAINED


_STYLES = {"better": "green", "worse": "red", "within noise": "dim"}


def comparison_table(rows: Sequence[Row], before: str, after: str) -> Table:
    """Two runs side by side, with the change and whether it is beyond chance."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in (before, after, "change", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    level = None
    for row in rows:
        if row.level != level:
            level = row.level
            table.add_row(f"[bold]{level}[/]")
        interval = "" if math.isnan(row.low) else f"{row.low:+.1%} … {row.high:+.1%}"
        change = "" if math.isnan(row.change) else f"{row.change:+.1%}"
        values = (_number(row.before), _number(row.after))
        table.add_row(
            f"  {row.figure}", *values, change, interval, row.verdict, style=_STYLES.get(row.verdict)
        )
    return table
