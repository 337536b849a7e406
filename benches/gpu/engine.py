"""What does the engine give in a closed loop of C listeners, and how soon do they hear something?

Both stages in one process and one loop, as a worker runs them, without HTTP. Every request is 137 frames,
10.96 s. The baseline to beat, through HTTP on the same GPU: 12.7 / 112 / 210 / 223 audio-s/s at C = 1 / 16 /
64 / 128.
Smooth start: how long a player must wait before it starts so that it never runs dry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benches.gpu.model import FRAMES, Model
from hocket.core import Chunk
from hocket.models.qwen3_tts.codec import CodecProgram
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.streaming import StreamingLimits, StreamingRunner

BASELINE = {1: 12.7, 16: 112.3, 64: 209.6, 128: 223.4}


class Loop:
    def __init__(
        self, model: Model, talker: TalkerProgram, codec: CodecProgram, slots: int, graphs: bool = True
    ) -> None:
        device = model.device
        self.model = model
        in_flight = 2 if device.type == "cuda" else 1
        self.heard: dict[str, list[tuple[float, float]]] = {}  # job -> (time, seconds of audio)
        self.begun: dict[str, float] = {}
        self.done: list[str] = []
        begin = time.perf_counter()
        self.codec = StreamingRunner(
            "codec", codec,
            StreamingLimits(
                slots=slots, max_batch=min(slots, 64), max_chunk_frames=8, in_flight=in_flight, graphs=graphs
            ),
            device, self._listen,
        )  # fmt: skip
        self.talker = AutoregressiveRunner(
            "talker", talker,
            AutoregressiveLimits(
                slots=slots, max_batch=slots, kv_blocks=slots * 20 + 1, prefill_tokens=1024,
                in_flight=in_flight,
                graphs=graphs, max_context=1024,
            ),
            device, self.codec_push,
        )  # fmt: skip
        self.codec.warm()
        self.talker.warm()
        self.warm_s = time.perf_counter() - begin
        self.rate = codec.rate_hz

    def codec_push(self, chunk: Chunk) -> None:
        self.codec.push(chunk)

    def _listen(self, chunk: Chunk) -> None:
        now = time.monotonic()
        self.heard[chunk.job].append((now, len(chunk.arrays["pcm"]) / self.rate))
        if chunk.last:
            self.done.append(chunk.job)

    def start(self, seed: int, frames: int) -> None:
        job = self.model.job(seed, frames)
        self.begun[job.id], self.heard[job.id] = time.monotonic(), []
        self.codec.start(job, {})
        self.talker.start(job, {})

    def run(self, clients: int, seconds: float, frames: int = FRAMES) -> dict[str, Any]:
        self.heard, self.begun, self.done = {}, {}, []
        seed, loops = 0, 0
        stats = [(r.stats.steps, r.stats.step_seconds, r.stats.rows) for r in (self.talker, self.codec)]
        begin = time.monotonic()
        for _ in range(clients):
            self.start(seed, frames)
            seed += 1
        last_start = begin
        while self.talker.jobs() or self.codec.jobs():
            now = time.monotonic()
            self.talker.tick(now)
            self.codec.tick(now)
            loops += 1
            finished, self.done = self.done, []
            for _ in finished:
                if now - begin < seconds:
                    self.start(seed, frames)
                    seed, last_start = seed + 1, now
        rows = [job for job in self.begun if self.heard[job]]
        # Audio of the middle: after the first quarter, until the last start.
        low, high = begin + (last_start - begin) / 4, last_start
        if seed == clients:
            low, high = begin, time.monotonic()
        audio = sum(s for job in rows for t, s in self.heard[job] if low <= t < high)
        ttfp = [self.heard[job][0][0] - self.begun[job] for job in rows]
        smooth = []
        for job in rows:
            before, wait = 0.0, 0.0
            for t, s in self.heard[job]:
                wait = max(wait, t - self.begun[job] - before)
                before += s
            smooth.append(wait)
        ends = [self.heard[job][-1][0] - self.begun[job] for job in rows]
        talker_steps = self.talker.stats.steps - stats[0][0]
        codec_steps = self.codec.stats.steps - stats[1][0]

        def ms(values: list[float], q: float) -> float:
            return float(np.percentile(values, q)) * 1e3

        return {
            "clients": clients, "requests": len(rows), "audio_s_per_s": audio / (high - low),
            "ttfp_p50_ms": ms(ttfp, 50), "ttfp_p99_ms": ms(ttfp, 99),
            "smooth_p50_ms": ms(smooth, 50), "smooth_p99_ms": ms(smooth, 99),
            "e2e_p50_ms": ms(ends, 50),
            "frame_ms": (time.monotonic() - begin) / max(talker_steps, 1) * 1e3,
            "talker_launch_ms": (self.talker.stats.step_seconds - stats[0][1]) / max(talker_steps, 1) * 1e3,
            "rows_per_step": (self.talker.stats.rows - stats[0][2]) / max(talker_steps, 1),
            "codec_steps": codec_steps,
            "codec_rows": (self.codec.stats.rows - stats[1][2]) / max(codec_steps, 1),
            "preemptions": self.talker.stats.preemptions, "loops": loops,
        }  # fmt: skip


def main(
    model: Model, talker: TalkerProgram, codec: CodecProgram, clients: tuple[int, ...], seconds: float,
    report: Callable[[str], None],
) -> list[Any]:  # fmt: skip
    rows = []
    loop = Loop(model, talker, codec, max(clients))
    report(f"warm {loop.warm_s:.1f} s; memory reserved {torch.cuda.memory_reserved() / 2**30:.1f} GiB")
    for c in clients:
        loop.run(c, 0.5, 24)
        row = loop.run(c, seconds)
        row["baseline_audio_s_per_s"] = BASELINE.get(c)
        row["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
        rows.append(row)
        report(
            f"C {c:4d}  {row['audio_s_per_s']:7.1f} audio-s/s  "
            f"TTFP {row['ttfp_p50_ms']:5.0f} / {row['ttfp_p99_ms']:5.0f}  "
            f"smooth {row['smooth_p50_ms']:5.0f} / {row['smooth_p99_ms']:5.0f} ms  "
            f"frame {row['frame_ms']:6.2f} ms  launch {row['talker_launch_ms']:5.2f}  "
            f"rows {row['rows_per_step']:5.1f}  "
            f"codec steps {row['codec_steps']} of {row['codec_rows']:4.1f}  n {row['requests']}"
        )
    return rows
