"""The commands, run as a user would run them, with a tiny model."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import hocket
from hocket.audio.decode import decode
from hocket.audio.wav import wav_header
from hocket.cli import app, bundled
from hocket.cli.bundled import FOLDER
from hocket.cli.serve import _drain
from hocket.models.qwen3_omni.synthetic import write_checkpoint as write_omni

DATA = Path(__file__).parents[1] / "data"
FRAMES = 4
SHORT = ["--seed", "1", "--max-frames", str(FRAMES + 1), "--set", "threads=1"]


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint(variant="custom_voice", never_ends=True))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str, code: int = 0, **options: Any) -> Any:
        result = CliRunner().invoke(app, words, **options)
        assert result.exit_code == code, (result.stderr, result.exception)
        return result

    return run


def test_say_answers_about_a_picture(run: Callable[..., Any], tmp_path: Path) -> None:
    model = str(write_omni(tmp_path / "omni"))
    Image.fromarray(np.full((40, 60, 3), 128, np.uint8)).save(tmp_path / "a.png")
    words = ("say", "What is it?", "--model", model, "--image", "a.png", "--image", "a.png", *SHORT)
    said = run(*words, "-o", "a.wav")
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.getnframes() == 1920 * (FRAMES + 1) - 555
    lines = said.stderr.strip().splitlines()
    assert len(lines) >= 2  # the answer as text, then the summary
    missing = run("say", "a", "--model", model, "--image", "b.png", code=2)
    assert "--image b.png cannot be read: No such file" in missing.stderr
    (tmp_path / "c.png").write_text("no picture")
    assert "--image cannot be decoded" in run("say", "a", "--model", model, "--image", "c.png", code=2).stderr


def test_max_tokens_cuts_the_answer(run: Callable[..., Any], tmp_path: Path) -> None:
    model = str(write_omni(tmp_path / "omni"))

    def answer(tokens: int) -> str:
        words = ("say", "Hello.", "--model", model, "--max-tokens", str(tokens), *SHORT)
        return run(*words).stderr.rpartition("\n")[0].rpartition("\n")[0]

    short, long = answer(1), answer(9)  # a token is a byte here, so that 2 might end inside a letter
    assert long.startswith(short)
    assert 0 < len(short) < len(long)


def test_say_writes_a_wav_and_the_frames(run: Callable[..., Any], model: str, tmp_path: Path) -> None:
    said = run("say", "Hello.", "--model", model, "-o", "a.wav", "--codes", "a.codes", *SHORT)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnframes(), file.getframerate()) == (1920 * FRAMES, 24000)
    codes = np.load(tmp_path / "a.codes")
    assert (codes.shape, codes.dtype) == ((FRAMES, 16), np.int32)
    assert re.search(
        r"0\.32 s of sound · first after \d+\.\d+ s · RTF \d+\.\d+ · seed 1 · .* · a\.wav", said.stderr
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.codes", "a.wav"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp3", []), ("a.ogg", []), ("a.opus", []), ("a.aac", []), ("a.flac", []),
        ("a.bin", ["--format", "flac"]),
    ],
)  # fmt: skip
def test_format_is_in_the_name_or_asked_for(
    run: Callable[..., Any], model: str, tmp_path: Path, name: str, options: list[str]
) -> None:
    run("say", "Hello.", "--model", model, "-o", name, *options, *SHORT)
    sound, rate = decode(tmp_path / name, param=name)
    assert len(sound) / rate >= FRAMES / 12.5


def test_sound_streams_to_standard_output(run: Callable[..., Any], model: str) -> None:
    wav = run("say", "-", "--model", model, "-o", "-", *SHORT, input="Hello.").stdout_bytes
    assert wav[:44] == wav_header(24000, None)
    pcm = run("say", "Hello.", "--model", model, "--stream-to-stdout", "--format", "pcm", *SHORT).stdout_bytes
    assert len(pcm) == 2 * 1920 * FRAMES
    assert wav[44:] == pcm


def test_voice_is_cloned_from_a_file(run: Callable[..., Any], checkpoint: Callable[..., Path]) -> None:
    base = str(checkpoint(variant="base"))
    voice = ["--ref-audio", str(DATA / "weasels.wav"), "--speaker-only"]
    run("say", "Hello.", "--model", base, *voice, *SHORT)


def test_without_a_model_hockets_own_voice_speaks(run: Callable[..., Any], tmp_path: Path) -> None:
    run("say", "One melody, several voices.", "--seed", "1")
    sound, rate = decode((tmp_path / "out.wav").read_bytes(), param="out.wav")
    assert 1.2 < len(sound) / rate < 4  # it says this much and ends by itself
    assert 0.02 < float(np.sqrt(np.square(sound).mean())) < 0.4
    assert "joe" in run("voices").stdout.split()


def test_the_voice_that_ships_is_whole() -> None:
    sums = dict(reversed(line.split("  ")) for line in (FOLDER / "SHA256SUMS").read_text().splitlines())
    for name, wanted in sums.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == wanted, name
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 64e6


def test_a_copy_without_its_voice_says_what_to_do(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    result = run("say", "Hello.", code=2)
    assert "came without its own voice; name a folder" in result.stderr


BAD: dict[str, tuple[list[str], int, str]] = {
    "nothing to say": (["say", ""], 2, "input holds nothing to say"),
    "voice": (["say", "a", "--voice", "nobody"], 2, "voice 'nobody' is not known; known voices: aiden"),
    "language": (["say", "a", "--language", "Klingon"], 2, "language 'Klingon' is not known; known: Auto"),
    "format": (["say", "a", "--format", "midi"], 2, "--format 'midi' is not known; known: wav, mp3"),
    "transcript": (["say", "a", "--ref-audio", "b.wav"], 2, "--ref-audio needs --ref-text"),
    "recording": (["say", "a", "--ref-text", "b"], 2, "--ref-text and --speaker-only need --ref-audio"),
    "no such recording": (
        ["say", "a", "--ref-audio", "nowhere.wav", "--speaker-only"], 2,
        "--ref-audio nowhere.wav cannot be read: No such file",
    ),
    "tokens of a text": (["say", "a", "--max-tokens", "3"], 2, "--max-tokens is for models that answer"),
    "no sound": (
        ["say", "a", "--ref-audio", str(DATA / "README.md"), "--speaker-only"], 2,
        "error: --ref-audio ",
    ),
    "setting": (["say", "a", "--set", "talker.slots"], 2, "is not of the form stage.field=value"),
    "unknown setting": (
        ["say", "a", "--set", "talker.slits=3"], 1, "talker.slits is not known; did you mean",
    ),
    "frames": (["say", "a", "--max-frames", "99999"], 2, "--max-frames must be "),
    "folder to write to": (["say", "a", "-o", "nowhere/a.wav"], 2, "is in a folder that is not there"),
    "folder as file": (["say", "a", "-o", "."], 2, "-o '.' is a folder; give a file to write"),
    "frames to write": (["say", "a", "--codes", "nowhere/a"], 2, "--codes 'nowhere/a' is in a folder"),
    "ending": (["say", "a", "-o", "a.m4a"], 2, "-o 'a.m4a' ends like no format; known: .ogg, .raw, .wav"),
    "folder of media": (["serve", "--port", "0", "--media-dir", "nowhere"], 2, "--media-dir 'nowhere' is"),
    "file of voices": (["serve", "--port", "0", "--voices-dir", __file__], 2, "is no folder; give one"),
    "result to write": (
        ["bench", "http://127.0.0.1:9", "--json", "nowhere/a.json"], 2, "--json 'nowhere/a.json' is in a",
    ),
    "file for pictures": (["bench", "http://127.0.0.1:9", "--plot", __file__], 2, "is a file; give a folder"),
    "model": (["voices", "./nowhere"], 1, "there is no such folder"),
    "voice alias": (["serve", "--port", "0", "--voice-alias", "a"], 2, "is not of the form name=target"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "code", "message"), BAD.values(), ids=BAD)
def test_error_is_one_line_with_a_remedy(
    run: Callable[..., Any], model: str, words: list[str], code: int, message: str
) -> None:
    if words[0] == "say":
        words = [*words, "--model", model]
    elif words[0] == "serve":
        words = [*words[:1], model, *words[1:]]
    result = run(*words, code=code)
    (line,) = result.stderr.strip().split("\n")
    assert line.startswith("error: ")
    assert message in line
    assert not list(Path().glob("*.part"))


def test_debug_shows_where_an_error_comes_from(run: Callable[..., Any], model: str) -> None:
    result = CliRunner().invoke(app, ["say", "", "--model", model, "--debug"])
    assert isinstance(result.exception, hocket.errors.InvalidRequest)


def test_taken_port_is_told_before_anything_is_loaded(run: Callable[..., Any], listener: Any) -> None:
    port = listener.getsockname()[1]
    result = run("serve", "./nowhere", "--port", str(port), code=1)
    assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use")


@pytest.fixture
def listener() -> Any:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_doctor_looks_at_machine_and_model(run: Callable[..., Any], model: str, tmp_path: Path) -> None:
    report = run("doctor").stdout
    for what in ("python", "torch", "cpu", "devices", "formats"):
        assert re.search(rf"^{what} +(ok|note) ", report, re.MULTILINE)
    report = run("doctor", model).stdout
    for what in ("model", "weights", "profile"):
        assert re.search(rf"^{what} +ok ", report, re.MULTILINE)
    (tmp_path / "empty").mkdir()
    assert re.search(r"model +bad .*config\.json", run("doctor", "./empty", code=1).stdout)


def test_doctor_does_not_fetch_what_it_looks_for(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it was imported
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # so that it is as it was when this test ends
    monkeypatch.delenv("HF_HUB_OFFLINE")
    report = run("doctor", "org/a-model", code=1).stdout
    assert "its files are not in the cache; its first use downloads them" in report
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids a download; unset it" in run("doctor", "org/a-model", code=1).stdout


def test_version(run: Callable[..., Any]) -> None:
    assert run("--version").stdout == f"hocket {hocket.__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, hocket.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl+C"])
def test_server_lets_requests_finish_and_ends_with_zero(model: str, sent: signal.Signals) -> None:
    """Ctrl+C goes to all processes of a terminal."""
    command = [sys.executable, "-c", "from hocket.cli import app; app()", "serve", model, "--port", "0"]
    options = ["--drain-timeout", "300", "--api-key", "k"]
    environment = {**os.environ, "PYTHONPATH": str(Path(hocket.__file__).parents[1])}
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as server:
        assert server.stderr is not None
        url = next(line.split()[0] for line in server.stderr if line.endswith("is ready\n"))
        body = {"input": "Hello.", "response_format": "pcm", "max_new_tokens": 4000}
        key = {"Authorization": "Bearer k"}
        with httpx2.stream("POST", f"{url}/v1/audio/speech", json=body, headers=key, timeout=60) as response:
            pieces = response.iter_raw()
            next(pieces)
            (os.killpg if sent is signal.SIGINT else os.kill)(server.pid, sent)
            next(line for line in server.stderr if line.startswith("stopping: 1 "))
            assert httpx2.get(f"{url}/ready").json()["status"] == "draining"
            refused = httpx2.post(f"{url}/v1/audio/speech", json=body, headers=key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            next(pieces)
        assert "Traceback" not in server.stderr.read()
        assert server.wait(60) == 0


def test_drain_aborts_what_does_not_finish_in_time() -> None:
    class Aborting:
        async def abort(self, job: str) -> bool:
            return running.pop(job) is not None

    running: dict[str, Any] = {"a": object(), "b": object()}
    asyncio.run(_drain(Aborting(), running, 0))  # type: ignore[arg-type]
    assert not running
