"""Cutting text into sentences and into units short enough to be spoken in one go.

Rules of `docs/api.md`: Latin `.!?` end a sentence only before a space or the end, and not after an
abbreviation, an initial or a number; `。！？…` and the Devanagari and Arabic marks end one at once;
closing quotes stay with their sentence; nothing is dropped.
"""

from __future__ import annotations

import itertools
import re
import unicodedata

_ABBREVIATIONS = frozenset(
    (
        "mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "vs", "etc", "e.g", "i.e", "cf", "no", "vol",
        "fig", "approx", "dept", "est", "inc", "ltd", "co", "corp", "gen", "col", "sgt", "capt", "lt",
        "rev", "hon", "gov", "sen", "rep", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept",
        "oct", "nov", "dec", "mt", "ave", "blvd", "a.m", "p.m", "u.s", "u.k", "ph.d", "m.a", "bzw", "z.b",
        "d.h", "usw", "ca", "nr", "str",
    )
)  # fmt: skip
_CLOSERS = "\"'”’»)]}」』）】》"
_LATIN = re.compile(r"[.!?]+[" + re.escape(_CLOSERS) + r"]*(?=\s|$)")
_DIRECT = re.compile(r"[。！？…｡।॥؟۔]+[" + re.escape(_CLOSERS) + r"]*")
_NEWLINE = re.compile(r"\s*\n\s*\n\s*|\n")
_CLAUSE = re.compile(r"[,;:，、；：،؛—][" + re.escape(_CLOSERS) + r"]*\s*")


def sentences(text: str) -> list[str]:
    """The sentences of `text`, each with the blanks that follow it; joined they give `text`."""
    ends = sorted(
        {m.end() for m in _DIRECT.finditer(text)}
        | {m.end() for m in _NEWLINE.finditer(text)}
        | {m.end() for m in _LATIN.finditer(text) if _ends_sentence(text, m)}
    )
    out: list[str] = []
    start = 0
    for end in (*ends, len(text)):
        while end < len(text) and text[end].isspace():
            end += 1
        if end > start:
            out.append(text[start:end])
            start = end
    return out


def _ends_sentence(text: str, mark: re.Match[str]) -> bool:
    if not mark.group().startswith(".") or mark.group().startswith(".."):
        return True
    before = re.search(r"\S+$", text[: mark.start()])
    if before is None:
        return False
    word = before.group().lstrip("\"'“‘«([{").lower()
    if word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
        return False
    rest = text[mark.end() :].lstrip()
    return not (word.isdigit() and len(word) < 3 and rest[:1].islower())  # "the 2. attempt"


class Cutter:
    """Cuts a text that is still being written into sentences, or clauses; one object serves one text.

    A unit is given as soon as nothing that may follow can change where it ends. Where the text is cut into
    pieces changes nothing, but that what belongs to a mark of the kind that closes at once, such as a
    quotation mark after `。`, goes to the next unit if it comes later. What holds neither letter nor digit
    is no unit: it goes with the next one, and at the end, where nothing is left to be said, with none.
    """

    def __init__(self, *, clauses: bool = False) -> None:
        self._clauses = clauses
        self._text = ""

    def add(self, text: str) -> list[str]:
        """The units that are certain now."""
        self._text += text
        pieces = self._pieces(self._text)
        rest = pieces.pop() if pieces and not _closed(pieces[-1], self._clauses) else ""
        if len(rest) > _LONGEST:
            *cut, rest = units(rest, _LONGEST // 4)
            pieces += cut
        return self._spoken(pieces, rest)

    def close(self) -> list[str]:
        """The rest."""
        return self._spoken(self._pieces(self._text), "")

    def _pieces(self, text: str) -> list[str]:
        pieces = sentences(text)
        return [clause for piece in pieces for clause in _clauses(piece)] if self._clauses else pieces

    def _spoken(self, pieces: list[str], rest: str) -> list[str]:
        out: list[str] = []
        held = ""
        for piece in pieces:
            if any(c.isalnum() for c in piece):
                out.append(held + piece)
                held = ""
            else:  # not to the unit before, which may be under way already
                held += piece
        self._text = held + rest
        return out


_LONGEST = 2000  # characters without a mark; more are cut anyway
_OPEN_CLAUSE = re.compile(r"(?:[,;:]{0}(?=\s)|[，、；：،؛—]{0})\s*".format(f"[{re.escape(_CLOSERS)}]*"))


def _clauses(sentence: str) -> list[str]:
    cuts = [0, *(m.end() for m in _OPEN_CLAUSE.finditer(sentence)), len(sentence)]
    return [sentence[a:b] for a, b in itertools.pairwise(cuts) if a < b]


def _closed(piece: str, clauses: bool) -> bool:
    """Whether the last piece of a text ends for certain, whatever follows."""
    body = piece.rstrip()
    marks = body.rstrip(_CLOSERS)
    if not marks:
        return False
    if _DIRECT.fullmatch(marks[-1]) or (clauses and marks[-1] in "，、；：،؛—"):
        return True
    if len(body) == len(piece):
        return False  # a Latin mark counts only before a blank
    if clauses and marks[-1] in ",;:":
        return True
    word = re.search(r"\S*$", marks.rstrip(".!?"))
    number = word is not None and word.group().lstrip("\"'“‘«([{").isdigit()
    return marks[-1] in ".!?" and not number and len(sentences(piece + "x")) == 2


def weight(text: str) -> int:
    """Rough length in Latin letters: an ideograph, kana or syllable block counts for three."""
    return sum(3 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def units(text: str, limit: int) -> list[str]:
    """Pieces of `text` of about `limit` weight, cut at sentence ends, else clauses, else blanks.

    Short text stays whole. Joined, the pieces give `text`; none is blank.
    """
    pieces: list[str] = []
    for sentence in sentences(text):
        pieces.extend(_shorter(sentence, limit))
    out: list[str] = []
    for piece in pieces:
        blank = out and not (piece.strip() and out[-1].strip())
        if blank or (out and weight(out[-1]) + weight(piece) <= limit):
            out[-1] += piece
        else:
            out.append(piece)
    return out


def _shorter(text: str, limit: int) -> list[str]:
    if weight(text) <= limit:
        return [text]
    middle = len(text) // 2
    for pattern in (_CLAUSE, re.compile(r"\s+")):
        cuts = [m.end() for m in pattern.finditer(text) if 0 < m.end() < len(text)]
        cuts = [c for c in cuts if not (text[c - 1] in ",." and text[c].isdigit())]  # "1,000"
        if cuts:
            cut = min(cuts, key=lambda c: abs(c - middle))
            return _shorter(text[:cut], limit) + _shorter(text[cut:], limit)
    cut = middle
    while cut < len(text) and (unicodedata.combining(text[cut]) or text[cut] in "\u200d\ufe0f"):
        cut += 1  # stay on a grapheme's edge
    return [text] if cut in (0, len(text)) else _shorter(text[:cut], limit) + _shorter(text[cut:], limit)
