"""What was heard beside what was written: the alignment with the fewest errors.

Levenshtein's distance over words (or characters), with one addition: words that differ only in being written
together or apart (*everyone*, *every one*) are equal, since nobody can hear the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Move = Literal["same", "substituted", "inserted", "deleted"]


@dataclass(slots=True, frozen=True)
class Step:
    move: Move
    written: tuple[str, ...]  # none where a word was inserted
    heard: tuple[str, ...]  # none where it was deleted


@dataclass(slots=True)
class Alignment:
    steps: list[Step] = field(default_factory=list)

    def count(self, move: Move) -> int:
        return sum(step.move == move for step in self.steps)

    @property
    def errors(self) -> int:
        return sum(step.move != "same" for step in self.steps)

    @property
    def longest_drop(self) -> int:
        """The most words in a row that are written and were not heard."""
        longest = run = 0
        for step in self.steps:
            run = run + 1 if step.move == "deleted" else 0
            longest = max(longest, run)
        return longest


def align(written: Sequence[str], heard: Sequence[str]) -> Alignment:
    """The alignment with the fewest errors; of several, one that substitutes where it can."""
    n, m = len(written), len(heard)
    pairs_written = [a + b for a, b in pairwise(written)]
    pairs_heard = [a + b for a, b in pairwise(heard)]
    cost = [[0] * (m + 1) for _ in range(n + 1)]
    back: list[list[tuple[int, int]]] = [[(0, 0)] * (m + 1) for _ in range(n + 1)]
    for i in range(n + 1):
        for j in range(m + 1):
            if not i and not j:
                continue
            ways: list[tuple[int, int, int]] = []  # cost, words written, words heard
            if i and j:
                ways.append((cost[i - 1][j - 1] + (written[i - 1] != heard[j - 1]), 1, 1))
            if i > 1 and j and pairs_written[i - 2] == heard[j - 1]:
                ways.append((cost[i - 2][j - 1], 2, 1))
            if i and j > 1 and written[i - 1] == pairs_heard[j - 2]:
                ways.append((cost[i - 1][j - 2], 1, 2))
            if i:
                ways.append((cost[i - 1][j] + 1, 1, 0))
            if j:
                ways.append((cost[i][j - 1] + 1, 0, 1))
            best = min(ways, key=lambda way: way[0])
            cost[i][j], back[i][j] = best[0], best[1:]
    steps = []
    i, j = n, m
    while i or j:
        di, dj = back[i][j]
        moved = cost[i][j] - cost[i - di][j - dj]
        move: Move = "same" if not moved else "substituted" if di and dj else "deleted" if di else "inserted"
        steps.append(Step(move, tuple(written[i - di : i]), tuple(heard[j - dj : j])))
        i, j = i - di, j - dj
    return Alignment(steps[::-1])


def marked(alignment: Alignment, *, apart: str = " ") -> str:
    """What was heard, for a reader: `[written→heard]`, `[+inserted]`, `[−deleted]`."""
    parts = []
    for step in alignment.steps:
        written, heard = apart.join(step.written), apart.join(step.heard)
        parts.append(
            {
                "same": heard,
                "substituted": f"[{written}→{heard}]",
                "inserted": f"[+{heard}]",
                "deleted": f"[−{written}]",
            }[step.move]
        )
    return apart.join(parts)


def looped(written: Sequence[str], heard: Sequence[str], *, longest: int = 8) -> int:
    """How many words heard are one more turn of a loop: the same 1 to `longest` words said again at once.

    A repetition that is written too ("very, very good") is none. A single word counts from its third turn on:
    a recogniser often hears one twice.
    """
    return max(0, _turns(heard, longest) - _turns(written, longest))


def _turns(words: Sequence[str], longest: int) -> int:
    at, extra = 0, 0
    while at < len(words):
        best = 0  # words after the first turn
        for n in range(1, longest + 1):
            turns = 1
            while words[at + turns * n : at + (turns + 1) * n] == words[at : at + n] and at + turns * n < len(
                words
            ):
                turns += 1
            if turns >= (3 if n == 1 else 2):
                best = max(best, (turns - 1) * n)
        extra += best
        at += best + 1 if best else 1
    return extra
