"""VoxCPM2: is it right on the device, how long does a patch take, and what does the engine give?

    python -m benches.gpu voxcpm --out voxcpm.json [--size 2] [--batches …] [--clients …] [--voice float16]

Regime: one patch of 160 ms runs 36 language-model layers on one token, nine times twelve diffusion layers on
22 and twelve encoder layers on five. 91 % of the arithmetic is diffusion, which is bound by it from some
eight requests on; alone, a step is bound by 7.7 GB of weights and by 156 layers in a row. The ceiling printed
is, part by part, the larger of bytes over 4.3 TB/s and operations over 790 TFLOP/s. Baselines in the closed
loop of 39 patches, through HTTP on the same GPU: 12.2 / 112 / 140.6 audio-s/s at 1 / 16 / 64 listeners.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benches.gpu import fp8
from benches.gpu.check import kernels
from benches.gpu.engine import Loop
from benches.gpu.frame import ARITHMETIC, BANDWIDTH, event_ms, kernel_times
from hocket.core import Chunk, ChunkKind, Job, SpeechRequest
from hocket.models.voxcpm.config import read_model_config, read_vae_config
from hocket.models.voxcpm.frontend import VoxCpmFrontEnd
from hocket.models.voxcpm.patches import Diffusion, diffuse, encode_patches
from hocket.models.voxcpm.prompt import TalkerInput
from hocket.models.voxcpm.stacks import Stack
from hocket.models.voxcpm.synthetic import Size, write_checkpoint, write_lora
from hocket.models.voxcpm.talker import CALLS, STEPS, TalkerProgram
from hocket.models.voxcpm.vae import VocoderProgram
from hocket.models.voxcpm.vae_synthetic import random_vae
from hocket.models.voxcpm.vae_weights import decoder_weights
from hocket.models.voxcpm.weights import load_talker
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.graphs import FrameGraphs, GraphPool, on, own_stream
from hocket.runtime.state import allocate

GOLDEN = Path(__file__).parents[2] / "tests/golden/voxcpm"
PATCHES = 39  # of every utterance: the work of the published comparison
TEXT = "Each voice fills the other's rests, and so the line goes on and on."
BASELINE = {1: 12.2, 16: 112.0, 64: 140.6}
TEN = CALLS[STEPS.index(10)]  # estimates of ten Euler steps
TIGHT = 60  # KV blocks of one token with which the golden jobs must give way to each other
CONTEXT = 100  # positions before a timed step: the middle of an utterance

Report = Callable[[str], None]
Section = Callable[[str, Callable[[], Any]], None]


class Model:
    """Programs and jobs of one size on one device; weights are drawn where they are used."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        self.folder = write_checkpoint(mkdtemp(), size=size, never_ends=True, vocoder=False)
        self.front = VoxCpmFrontEnd(self.folder)
        self.config = read_model_config(self.folder)
        self.vae = read_vae_config(self.folder, self.config)

    def talker(self, dtype: torch.dtype) -> TalkerProgram:
        weights = load_talker(self.folder, self.config, self.device, dtype)
        return TalkerProgram(self.config, weights, self.vae.frame_rate_hz / self.config.patch_size)

    def vocoder(self, dtype: torch.dtype) -> VocoderProgram:
        tensors = random_vae(self.vae, 0, self.device, exact=False)
        return VocoderProgram(decoder_weights(tensors, self.vae, dtype), self.vae, self.config.patch_size)

    def job(self, seed: int, frames: int = PATCHES) -> Job:
        text = TEXT[: 40 + seed % 24]
        return self.front.prepare(SpeechRequest(text=text, max_frames=frames, seed=seed))


def main(
    size: Size, device: torch.device, batches: tuple[int, ...], clients: tuple[int, ...], seconds: float,
    voice: str, section: Section, report: Report,
) -> None:  # fmt: skip
    """Run every part as a section of its own, so that one that fails leaves the others."""
    model = Model(size, device)
    begin = time.perf_counter()
    talker = model.talker(torch.bfloat16)
    report(f"VoxCPM of size {size} ready in {time.perf_counter() - begin:.1f} s")
    section("voxcpm check", lambda: graph_equals_eager(model, talker))
    section("voxcpm step", lambda: steps(model, talker, batches, report))
    if device.type == "cuda":
        section("voxcpm prefill", lambda: prefills(model, talker))
        for b in (1, 64):
            section(f"voxcpm kernels {b}", lambda b=b: listed_kernels(model, talker, b))
    section("voxcpm engine", lambda: engine(model, talker, getattr(torch, voice), clients, seconds, report))
    section("voxcpm golden", lambda: golden(device))
    exact = model.talker(torch.float32)
    section("voxcpm precision", lambda: precision(exact, talker))
    if device.type == "cuda":
        section("voxcpm fp8", lambda: fp8.main(exact, talker, report))


# --- is it right? ------------------------------------------------------------------------------


def golden(device: torch.device) -> dict[str, Any]:
    """Latents of the published package, fp32, kernels and twins, from graphs and eagerly, and starved of
    blocks; all modes, two LoRAs and none in one batch."""
    cases = json.loads((GOLDEN / "cases.json").read_text("utf-8"))["cases"]
    names = [name for name, case in cases.items() if case["checkpoint"] == {"size": "tiny"}]
    folder = write_checkpoint(mkdtemp(), size="tiny", vocoder=False)
    written = json.loads((folder / "config.json").read_text("utf-8"))
    for name in names:
        if cases[name]["lora"] is not None:
            write_lora(folder / "lora" / name, written, **cases[name]["lora"])
    arrays = {name: dict(np.load(GOLDEN / f"{name}.npz")) for name in names}
    longest = max(len(a["noise"]) for a in arrays.values())
    table = torch.zeros(len(names), longest, arrays[names[0]]["noise"][0].size, device=device)
    for row, name in zip(table, names, strict=True):
        noise = torch.from_numpy(arrays[name]["noise"]).flatten(1)
        row[: len(noise)] = noise.to(device)

    def recorded(seed: Tensor, frame: Tensor, n: int) -> Tensor:
        return table[seed, frame.long().clamp(max=longest - 1)]

    config = read_model_config(folder)
    program = TalkerProgram(config, load_talker(folder, config, device, torch.float32), 6.25, recorded)
    jobs, voices = [], {}
    for seed, name in enumerate(names):
        request, a = cases[name]["request"], arrays[name]
        asked = TalkerInput(
            ids=a["ids"].tolist(), reference="reference" in a, continued="prompt" in a,
            guidance=request.get("guidance", 2.0), steps=request.get("steps", 10), temperature=1.0,
            least=request["least"], lora=name if cases[name]["lora"] is not None else "",
        )  # fmt: skip
        inputs = {"talker": msgspec.msgpack.encode(asked)}
        jobs.append(Job(id=name, route=("talker",), inputs=inputs, seed=seed, max_frames=request["most"]))
        given = {key: a[key] for key in ("reference", "prompt") if key in a}
        kind = ChunkKind.CONDITIONING
        voices[name] = {
            "encoder": Chunk(job=name, source="encoder", index=0, kind=kind, arrays=given, last=True)
        }
    results = {}
    for which in ("triton", "torch") if device.type == "cuda" else ("torch",):
        for graphs, blocks in ((True, 256), (False, 256), (True, TIGHT)):
            with kernels(which):
                program.bounded_by_context = which == "torch"
                chunks: list[Chunk] = []
                limits = AutoregressiveLimits(
                    kv_blocks=blocks, block_tokens=1, max_batch=16, in_flight=2, graphs=graphs
                )
                runner = AutoregressiveRunner("talker", program, limits, device, chunks.append)
                apart = 0 if blocks == TIGHT else 2
                latents = _run(runner, [(apart * i, job) for i, job in enumerate(jobs)], chunks, voices)
                error = max(_error(latents[name], arrays[name]["latents"]) for name in names)
                how = f"golden fp32, {which}, {'graphs' if graphs else 'eager'}, {blocks} blocks"
                given = f"{runner.stats.preemptions} preemptions"
                results[how] = f"largest difference over {len(names)} cases {error:.1e}, {given}"
    return results


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max()) if got.shape == wanted.shape else float("inf")


def _run(
    runner: AutoregressiveRunner, jobs: list[tuple[int, Job]], chunks: list[Chunk], voices: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Start each job at its turn; latents of each."""
    waiting, turn = list(jobs), 0
    while waiting or runner.jobs():
        while waiting and waiting[0][0] <= turn:
            job = waiting.pop(0)[1]
            runner.start(job, voices.get(job.id, {}))
        runner.tick(time.monotonic())
        turn += 1
    parts: dict[str, list[np.ndarray]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.job, []).append(chunk.arrays["latents"])
    return {job: np.concatenate(p) for job, p in parts.items()}


def graph_equals_eager(model: Model, program: TalkerProgram) -> dict[str, Any]:
    """Twelve steps of five requests in a batch for eight, one of which ends on the way, from a graph and by
    the same calls run eagerly: bit for bit, since shapes are the same. (Through the scheduler they are not:
    who shares a batch follows the clock, and sums follow the batch; `golden` does that in fp32.)"""
    rows, device, outputs = 5, model.device, []
    padded = torch.tensor([1, 2, 3, 4, 5, 0, 0, 0], device=device)
    stream = own_stream(device)
    for eager in (False, True):
        torch.manual_seed(0)
        state = _state(program, rows, CONTEXT)
        state.limit[2] = 27
        step, slots = program.step, padded
        if stream is not None and not eager:
            graphs = FrameGraphs(program, state, max_batch=8, max_context=256, device=device, stream=stream)
            step, slots = graphs.step, padded[:rows]
        made = []
        with on(stream):
            for _ in range(12):
                out = step(state, slots, 256, program.usual_variant)
                made += [out.chunk[:rows].clone(), out.emit[:rows].clone(), out.stop[:rows].clone()]
        if stream is not None:
            torch.cuda.synchronize()
        outputs.append([*made, state.x.clone(), state.patch.clone(), state.cache.position.clone()])
    differing = [i for i, (a, b) in enumerate(zip(*outputs, strict=True)) if not torch.equal(a, b)]
    return {
        f"{program.dtype}, graph against eager: tensors that differ": f"{len(differing)} of {len(outputs[0])}"
    }


def precision(exact: TalkerProgram, program: TalkerProgram) -> dict[str, Any]:
    """How far is half precision from fp32, patch by patch, given the same patches before?"""
    b, device = 8, program.device
    slots = torch.arange(1, b + 1, device=device)
    states = [_state(p, b, CONTEXT) for p in (exact, program)]
    kept = states[0].cache.kv.normal_()
    states[1].cache.kv.copy_(kept)
    states[1].x.copy_(states[0].x.normal_())
    states[1].patch.copy_(states[0].patch.normal_())
    patch_errors, hidden_errors = [], []
    seen = [_recorded_hidden(p) for p in (exact, program)]
    for _ in range(12):
        outs = [
            p.step(s, slots, 512, p.usual_variant).chunk.float()
            for p, s in zip((exact, program), states, strict=True)
        ]
        patch_errors.append(_relative(outs[1], outs[0]))
        hidden_errors.append(_relative(seen[1].pop().float(), seen[0].pop()))
        states[1].patch[slots] = outs[0].to(program.dtype)
        states[1].x[slots] = encode_patches(program.w.encoder, states[1].patch[slots], None)
    del program.stop_logits
    name = (
        f"{program.dtype}, given the patches of fp32, rms of the difference over rms, median and worst of 12"
    )
    return {
        f"{name}: hidden state that decides about the end": [sorted(hidden_errors)[6], max(hidden_errors)],
        f"{name}: patch": [sorted(patch_errors)[6], max(patch_errors)],
    }


def _relative(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).square().mean() / wanted.square().mean()).sqrt().item()


def _recorded_hidden(p: TalkerProgram) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(base: Tensor) -> Tensor:
        found.append(base)
        return type(p).stop_logits(p, base)

    p.stop_logits = keep  # type: ignore[method-assign]
    return found


# --- how long does a patch take? ---------------------------------------------------------------


def _state(program: TalkerProgram, b: int, context: int) -> Any:
    """A batch in the middle of its utterances."""
    blocks = 16
    state = allocate(
        program.declare(), slots=b + 1, device=program.device, blocks=(b + 1) * blocks, max_blocks=blocks
    ).tensors
    state.cache.kv.normal_()
    state.cache.blocks.copy_(torch.arange((b + 1) * blocks, device=program.device).view(-1, blocks))
    state.cache.position.fill_(context)
    state.x.normal_()
    state.patch.normal_()
    state.live[1:] = True
    state.frame.fill_(20)
    state.least.fill_(1 << 30)
    state.limit.fill_(1 << 30)
    state.seed.copy_(torch.arange(b + 1, device=program.device))
    state.guidance.fill_(2.0)
    state.temperature.fill_(1.0)
    state.steps.fill_(10)
    if program.device.type == "cuda":
        torch.cuda.synchronize()  # what reads it runs on a stream of its own
    return state


def _parts(program: TalkerProgram, state: Any, slots: Tensor) -> dict[str, Callable[[], Any]]:
    """The step, and its two halves: what the language models do, and the patch with its way back."""
    c, b, w = program.config, slots.shape[0], program.w
    device, dtype = program.device, program.dtype
    mu = torch.randn(b, 2 if c.v2 else 1, c.dit_config.hidden_dim, device=device, dtype=dtype)
    before = torch.randn(b, c.patch_size, c.feat_dim, device=device, dtype=dtype)
    noise = torch.randn(b, c.patch_size, c.feat_dim, device=device)
    guidance = torch.full((b,), 2.0, device=device)
    asked = torch.full((b,), 10, device=device)
    return {
        "step": lambda: program.step(state, slots, 256, program.usual_variant),
        "diffusion": lambda: diffuse(
            w.diffusion, mu, before, noise.clone(), guidance, asked, TEN, True, None
        ),
        "encoder": lambda: encode_patches(w.encoder, before, None),
    }


def _size(stack: Stack) -> int:
    matrices = ("qkv", "out", "gate_up", "down")
    return sum(getattr(layer.weights, m).numel() for layer in stack.layers for m in matrices)


def ceilings_ms(program: TalkerProgram, b: int) -> dict[str, float]:
    w, c = program.w, program.config
    d: Diffusion = w.diffusion
    kv = 2 * (len(w.base.layers) + len(w.residual.layers)) * program.shape.kv_heads * program.shape.head_dim

    def bound(weights: int, tokens: int, times: int = 1, extra: float = 0.0) -> float:
        return times * max((2 * weights + extra) / BANDWIDTH, 2 * weights * tokens / ARITHMETIC) * 1e3

    language = _size(w.base) + _size(w.residual)
    return {
        "language": bound(language, b, extra=2.0 * kv * CONTEXT * b),
        "diffusion": bound(_size(d.stack), 2 * b * d.cos.shape[0], TEN),
        "encoder": bound(_size(w.encoder.stack), b * (1 + c.patch_size)),
    }


def steps(model: Model, program: TalkerProgram, batches: tuple[int, ...], report: Report) -> list[Any]:
    rows = []
    stream = own_stream(model.device)
    for b in batches:
        slots = torch.arange(1, b + 1, device=model.device)
        calls = _parts(program, _state(program, b, CONTEXT), slots)
        row: dict[str, Any] = {"b": b}
        if stream is None:
            for name, call in calls.items():
                row[f"{name}_ms"] = _wall_ms(call)
        else:
            pool = GraphPool(stream)
            with torch.cuda.stream(stream):
                for name, call in calls.items():
                    pool.capture(name, call)
                    row[f"{name}_ms"] = event_ms(partial(pool.replay, name, call), 20)
                row["eager_ms"] = event_ms(calls["step"], 3, warm=1)
            del pool
        row["rest_ms"] = row["step_ms"] - row["diffusion_ms"] - row["encoder_ms"]
        row["ceilings_ms"] = ceilings_ms(program, b)
        ceiling = sum(row["ceilings_ms"].values())
        audio = b / program.frame_rate_hz * 1e3 / row["step_ms"]
        rows.append(row)
        parts = "  ".join(
            f"{name} {row[f'{key}_ms']:7.3f} ({row['ceilings_ms'][name] / row[f'{key}_ms']:4.0%})"
            for name, key in (("language", "rest"), ("diffusion", "diffusion"), ("encoder", "encoder"))
        )
        report(
            f"b {b:4d}  step {row['step_ms']:7.3f} ms  "
            f"ceiling {ceiling:6.3f} ({ceiling / row['step_ms']:4.0%})  {audio:7.1f} audio-s/s  "
            f"{parts}  eager {row.get('eager_ms', 0.0):7.2f}"
        )
    return rows


def prefills(model: Model, program: TalkerProgram) -> dict[str, str]:
    """What prompts cost: ms for b of them with n rows each, which stand between two steps."""
    out, stream = {}, own_stream(model.device)
    for b, n in ((1, 32), (1, 64), (2, 64), (4, 64), (8, 64), (1, 128), (4, 128), (16, 128)):
        state = _state(program, b, 0)
        slots = torch.arange(1, b + 1, device=model.device)
        x = torch.randn(b, n, program.width, device=model.device, dtype=program.dtype)
        count = torch.full((b,), n, device=model.device)
        call = partial(program.prefill, state, slots, x, count, 256)
        nothing = partial(state.cache.position.fill_, 0)
        pool = GraphPool(stream)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            pool.capture(0, lambda call=call, nothing=nothing: (call(), nothing()))  # type: ignore[misc]
            ms = event_ms(partial(pool.replay, 0, call), 10)
        out[f"prefill {b:3d} x {n:3d} rows"] = f"{ms:7.3f} ms"
    return out


def _wall_ms(call: Callable[[], Any]) -> float:
    call()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def listed_kernels(model: Model, program: TalkerProgram, b: int) -> dict[str, str]:
    """What takes longest within one step of b rows: ms a step and launches, by kernel."""
    stream = own_stream(model.device)
    slots = torch.arange(1, b + 1, device=model.device)
    call = _parts(program, _state(program, b, CONTEXT), slots)["step"]
    pool = GraphPool(stream)
    with torch.cuda.stream(stream):
        pool.capture("step", call)
        pool.replay("step", call)
        torch.cuda.synchronize()
        found = kernel_times(lambda: pool.replay("step", call), 4)
    return {f"b {b:3d}  {kernel}": f"{ms:7.3f} ms {count:5d} x" for kernel, ms, count in found[:18]}


# --- the closed loop ---------------------------------------------------------------------------


def engine(
    model: Model, talker: TalkerProgram, voice: torch.dtype, clients: tuple[int, ...], seconds: float,
    report: Report,
) -> list[Any]:  # fmt: skip
    """Talker and vocoder in one process and one loop, as a worker runs them, without HTTP."""
    rows = []
    loop = Loop(model, talker, model.vocoder(voice), max(clients))  # type: ignore[arg-type]
    report(f"warm {loop.warm_s:.1f} s, vocoder {voice}")
    for c in clients:
        loop.run(c, 0.5, 8)
        row = loop.run(c, seconds, PATCHES)
        row["baseline_audio_s_per_s"] = BASELINE.get(c)
        rows.append(row)
        report(
            f"C {c:4d}  {row['audio_s_per_s']:7.1f} audio-s/s  "
            f"TTFP {row['ttfp_p50_ms']:5.0f} / {row['ttfp_p99_ms']:5.0f}  "
            f"smooth {row['smooth_p50_ms']:5.0f} / {row['smooth_p99_ms']:5.0f} ms  "
            f"step {row['frame_ms']:6.2f} ms  launch {row['talker_launch_ms']:5.2f}  "
            f"rows {row['rows_per_step']:5.1f}  "
            f"vocoder steps {row['codec_steps']} of {row['codec_rows']:4.1f}  n {row['requests']}"
        )
    return rows
