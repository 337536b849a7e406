"""`hocket bench` as a user runs it, against a scripted server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hocket.bench import result
from hocket.cli import app
from tests.bench.conftest import PCM, FakeServer, answer, speak

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> Any:
        ran = CliRunner().invoke(app, ["bench", *words])
        assert ran.exit_code == code, (ran.output, ran.exception)
        return ran

    return run


def test_closed_loop_is_told_and_written(run: Run, server: FakeServer, tmp_path: Path) -> None:
    ran = run(server.url, "--concurrency", "1,3", "--requests", "4,9", "--json", "a.json", "--voice", "ada")
    assert "1 client" in ran.stdout
    assert "3 clients" in ran.stdout
    assert re.search(r"^failures +0 +0$", ran.stdout, re.M)
    assert ran.stderr.splitlines()[-1] == "result: a.json"
    found = result.load(tmp_path / "a.json")
    assert [(level.load, level.whole.requests) for level in found.levels] == [(1, 4), (3, 9)]
    assert found.levels[1].whole.audio_each.mean == 0.1
    assert found.server == {
        "url": server.url,
        "version": {"version": "1"},
        "software": "scripted",
        "models": {"object": "list", "data": [{"id": "scripted"}]},
    }
    asked = [one for one in server.requests if one]
    assert len(asked) == 4 + 9 + 1 + 3  # a warm-up a client
    assert {one["model"] for one in asked} == {"scripted"}
    assert {one["voice"] for one in asked} == {"ada"}


def test_json_goes_to_standard_output(run: Run, server: FakeServer) -> None:
    ran = run(server.url, "--concurrency", "1", "--requests", "2", "--warmup", "0", "--json", "-")
    assert json.loads(ran.stdout)["levels"][0]["whole"]["requests"] == 2


def test_arrivals_and_listeners(run: Run, server: FakeServer, tmp_path: Path) -> None:
    run(server.url, "--rate", "400", "--requests", "30", "--json", "a.json")
    (level,) = result.load(tmp_path / "a.json").levels
    assert (level.kind, level.name, level.whole.requests) == ("arrivals", "400 req/s", 30)
    ran = run(server.url, "--listeners", "4", "--requests", "8", "--json", "b.json")
    (level,) = result.load(tmp_path / "b.json").levels
    assert (level.name, level.whole.requests) == ("4 listeners", 8)
    assert "listeners served throughout" in ran.stdout


def test_several_processes_share_a_level(run: Run, server: FakeServer, tmp_path: Path) -> None:
    run(server.url, "--concurrency", "3", "--requests", "7", "--processes", "2", "--json", "a.json")
    (level,) = result.load(tmp_path / "a.json").levels
    assert (level.whole.requests, level.client.processes) == (7, 2)
    assert sorted(set(level.requests.client)) == [0, 1, 2]


def test_more_failures_than_allowed_are_exit_code_1(run: Run, server: FakeServer) -> None:
    def every_third_fails(path: str, body: dict[str, Any]) -> list[bytes]:
        if body and len(server.requests) % 3 == 0:
            return answer(b'{"error":{"message":"full"}}', status=503, headers={"Retry-After": "0"})
        return speak(path, body)

    server.answer = every_third_fails
    options = [server.url, "--concurrency", "1", "--requests", "9", "--warmup", "0"]
    ran = run(*options, code=1)
    assert "3 HTTP 503" in ran.stdout
    assert "1 client: HTTP 503, the first: full" in ran.stdout
    assert "refusals asked to come back after 0 to 0 s" in ran.stdout
    run(*options, "--max-failures", "3")


def test_nothing_is_measured_where_nothing_works(run: Run, server: FakeServer) -> None:
    server.answer = lambda path, body: answer(b'{"error":{"message":"no such model"}}', status=404)
    ran = run(server.url, "--concurrency", "1", code=1)
    assert ran.stderr == "error: no request succeeded; the first: HTTP 404: no such model\n"


def test_server_that_is_not_there(run: Run, server: FakeServer) -> None:
    server.stop()
    ran = run(server.url, code=1)
    assert ran.stderr.startswith(f"error: {server.url} does not answer: ")
    assert ran.stderr.endswith("is the server running?\n")


def test_interrupt_gives_what_there_is(run: Run, server: FakeServer, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it

    def interrupt(path: str, body: dict[str, Any]) -> list[bytes]:
        if len(server.requests) == 8:
            os.kill(os.getpid(), signal.SIGINT)
            return answer(bytes(100), headers=PCM)[:2]  # and never the end
        return speak(path, body)

    server.answer = interrupt
    ran = run(server.url, "--concurrency", "1", "--duration", "600", "--json", "a.json", code=130)
    assert "interrupted: this is what there is" in ran.stderr
    assert "1 client (cut)" in ran.stdout
    found = result.load(tmp_path / "a.json")
    assert found.interrupted
    assert (found.levels[0].whole.requests, found.failures) == (4, 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_plots_are_written(run: Run, server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = run(server.url, "--concurrency", "1", "--requests", "5", "--plot", "pictures")
    assert len(list((tmp_path / "pictures").glob("bench-*.png"))) == 3
    assert ran.stderr.count("picture: ") == 3


def test_two_results_are_compared(run: Run, server: FakeServer) -> None:
    for name, seed in (("a.json", "1"), ("b.json", "2")):
        run(server.url, "--concurrency", "2", "--requests", "24", "--seed", seed, "--json", name)
    ran = run("--compare", "a.json", "b.json")
    assert re.search(r"^ +a\.json +b\.json +change +95 % interval", ran.stdout, re.M)
    assert re.search(r"TTFP P50, ms +[\d.]+ +[\d.]+ +[+-]\d", ran.stdout)
    assert "not alike in seed: 1 and 2" in ran.stderr


URL = "http://127.0.0.1:9"
BAD = {
    "nothing": ([], "give the address of a server, or --compare A.json B.json"),
    "no address": (["localhost"], "'localhost' is not an address such as http://127.0.0.1:8000"),
    "both": ([URL, "--compare", "a.json", "b.json"], "--compare takes two result files and no URL"),
    "concurrency": (
        [URL, "--concurrency", "1,x"],
        "--concurrency '1,x' is not a list of positive whole numbers",
    ),
    "no clients": ([URL, "--concurrency", "0"], "--concurrency '0' is not a list of positive whole numbers"),
    "rate": ([URL, "--rate", "-1", "--duration", "1"], "--rate '-1' is not a list of positive numbers"),
    "two loads": ([URL, "--rate", "1", "--listeners", "1"], "--rate and --listeners are different loads"),
    "no end": ([URL, "--listeners", "4"], "--listeners needs --duration or --requests"),
    "counts": ([URL, "--requests", "1,2"], "--requests has 2 numbers for 3 levels; give 1 or 3"),
    "frames": ([URL, "--max-new-tokens", "9-5"], "LEAST must be at least 1 and at most MOST"),
    "no frames": ([URL, "--max-new-tokens", "many"], "'many' is neither a number nor LEAST-MOST"),
    "extra": ([URL, "--extra", "language=English"], "a string is written language='\"…\"'"),
    "extra without a name": ([URL, "--extra", "5"], "--extra '5' is not of the form key=json"),
    "format": ([URL, "--format", "mp3"], "is not one of 'pcm', 'wav'"),
    "processes": ([URL, "--processes", "0"], "Invalid value for '--processes'"),
    "no option": ([URL, "--conc", "1"], "No such option"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_bad_usage_is_exit_code_2_before_anything_is_sent(run: Run, words: list[str], message: str) -> None:
    told = run(*words, code=2).stderr
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", told).split())


def test_commands_in_the_documentation_can_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/bench.md").read_text("utf-8")
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)).replace("\\\n", " ")
    commands = [line for line in blocks.splitlines() if line.startswith("hocket bench")]
    assert len(commands) >= 5
    command = sys.modules["hocket.cli.bench"]  # whose name in the package is the function's
    parse = command._levels
    seen = []
    monkeypatch.setattr(command, "_levels", lambda *a: seen.append(parse(*a)) or stop())
    for line in commands:
        ran = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert ran.exit_code in (1, 77), (line, ran.output)
        assert ran.exit_code == 77 or "--compare" in line, (line, ran.output)
    assert seen


def stop() -> None:
    raise SystemExit(77)
