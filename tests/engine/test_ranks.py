"""Ranks of one stage: however late each one's device is, all launch the same, in the same order."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hocket.core import Job, SpeechRequest
from hocket.engine.messages import Message, Shutdown, Turn
from hocket.engine.ranks import Follower, Leader
from hocket.errors import InvalidRequest
from hocket.models.qwen3_tts.config import read_model_config
from hocket.models.qwen3_tts.frontend import QwenTtsFrontEnd
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.models.qwen3_tts.weights import load_talker
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.ring import OutputRing

CPU = torch.device("cpu")


class Recorded:
    """A program, and what was launched on it."""

    def __init__(self, program: TalkerProgram) -> None:
        self.program = program
        self.launched: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def step(self, state: Any, slots: torch.Tensor, *rest: Any) -> Any:
        out = self.program.step(state, slots, *rest)
        self.launched.append(("step", slots.tolist(), out.chunk.tolist(), rest))
        return out

    def prefill(self, state: Any, *given: Any) -> None:
        self.launched.append(("prefill", [x.shape for x in given if isinstance(x, torch.Tensor)]))
        self.program.prefill(state, *given)


class Post:
    """A mailbox whose messages the test carries."""

    address = "local:leader"

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, address: str, message: Message) -> None:
        self.sent.append((address, message))

    def flush(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(size="tiny", variant="custom_voice", never_ends=True)


@pytest.fixture
def programs(folder: Path) -> list[Recorded]:
    config = read_model_config(folder)
    weights = load_talker(folder, config, CPU, torch.float32)
    return [Recorded(TalkerProgram(config, weights)) for _ in range(2)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are there when they are there: another time on each rank."""
    chance = random.Random(3)
    monkeypatch.setattr(
        OutputRing, "readable", property(lambda ring: bool(ring._entries) and chance.random() < 0.3)
    )


def runner(program: Recorded, out: Callable[[Any], None], **limits: Any) -> AutoregressiveRunner:
    made = AutoregressiveLimits(**{"slots": 3, "max_batch": 2, "kv_blocks": 12, "in_flight": 2, **limits})
    return AutoregressiveRunner("talker", program, made, CPU, out)  # type: ignore[arg-type]


def job(folder: Path, number: int) -> Job:
    text = "one voice fills the rests of another"[: 12 + 5 * (number % 5)]
    r = SpeechRequest(text=text, seed=number, max_frames=5 + 7 * number % 30, request_id=f"job-{number}")
    made = QwenTtsFrontEnd(folder).prepare(r)
    made.priority = number % 3
    return made


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("seed", range(4))
def test_a_follower_launches_what_its_leader_does(seed: int, programs: list[Recorded], folder: Path) -> None:
    heard: dict[str, list[np.ndarray]] = {}
    post, draw = Post(), random.Random(seed)
    lead = runner(programs[0], lambda c: heard.setdefault(c.job, []).append(c.arrays["codes"]))
    leader = Leader(lead, post, ["rank1"])  # type: ignore[arg-type]
    follower = Follower(runner(programs[1], lambda c: None), post)  # type: ignore[arg-type]
    now, waiting = 0.0, [job(folder, n) for n in range(12)]
    running: list[str] = []
    while waiting or leader.jobs():
        now += draw.random() * 0.05
        what = draw.random()
        if waiting and what < 0.2:
            running.append(waiting[0].id)
            leader.start(waiting.pop(0), {})
        elif running and what < 0.23:
            leader.abort(running.pop(draw.randrange(len(running))))
        elif running and what < 0.3:
            leader.pause(draw.choice(running), draw.random() < 0.3)
        elif running and what < 0.35:
            for name in running:  # so that nobody waits for ever
                leader.pause(name, False)
        leader.tick(now)
    for address, message in post.sent:
        assert address == "rank1"
        follower._repeat(message)
    assert programs[1].launched == programs[0].launched
    assert lead.refresh_stats().preemptions > 0
    turns = sum(isinstance(message, Turn) for _, message in post.sent)
    assert turns < 4 * sum(what[0] == "step" for what in programs[0].launched)
    leader.close()
    assert isinstance(post.sent[-1][1], Shutdown)


@pytest.mark.usefixtures("late")
def test_an_idle_leader_says_nothing(programs: list[Recorded], folder: Path) -> None:
    post = Post()
    leader = Leader(runner(programs[0], lambda c: None), post, ["rank1"])  # type: ignore[arg-type]
    assert not any(leader.tick(now) for now in range(100))
    assert post.sent == []


def test_an_aborted_job_is_no_work_that_stands_still(programs: list[Recorded], folder: Path) -> None:
    leader = Leader(runner(programs[0], lambda c: None, in_flight=1), Post(), ["rank1"])  # type: ignore[arg-type]
    leader.start(job(folder, 1), {})
    leader.tick(100.0)
    leader.tick(101.0)
    leader.abort("job-1")
    leader.tick(102.0)
    assert leader.refresh_stats().idle_for(1000.0) == 0


def test_a_job_that_never_fits_is_refused_on_every_rank(programs: list[Recorded], folder: Path) -> None:
    post = Post()
    leader = Leader(runner(programs[0], lambda c: None, kv_blocks=3), post, ["rank1"])  # type: ignore[arg-type]
    follower = Follower(runner(programs[1], lambda c: None, kv_blocks=3), post)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        leader.start(job(folder, 4), {})
    for _, message in post.sent:
        follower._repeat(message)
    assert leader.jobs() == follower._runner.jobs() == []
