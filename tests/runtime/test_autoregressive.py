"""What shares a batch, a pool or a prefix with a request never changes what it says."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hocket.core import Chunk, ChunkKind, Job, Reference, Sampling, SpeechRequest
from hocket.errors import InvalidRequest
from hocket.models.qwen3_tts.config import read_model_config
from hocket.models.qwen3_tts.frontend import QwenTtsFrontEnd
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.models.qwen3_tts.weights import load_talker
from hocket.runtime import autoregressive
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner

CPU = torch.device("cpu")
LONG, SHORT = 44, 14  # frames; the long ones outgrow what a starved pool kept for them
TEXT = "one voice fills the rests of another while the melody passes on from hand to hand"
Arrived = dict[str, Chunk]


class Driver:
    """A runner and what came out of it, by job."""

    def __init__(self, program: TalkerProgram, **limits: Any) -> None:
        self.out: defaultdict[str, list[Chunk]] = defaultdict(list)
        self.runner = AutoregressiveRunner(
            "talker", program, AutoregressiveLimits(**limits), CPU, lambda c: self.out[c.job].append(c)
        )

    def start(self, job: Job, arrived: Arrived) -> None:
        self.runner.start(job, arrived)

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.runner.tick(time.monotonic())

    def finish(self) -> None:
        while self.runner.tick(time.monotonic()):
            pass

    def codes(self, job: Job) -> list[list[int]]:
        return np.concatenate([c.arrays["codes"] for c in self.out[job.id]]).tolist()

    def free(self) -> bool:
        s = self.runner.refresh_stats()
        return (s.slots_used, s.kv_blocks_used, s.waiting, len(self.runner.jobs())) == (0, 0, 0, 0)


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(size="tiny", variant="base")


@pytest.fixture(scope="module")
def program(folder: Path) -> TalkerProgram:
    config = read_model_config(folder)
    return TalkerProgram(config, load_talker(folder, config, CPU, torch.float32))


def make_jobs(folder: Path, count: int, long: int = LONG) -> list[tuple[Job, Arrived]]:
    """Different texts, voices, prompt forms and samplings; the last four repeat the first four's
    prompts with other seeds."""
    front = QwenTtsFrontEnd(folder)
    out = []
    for n in range(count):
        i = n % 12
        rng = np.random.default_rng(i)
        continued = i % 4 < 2
        reference = Reference(
            samples=np.zeros(24000, np.float32),
            rate_hz=24000,
            text="rests of another",
            speaker_only=not continued,
        )
        job = front.prepare(
            SpeechRequest(
                text=TEXT[i % 5 * 5 : i % 5 * 5 + 20 + 5 * (i % 7)],
                language="English" if i % 3 else "Auto",
                reference=reference,
                text_first=i % 2 == 0,
                max_frames=(long if n < 5 else SHORT) + i % 3,
                seed=1000 + n,
                sampling=Sampling(
                    temperature=0.0 if i % 5 == 4 else 0.9, top_k=50, top_p=0.8 if i % 3 == 0 else 1.0
                ),
                request_id=f"job-{n}",
            )
        )
        arrays = {
            "speaker": rng.standard_normal(64).astype(np.float32),
            "codes": rng.integers(0, 2048, (20 + i // 2, 16)).astype(np.int32),
        }
        kind = ChunkKind.CONDITIONING
        chunk = Chunk(job=job.id, source="reference", index=0, kind=kind, arrays=arrays, last=True)
        out.append((job, {"reference": chunk}))
    return out


@pytest.fixture(scope="module")
def jobs(folder: Path) -> list[tuple[Job, Arrived]]:
    return make_jobs(folder, 16)


@pytest.fixture(scope="module")
def alone(program: TalkerProgram, jobs: list[tuple[Job, Arrived]]) -> dict[str, list[list[int]]]:
    """What each job says when it has a fresh runner to itself."""
    out = {}
    for job, arrived in jobs:
        d = Driver(program, slots=1, max_batch=1, kv_blocks=64, prefill_tokens=0, prefix_cache=False)
        d.start(job, arrived)
        d.finish()
        assert d.free()
        out[job.id] = d.codes(job)
    return out


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("prefill_tokens", [16, 32, 0], ids=["prefill 16", "prefill 32", "prefill whole"])
@pytest.mark.parametrize("kv_blocks", [300, 26], ids=["ample", "starved"])
def test_sixteen_together_say_what_each_says_alone(
    program: TalkerProgram, jobs: Any, alone: Any, prefix_cache: bool, prefill_tokens: int, kv_blocks: int
) -> None:
    d = Driver(program, kv_blocks=kv_blocks, prefill_tokens=prefill_tokens, prefix_cache=prefix_cache)
    for at, (job, arrived) in enumerate(jobs):
        d.start(job, arrived)
        d.tick(at % 3)  # they join at different frames
    d.finish()
    for job, _ in jobs:
        assert d.codes(job) == alone[job.id], job.id
    assert (d.runner.stats.preemptions > 0) == (kv_blocks == 26)
    assert (d.runner.stats.prefix_hits > 0) == prefix_cache
    assert d.free()


def test_fewer_places_in_a_batch_than_slots(program: TalkerProgram, jobs: Any, alone: Any) -> None:
    d = Driver(program, kv_blocks=300, max_batch=3)
    for job, arrived in jobs:
        d.start(job, arrived)
    d.finish()
    assert all(d.codes(job) == alone[job.id] for job, _ in jobs)


def test_higher_priority_takes_the_slot_and_the_other_goes_on_later(
    program: TalkerProgram, jobs: Any, alone: Any
) -> None:
    (low, low_in), (high, high_in) = jobs[0], jobs[8]
    high = msgspec.structs.replace(high, priority=5)
    d = Driver(program, slots=1, max_batch=1, kv_blocks=64)
    d.start(low, low_in)
    d.tick(5)
    made = len(d.out[low.id])
    assert made
    d.start(high, high_in)
    d.tick(30)
    assert d.out[high.id][-1].last
    d.finish()
    assert d.runner.stats.preemptions == 1
    assert d.codes(low) == alone[low.id]
    assert d.codes(high) == alone[high.id]


@pytest.mark.parametrize("when", [0, 1, 2, 5, 12])
def test_abort_at_any_moment_frees_everything_and_disturbs_nobody(
    program: TalkerProgram, jobs: Any, alone: Any, when: int
) -> None:
    d = Driver(program, slots=4, kv_blocks=60, prefill_tokens=16)
    for job, arrived in jobs[:8]:
        d.start(job, arrived)
    d.tick(when)
    for job, _ in jobs[:8:2]:
        d.runner.abort(job.id)
    d.finish()
    for job, _ in jobs[1:8:2]:
        assert d.codes(job) == alone[job.id]
    assert d.free()


def test_paused_job_gives_its_slot_away_and_goes_on_exactly(
    program: TalkerProgram, jobs: Any, alone: Any
) -> None:
    (one, one_in), (two, two_in) = jobs[0], jobs[1]
    d = Driver(program, slots=1, max_batch=1, kv_blocks=64)
    d.start(one, one_in)
    d.tick(4)
    d.runner.pause(one.id, True)
    d.start(two, two_in)
    d.finish()
    assert d.codes(two) == alone[two.id]
    assert not d.out[one.id][-1].last
    d.runner.pause(one.id, False)
    d.finish()
    assert d.codes(one) == alone[one.id]
    assert d.free()


def test_text_fed_word_by_word_gives_what_whole_text_gives(checkpoint: Any) -> None:
    folder = checkpoint(size="tiny", variant="custom_voice")
    config = read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, CPU, torch.float32))
    front = QwenTtsFrontEnd(folder)
    text = "Hello there, this text is written while it is spoken."
    options: dict[str, Any] = {"seed": 3, "max_frames": 60, "text_first": False}
    whole = front.prepare(SpeechRequest(text=text, request_id="whole", **options))
    live, feed = front.open_text(SpeechRequest(text="Hello there,", request_id="live", **options))
    live.max_frames = whole.max_frames
    d = Driver(program, kv_blocks=64)
    d.start(whole, {})
    d.start(live, {})
    d.tick(20)
    made = len(d.out[live.id])
    assert made < len(d.out[whole.id]), "it must wait for text, not go on without"
    d.tick(10)
    assert len(d.out[live.id]) == made
    for word in text.removeprefix("Hello there,").split(" ")[1:]:
        data = feed.add(" " + word)
        if data:
            d.runner.feed(live.id, data)
        d.tick(3)
    d.runner.feed(live.id, feed.close())
    d.finish()
    assert d.codes(live) == d.codes(whole)
    assert d.free()


def test_waiting_for_text_holds_no_slot_that_another_wants(checkpoint: Any) -> None:
    folder = checkpoint(size="tiny", variant="custom_voice")
    config = read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, CPU, torch.float32))
    front = QwenTtsFrontEnd(folder)
    live, feed = front.open_text(SpeechRequest(text="Hello there,", max_frames=60, seed=1))
    other = front.prepare(SpeechRequest(text="Me too.", max_frames=10, seed=1))
    d = Driver(program, slots=1, max_batch=1, kv_blocks=64)
    d.start(live, {})
    d.finish()
    d.start(other, {})
    d.finish()
    assert d.out[other.id][-1].last
    d.runner.feed(live.id, feed.close())
    d.finish()
    assert d.out[live.id][-1].last
    assert d.free()


def test_a_job_that_never_fits_is_refused_at_once(program: TalkerProgram, folder: Path) -> None:
    (job, arrived) = make_jobs(folder, 1, long=900)[0]
    d = Driver(program, kv_blocks=26)
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        d.start(job, arrived)
    assert d.free()


def test_a_burst_of_prompts_is_as_few_calls_as_its_rows_fill(
    program: TalkerProgram, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    codes = []
    for most, jobs_a_call in ((2048, 16), (50, 16), (2048, 4)):
        monkeypatch.setattr(autoregressive, "CALL_ROWS", most)
        jobs = make_jobs(folder, 6)
        d = Driver(program, kv_blocks=256, prefill_tokens=0, max_batch=jobs_a_call)

        def prefill(state: Any, x: torch.Tensor, *rest: Any) -> None:
            calls.append(len(x))
            program.prefill(state, x, *rest)

        d.runner._run_prefill = prefill
        for job, arrived in jobs:
            d.start(job, arrived)
        d.finish()
        codes.append([d.codes(job) for job, _ in jobs])
        calls.append(0)
    whole, cut, by_four = (
        [int(n) for n in part.split()] for part in " ".join(map(str, calls)).split(" 0")[:3]
    )
    assert codes[0] == codes[1] == codes[2]
    assert len(whole) == 1
    assert set(cut[:-1]) == {50}
    assert len(by_four) == 2
    assert sum(cut) == sum(by_four) == whole[0]


@pytest.mark.parametrize(
    ("frames", "passed_s", "rows"),
    [
        (0, 0.0, None),  # nobody listens: the whole burst
        (1, 0.0, 16),
        (4, 0.4, 16),  # somebody waits for sound: a little, so that the others get on
        (9, 0.0, 16 * 5),  # 0.72 s in hand, of which a quarter is kept
        (9, 0.3, 16 * 2),
        (25, 0.0, 16 * 21),
    ],
)
def test_prompts_take_the_time_that_listeners_have(
    program: TalkerProgram, folder: Path, frames: int, passed_s: float, rows: int | None
) -> None:
    jobs = make_jobs(folder, 8)
    d = Driver(program, kv_blocks=300, prefill_tokens=16, prefix_cache=False)
    if frames:
        d.runner.start(*jobs[0])
        for _ in range(frames):
            d.runner.tick(0.0)
        assert len(d.out[jobs[0][0].id]) == frames
    given: list[int] = []

    def prefill(state: Any, x: torch.Tensor, *rest: Any) -> None:
        given.append(len(x))
        program.prefill(state, x, *rest)

    d.runner._run_prefill = prefill
    whole = 0
    for job, arrived in jobs[1:]:
        d.runner.start(job, arrived)
        whole += len(program.begin(job, arrived).row_keys) - 1
    d.runner.tick(passed_s)
    assert sum(given) == (whole if rows is None else min(whole, rows))
