"""English number words and digits, brought to one form: each digit a word of its own.

`7179`, `seven thousand one hundred and seventy-nine`, `seventy-one seventy-nine` and `seven one seven nine`
are readings of one number, and all become `7 1 7 9`. Millions and more stay words: `5 billion`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
PAUSE = ","  # a mark between words, over which no number goes on

_SMALL = {word: value for value, word in enumerate(UNITS)} | {"naught": 0, "nought": 0}
_SMALL |= {word: 10 * value for value, word in enumerate(TENS, 2)} | {"fourty": 40}
_IRREGULAR = {"first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12}
_ORDINAL = _IRREGULAR | {w + "th": v for v, w in enumerate(UNITS) if v and v not in _IRREGULAR.values()}
_ORDINAL |= {word[:-1] + "ieth": 10 * value for value, word in enumerate(TENS, 2)}
_ORDINAL |= {word + "s": value for word, value in _ORDINAL.items() if value > 2}  # fractions: two fifths
_DECADE = {word[:-1] + "ies": 10 * value for value, word in enumerate(TENS, 2)}
_ENDINGS = {"": "", "th": "th", "s": "s", "ths": "th"}  # of hundred and thousand


class Number(NamedTuple):
    value: int
    end: int  # the word after it
    kind: str = ""  # `th` of an ordinal, `s` of a decade: nothing can follow in this number


def digits_apart(words: Sequence[str]) -> list[str]:
    """`words` (lower case, with `PAUSE` between some) with every number as its digits, without the pauses.

    `th` follows an ordinal or a fraction's part, `s` a decade.
    """
    out: list[str] = []
    at = 0
    while at < len(words):
        found = _number(words, at)
        if found is None:
            if words[at] != PAUSE:
                out.append(words[at])
            at += 1
            continue
        alone = found.end == at + 1 and words[at].isdecimal()
        out += words[at] if alone else str(found.value)  # alone: with zeros in front, as it stands
        out += [found.kind] if found.kind else []
        at = found.end
    return out


def _number(words: Sequence[str], at: int) -> Number | None:
    """The longest number that begins here; the next may follow at once, as in nineteen | fifty-six."""
    found = _below_thousand(words, at)
    if found is None or found.kind or found.value >= 1000 or not found.value:
        return found
    scaled = _scaled(words, found, "thousand", 1000)
    if scaled is None or scaled.kind:
        return scaled or found
    start = scaled.end
    rest = _below_thousand(words, start + (_at(words, start) in ("and", PAUSE)))
    if rest is None or not 0 < rest.value < 1000 or _at(words, rest.end) == "thousand":
        return scaled
    return Number(scaled.value + rest.value, rest.end, rest.kind)


def _below_thousand(words: Sequence[str], at: int) -> Number | None:
    if _at(words, at) == "a" and _at(words, at + 1) in ("hundred", "thousand"):
        found: Number | None = Number(1, at + 1)
    else:
        found = _digits(words, at) or _below_hundred(words, at)
    if found is None or found.kind or not 0 < found.value < 100:
        return found
    scaled = _scaled(words, found, "hundred", 100)
    if scaled is None or scaled.kind:
        return scaled or found
    start = scaled.end
    rest = _below_hundred(words, start + (_at(words, start) == "and"))
    return Number(scaled.value + rest.value, rest.end, rest.kind) if rest and rest.value else scaled


def _scaled(words: Sequence[str], number: Number, scale: str, size: int) -> Number | None:
    word = _at(words, number.end)
    if not word.startswith(scale) or word[len(scale) :] not in _ENDINGS:
        return None
    return Number(number.value * size, number.end + 1, _ENDINGS[word[len(scale) :]])


def _below_hundred(words: Sequence[str], at: int) -> Number | None:
    word = _at(words, at)
    if word == "oh" and (_is_number(_at(words, at - 1)) or _is_number(_at(words, at + 1))):
        return Number(0, at + 1)
    for table, kind in ((_ORDINAL, "th"), (_DECADE, "s")):
        if word in table:
            return Number(table[word], at + 1, kind)
    if word not in _SMALL:
        return None
    value = _SMALL[word]
    following = _at(words, at + 1)
    if value >= 20:
        for table, kind in ((_SMALL, ""), (_ORDINAL, "th")):
            if 0 < table.get(following, 0) < 10:
                return Number(value + table[following], at + 2, kind)
    return Number(value, at + 1)


def _digits(words: Sequence[str], at: int) -> Number | None:
    word = _at(words, at)
    for ending, kind in (("", ""), ("st", "th"), ("nd", "th"), ("rd", "th"), ("th", "th"), ("s", "s")):
        stem = word.removesuffix(ending)
        if (not ending or stem != word) and stem.isdecimal() and stem.isascii():
            return Number(int(stem), at + 1, kind)
    return None


def _is_number(word: str) -> bool:
    return word in _SMALL or word.isdecimal()


def _at(words: Sequence[str], at: int) -> str:
    return words[at] if 0 <= at < len(words) else ""


def value_of(word: str) -> int | None:
    """The number below a hundred that one word, or any that digits stand for."""
    return int(word) if word.isdecimal() and word.isascii() else _SMALL.get(word)


def spell(number: int) -> list[str]:
    """The words in which a number is most often read: 1956 as nineteen fifty-six."""
    if 1100 <= number < 2100 and number % 1000 >= 10:
        rest = number % 100
        return [
            *spell(number // 100),
            *(["oh"] if 0 < rest < 10 else []),
            *(spell(rest) if rest else ["hundred"]),
        ]
    if number < 20:
        return [UNITS[number]]
    if number < 100:
        return [TENS[number // 10 - 2], *([UNITS[number % 10]] if number % 10 else [])]
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand")):
        if number >= size:
            return [*spell(number // size), name, *(spell(number % size) if number % size else [])]
    return [UNITS[number // 100], "hundred", *(spell(number % 100) if number % 100 else [])]
