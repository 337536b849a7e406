"""`hocket voices`: who can speak."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hocket.cli.report import Debug, note, reports_errors


@reports_errors
def voices(
    model: Annotated[str | None, typer.Argument(help="Folder, or name on a hub.")] = None,
    debug: Debug = False,
) -> None:
    """List the voices of a model."""
    # Imported here: --help should not wait for PyTorch.
    from hocket.cli.bundled import bundled_model
    from hocket.engine.hub import resolve_model
    from hocket.models import family_of, load_family

    folder = resolve_model(model or bundled_model())
    info = load_family(family_of(folder)).front_end(folder).info
    if info.voices:
        table = Table("voice", "name", "languages", "", box=None, header_style="bold")
        for voice in info.voices:
            mark = "default" if voice.id == info.default_voice else ""
            table.add_row(voice.id, voice.name, ", ".join(voice.languages) or "any", mark)
        Console().print(table)
    else:
        note("this model has no voices of its own")
    if info.clones:
        note("it imitates a recording: hocket say --ref-audio FILE --ref-text TEXT")
    if info.instructions:
        note("it follows --instructions")
    note(f"languages: {', '.join(info.languages) or 'not chosen by name'}")
