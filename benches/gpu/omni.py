"""Qwen3-Omni: does the device speak as published, what does a frame cost, and what does a caller get?

    python -m benches.gpu.omni [check] [frame] [served] [--callers 1 16 64] [--works 0 1] [--profile NAME]
        [--set thinker.weights=float8] [--spans spans.json]      # python -m benches.gpu.timeline draw …

Question   codes and waves of the golden files in fp32 through kernels and graphs (check); milliseconds of a
           Talker step and of a Code2Wav step in bf16 (frame); requests a second, time to first sound and RTF
           of equal work, 150 tokens of prompt, 40 of text, 150 frames (12 s), and 150 / 14 / 45, and what
           each stage does for it (served).
Regime     memory: experts and weights are read once a step, whatever the batch.
Ceiling    bytes over 4.3 TB/s, with the experts that uniform routing visits on average; the seed's three GPUs
           gave 11.7 requests a second at 64 callers, first sound after 632 ms.
Weights are drawn on the device and never end by themselves; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import numpy as np
import torch

from benches.gpu.frame import BANDWIDTH, event_ms
from hocket import AsyncEngine, Chat, Message, SpeechRequest
from hocket.core import Chunk, ChunkKind, Job
from hocket.engine.stream import Audio
from hocket.models.qwen3_omni import synthetic
from hocket.models.qwen3_omni.code2wav import Code2WavProgram
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.handoff import FIRST, INNER, TalkerInput, user_turns
from hocket.models.qwen3_omni.speech_weights import load_code2wav, load_talker
from hocket.models.qwen3_omni.talker import TalkerProgram
from hocket.nn.talker import DrawInput
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.graphs import FrameGraphs, StreamGraphs, own_stream
from hocket.runtime.state import allocate
from hocket.runtime.streaming import StreamingLimits, StreamingRunner

GOLDEN = Path(__file__).parents[2] / "tests/golden/qwen3_omni"
GREEDY = DrawInput(temperature=0, top_k=0, top_p=1)
WORK = ((150, 40, 150), (150, 14, 45))  # tokens of prompt and of text, frames
CONTEXT = 400
REPEAT = 30
LETTERS = "bcdfghjklopqvwxz"  # no two of them are one token


# --- check -------------------------------------------------------------------------------------


def check(device: torch.device) -> dict[str, Any]:
    """Codes and waves of the tiny checkpoint against the published ones."""
    folder = synthetic.write_checkpoint(Path(mkdtemp()))
    config = read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, device, torch.float32))
    codec = Code2WavProgram(load_code2wav(folder, config, device, torch.float32), config.code2wav)
    cases = json.loads((GOLDEN / "speech.json").read_text("utf-8"))["cases"]
    found = {}
    for name, case in cases.items():
        made = dict(np.load(GOLDEN / f"speech_{name}.npz"))
        out: list[Chunk] = []
        limits = AutoregressiveLimits(kv_blocks=256, in_flight=2 if device.type == "cuda" else 1)
        talker = AutoregressiveRunner("talker", program, limits, device, out.append)
        asked = TalkerInput(
            user=made["prompt"][user_turns(config, made["prompt"])].tobytes(),
            role=made["prompt"][-3:].tolist(),
            speaker=config.talker.speaker_id[case.get("speaker", "ethan")],
            positions=made["positions"].tobytes(),
            drops_cut=bool(case.get("cut")),
            first=GREEDY,
            inner=GREEDY,
            repetition_penalty=1.05,
        )
        inputs = {"talker": msgspec.msgpack.encode(asked)}
        talker.start(Job(id="j", route=("talker",), inputs=inputs, seed=0, max_frames=case["frames"]), {})
        if "hidden" in made:
            rows = {"rows": made["hidden"]}
            talker.push(Chunk(job="j", source="thinker", index=0, kind=ChunkKind.ROWS, arrays=rows))
        reason = "length" if case.get("cut") else "stop"
        tokens = {"tokens": made["text"][:, None]}
        talker.push(
            Chunk(
                job="j", source="thinker", index=1, kind=ChunkKind.TOKENS, arrays=tokens, last=True,
                finish_reason=reason,
            )
        )  # fmt: skip
        while talker.jobs():
            talker.tick(time.monotonic())
        codes = np.concatenate([chunk.arrays["codes"] for chunk in out])
        found[name] = {"codes": bool(np.array_equal(codes, made["codes"]))}
        if "wave" in made:
            found[name]["wave"] = wave_error(codec, device, out, made["wave"])
    return found


def wave_error(codec: Code2WavProgram, device: torch.device, codes: list[Chunk], wave: np.ndarray) -> float:
    """Largest difference of what the stage makes of these codes."""
    out: list[Chunk] = []
    limits = StreamingLimits(in_flight=2 if device.type == "cuda" else 1)
    runner = StreamingRunner("code2wav", codec, limits, device, out.append)
    runner.start(Job(id="j", route=("code2wav",), inputs={}, seed=0, max_frames=1), {})
    for chunk in codes:
        runner.push(chunk)
    while runner.jobs():
        runner.tick(time.monotonic())
    made = np.concatenate([chunk.arrays["pcm"] for chunk in out])
    return float(np.abs(made - wave).max()) if made.shape == wave.shape else float("inf")


# --- frame -------------------------------------------------------------------------------------


def floor_ms(program: TalkerProgram, b: int) -> float:
    """Bytes that a step of b rows must read, over the memory's bandwidth."""
    w = program.w
    outer = [t for layer in w.layers for t in (layer.qkv, layer.out)]
    experts = [layer.moe for layer in w.layers]
    count, top_k = experts[0].gate_up.shape[0] - experts[0].shared, experts[0].top_k
    hit = count * (1 - (1 - top_k / count) ** b) + experts[0].shared
    routed = sum(m.gate_up[0].nbytes + m.down[0].nbytes for m in experts) * hit
    inner = sum(
        t.nbytes for layer in w.inner_layers for t in (layer.qkv, layer.out, layer.gate_up, layer.down)
    )
    passes = program.books - 1
    read = sum(t.nbytes for t in outer) + routed + inner * passes + w.inner_heads.nbytes + w.head.nbytes
    return read / BANDWIDTH * 1e3


def frame(folder: Path, device: torch.device, batches: list[int]) -> dict[str, Any]:
    """Milliseconds of a captured step, by rows; the Talker's beside its floor."""
    config = read_model_config(folder)
    dtype = torch.bfloat16
    found: dict[str, Any] = {"talker": {}, "code2wav": {}}
    program = TalkerProgram(config, load_talker(folder, config, device, dtype))
    tokens = 16
    blocks = -(-CONTEXT // tokens)
    most = max(batches)
    stream = own_stream(device)
    state = allocate(
        program.declare(), slots=most + 1, device=device, blocks=most * blocks + 1, block_tokens=tokens,
        max_blocks=blocks,
    ).tensors  # fmt: skip
    state.cache.blocks[1:] = torch.arange(1, most * blocks + 1, device=device).view(most, blocks).int()
    state.cache.position[1:] = CONTEXT // 2
    state.live[1:], state.limit[1:] = True, 1 << 20
    for at, d in enumerate((FIRST, INNER)):
        state.temperature[:, at], state.top_k[:, at], state.top_p[:, at] = d.temperature, d.top_k, d.top_p
    graphs = FrameGraphs(
        program, state, max_batch=most, max_context=blocks * tokens, device=device, stream=stream
    )
    torch.cuda.synchronize(device)
    for b in batches:
        slots = torch.arange(1, b + 1, device=device)
        with torch.cuda.stream(stream):
            call = partial(graphs.step, state, slots, CONTEXT, program.usual_variant)
            ms = event_ms(call, REPEAT)
        found["talker"][b] = {"ms": ms, "floor_ms": floor_ms(program, b)}
        print(f"talker   b {b:4}  {ms:7.3f} ms  floor {found['talker'][b]['floor_ms']:.3f}", flush=True)
    del call, graphs, state, program
    for precise in (torch.float32, dtype):
        codec = Code2WavProgram(load_code2wav(folder, config, device, precise), config.code2wav)
        kept = allocate(codec.declare(), slots=most + 1, device=device).tensors
        steps = StreamGraphs(codec, kept, max_batch=most, device=device, stream=stream)
        torch.cuda.synchronize(device)
        for b in batches:
            for n in (1, 8):
                slots = torch.arange(1, b + 1, device=device)
                codes = torch.randint(0, 2048, (b, n, 16), dtype=torch.int32, device=device)
                with torch.cuda.stream(stream):
                    ms = event_ms(partial(steps.step, kept, slots, codes), REPEAT)
                found["code2wav"][f"{precise} {n} x {b}"] = ms
                print(f"code2wav {precise} {n} frames b {b:4}  {ms:7.3f} ms", flush=True)
    return found


# --- served ------------------------------------------------------------------------------------


@dataclass
class Took:
    """One request: seconds to the first sound and to the last, of sound, and when it ended."""

    first: float = 0.0
    last: float = 0.0
    sound: float = 0.0
    ended: float = 0.0


async def one(engine: AsyncEngine, request: SpeechRequest) -> Took:
    began, took, samples = time.monotonic(), Took(), 0
    stream = await engine.submit(request)
    async for piece in stream.pieces():
        if isinstance(piece, Audio) and len(piece.samples):
            took.last = time.monotonic() - began
            took.first = took.first or took.last
            samples += len(piece.samples)
    took.sound = samples / engine.info.sample_rate_hz
    return took


def asked(engine: AsyncEngine, prompt: int, tokens: int, frames: int, seed: int) -> SpeechRequest:
    """A request of exactly so many tokens of prompt; each with other words, so that no prefix is shared."""
    rng = np.random.default_rng(seed)

    def chat(letters: int) -> Chat:
        text = "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), letters))
        return Chat(messages=[Message(role="user", parts=[text])], max_tokens=tokens)

    there = engine.front_end.prepare(SpeechRequest(chat=chat(10))).text_tokens
    return SpeechRequest(chat=chat(prompt - there + 10), max_frames=frames, seed=seed)


async def loop(
    engine: AsyncEngine, callers: int, requests: list[SpeechRequest], gap_s: float = 0.0
) -> list[Took]:
    """A closed loop of so many callers, each of whom begins `gap_s` after the one before."""
    left, results, began = iter(requests), list[Took](), time.monotonic()

    async def caller(number: int) -> None:
        await asyncio.sleep(number * gap_s)
        for request in left:
            took = await one(engine, request)
            took.ended = time.monotonic() - began
            results.append(took)

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return results


async def level(
    engine: AsyncEngine, callers: int, work: tuple[int, int, int], rounds: int, gap_s: float = 0.0
) -> dict[str, Any]:
    """`rounds` requests a caller: what callers see, and what each stage did for it.

    Requests are equal, so callers who begin together stay together, and all prompts come at once, round for
    round. With a gap they come evenly; then the rate is that of the middle half of the time.
    """
    requests = [asked(engine, *work, seed=number) for number in range(rounds * callers)]
    before = await counted(engine)
    took = await loop(engine, callers, requests, gap_s)
    after = await counted(engine)
    wall = max(t.ended for t in took)
    rate = len(took) / wall
    if gap_s:
        rate = sum(wall / 4 <= t.ended < wall * 3 / 4 for t in took) / (wall / 2)
    first = np.array([t.first for t in took]) * 1e3
    return {
        "requests_s": rate,
        "audio_s_s": rate * took[0].sound,
        "ttfp_ms_p50": float(np.median(first)),
        "ttfp_ms_p99": float(np.quantile(first, 0.99)),
        "rtf": float(np.mean([t.last / t.sound for t in took])),
        "last_s": float(np.mean([t.last for t in took])),
        "loop_cpu": (after.pop("loop") - before.pop("loop")) / wall,
        "stages": {name: spent(before[name], after[name], wall) for name in after if after[name]["steps"]},
    }


async def counted(engine: AsyncEngine) -> dict[str, Any]:
    """Every stage's counters, added up over its replicas, from heartbeats younger than this call."""
    assert engine.fleet is not None
    seats = list(engine.fleet.seats.values())
    old = [seat.status for seat in seats]
    while any(seat.status is was for seat, was in zip(seats, old, strict=True)):
        await asyncio.sleep(0.02)
    status = engine.status()
    names = ("steps", "rows", "step_seconds", "queued", "queue_seconds", "preemptions")
    found: dict[str, Any] = {
        stage: {name: sum(getattr(s, name) for s in all) for name in names}
        for stage, all in status.stages.items()
    }
    return found | {"loop": status.overhead_seconds}


def spent(before: dict[str, float], after: dict[str, float], wall: float) -> dict[str, float]:
    """What a stage did between two counts. Its host's share is time inside the program: launching."""
    grown = {name: after[name] - before[name] for name in after}
    steps = max(grown["steps"], 1)
    return {
        "steps_s": grown["steps"] / wall,
        "rows_a_step": grown["rows"] / steps,
        "host_share": grown["step_seconds"] / wall,
        "queue_ms": 1e3 * grown["queue_seconds"] / max(grown["queued"], 1),
        "preemptions": grown["preemptions"],
    }


def shown(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in row.items() if name != "stages")


async def served(
    folder: Path, works: list[int], callers: list[int], rounds: int, spans: Path | None, **options: Any
) -> dict[str, Any]:
    """Each kind of work at each level of callers; at the highest, what the device did when they began."""
    found: dict[str, Any] = {}
    began = time.monotonic()
    async with AsyncEngine(folder, **options) as engine:
        found["ready_s"] = time.monotonic() - began
        print(f"ready after {found['ready_s']:.1f} s", flush=True)
        for work in (WORK[number] for number in works):
            most = max(callers)
            await loop(engine, most, [asked(engine, *work, seed=5000 + n) for n in range(most)])
            for count in callers:
                together = await level(engine, count, work, rounds)
                rows = {f"{work} at {count}": together}
                if count > 1:
                    apart = await level(engine, count, work, rounds + 1, together["last_s"] / count)
                    rows[f"{work} at {count}, evenly"] = apart
                for name, row in rows.items():
                    print(f"{name}: {shown(row)}", flush=True)
                    for stage, did in row["stages"].items():
                        print(f"    {stage:9} {shown(did)}", flush=True)
                found |= rows
        if spans is not None:
            found["device"] = await traced(engine, max(callers), WORK[works[0]], spans)
            for lane, row in found["device"].items():
                print(f"{lane:24} {shown(row)}", flush=True)
    return found


# --- timeline ----------------------------------------------------------------------------------

MARKS = {"_end_token": "thinker", "_end_frame": "talker", "_carry": "code2wav"}  # kernels of one stage


async def traced(
    engine: AsyncEngine, callers: int, work: tuple[int, int, int], out: Path
) -> dict[str, dict[str, float]]:
    """Record 0.5 s from when all callers begin -> by stage, the share of time in which its kernels ran.

    Writes the spans to `out`, for `benches.gpu.timeline draw`.
    """
    requests = [asked(engine, *work, seed=1000 + n) for n in range(callers)]
    folder = Path(mkdtemp())
    await engine.start_trace()
    running = asyncio.create_task(loop(engine, callers, requests))
    await asyncio.sleep(0.5)
    files = await engine.stop_trace(folder)
    await running
    spans, lanes = [], list[str]()
    for file in files:
        for lane, events in streams(json.loads(file.read_text())).items():
            spans += [[len(lanes), at, ms, name] for at, ms, name in events]
            lanes.append(lane if len(files) == 1 else f"{file.stem} {lane}")
    first = min(span[1] for span in spans)
    for span in spans:
        span[1:3] = round(span[1] - first, 4), round(span[2], 4)
    out.write_text(json.dumps({"clients": callers, "lanes": lanes, "spans": spans}))
    wall = max(at + ms for _, at, ms, _ in spans)
    busy = {
        name: {"busy": sum(ms for lane, _, ms, _ in spans if lanes[lane] == name) / wall} for name in lanes
    }
    return busy | {"any": {"busy": covered([(at, at + ms) for _, at, ms, _ in spans]) / wall}}


def streams(trace: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """Kernels and copies of a Chrome trace by stage: start, length in ms, name."""
    found: defaultdict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            stream = event["args"].get("stream", event["tid"])
            found[stream].append((event["ts"] / 1e3, event["dur"] / 1e3, event["name"][:60]))
    named = {}
    for stream, events in found.items():
        marks = Counter(stage for _, _, name in events for mark, stage in MARKS.items() if mark in name)
        named[marks.most_common(1)[0][0] if marks else f"stream {stream}"] = sorted(events)
    return named


def covered(spans: list[tuple[float, float]]) -> float:
    """How much time some of the spans cover."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.omni", description=__doc__.partition("\n")[0])
    p.add_argument("parts", nargs="*", default=["check", "frame", "served"])
    p.add_argument("--size", default="30b", choices=["tiny", "30b"])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    p.add_argument("--callers", type=int, nargs="+", default=[1, 16, 64])
    p.add_argument("--rounds", type=int, default=4, help="Requests of a caller.")
    p.add_argument("--works", type=int, nargs="+", default=[0, 1], help="0: 12 s of sound, 1: 3.6 s.")
    p.add_argument("--spans", type=Path, help="Where to put what the device did at the highest level.")
    p.add_argument("--profile", help="By default the family's own, on one device.")
    p.add_argument("--set", action="append", default=[], help="stage.field=value of the profile.")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    if "check" in a.parts:
        with torch.inference_mode():
            found["check"] = check(device)
        print(found["check"], flush=True)
    if {"frame", "served"} & set(a.parts):
        folder = synthetic.write_checkpoint(Path(mkdtemp()), size=a.size, never_ends=True, drawn=True)
        if "frame" in a.parts:
            with torch.inference_mode():
                found["frame"] = frame(folder, device, a.batches)
            gc.collect()
            torch.cuda.empty_cache()  # the worker is another process
        if "served" in a.parts:
            changes = dict(f"stages.{change}".split("=", 1) for change in a.set)
            options = {"profile": a.profile, "overrides": changes}
            found["served"] = asyncio.run(served(folder, a.works, a.callers, a.rounds, a.spans, **options))
    if a.out is not None:
        a.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
