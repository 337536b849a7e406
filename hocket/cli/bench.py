"""`hocket bench`: load on a speech server, and what its listeners would hear.

What the figures mean is in docs/bench.md. Exit codes: 0 done, 1 more failures than --max-failures,
2 bad usage, 130 interrupted; an interrupt gives what was measured until then.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

import hocket
from hocket.cli.measured import (
    ApiKey,
    Compare,
    Extra,
    JsonOut,
    Plot,
    check_outputs,
    deliver,
    fields_of,
    first_model,
    names_of,
    tables,
)
from hocket.cli.report import Debug, console, note, reports_errors
from hocket.errors import InvalidRequest, clip

if TYPE_CHECKING:
    from hocket.bench.load import Level
    from hocket.bench.processes import Crew
    from hocket.bench.result import Result


@reports_errors
def bench(
    url: Annotated[str | None, typer.Argument(help="Address of the server, with or without /v1.")] = None,
    model: Annotated[str | None, typer.Option(help="By default the first that the server lists.")] = None,
    voice: Annotated[str | None, typer.Option(help="By default the server's.")] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Closed loop: clients, each of which sends when its last request has ended. [1,4,16]"
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Open loop: requests a second, arriving by a Poisson process; 4 or 4,8."),
    ] = None,
    listeners: Annotated[
        str | None, typer.Option(help="Open loop: listeners who play in real time, one text after another.")
    ] = None,
    requests: Annotated[
        str | None, typer.Option(help="Requests of each level, one number or one a level. [6 a client, ≥ 12]")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds in which each level sends.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="A text a line, or a Seed-TTS .lst with recordings; else sentences of 10 to 40 words."
        ),
    ] = None,
    max_new_tokens: Annotated[
        str | None, typer.Option(help="Most frames a request: N, or LEAST-MOST to draw from.")
    ] = None,
    response_format: Annotated[Literal["pcm", "wav"], typer.Option("--format")] = "pcm",
    sample_rate: Annotated[
        int, typer.Option(min=1, help="Of the sound, in Hz, where the answer does not say.")
    ] = 24_000,
    extra: Extra = None,
    seed: Annotated[int, typer.Option(min=0, help="Of texts, lengths and arrivals.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Uncounted requests a client before each level.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a request may take.")] = 300.0,
    processes: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    api_key: ApiKey = None,
    max_failures: Annotated[int, typer.Option(min=0, help="More failed requests make exit code 1.")] = 0,
    json_out: JsonOut = None,
    plot: Plot = None,
    compare: Compare = None,
    debug: Debug = False,
) -> None:
    """Measure a speech server under load."""
    # Imported here: --help should not wait for NumPy.
    from hocket.bench import plots
    from hocket.bench.http import Client
    from hocket.bench.load import Workload
    from hocket.bench.processes import Crew, run_loop
    from hocket.bench.result import ask_server, new_result
    from hocket.bench.texts import read_texts

    if compare is not None:
        if url is not None:
            raise InvalidRequest("--compare takes two result files and no URL")
        return _compare(*compare)
    if url is None:
        raise InvalidRequest("give the address of a server, or --compare A.json B.json")
    Client(url)  # says so if it is no address
    levels = _levels(concurrency, rate, listeners, requests, duration)
    if texts is not None:
        read_texts(texts)
    check_outputs(json_out, plot, "bench")
    work = Workload(
        url=url,
        api_key=api_key,
        model=model,
        voice=voice,
        format=response_format,
        sample_rate_hz=sample_rate,
        texts=texts,
        max_new_tokens=_span(max_new_tokens),
        extra=fields_of(extra or []),
        seed=seed,
        timeout_s=timeout,
    )
    server = run_loop(ask_server(work))
    work = replace(work, model=model or first_model(server))
    result = new_result(work, ["hocket", *sys.argv[1:]], server, hocket.__version__)
    with Crew(work, processes) as crew:
        run_loop(_run(crew, levels, warmup, result))
    deliver(result, json_out, plot, show=partial(_show, result), draw=plots.draw)
    if result.interrupted:
        raise typer.Exit(130)
    if result.failures > max_failures:
        note(f"{result.failures} requests failed; --max-failures {max_failures}")
        raise typer.Exit(1)


def _show(result: Result, out: Console) -> None:
    from hocket.bench.tables import remarks, result_table

    out.print(result_table(result), highlight=False)
    for line in remarks(result):
        out.print(line, style="dim", highlight=False, markup=False)


async def _run(crew: Crew, levels: Sequence[Level], warmup: int, result: Result) -> None:
    """Play the levels one after the other, into `result`."""
    from hocket.bench.live import Live
    from hocket.bench.result import level_result

    restore = _on_interrupt(crew)
    try:
        with Live(console) as live:
            for level in levels:
                ready = await crew.warm(level, warmup, live.watch)
                if crew.stopped:
                    break
                shares, began = await crew.play(ready, live.watch)
                found = level_result(ready, shares, began, stopped=crew.stopped)
                result.levels.append(found)
                if not console.is_terminal:
                    note(f"{level.name}: {found.whole.requests} done in {found.wall_s:.1f} s")
    finally:
        restore()
        result.interrupted = crew.stopped
        await crew.close()


def _on_interrupt(crew: Crew) -> Any:
    """Let Ctrl+C stop the crew; a second one has its usual meaning. -> what undoes it"""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def act() -> None:
        note("interrupted: this is what there is")
        restore()
        crew.stop()

    def restore() -> None:
        with suppress(NotImplementedError):  # Windows
            loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    try:
        loop.add_signal_handler(signal.SIGINT, act)
    except NotImplementedError:  # Windows
        signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(act))
    return restore


def _compare(before: Path, after: Path) -> None:
    from hocket.bench.compare import compare, differences
    from hocket.bench.result import load
    from hocket.bench.tables import comparison_table

    one, two = load(before), load(after)
    tables().print(comparison_table(compare(one, two), *names_of(before, after)), highlight=False)
    for line in differences(one, two):
        note(f"not alike in {line}")
    note("maybe: beyond chance within these runs, but two runs of one server often differ by 10 %")


# --- what the options mean -------------------------------------------------------------------


def _levels(
    concurrency: str | None,
    rate: str | None,
    listeners: str | None,
    requests: str | None,
    duration: float | None,
) -> list[Level]:
    from hocket.bench.load import Kind, Level

    given = {"--concurrency": concurrency, "--rate": rate, "--listeners": listeners}
    chosen = {option: text for option, text in given.items() if text is not None}
    if len(chosen) > 1:
        raise InvalidRequest(f"{' and '.join(chosen)} are different loads; give one of them")
    option, text = next(iter(chosen.items()), ("--concurrency", "1,4,16"))
    kinds: dict[str, Kind] = {"--concurrency": "closed", "--rate": "arrivals", "--listeners": "listeners"}
    loads = _numbers(option, text, whole=option != "--rate")
    counts = None if requests is None else [int(n) for n in _numbers("--requests", requests, whole=True)]
    if counts is not None and len(counts) not in (1, len(loads)):
        raise InvalidRequest(
            f"--requests has {len(counts)} numbers for {len(loads)} levels; give 1 or {len(loads)}"
        )
    if counts is None and duration is None:
        if option != "--concurrency":
            raise InvalidRequest(f"{option} needs --duration or --requests")
        counts = [max(12, 6 * int(load)) for load in loads]
    if counts is not None and len(counts) == 1:
        counts = counts * len(loads)
    return [
        Level(
            kind=kinds[option], load=load, requests=None if counts is None else counts[n], duration_s=duration
        )
        for n, load in enumerate(loads)
    ]


def _numbers(option: str, text: str, *, whole: bool) -> list[float]:
    kind = "whole numbers" if whole else "numbers"
    try:
        found = [float(int(part)) if whole else float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise InvalidRequest(f"{option} {clip(text)!r} is not a list of positive {kind} such as 1,4,16")
    return found


def _span(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    least, dash, most = text.partition("-")
    if not least.isdecimal() or (dash and not most.isdecimal()):
        raise InvalidRequest(f"--max-new-tokens {clip(text)!r} is neither a number nor LEAST-MOST")
    span = (int(least), int(most or least))
    if not 1 <= span[0] <= span[1]:
        raise InvalidRequest(f"--max-new-tokens {clip(text)!r}: LEAST must be at least 1 and at most MOST")
    return span
