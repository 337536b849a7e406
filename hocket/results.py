"""What `hocket bench` and `hocket eval` leave behind: result files, and pictures of one look.

A result is a struct whose field `schema` names its command and a number. The number changes when a reader of
the last one would misread a file; a new field with a default leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from hocket.errors import InvalidRequest, Unsupported, clip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T", bound=msgspec.Struct)


def command_line(words: Sequence[str]) -> str:
    """`words` as one would type them, without the API key."""
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "--api-key":
            word = "…"
        elif word.startswith("--api-key="):
            word = "--api-key=…"
        kept.append(f"'{word}'" if not word or set(word) & set(" '\"{}|*?$&;<>()") else word)
    return " ".join(kept)


def encode(result: msgspec.Struct) -> bytes:
    """The result as JSON and a newline."""
    return msgspec.json.encode(result, enc_hook=str) + b"\n"


def save(result: msgspec.Struct, path: Path) -> None:
    """Write the result to `path`."""
    path.write_bytes(encode(result))


def load(path: Path, type: type[T], schema: str) -> T:
    """The result in `path`. Raises InvalidRequest if it is no result file, or one of another schema."""
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=dict).get("schema")
        if found != schema:
            raise InvalidRequest(f"{path} is of schema {clip(found)!r}, not {schema!r}")
        return msgspec.json.decode(data, type=type)
    except msgspec.DecodeError as error:
        command = schema.partition("/")[0].replace("-", " ")
        raise InvalidRequest(f"{path} is not a result of {command} --json: {error}") from error


def check_plots(extra: str) -> None:
    """Raises Unsupported if there is nothing to draw with. Said before a run, not after it.

    `extra` is the one of ours that brings matplotlib, which is imported only to draw.
    """
    try:
        import matplotlib  # noqa: F401  # an optional dependency
    except ImportError as error:
        message = f'plots need matplotlib, which is not installed: pip install "hocket[{extra}]"'
        raise Unsupported(message, param="--plot") from error


def plain(axes: Axes, x: str, y: str) -> None:
    """Axes with these labels, a grid behind, and no more frame than needed."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
