"""One sound judged: what was heard, by whom it seems to be spoken, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from hocket.eval.align import align, looped, marked
from hocket.eval.defects import clicks, clipped, dc_offset, loudness_lufs, peak_db, silence
from hocket.eval.ears import Heard
from hocket.eval.likeness import Likeness, cosine
from hocket.eval.normal import is_ideographic, syllables, units
from hocket.eval.sound import Sound
from hocket.eval.speakers import Spoken
from hocket.eval.texts import Item

_AFTER_S = 1.5  # of sound behind the last word heard; Whisper's ends of clean speech are within half a second
_DROP = 3  # words in a row that are missing: a part of the text was left out, not misheard


class Utterance(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is known of one sound; times in seconds, levels in dB of full scale.

    `failure`: nothing was spoken, and all else is empty.
    """

    name: str
    seed: int | None = None
    text: str
    failure: str = ""
    seconds: float = 0.0
    expected_s: float = 0.0  # the teacher's length, or an estimate from the text
    finish: str = ""
    missed_end: str = ""  # "limit": cut by a limit; "long": longer than it should be; "after": see below
    after_s: float = 0.0  # sound behind the last word heard; "after" if it lasts
    heard: str | None = None  # None: nobody listened
    aligned: str = ""  # what was heard, errors marked
    words: int = 0  # written; characters of scripts without blanks
    substituted: int = 0
    inserted: int = 0
    deleted: int = 0
    dropped: int = 0  # words of the longest part that was left out, if at least 3
    looped: int = 0  # words said again
    similarity: float | None = None
    words_per_s: float = 0.0
    syllables_per_s: float = 0.0
    leading_s: float = 0.0
    trailing_s: float = 0.0
    inner_s: float = 0.0
    loudness_lufs: float | None = None  # None: silent
    peak_db: float = 0.0
    dc_offset: float = 0.0
    clipped: int = 0  # samples
    clicks: list[float] = []
    envelope: list[float] = []  # RMS of each tenth of a second: tells whether two runs said the same

    @property
    def errors(self) -> int:
        return self.substituted + self.inserted + self.deleted

    @property
    def wer(self) -> float:
        """NaN where nobody listened."""
        return self.errors / self.words if self.words and self.heard is not None else math.nan

    @property
    def length_ratio(self) -> float:
        return self.seconds / self.expected_s if self.expected_s else math.nan


@dataclass(slots=True)
class Judge:
    """Judges sounds, one at a time."""

    listen: Callable[[Sound], Heard] | None = None
    likeness: Likeness | None = None
    language: str = "en"
    long: float = 2.5  # times the expected length

    def __call__(
        self, item: Item, seed: int | None, spoken: Spoken, expected_s: float | None, voice: np.ndarray | None
    ) -> Utterance:
        """`expected_s` None: estimated; `voice` None: not compared."""
        sound = spoken.sound
        quiet = silence(sound)
        speech_s = max(sound.seconds - quiet.leading_s - quiet.trailing_s, 0.0)
        loudness = loudness_lufs(sound)
        found = Utterance(
            name=item.name,
            seed=seed,
            text=item.text,
            seconds=round(sound.seconds, 4),
            expected_s=round(expected_s or usual_length_s(item.text), 3),
            finish=spoken.finish,
            leading_s=round(quiet.leading_s, 3),
            trailing_s=round(quiet.trailing_s, 3),
            inner_s=round(quiet.inner_s, 3),
            loudness_lufs=round(loudness, 2) if math.isfinite(loudness) else None,
            peak_db=round(peak_db(sound), 2),
            dc_offset=round(dc_offset(sound), 6),
            clipped=clipped(sound),
            clicks=[round(at, 4) for at in clicks(sound)],
            envelope=envelope(sound),
        )
        if speech_s:
            found.words_per_s = round(len(units(item.text, self.language)) / speech_s, 3)
            found.syllables_per_s = round(syllables(item.text) / speech_s, 3)
        if spoken.finish == "length":
            found.missed_end = "limit"
        elif found.length_ratio > self.long:
            found.missed_end = "long"
        if self.listen is not None:
            heard = self.listen(sound)
            self._compare(found, heard.text)
            if heard.end_s is not None:
                found.after_s = round(max(0.0, sound.seconds - quiet.trailing_s - heard.end_s), 3)
            if found.after_s > _AFTER_S and not found.missed_end:
                found.missed_end = "after"
        if self.likeness is not None and voice is not None:
            own = self.likeness.embed(sound)
            found.similarity = round(cosine(own, voice), 4) if own is not None else 0.0
        return found

    def _compare(self, found: Utterance, heard: str) -> None:
        written, said = units(found.text, self.language), units(heard, self.language)
        alignment = align(written, said)
        found.heard = heard
        found.aligned = marked(alignment, apart="" if is_ideographic(found.text) else " ")
        found.words = len(written)
        found.substituted = alignment.count("substituted")
        found.inserted = alignment.count("inserted")
        found.deleted = alignment.count("deleted")
        found.dropped = alignment.longest_drop if alignment.longest_drop >= _DROP else 0
        found.looped = looped(written, said)


def usual_length_s(text: str) -> float:
    """About how long an unhurried reader takes: 4 syllables a second, and pauses at marks."""
    pauses = sum(mark in ".,;:!?…—。，、；：！？" for mark in text)
    return 0.6 + 0.25 * syllables(text) + 0.25 * pauses


def envelope(sound: Sound) -> list[float]:
    """The RMS of each tenth of a second, the last of which may be shorter."""
    step = max(1, sound.rate_hz // 10)
    parts = [sound.samples[at : at + step] for at in range(0, len(sound.samples), step)]
    return [round(float(np.sqrt(np.mean(part.astype(np.float64) ** 2))), 4) for part in parts]
