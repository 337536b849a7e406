"""Utterances, totals and gates, with an ear that is told what it hears."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.errors import InvalidRequest, RequestFailed
from hocket.eval import result as results
from hocket.eval.ears import Heard
from hocket.eval.judge import Judge, Utterance, usual_length_s
from hocket.eval.result import Result, judge_gates, same_sounds, totals, wer_change, worst
from hocket.eval.run import evaluate, teacher_files, voices
from hocket.eval.sound import Sound, read_wav, write_wav
from hocket.eval.speakers import RUNAWAY, Spoken, recordings
from hocket.eval.tables import faults
from hocket.eval.texts import Item
from hocket.results import save
from tests.eval.conftest import RATE_HZ, quiet, sound, vowel

TEXT = "The cat sat on the mat."
ITEM = Item("a", TEXT)
SPEECH = sound(quiet(0.1), vowel(1.4), quiet(0.2))


def judged(
    heard: str = TEXT,
    spoken: Sound = SPEECH,
    finish: str = "stop",
    expected_s: float | None = 2.0,
    end_s: float | None = None,
) -> Utterance:
    return Judge(listen=lambda _: Heard(heard, end_s))(ITEM, 1, Spoken(spoken, finish), expected_s, None)


def test_a_good_utterance_has_nothing_wrong() -> None:
    found = judged()
    assert (found.words, found.errors, found.wer, found.missed_end, found.clicks) == (6, 0, 0.0, "", [])
    assert (found.leading_s, found.length_ratio) == (pytest.approx(0.1, abs=0.011), pytest.approx(0.85))
    assert found.words_per_s == pytest.approx(6 / 1.4, rel=0.05)
    assert found.syllables_per_s == pytest.approx(6 / 1.4, rel=0.05)
    assert worst([found]) == []


@pytest.mark.parametrize(
    ("heard", "faulty"),
    [
        ("The cat sat.", ["leaves out 3"]),
        ("The cat sat on the mat on the mat on the mat.", ["repeats 6"]),
        ("The hat sat on a mat.", []),
    ],
)
def test_faults_of_words(heard: str, faulty: list[str]) -> None:
    found = judged(heard)
    assert found.errors
    assert faults(found) == faulty


@pytest.mark.parametrize(
    ("finish", "seconds", "missed"),
    [("stop", 4.9, ""), ("", 4.9, ""), ("length", 1.0, "limit"), ("stop", 5.1, "long"), ("", 5.1, "long")],
)
def test_missed_end_is_a_limit_or_much_too_long(finish: str, seconds: float, missed: str) -> None:
    long = sound(vowel(seconds))
    assert judged(spoken=long, finish=finish).missed_end == missed


@pytest.mark.parametrize(
    ("end_s", "after_s", "missed"),
    [(None, 0, ""), (1.5, 0, ""), (1.1, 0.4, ""), (0.1, 1.4, ""), (-0.2, 1.7, "after")],
)
def test_noise_behind_the_last_word_is_a_missed_end(end_s: float | None, after_s: float, missed: str) -> None:
    found = judged(end_s=end_s)
    assert found.after_s == pytest.approx(after_s, abs=0.02)
    assert found.missed_end == missed


def test_expected_length_is_estimated_where_nobody_spoke_before() -> None:
    assert judged(expected_s=None).expected_s == usual_length_s(TEXT) == pytest.approx(2.35)


def test_faults_of_sound() -> None:
    clean = SPEECH.samples.copy()
    clean[round(1.6 * RATE_HZ)] = 0.5
    clean[10_000:10_010] = 1.0
    found = judged(spoken=Sound(clean, RATE_HZ))
    assert found.clipped == 10
    assert any(abs(at - 1.6) < 1e-3 for at in found.clicks)
    assert "clips" in faults(found)


def test_a_silent_answer_is_judged_too() -> None:
    found = judged("", sound(np.zeros(RATE_HZ)))
    assert (found.wer, found.words_per_s, found.loudness_lufs, found.dropped) == (1.0, 0.0, None, 6)
    assert judged("", Sound(np.zeros(0, np.float32), RATE_HZ)).seconds == 0


# --- the run -----------------------------------------------------------------------------------


def test_utterances_come_in_order_and_failures_among_them(tmp_path: Path) -> None:
    items = [Item(str(n), f"Text {n}.") for n in range(6)]
    gate = threading.Barrier(3)

    def speak(item: Item, seed: int | None) -> Spoken:
        gate.wait(10)  # three at once, or nobody
        if item.name == "2":
            raise RequestFailed("no voice today")
        if item.name == "3":
            raise RequestFailed("it did not end", code=RUNAWAY)
        return Spoken(SPEECH, "stop")

    pairs = [(item, None) for item in items]
    found = list(evaluate(pairs, speak, Judge(), concurrency=3, keep=tmp_path / "kept"))
    assert [u.name for u in found] == list("012345")
    assert [u.failure for u in found if u.failure] == ["no voice today", "it did not end"]
    assert [u.missed_end for u in found if u.failure] == ["", "limit"]
    assert sorted(path.name for path in (tmp_path / "kept").glob("*.wav")) == [
        "0.wav",
        "1.wav",
        "4.wav",
        "5.wav",
    ]
    assert (tmp_path / "kept/4.txt").read_text() == "Text 4.\n"
    assert len(read_wav(tmp_path / "kept/4.wav").samples) == len(SPEECH.samples)


def test_sounds_of_several_seeds_are_kept_apart(tmp_path: Path) -> None:
    list(evaluate([(ITEM, 1), (ITEM, 2)], lambda *_: Spoken(SPEECH), Judge(), keep=tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*.wav")) == ["a-s1.wav", "a-s2.wav"]


def test_our_own_mistake_is_not_a_failure_of_the_speaker() -> None:
    def speak(item: Item, seed: int | None) -> Spoken:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(evaluate([(ITEM, None)], speak, Judge()))


class Ear:
    """Knows a voice by the first sample of its recording."""

    def embed(self, spoken: Sound) -> Any:
        return np.eye(9)[round(8 * float(spoken.samples[0]))]


def test_which_voice_an_item_is_compared_with(tmp_path: Path) -> None:
    files = {}
    for n, name in enumerate(("a", "b", "one", "target")):
        files[name] = tmp_path / f"{name}.wav"
        write_wav(files[name], Sound(np.full(10, n / 8, np.float32), 1000))
    items = [Item("a", TEXT, reference=files["one"]), Item("z", TEXT)]
    ear: Any = Ear()

    def ask(given: Path | None, teacher: dict[str, Path], cloned: bool = False) -> list[Any]:
        voice_of = voices(ear, items, given, teacher, cloned=cloned)
        return [
            None if (voice := voice_of(item)) is None else np.flatnonzero(voice).tolist() for item in items
        ]

    assert ask(files["one"], {"a": files["a"]}, cloned=True) == [[2], [2]]  # the recording given
    assert ask(tmp_path, {}) == [[0], None]  # NAME.wav of the folder
    assert ask(None, {"a": files["a"]}, cloned=True) == [[2], None]  # the item's own reference
    assert ask(None, {"a": files["a"], "z": files["target"]}) == [[0, 3], [0, 3]]  # the teacher's mean
    assert ask(None, {}) == [None, None]
    others = [Item("x", TEXT)]
    voice = voices(ear, others, tmp_path, {}, cloned=False)(others[0])
    assert np.flatnonzero(voice).tolist() == [0, 1, 2, 3]  # no file is of that name: the mean of all


def test_teacher_is_the_folder_or_the_lists_own_recording(tmp_path: Path) -> None:
    for name in ("a", "t"):
        (tmp_path / f"{name}.wav").write_bytes(b"")
    items = [Item("a", TEXT), Item("b", TEXT, target=tmp_path / "t.wav"), Item("c", TEXT)]
    assert teacher_files(items, tmp_path) == {"a": tmp_path / "a.wav"}
    assert teacher_files(items, None) == {"b": tmp_path / "t.wav"}


def test_a_recording_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    (found,) = evaluate([(ITEM, None)], recordings({"a": tmp_path / "a.wav"}), Judge())
    assert found.failure == f"there is no file {tmp_path / 'a.wav'}"


# --- totals, gates, files ------------------------------------------------------------------------


def many() -> list[Utterance]:
    misheard = Utterance(name="a", text="x", seconds=2, expected_s=2, heard="", words=10, substituted=1)
    long = Utterance(name="b", text="x", seconds=9, expected_s=3, heard="", words=30, deleted=3)
    rough = Utterance(name="c", text="x", seconds=1, expected_s=2, heard="", words=10)
    misheard.similarity, long.similarity = 0.9, 0.8
    long.missed_end = "long"
    rough.clicks, rough.clipped = [0.1, 0.2], 5
    return [misheard, long, rough, Utterance(name="d", text="x", failure="HTTP 500")]


def test_totals_are_of_all_words_together() -> None:
    found = totals(many())
    assert (found.utterances, found.failures, found.seconds) == (4, 1, 12)
    assert found.wer == pytest.approx(4 / 50)
    assert found.wer_low is not None
    assert found.wer_high is not None
    assert found.wer_low <= found.wer <= found.wer_high
    assert found.wrong_utterances == pytest.approx(2 / 3)
    assert (found.similarity, found.similarity_least) == (pytest.approx(0.85), 0.8)
    assert (found.length_ratio_most, found.missed_ends, found.clicking, found.clipping) == (3, 1, 1, 1)


def test_worst_come_first() -> None:
    assert [u.name for u in worst(many())] == ["d", "b", "a", "c"]
    assert len(worst(many() * 9)) == 10


@pytest.mark.parametrize(
    ("option", "holds_at", "fails_at", "told"),
    [
        ("--max-wer", 8.1, 7.9, "8 %, most"),
        ("--min-similarity", 0.84, 0.86, "0.85, least"),
        ("--max-missed", 1, 0, "1, most"),
        ("--max-length-ratio", 3, 2.5, "3, most"),
        ("--max-clicking", 1, 0, "1, most"),
        ("--max-clipping", 1, 0, "1, most"),
        ("--max-looped", 0, -1, "0, most"),
        ("--max-dropped", 0, -1, "0, most"),
        ("--max-failures", 1, 0, "1, most"),
    ],
)
def test_gate(option: str, holds_at: float, fails_at: float, told: str) -> None:
    found = totals(many())
    assert [gate.holds for gate in judge_gates(found, {option: holds_at})] == [True]
    (gate,) = judge_gates(found, {option: fails_at})
    assert not gate.holds
    assert gate.told.startswith(told)
    assert judge_gates(found, {option: None}) == []


@pytest.mark.parametrize("option", ["--max-wer", "--min-similarity", "--max-missed", "--max-clicking"])
def test_a_gate_on_what_nobody_measured_fails(option: str) -> None:
    nothing = totals([Utterance(name="a", text="x", failure="HTTP 500")])
    (gate,) = judge_gates(nothing, {option: 0})
    assert not gate.holds
    assert gate.told.startswith("nothing was measured")


def new(utterances: list[Utterance]) -> Result:
    made = results.new_result(["hocket", "eval", "--api-key", "secret", "a b"], "1", {"model": "m"}, {})
    made.utterances, made.totals = utterances, totals(utterances)
    return made


def test_result_file_is_read_back(tmp_path: Path) -> None:
    made = new(many())
    made.gates = judge_gates(made.totals, {"--max-wer": 5.0})
    save(made, tmp_path / "a.json")
    assert results.load(tmp_path / "a.json") == made
    assert made.command == "hocket eval --api-key … 'a b'"


@pytest.mark.parametrize(
    ("data", "message"),
    [(b'{"schema":"hocket-bench/1"}', "of schema 'hocket-bench/1'"), (b"x", "not a result")],
)
def test_what_is_no_result_is_told(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(InvalidRequest, match=message):
        results.load(tmp_path / "a.json")


def test_sounds_are_alike_to_rounding() -> None:
    rng = np.random.default_rng(0)
    noise = (1e-4 * rng.uniform(-1, 1, len(SPEECH.samples))).astype(np.float32)
    rounded = judged(spoken=Sound(SPEECH.samples + noise, RATE_HZ))
    other = judged(spoken=Sound(SPEECH.samples * np.float32(0.98), RATE_HZ))
    longer = judged(spoken=Sound(np.pad(SPEECH.samples, (0, 100)), RATE_HZ))
    found = [same_sounds(new([judged()]), new([one])) for one in (judged(), rounded, other, longer)]
    assert found == [(1, 1), (1, 1), (1, 0), (1, 0)]


def test_change_of_word_errors_is_of_the_same_utterances() -> None:
    better = [Utterance(name="a", text="x", heard="", words=10, substituted=0)]
    change = wer_change(new(many()), new(better))
    assert change == (pytest.approx(-0.1), pytest.approx(-0.1), pytest.approx(-0.1))
    assert wer_change(new(many()), new([])) is None
    assert math.isnan(Utterance(name="a", text="x").wer)
