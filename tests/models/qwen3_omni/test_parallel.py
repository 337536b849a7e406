"""The Thinker over two processes: the same tokens as over one, and splits that cannot be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing

from hocket.core import Job
from hocket.errors import StartupError
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.thinker import ThinkerProgram
from hocket.models.qwen3_omni.weights import load_thinker
from hocket.nn.parallel import Shard
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from tests.models.qwen3_omni.test_thinker import CPU, job_of

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
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{out / 'meet'}", rank=rank, world_size=size
    )
    config, shard = read_model_config(folder), Shard(rank, size)
    program = ThinkerProgram(config, load_thinker(folder, config, CPU, torch.float32, shard=shard), shard)
    made = tokens(program, jobs(golden))
    torch.save((made, program.declare().cache.kv.shape), out / f"rank{rank}")  # type: ignore[attr-defined]
    torch.distributed.destroy_process_group()


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
