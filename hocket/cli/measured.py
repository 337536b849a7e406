"""What `hocket bench` and `hocket eval` share: options, and where a result goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hocket.cli.report import check_file, note
from hocket.errors import InvalidRequest, clip

if TYPE_CHECKING:
    import msgspec

_WIDE = 10_000  # a table in a file or a pipe is not folded

ApiKey = Annotated[str | None, typer.Option(envvar="HOCKET_API_KEY", help="Sent as bearer.")]
Compare = Annotated[
    tuple[Path, Path] | None, typer.Option(help="Two result files to compare, instead of a run.")
]
Extra = Annotated[
    list[str] | None,
    typer.Option(help="key=json: a field of each request to a server; null leaves one out. May be repeated."),
]
JsonOut = Annotated[
    str | None, typer.Option("--json", help="The file to write the result to; - is standard output.")
]
Plot = Annotated[Path | None, typer.Option(help="The folder to write pictures to (PNG).")]


def check_outputs(json_out: str | None, plot: Path | None, extra: str) -> None:
    """Raises InvalidRequest where a result could not be written: before a run, not after it.

    `extra` is the one of ours that brings what draws.
    """
    from hocket.results import check_plots

    if json_out not in (None, "-"):
        check_file("--json", str(json_out))
    if plot is not None:
        if plot.exists() and not plot.is_dir():
            raise InvalidRequest(f"--plot {clip(plot)!r} is a file; give a folder to write pictures to")
        check_plots(extra)


def deliver(
    result: msgspec.Struct,
    json_out: str | None,
    plot: Path | None,
    *,
    show: Callable[[Console], None],
    draw: Callable[[Any, Path], list[Path]],
) -> None:
    """Show the result, or print it as JSON; write its files."""
    from hocket.results import encode, save

    if json_out == "-":
        sys.stdout.buffer.write(encode(result))
    else:
        show(tables())
    if json_out not in (None, "-"):
        save(result, Path(str(json_out)))
        note(f"result: {json_out}")
    if plot is not None:
        for path in draw(result, plot):
            note(f"picture: {path}")


def tables() -> Console:
    """Standard output, for tables."""
    out = Console()
    return out if out.is_terminal else Console(width=_WIDE)


def names_of(before: Path, after: Path) -> tuple[str, str]:
    """What to call two results that are compared: their files' names, or paths where those are equal."""
    return (before.name, after.name) if before.name != after.name else (str(before), str(after))


def fields_of(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=json`, as given with --extra, as fields of a request's body."""
    import msgspec

    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--extra {clip(pair)!r} is not of the form key=json")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            message = f"--extra {clip(pair)!r}: the value is not JSON; a string is written {name}='\"…\"'"
            raise InvalidRequest(message) from None
    return found


def first_model(about: Mapping[str, Any]) -> str | None:
    """The model to ask for when none was named: the first of a server's list, if it has one."""
    models = about.get("models")
    entries = models.get("data") if isinstance(models, dict) else None
    first = entries[0] if isinstance(entries, list) and entries else None
    return str(first["id"]) if isinstance(first, dict) and "id" in first else None
