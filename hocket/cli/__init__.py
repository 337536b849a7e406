"""The command line: one file per command, all of them thin.

Each command imports what it works with when it runs, so that `hocket --help` and a mistyped option do not
wait for PyTorch.
"""

from __future__ import annotations

from typing import Annotated

import typer

import hocket
from hocket.cli.bench import bench
from hocket.cli.doctor import doctor
from hocket.cli.eval import eval_
from hocket.cli.say import say
from hocket.cli.serve import serve
from hocket.cli.voices import voices

app = typer.Typer(
    name="hocket",
    help="Speech from text, streamed while it is made.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # errors are told in one line by `hocket.cli.report`
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(say)
app.command()(serve)
app.command()(voices)
app.command()(bench)
app.command(name="eval")(eval_)
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hocket {hocket.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Speech from text, streamed while it is made."""
