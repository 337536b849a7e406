"""How commands speak to the person at the terminal: on stderr, in one line, with a remedy.

Exit codes: 0 done, 1 failed, 2 the command was given something it cannot use, 130 interrupted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hocket.errors import HocketError, InvalidRequest, clip

P = ParamSpec("P")
R = TypeVar("R")

console = Console(stderr=True, highlight=False)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def note(text: str) -> None:
    """One line for the reader, who may also be a log."""
    console.print(escape(text), style="dim", soft_wrap=True)


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Make a command tell its errors in one line and exit with the code they have."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except HocketError as error:
            if kwargs.get("debug"):
                raise
            _fail(error.message, 2 if isinstance(error, InvalidRequest) else 1)
        except BrokenPipeError:
            # Whoever read our sound has gone. Python would complain once more when it flushes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            if kwargs.get("debug"):
                raise
            _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error), 1)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run


_OPTIONS = {"max_new_tokens": "--max-frames", "ref_audio": "--ref-audio", "ref_text": "--ref-text"}


def _fail(message: str, code: int) -> NoReturn:
    for field, option in _OPTIONS.items():  # fields as the API calls them, where the option's word is another
        message = message.replace(field, option)
    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A line that shows that something goes on, while it does; gives a function that changes its text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(text), total=None)
        yield lambda words: bar.update(task, description=escape(words))


def check_file(option: str, file: str | Path) -> None:
    """Raises InvalidRequest if no file of that name can be written: before the work, not after it."""
    path = Path(file)
    if path.is_dir():
        raise InvalidRequest(f"{option} {clip(file)!r} is a folder; give a file to write")
    if not path.parent.is_dir():
        raise InvalidRequest(f"{option} {clip(file)!r} is in a folder that is not there: {clip(path.parent)}")


def settings_of(pairs: Sequence[str]) -> dict[str, str]:
    """`stage.field=value`, as given with --set, as overrides of a profile."""
    overrides = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise InvalidRequest(f"--set {pair!r} is not of the form stage.field=value")
        # A stage's setting is `talker.slots` here, `stages.talker.slots` in the profile.
        name = name.strip()
        overrides[f"stages.{name}" if name.count(".") == 1 else name] = value.strip()
    return overrides


def pairs_of(option: str, pairs: Sequence[str]) -> Mapping[str, str]:
    """`name=target` options as a mapping."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, target = pair.partition("=")
        if not equals or not name or not target:
            raise InvalidRequest(f"{option} {pair!r} is not of the form name=target")
        found[name] = target
    return found
