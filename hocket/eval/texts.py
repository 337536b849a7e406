"""What is to be said: our own sentences, the lines of a file, a Seed-TTS list, or texts beside recordings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.errors import InvalidRequest, clip

HELD_OUT = "heldout"  # the name of the built-in list
_BUILT_IN = Path(__file__).with_name("heldout.txt")


@dataclass(slots=True, frozen=True)
class Item:
    name: str  # of its sound's file, without .wav
    text: str
    reference: Path | None = None  # a recording of the voice to imitate
    said: str | None = None  # in the reference
    target: Path | None = None  # the text as a person read it


def read_items(source: str) -> list[Item]:
    """The items of `heldout`, of a file with a text a line, or of a Seed-TTS list (suffix .lst).

    A line of a list is `name|what the recording says|recording|text`, perhaps with `|recording of the text`;
    files are found from the list's folder. Items of other files are named by their line, 0001 and so on.
    Raises InvalidRequest with the number of the line that is no such line, and OSError.
    """
    path = _BUILT_IN if source == HELD_OUT else Path(source)
    items = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".lst":
            items.append(_listed(path, number, line))
        else:
            items.append(Item(f"{number:04d}", line.strip()))
    if not items:
        raise InvalidRequest(f"{path} holds no text", param="--texts")
    names = [item.name for item in items]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"{path} has the name {clip(twice)!r} twice", param="--texts")
    return items


def _listed(path: Path, number: int, line: str) -> Item:
    where = f"{path}, line {number}"
    fields = [part.strip() for part in line.split("|")]
    if len(fields) < 4 or not fields[0] or not fields[3]:
        raise InvalidRequest(
            f"{where}: {clip(line)!r} is not name|transcript|recording|text", param="--texts"
        )
    files = [path.parent / name if name else None for name in (fields[2], *fields[4:5])]
    for file in files:
        if file is not None and not file.is_file():
            raise InvalidRequest(f"{where}: there is no file {file}", param="--texts")
    name = fields[0].removesuffix(".wav").replace("/", "_")
    return Item(name, fields[3], files[0], fields[1] or None, files[1] if len(files) > 1 else None)


def items_beside(folder: Path) -> list[Item]:
    """The recordings of a folder that have their text beside them: NAME.wav with NAME.txt."""
    found = sorted(folder.glob("*.wav"))
    items = [
        Item(path.stem, text)
        for path in found
        if path.with_suffix(".txt").is_file()
        and (text := path.with_suffix(".txt").read_text("utf-8").strip())
    ]
    if len(items) < len(found):
        bare = next(path for path in found if not path.with_suffix(".txt").is_file())
        raise InvalidRequest(
            f"{bare} has no text: put it into {bare.with_suffix('.txt').name} beside it, or give --texts",
            param="--texts",
        )
    return items


def limited(items: Sequence[Item], limit: int | None) -> list[Item]:
    """`limit` of the items, spread evenly over all of them: a list is often sorted by something."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[n * len(items) // limit] for n in range(limit)]
