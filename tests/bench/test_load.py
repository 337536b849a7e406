from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.bench.http import Exchange
from hocket.bench.load import Bodies, Level, Load, Share, Workload
from hocket.bench.metrics import Trace
from hocket.bench.texts import read_texts
from hocket.errors import InvalidRequest

RATE = 1000
Virtually = Callable[[Any], Any]


class Studio:
    """A server that speaks to `seats` clients at once, in virtual time; others wait for a seat."""

    def __init__(self, seats: int, packets: list[tuple[float, int]], refuse: int = 0) -> None:
        self.packets = packets  # (pause before it, samples)
        self.refuse = refuse
        self.bytes_in = 0
        self.bodies: list[dict[str, Any]] = []
        self.seats = asyncio.Semaphore(seats)
        self.stopped: list[str] = []

    async def request(self, method: str, path: str, body: bytes) -> Exchange:
        exchange, loop = Exchange(), asyncio.get_running_loop()
        self.bodies.append(json.loads(body))
        exchange.headers = {"x-sample-rate": str(RATE)}
        if self.refuse:
            self.refuse -= 1
            exchange.status, exchange.ended = 503, loop.time()
            exchange.headers["retry-after"] = "2"
            return exchange
        exchange.status = 200
        async with self.seats:
            for pause, samples in self.packets:
                await asyncio.sleep(pause)
                exchange.times.append(loop.time())
                exchange.sizes.append(2 * samples)
        exchange.ended = loop.time()
        return exchange

    def stop(self, failure: str) -> None:
        self.stopped.append(failure)


def play(
    virtually: Virtually, level: Level, seats: int, packets: list[tuple[float, int]], **options: Any
) -> tuple[list[Trace], Share, Studio]:
    """-> traces with times since the level's beginning, in order of being due"""

    async def run() -> tuple[Share, Studio]:
        studio = Studio(seats, packets, **options)
        began = asyncio.get_running_loop().time()
        load = Load(Workload(url="http://a"), level, studio, began)  # type: ignore[arg-type]
        share = await load.run()
        assert (load.tally.sent, load.tally.done + load.tally.failed) == (len(share.traces),) * 2
        for trace in share.traces:
            trace.due, trace.sent, trace.ended = (
                round(t - began, 6) for t in (trace.due, trace.sent, trace.ended)
            )
            trace.times = [round(t - began, 6) for t in trace.times]
        share.until = round(share.until - began, 6)
        return share, studio

    share, studio = virtually(run())
    return sorted(share.traces, key=lambda t: (t.due, t.client)), share, studio


SECOND = [(0.25, 500), (0.75, 500)]  # a second of work for a second of sound


def test_closed_client_sends_when_its_last_request_has_ended(virtually: Virtually) -> None:
    traces, share, _ = play(virtually, Level(kind="closed", load=2, requests=5), 2, SECOND)
    assert [(t.client, t.sent, t.ended) for t in traces] == [
        (0, 0.0, 1.0), (1, 0.0, 1.0), (0, 1.0, 2.0), (1, 1.0, 2.0), (0, 2.0, 3.0),
    ]  # fmt: skip
    assert traces[0].times == [0.25, 1.0]
    assert (traces[0].bytes_per_s, traces[0].audio_s) == (2000.0, 1.0)
    assert share.until == 2.0  # the first client that found no work


def test_duration_ends_sending_not_hearing(virtually: Virtually) -> None:
    traces, share, _ = play(virtually, Level(kind="closed", load=1, duration_s=2.5), 1, SECOND)
    assert [(t.sent, t.ended) for t in traces] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    assert share.until == 3.0


def test_arrivals_do_not_wait_for_a_slow_server(virtually: Virtually) -> None:
    """Coordinated omission: what queues behind a stall is charged for all of its wait."""
    level = Level(kind="arrivals", load=4.0, requests=12)
    traces, _, _ = play(virtually, level, 1, SECOND)
    assert [t.ended - t.times[-1] for t in traces] == [0.0] * 12
    due = [t.due for t in traces]
    assert due == sorted(due)
    assert due[-1] < 8  # 12 arrivals at 4/s, while the server needs 12 s
    for n, one in enumerate(traces):
        assert one.times[0] >= due[0] + n + 0.25 - 1e-6  # served one after the other
        assert one.sent == one.due


def test_arrivals_are_poisson_seeded_and_shared(virtually: Virtually) -> None:
    def dues(seed: int, parts: int) -> list[float]:
        async def run() -> list[float]:
            found = []
            for part in range(parts):
                level = Level(kind="arrivals", load=50.0, duration_s=20.0)
                work = Workload(url="http://a", seed=seed)
                load = Load(work, level, Studio(9999, [(0.0, 1)]), 100.0, part, parts)  # type: ignore[arg-type]
                found += [due for _, due in zip(range(1000), load.arrivals(), strict=False)][part::parts]
            return sorted(found)

        return virtually(run())

    one = dues(1, 1)
    assert one == dues(1, 3)
    assert one != dues(2, 1)
    gaps = [b - a for a, b in zip([100.0, *one], one, strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.05)  # 1/e


def test_listener_asks_again_when_the_last_sound_has_been_played(virtually: Virtually) -> None:
    quick = [(0.25, 1000), (0.25, 3000)]  # 4 s of sound in half a second
    traces, _, _ = play(virtually, Level(kind="listeners", load=2, duration_s=9.0, spread_s=4.0), 2, quick)
    assert [(t.client, t.due) for t in traces] == [(0, 0.0), (1, 2.0), (0, 4.25), (1, 6.25), (0, 8.5)]


def test_listener_waits_out_silences(virtually: Virtually) -> None:
    slow = [(0.5, 500), (1.5, 500)]  # dry at 1.0, goes on at 2.0, ends at 2.5
    traces, _, _ = play(virtually, Level(kind="listeners", load=1, requests=2), 1, slow)
    assert [t.due for t in traces] == [0.0, 2.5]


def test_refused_client_comes_back_when_it_was_told_to(virtually: Virtually) -> None:
    traces, _, _ = play(virtually, Level(kind="closed", load=1, requests=3), 1, SECOND, refuse=1)
    assert [(t.sent, t.failure) for t in traces] == [(0.0, "HTTP 503"), (2.0, ""), (3.0, "")]


def test_hopeless_level_is_given_up(virtually: Virtually) -> None:
    level = Level(kind="closed", load=1, requests=1000)
    traces, _, studio = play(virtually, level, 1, SECOND, refuse=1000)
    assert len(traces) == 8
    assert studio.stopped == ["interrupted"]


# --- bodies ---


def test_body_asks_for_a_raw_stream() -> None:
    work = Workload(
        url="http://a", model="m", voice="ada", max_new_tokens=(50, 60), extra={"language": "English"}
    )
    body, text = Bodies(work, Level(kind="closed", load=1)).draw(0)
    found = json.loads(body)
    assert 50 <= found.pop("max_new_tokens") <= 60
    assert found == {
        "input": text.words, "model": "m", "voice": "ada", "response_format": "pcm",
        "stream": True, "stream_format": "audio", "language": "English",
    }  # fmt: skip
    assert 10 <= len(text.words.split()) <= 40


def test_null_takes_a_field_out() -> None:
    work = Workload(url="http://a", extra={"stream": None})
    assert "stream" not in json.loads(Bodies(work, Level(kind="closed", load=1)).draw(0)[0])


def test_texts_depend_on_seed_level_and_number_only() -> None:
    def draw(seed: int = 0, load: int = 4, number: int = 3) -> str:
        return (
            Bodies(Workload(url="http://a", seed=seed), Level(kind="closed", load=load)).draw(number)[1].words
        )

    assert draw() == draw()
    assert len({draw(), draw(seed=1), draw(load=5), draw(number=4)}) == 4


def test_lines_of_a_file_are_said_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\nThree.\n", "utf-8")
    bodies = Bodies(Workload(url="http://a", texts=tmp_path / "a.txt"), Level(kind="closed", load=1))
    assert {bodies.draw(n)[1].words for n in range(3)} == {"One.", "Two.", "Three."}
    assert bodies.draw(0) == bodies.draw(3)


def test_seed_tts_list_sends_its_recordings(tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs/a.wav").write_bytes(b"RIFF")
    (tmp_path / "meta.lst").write_text("n|Said there.|wavs/a.wav|Say this.|wavs/truth.wav\n", "utf-8")
    work = Workload(url="http://a", texts=tmp_path / "meta.lst")
    body = json.loads(Bodies(work, Level(kind="closed", load=1)).draw(0)[0])
    assert (body["input"], body["ref_text"]) == ("Say this.", "Said there.")
    assert body["ref_audio"] == "data:audio/wav;base64,UklGRg=="


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n\n", "holds no text"),
        ("a.lst", "name|said|a.wav\n", "line 1: 'name|said|a.wav' is not name|transcript|recording|text"),
        ("a.lst", "\nname|said|a.wav|text\n", "line 2: there is no file"),
    ],
)
def test_bad_text_file_is_named_by_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(InvalidRequest) as caught:
        read_texts(tmp_path / name)
    assert message in caught.value.message
