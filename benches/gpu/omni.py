"""Qwen3-Omni: does the device speak as published, what does a frame cost, and what does a caller get?

    python -m benches.gpu.omni [check] [frame] [served] [--size 30b] [--callers 1 16 64] [--profile NAME]

Question   codes and waves of the golden files in fp32 through kernels and graphs (check); milliseconds of a
           Talker step and of a Code2Wav step in bf16 (frame); requests a second, time to first sound and RTF
           of equal work: 150 tokens of prompt, 40 of text, 150 frames (12 s), and 150 / 14 / 45 (served).
Regime     memory: experts and weights are read once a step, whatever the batch.
Ceiling    bytes over 4.3 TB/s, with the experts that uniform routing visits on average; the seed's three GPUs
           gave 11.7 requests a second at 64 callers, first sound after 632 ms.
Weights are drawn on the device and never end by themselves; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
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


async def one(engine: AsyncEngine, request: SpeechRequest) -> tuple[float, float, float]:
    """Seconds to the first sound, to the last, and of sound."""
    began, first, last, samples = time.monotonic(), 0.0, 0.0, 0
    stream = await engine.submit(request)
    async for piece in stream.pieces():
        if isinstance(piece, Audio) and len(piece.samples):
            last = time.monotonic() - began
            first = first or last
            samples += len(piece.samples)
    return first, last, samples / engine.info.sample_rate_hz


def asked(engine: AsyncEngine, prompt: int, tokens: int, frames: int, seed: int) -> SpeechRequest:
    """A request of exactly so many tokens of prompt; each with other words, so that no prefix is shared."""
    rng = np.random.default_rng(seed)

    def chat(letters: int) -> Chat:
        text = "".join(chr(97 + i) for i in rng.integers(0, 26, letters))
        return Chat(messages=[Message(role="user", parts=[text])], max_tokens=tokens)

    there = engine.front_end.prepare(SpeechRequest(chat=chat(10))).text_tokens
    return SpeechRequest(chat=chat(prompt - there + 10), max_frames=frames, seed=seed)


async def level(engine: AsyncEngine, callers: int, work: tuple[int, int, int]) -> dict[str, float]:
    """A closed loop of so many callers, four requests each."""
    numbers = iter(range(4 * callers))
    results: list[tuple[float, float, float]] = []

    async def caller() -> None:
        for number in numbers:
            results.append(await one(engine, asked(engine, *work, seed=number)))

    began = time.monotonic()
    await asyncio.gather(*(caller() for _ in range(callers)))
    wall = time.monotonic() - began
    first = np.array([r[0] for r in results]) * 1e3
    rtf = np.mean([last / seconds for _, last, seconds in results])
    return {
        "requests_s": len(results) / wall,
        "audio_s_s": sum(r[2] for r in results) / wall,
        "ttfp_ms_p50": float(np.median(first)),
        "ttfp_ms_p99": float(np.quantile(first, 0.99)),
        "rtf": float(rtf),
    }


async def served(folder: Path, callers: list[int], **options: Any) -> dict[str, Any]:
    """Each level of callers with each kind of work."""
    found: dict[str, Any] = {}
    async with AsyncEngine(folder, **options) as engine:
        for work in WORK:
            await level(engine, max(callers), work)  # captures what is captured when needed
            for count in callers:
                row = await level(engine, count, work)
                found[f"{work} at {count}"] = row
                print(work, count, {k: round(v, 3) for k, v in row.items()}, flush=True)
        found["stages"] = {
            name: [
                {"steps": s.steps, "ms": 1e3 * s.step_seconds / max(s.steps, 1), "rows": s.rows} for s in all
            ]
            for name, all in engine.status().stages.items()
        }
    return found


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.omni", description=__doc__.partition("\n")[0])
    p.add_argument("parts", nargs="*", default=["check", "frame", "served"])
    p.add_argument("--size", default="30b", choices=["tiny", "30b"])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    p.add_argument("--callers", type=int, nargs="+", default=[1, 16, 64])
    p.add_argument("--profile", help="By default the family's own, on one device.")
    p.add_argument("--set", action="append", default=[], help="stage.field=value of the profile.")
    p.add_argument("--out", type=Path)
    a = p.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    if "check" in a.parts:
        found["check"] = check(device)
        print(found["check"], flush=True)
    if {"frame", "served"} & set(a.parts):
        drawn = a.size != "tiny"
        folder = synthetic.write_checkpoint(Path(mkdtemp()), size=a.size, never_ends=True, drawn=drawn)
        if "frame" in a.parts:
            with torch.inference_mode():
                found["frame"] = frame(folder, device, a.batches)
            torch.cuda.empty_cache()
        if "served" in a.parts:
            changes = dict(f"stages.{change}".split("=", 1) for change in a.set)
            found["served"] = asyncio.run(served(folder, a.callers, profile=a.profile, overrides=changes))
    if a.out is not None:
        a.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
