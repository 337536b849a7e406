"""What is spoken: sentences of 10 to 40 words, the lines of a file, or a Seed-TTS list with recordings."""

from __future__ import annotations

import base64
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hocket.errors import InvalidRequest, clip

SHORTEST, LONGEST = 10, 40  # words


@dataclass(slots=True, frozen=True)
class Text:
    words: str
    reference: Path | None = None  # a recording of the voice to imitate
    said: str | None = None  # in the recording


def sentence(rng: random.Random) -> Text:
    """An English sentence of 10 to 40 words, every length as likely; the same for equal states of `rng`."""
    left = rng.randint(SHORTEST, LONGEST)
    parts: list[str] = []
    while left:
        lengths = [n for n in _CLAUSES if n <= left and (left - n == 0 or left - n >= min(_CLAUSES))]
        length = rng.choice(lengths)
        parts.append(rng.choice(_CLAUSES[length]))
        left -= length
    text = ", ".join(parts)
    return Text(text[0].upper() + text[1:] + ".")


def read_texts(path: Path) -> list[Text]:
    """The texts of a file: one a line, or with the suffix .lst as Seed-TTS writes them.

    A line of a list is `name|what the recording says|recording|text`, more fields are ignored; recordings
    are found from the list's folder. Raises InvalidRequest with the number of the line that is no such line.
    """
    lines = path.read_text("utf-8").splitlines()
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".lst":
            texts.append(Text(line.strip()))
            continue
        fields = [part.strip() for part in line.split("|")]
        if len(fields) < 4 or not fields[3]:
            message = f"{path}, line {number}: {clip(line)!r} is not name|transcript|recording|text"
            raise InvalidRequest(message, param="--texts")
        recording = path.parent / fields[2]
        if not recording.is_file():
            raise InvalidRequest(f"{path}, line {number}: there is no file {recording}", param="--texts")
        texts.append(Text(fields[3], recording, fields[1]))
    if not texts:
        raise InvalidRequest(f"{path} holds no text", param="--texts")
    return texts


@lru_cache(maxsize=256)
def data_url(recording: Path) -> str:
    """A recording as `ref_audio` takes it."""
    kind = {".mp3": "mpeg", ".flac": "flac", ".ogg": "ogg", ".opus": "ogg"}.get(recording.suffix, "wav")
    return f"data:audio/{kind};base64,{base64.b64encode(recording.read_bytes()).decode()}"


def _by_length(clauses: Sequence[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for clause in clauses:
        found[len(clause.split())].append(clause)
    return dict(found)


_CLAUSES = _by_length(
    [
        "the rain has stopped",
        "nobody answered the phone",
        "she closed the window",
        "we waited a while",
        "the last bus left early",
        "he poured two small cups",
        "their neighbours had gone out",
        "a door opened somewhere below",
        "the harbour lights came on slowly",
        "children were singing in the yard",
        "he read the letter once more",
        "it smelled of bread and coffee",
        "an old clock struck nine across town",
        "the road climbed between walls of stone",
        "she wrote the number on her hand",
        "we could hear the river at night",
        "the ferry turned and made for the island",
        "a small brown dog followed us all morning",
        "most of the shops were shut on Mondays",
        "he kept the map folded in his pocket",
        "the museum stays open until eight on Thursday evenings",
        "nothing in the garden had grown since the spring",
        "they carried the table out under the apple trees",
        "her train was late because of snow further north",
        "the baker set aside one loaf for us every day",
        "from the tower you can see as far as France",
        "the meeting was moved to the larger room upstairs again",
        "he had forgotten how quiet the valley was in winter",
    ]
)
