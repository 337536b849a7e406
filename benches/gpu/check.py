"""Is the device right? Golden codes in fp32 with kernels and twins, eager and from graphs; and in bf16 at
full size, graphs against the same calls run eagerly, with jobs of many lengths that join and leave.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from benches.gpu.model import Model
from hocket.core import Chunk, Job, Sampling, SpeechRequest
from hocket.kernels import choice
from hocket.models.qwen3_tts.codec import CodecProgram
from hocket.models.qwen3_tts.config import CODEC_FOLDER, load_codec_config, read_model_config
from hocket.models.qwen3_tts.frontend import QwenTtsFrontEnd
from hocket.models.qwen3_tts.synthetic import write_checkpoint
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.models.qwen3_tts.weights import load_codec_decoder, load_talker
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.graphs import GraphPool
from hocket.runtime.state import allocate

GOLDEN = Path(__file__).parents[2] / "tests/golden/qwen3_tts"
CASES = (
    "custom_full",
    "custom_streaming",
    "custom_streaming_long",
    "custom_dialect_chinese",
    "custom_instruct",
)

TIGHT = 24  # KV blocks with which the five jobs must give way to each other


@contextmanager
def kernels(which: str) -> Iterator[None]:
    kept, choice._WANTED = choice._WANTED, which
    try:
        yield
    finally:
        choice._WANTED = kept


@contextmanager
def unrecorded() -> Iterator[None]:
    """Graphs' calls, padding and buffers included, but run eagerly."""
    kept = GraphPool.replay
    GraphPool.replay = lambda self, key, call: call()  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphPool.replay = kept  # type: ignore[method-assign]


def run(
    runner: AutoregressiveRunner,
    jobs: list[tuple[int, Job]],
    chunks: list[Chunk],
    aborts: Iterable[tuple[int, str]] = (),
) -> dict[str, np.ndarray]:
    """Start each job at its tick, abort some at theirs; codes of each."""
    waiting, ends, tick = list(jobs), list(aborts), 0
    while waiting or runner.jobs():
        while waiting and waiting[0][0] <= tick:
            runner.start(waiting.pop(0)[1], {})
        while ends and ends[0][0] <= tick:
            runner.abort(ends.pop(0)[1])
        runner.tick(time.monotonic())
        if runner.device.type == "cuda":
            torch.cuda.synchronize()  # a turn is a step, so that who shares one is the same every time
        tick += 1
    codes: dict[str, list[np.ndarray]] = {}
    for chunk in chunks:
        codes.setdefault(chunk.job, []).append(chunk.arrays["codes"])
    return {job: np.concatenate(parts) for job, parts in codes.items()}


def golden(device: torch.device) -> dict[str, Any]:
    cases = json.loads((GOLDEN / "cases.json").read_text())["cases"]
    folder = write_checkpoint(mkdtemp(), **cases[CASES[0]]["checkpoint"])
    front, config = QwenTtsFrontEnd(folder), read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, device, torch.float32))
    results = {}
    for which in ("triton", "torch", "resident") if device.type == "cuda" else ("torch",):
        if which == "resident":
            program._stay(anyway=True)
        for graphs, blocks in ((True, 512), (False, 512), (True, TIGHT)):
            with kernels("torch" if which == "torch" else "triton"):
                program.bounded_by_context = which == "torch"
                jobs, wanted = [], {}
                for i, name in enumerate(CASES):
                    r = cases[name]["request"]
                    request = SpeechRequest(
                        text=r["text"], voice=r.get("speaker"), language=r["language"],
                        instructions=r.get("instruct"), text_first=r["full"], max_frames=14,
                        sampling=Sampling(temperature=0), seed=0,
                    )  # fmt: skip
                    jobs.append((0 if blocks == TIGHT else 3 * i, front.prepare(request)))
                    wanted[jobs[-1][1].id] = name
                chunks: list[Chunk] = []
                limits = AutoregressiveLimits(
                    kv_blocks=blocks, block_tokens=4, max_batch=8, in_flight=2, graphs=graphs
                )
                runner = AutoregressiveRunner("talker", program, limits, device, chunks.append)
                codes = run(runner, jobs, chunks)
                equal = sum(
                    np.array_equal(codes[job], np.load(GOLDEN / f"{name}.npz")["codes"])
                    for job, name in wanted.items()
                )
                how = f"{which}, {'graphs' if graphs else 'eager'}, {blocks} blocks"
                given = f"{runner.stats.preemptions} preemptions"
                results[f"golden fp32, {how}"] = f"{equal} of {len(CASES)}, {given}"
    results |= waveform(device, folder)
    return results


def waveform(device: torch.device, folder: Path) -> dict[str, Any]:
    """fp32 codec on the device against the CPU, in chunks."""
    codes = torch.from_numpy(np.load(GOLDEN / f"{CASES[0]}.npz")["codes"].astype(np.int32))[None]
    out = {}
    for where in (torch.device("cpu"), device):
        codec = folder / CODEC_FOLDER
        program = CodecProgram(load_codec_decoder(codec, where, torch.float32), load_codec_config(codec))
        state = allocate(program.declare(), slots=2, device=where).tensors
        slots = torch.tensor([1], device=where)
        parts, at = [], 0
        for n in (1, 2, 4, 4, 2):
            parts.append(program.step(state, slots, codes[:, at : at + n].to(where)).cpu())
            at += n
        out[where.type] = torch.cat(parts, dim=1)
    error = (out["cpu"] - out[device.type]).abs().max().item()
    return {"codec fp32, largest difference from the CPU": error, "codec peak": out["cpu"].abs().max().item()}


def full_size(model: Model, program: TalkerProgram, most: int = 256) -> dict[str, Any]:
    """Some 1.5 jobs for each of `most` rows that join one after another, of many lengths; every ninth is
    aborted on its way, and blocks are so few that some must give way and are run again."""
    jobs = most + most // 2
    lengths = [24 + 37 * i % 50 for i in range(jobs)]
    limits = AutoregressiveLimits(slots=most, max_batch=most, kv_blocks=5 * most // 2, in_flight=2)
    outputs, used = [], []
    for eager in (False, True):
        prepared = [(i // 8, model.job(i, n)) for i, n in enumerate(lengths)]
        ends = [(start + 6, job.id) for i, (start, job) in enumerate(prepared) if i % 9 == 4]
        chunks: list[Chunk] = []
        runner = AutoregressiveRunner("talker", program, limits, model.device, chunks.append)
        with unrecorded() if eager else nullcontext():
            codes = run(runner, prepared, chunks, ends)
        outputs.append([codes.get(job.id) for _, job in prepared])
        used.append({key[0] for key in runner._graphs._steps} if runner._graphs is not None else set())
    equal = sum(a is b or np.array_equal(a, b) for a, b in zip(*outputs, strict=True))
    return {
        "bf16 1.7b, sampled, graphs against eager": f"{equal} of {jobs}",
        "preemptions": runner.stats.preemptions,
        "aborted": len(ends),
        "batch sizes": sorted(used[0]),
    }
