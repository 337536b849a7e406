"""What does the engine cost on a CPU, and what is left for the model?

Question   time to first audio, real-time factor and audio seconds a second at c = 1, 4, 16, and the
           engine's own time for one frame step: everything outside the program's forward.
Regime     dispatch-bound at tiny widths (some 2,000 torch calls a frame), bandwidth-bound at real ones.
Ceiling    the engine's budget is 1 ms a step at 16 slots on two cores; a frame is 80 ms of audio.

    python benches/cpu.py                       # tiny random checkpoint
    python benches/cpu.py --model FOLDER        # any Qwen3-TTS checkpoint
    python benches/cpu.py --size 0.6b           # random weights at full width

The matching tests: tests/engine/test_engine.py, tests/runtime/test_autoregressive.py.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import platform
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hocket.core import SpeechRequest
from hocket.engine.client import AsyncEngine
from hocket.engine.worker import Worker
from hocket.models.qwen3_tts.synthetic import write_checkpoint

TEXT = "The melody passes from voice to voice, each filling the other's rests."
console = Console()


async def one(engine: AsyncEngine, seed: int, frames: int) -> tuple[float, float, float, float]:
    """Seconds to the first audio, of everything, of audio; and the wait after which it plays smoothly."""
    begin = time.perf_counter()
    first = smooth = audio = 0.0
    async for piece in await engine.submit(SpeechRequest(text=TEXT, seed=seed, max_frames=frames + 1)):
        now = time.perf_counter() - begin
        if len(piece.samples):
            first = first or now
            smooth = max(smooth, now - audio)  # this piece must be here when what came before is played
            audio += len(piece.samples) / engine.info.sample_rate_hz
    return first, time.perf_counter() - begin, audio, smooth


async def level(engine: AsyncEngine, concurrency: int, rounds: int, frames: int) -> dict[str, Any]:
    """A closed loop: each of `concurrency` clients speaks `rounds` utterances one after the other."""

    async def client(n: int) -> list[tuple[float, float, float, float]]:
        return [await one(engine, 1000 * n + r, frames) for r in range(rounds)]

    begin = time.perf_counter()
    results = [r for rs in await asyncio.gather(*(client(n) for n in range(concurrency))) for r in rs]
    wall = time.perf_counter() - begin
    return {
        "concurrency": concurrency,
        "ttfp_ms": 1000 * statistics.median(r[0] for r in results),
        "smooth_start_ms": 1000 * statistics.median(r[3] for r in results),
        "rtf": statistics.mean(r[1] / r[2] for r in results),
        "audio_s_per_s": sum(r[2] for r in results) / wall,
        "requests": len(results),
    }


async def measure(
    folder: Path, levels: list[int], rounds: int, frames: int
) -> tuple[list[dict[str, Any]], str]:
    profile = cProfile.Profile()
    run = Worker.run

    def profiled(self: Worker, *args: Any) -> None:
        profile.enable()
        try:
            run(self, *args)
        finally:
            profile.disable()

    out = []
    for concurrency in levels:
        async with AsyncEngine(folder, processes=True) as engine:
            await one(engine, 0, 4)
            row = await level(engine, concurrency, rounds, frames)
            await asyncio.sleep(1.2)  # the next heartbeat
            status = engine.status()
            (talker,), (codec,) = status.stages["talker"], status.stages["codec"]
            row["engine_ms_per_step"] = 1000 * status.overhead_seconds / talker.steps
            row["talker_ms_per_step"] = 1000 * talker.step_seconds / talker.steps
            row["talker_batch"] = talker.rows / talker.steps
            row["codec_ms_per_frame"] = 1000 * codec.step_seconds / codec.frames
            out.append(row)
    Worker.run = profiled  # type: ignore[method-assign]
    try:
        async with AsyncEngine(folder, processes=False) as engine:
            await level(engine, max(levels), 1, frames)
            steps = max(1, engine.status().stages["talker"][0].steps)
    finally:
        Worker.run = run  # type: ignore[method-assign]
    return out, breakdown(profile, steps)


def breakdown(profile: cProfile.Profile, steps: int) -> str:
    """Own time of the engine's functions, models and layers left out."""
    lines = []
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, calls, own, _, _) in stats.items():
        if any(part in file for part in ("hocket/engine", "hocket/runtime", "hocket/core")):
            lines.append(
                (own, f"{1e6 * own / steps:8.1f} us {calls / steps:7.1f} calls  {Path(file).name}:{name}")
            )
    return "\n".join(text for _, text in sorted(lines, reverse=True)[:12])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.model or write_checkpoint(Path(temporary) / "model", size=a.size, never_ends=True)
        levels = [int(c) for c in a.concurrency.split(",")]
        rows, where = asyncio.run(measure(folder, levels, a.rounds, a.frames))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    console.print(
        f"The engine's own functions at c = {max(levels)}, own time a talker step (under the profiler):"
    )
    console.print(where, highlight=False)
    result = {
        "bench": "cpu",
        "model": str(a.model or a.size),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    if a.json:
        a.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
