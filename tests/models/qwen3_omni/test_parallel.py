"""The Thinker over two ranks: the same as over one, alone and in the engine, and splits that cannot be."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

from hocket import AsyncEngine, Sampling, SpeechRequest
from hocket.core import Job
from hocket.engine.fleet import plan_workers
from hocket.engine.launcher import processes_of
from hocket.engine.profile import load_profile
from hocket.errors import InvalidRequest, StartupError, WorkerDied
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.thinker import ThinkerProgram
from hocket.models.qwen3_omni.weights import load_thinker
from hocket.nn.parallel import Shard, join
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from tests.engine.test_handoff import released
from tests.models.qwen3_omni.test_thinker import CPU, job_of
from tests.models.qwen3_omni.test_whole import GREEDY, hear, request

NAMES = ["text", "turns"]
LIMITS = AutoregressiveLimits(kv_blocks=64, prefill_tokens=50)


def jobs(golden: dict[str, dict[str, np.ndarray]]) -> list[Job]:
    drawn = {"temperature": 0.8, "top_k": 30, "stops": []}
    greedy = [job_of(golden[name], i) for i, name in enumerate(NAMES)]
    return [*greedy, job_of(golden["turns"], 2, **drawn)]


def tokens(program: ThinkerProgram, asked: list[Job]) -> list[list[int]]:
    made: dict[str, list[int]] = {job.id: [] for job in asked}
    runner = AutoregressiveRunner(
        "thinker", program, LIMITS, CPU, lambda c: made[c.job].extend(c.arrays["tokens"][:, 0].tolist())
    )
    for job in asked:
        runner.start(job, {})
    while runner.tick(0.0):  # one clock for all ranks, so that they choose alike
        pass
    return list(made.values())


def work(rank: int, size: int, folder: Path, out: Path, golden: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    config, shard = read_model_config(folder), join(str(out / "meeting"), rank, size, CPU)
    program = ThinkerProgram(config, load_thinker(folder, config, CPU, torch.float32, shard=shard), shard)
    made = tokens(program, jobs(golden))
    torch.save((made, program.declare().cache.kv.shape), out / f"rank{rank}")  # type: ignore[attr-defined]


def test_two_ranks_say_what_one_says(omni: Any, omni_golden: Any, tmp_path: Path) -> None:
    golden = {name: omni_golden(f"thinker_{name}") for name in NAMES}
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(i, 2, omni(), tmp_path, golden)) for i in range(2)]
    for rank in ranks:
        rank.start()
    config = read_model_config(omni())
    alone = tokens(ThinkerProgram(config, load_thinker(omni(), config, CPU, torch.float32)), jobs(golden))
    end = time.monotonic() + 120
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
        assert rank.exitcode == 0
    (first, shape), (second, _) = (torch.load(tmp_path / f"rank{i}", weights_only=False) for i in range(2))
    assert first == second == alone
    assert [list(golden[name]["tokens"]) for name in NAMES] == alone[:2]
    assert shape[4] == config.thinker_config.text_config.num_key_value_heads // 2


@pytest.mark.parametrize(
    ("size", "says"), [(3, "4 query heads cannot be split over 3"), (4, "2 key/value heads .* over 4")]
)
def test_impossible_splits_name_the_numbers(size: int, says: str, omni: Any) -> None:
    config = read_model_config(omni())
    with pytest.raises(StartupError, match=says):
        load_thinker(omni(), config, CPU, torch.float32, shard=Shard(0, size))


# --- in the engine -----------------------------------------------------------------------------

TWO = {"stages.thinker.tensor_parallel": "2", "threads": "1"}
SMALL = {
    "stages.thinker.slots": "3",
    "stages.thinker.kv_blocks": "24",  # so that some must give way
    "stages.thinker.prefill_tokens": "40",
}


def asked(n: int, **options: Any) -> SpeechRequest:
    """Texts of several lengths, greedy or drawn; a few of them with a medium."""
    name = ("text_7", "image", "text_1", "audio", "text_64")[n % 5]
    tokens = 3 + 11 * n % 40
    r = request(name, tokens, seed=n, max_frames=6, extra={}, **options)
    assert r.chat is not None
    r.chat.modalities = ("text", "audio") if n % 3 == 0 else ("text",)
    r.chat.sampling = Sampling(temperature=0.9, top_k=30) if n % 2 else GREEDY
    return r


async def conversations(engine: AsyncEngine, count: int) -> list[tuple[str, bytes] | None]:
    """What many hear that come and go, None from those who leave early: every fifth."""
    rng = random.Random(1)

    async def one(n: int) -> tuple[str, bytes] | None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        if n % 5 != 4:
            heard = await hear(engine, asked(n))
            return heard.text, heard.codes.tobytes()
        stream = await engine.submit(asked(n))
        async for _ in stream.pieces():
            break
        await stream.aclose()
        return None

    return await asyncio.gather(*(one(n) for n in range(count)))


@pytest.fixture(scope="module")
def alone(omni: Any) -> list[tuple[str, bytes] | None]:
    """What all hear from one rank."""

    async def main() -> list[tuple[str, bytes] | None]:
        async with AsyncEngine(omni(never_ends=True), processes=False, overrides=SMALL) as engine:
            return await conversations(engine, 12)

    return asyncio.run(main())


@pytest.mark.parametrize(("processes", "count"), [(False, 12), (True, 6)], ids=["threads", "processes"])
async def test_two_ranks_serve_what_one_serves(processes: bool, count: int, alone: Any, omni: Any) -> None:
    async with AsyncEngine(omni(never_ends=True), processes=processes, overrides=SMALL | TWO) as engine:
        assert await conversations(engine, count) == alone[:count]
        (seat,) = engine.fleet.seats.values()
        await released(engine)
        (thinker,) = engine.status().stages["thinker"]
        assert thinker.steps > 0
        if processes:
            assert len(seat.launched.processes) == 2


async def test_what_one_rank_refuses_all_refuse(omni: Any) -> None:
    """A job that never fits leaves the ranks in step."""
    async with AsyncEngine(omni(never_ends=True), processes=False, overrides=SMALL | TWO) as engine:
        good = asked(2)
        before = await hear(engine, good)
        bad = asked(2)
        assert bad.chat is not None
        bad.chat.max_tokens = 2000
        with pytest.raises(InvalidRequest, match="thinker holds 384") as refused:
            await hear(engine, bad)
        assert refused.value.code == "context_too_long"
        assert (await hear(engine, good)).text == before.text


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_takes_its_worker_along(rank: int, omni: Any) -> None:
    async with AsyncEngine(omni(never_ends=True), overrides=TWO) as engine:
        (seat,) = engine.fleet.seats.values()
        r = asked(2)
        assert r.chat is not None
        before = (await hear(engine, r)).text
        r.chat.max_tokens = 2000
        stream = await engine.submit(r)
        pieces = stream.pieces()
        await anext(pieces)
        ranks = seat.launched.processes
        os.kill(ranks[rank].pid, signal.SIGKILL)
        who = "rank 1 of worker cpu:0" if rank else "the worker cpu:0"
        with pytest.raises(WorkerDied, match=f"{who} that ran this request ended unexpectedly"):
            async for _ in pieces:
                pass
        for process in ranks:
            process.join(10)
            assert not process.is_alive()
        while not seat.ready:
            await asyncio.sleep(0.05)
        assert (await hear(engine, asked(2))).text == before
        assert engine.status().restarts == 1


@pytest.mark.parametrize(
    ("size", "says"), [(3, "4 query heads cannot be split over 3"), (4, "2 key/value heads .* over 4")]
)
async def test_the_engine_does_not_start_with_an_impossible_split(size: int, says: str, omni: Any) -> None:
    overrides = TWO | {"stages.thinker.tensor_parallel": str(size)}
    with pytest.raises(StartupError, match=f"worker cpu:0: {says}"):
        async with AsyncEngine(omni(), processes=False, overrides=overrides):
            pass


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "talker.tensor_parallel",
            "tensor_parallel is 2, which this stage cannot do; leave it out; .* thinker can",
        ),
        ("code2wav.tensor_parallel", "has no effect: the stage is streaming"),
        ("audio.tensor_parallel", "has no effect: the stage is one-shot"),
    ],
)
async def test_only_the_thinker_is_split(setting: str, says: str, omni: Any) -> None:
    with pytest.raises(StartupError, match=says) as refused:
        async with AsyncEngine(omni(), overrides={f"stages.{setting}": "2"}):
            pass
    assert refused.value.param == f"stages.{setting}"


def test_ranks_and_replicas_take_devices_one_after_another(omni: Any) -> None:
    overrides = {"stages.thinker.replicas": "2", "stages.thinker.tensor_parallel": "2"}
    profile = load_profile("qwen3_omni_text", "cuda", overrides)
    plans = plan_workers(profile, ["thinker"], omni())
    assert [[part.device for part, _ in processes_of(plan, "ipc://w", "m")] for plan in plans] == [
        ["cuda:0", "cuda:1"],
        ["cuda:2", "cuda:3"],
    ]


def test_a_worker_has_one_stage_that_is_split(omni: Any) -> None:
    both = {f"stages.{stage}.tensor_parallel": "2" for stage in ("thinker", "talker")}
    with pytest.raises(StartupError, match="talker and thinker are both split and both begin on cuda:0"):
        plan_workers(load_profile("qwen3_omni", "cuda", both), ["thinker", "talker"], omni())
