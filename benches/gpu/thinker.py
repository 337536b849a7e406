"""Qwen3-Omni's Thinker: is it right on the device, how long does a token take, and a prompt, and a picture?

    python -m benches.gpu.thinker [--layers 48] [--batches 1 16 64 256] [--float8] [--out thinker.json]

Regime: memory. A step reads the experts that its rows visit: 8 of 128 with one row, nearly all from 64 rows
on, 59.5 GB in 48 layers. The ceiling printed is bytes over 4.3 TB/s, with the number of experts that uniform
routing visits on average. Weights are drawn on the device; 61 GB with all layers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benches.gpu.frame import BANDWIDTH, event_ms, kernel_times
from hocket.core import TILE, Job, Places
from hocket.kernels import moe as kernels
from hocket.kernels.choice import compiling_ahead
from hocket.kernels.moe import experts_torch, experts_triton, route_torch, route_triton
from hocket.kernels.vocabulary import draw_any_torch, draw_any_triton
from hocket.models.qwen3_omni import synthetic
from hocket.models.qwen3_omni.audio import encode as hear
from hocket.models.qwen3_omni.audio import log_mel
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.prompt import ThinkerInput
from hocket.models.qwen3_omni.thinker import ThinkerProgram
from hocket.models.qwen3_omni.vision import encode as see
from hocket.models.qwen3_omni.weights import load_audio, load_thinker, load_vision
from hocket.nn.moe import MoeWeights, in_float8, moe
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.graphs import GraphPool, own_stream
from hocket.runtime.state import allocate

GOLDEN = Path(__file__).parents[2] / "tests/golden/qwen3_omni"
CONTEXT = 200
Report = Callable[[str], None]


def visited(experts: int, top_k: int, rows: int) -> float:
    """Experts that so many rows visit on average, if every expert is as likely."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def golden(device: torch.device) -> dict[str, Any]:
    """Tokens of the tiny checkpoint in fp32, through kernels and graphs, against the published ones; with
    experts in float8, against those of the twins on the CPU."""
    folder = synthetic.write_checkpoint(Path(mkdtemp()))
    result = {}
    program = tiny(folder, device, False)
    for name in ("text", "turns", "tools"):
        expected = np.load(GOLDEN / f"thinker_{name}.npz")
        result[name] = written(program, expected["ids"]) == expected["tokens"].tolist()
    small, twin = (tiny(folder, on, True) for on in (device, torch.device("cpu")))
    ids = np.load(GOLDEN / "thinker_turns.npz")["ids"]
    result["float8"] = written(small, ids) == written(twin, ids)
    return result


def tiny(folder: Path, device: torch.device, float8: bool) -> ThinkerProgram:
    config = read_model_config(folder)
    return ThinkerProgram(config, load_thinker(folder, config, device, torch.float32, float8=float8))


def written(program: ThinkerProgram, ids: np.ndarray) -> list[int]:
    """Twelve tokens, greedy, or fewer."""
    made: list[int] = []
    limits = AutoregressiveLimits(
        slots=4, max_batch=4, kv_blocks=128, in_flight=2 if program.device.type == "cuda" else 1
    )
    runner = AutoregressiveRunner(
        "thinker", program, limits, program.device,
        lambda chunk: made.extend(chunk.arrays["tokens"][:, 0].tolist()),
    )  # fmt: skip
    asked = ThinkerInput(ids=ids.tobytes(), stops=[program.config.im_end_token_id])
    inputs = {"thinker": msgspec.msgpack.encode(asked)}
    runner.start(Job(id="j", route=("thinker",), inputs=inputs, seed=0, max_frames=12), {})
    while runner.jobs():
        runner.tick(time.monotonic())
    return made


def check(device: torch.device) -> dict[str, float]:
    """Kernels against twins at the released sizes: error of the kernel over error of the twin, both in bf16
    against fp32. Near 1 is right."""
    result: dict[str, float] = {}
    for label, e, k, shared, d, f in (("thinker", 128, 8, 0, 2048, 768), ("talker", 128, 6, 2, 1024, 384)):
        w = random_moe(e, k, shared, d, f, device)
        norm = torch.ones(d, device=device, dtype=torch.bfloat16)
        for m in (1, 3, 16, 17, 64, 200, 1024):
            x = torch.randn(m, d, device=device, dtype=torch.bfloat16)
            y, weight, expert = route_triton(x, norm, 1e-6, w.router, k, shared)
            _, twin, same = route_torch(x, norm, 1e-6, w.router, k, shared)
            result[f"{label} {m} rows: experts chosen alike"] = float((expert == same).float().mean())
            result[f"{label} {m} rows: weights apart"] = float((weight.float() - twin.float()).abs().max())
            given = (y, weight, expert, w.gate_up, w.down, x)
            made, twin = experts_triton(*given).float(), experts_torch(*given).float()
            exact = plainly(*given)
            apart = (made - exact).square().mean().sqrt() / (exact - x.float()).square().mean().sqrt()
            of_twin = (twin - exact).square().mean().sqrt() / (exact - x.float()).square().mean().sqrt()
            result[f"{label} {m} rows: error"] = float(apart)
            result[f"{label} {m} rows: error of the twin"] = float(of_twin)
    logits = torch.randn(64, 152064, device=device).bfloat16()
    heat = torch.linspace(0, 1, 64, device=device)
    key = torch.arange(64, device=device)
    for noisy in (False, True):
        made, twin = (call(logits, heat, key, noisy) for call in (draw_any_triton, draw_any_torch))
        result[f"drawn alike, noisy {noisy}"] = float((made == twin).float().mean())
    return result


def plainly(
    x: Tensor, weight: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor
) -> Tensor:
    """The mixture in fp32, one expert after the other."""
    out = residual.float().clone()
    for e in expert.unique().tolist():
        row, k = (expert == e).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[row].float(), gate_up[e].float()).chunk(2, dim=1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[e].float())
        out.index_add_(0, row, y * weight[row, k, None].float())
    return out


def random_moe(e: int, k: int, shared: int, d: int, f: int, device: torch.device) -> MoeWeights:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

    router = draw(e + (shared > 0), d)
    return MoeWeights(router, draw(e + shared, 2 * f, d), draw(e + shared, d, f), k, shared)


def layers(device: torch.device, batches: list[int], float8: bool, report: Report) -> list[dict[str, Any]]:
    """Mixtures alone, eight in a row with weights of their own so that no cache helps."""
    rows = []
    stream = own_stream(device)
    for label, e, k, shared, d, f in (("thinker", 128, 8, 0, 2048, 768), ("talker", 128, 6, 2, 1024, 384)):
        ws = [random_moe(e, k, shared, d, f, device) for _ in range(8)]
        if float8:
            ws = [in_float8(w) for w in ws]
        norm = torch.ones(d, device=device, dtype=torch.bfloat16)
        for b in batches:
            x = torch.randn(b, d, device=device, dtype=torch.bfloat16)

            def call(x: Tensor = x, ws: list[MoeWeights] = ws, norm: Tensor = norm) -> Tensor:
                y = x
                for w in ws:
                    y = moe(w, y, norm, 1e-6)
                return y

            pool = GraphPool(stream)
            with torch.cuda.stream(stream):
                pool.capture("layer", call)
                us = event_ms(lambda: pool.replay("layer", call), 30) / len(ws) * 1e3  # noqa: B023
                times = kernel_times(lambda: pool.replay("layer", call), 4)  # noqa: B023
            size = (visited(e, k, b) + shared) * 3 * d * f * (1 if float8 else 2)
            ceiling = size / BANDWIDTH * 1e6
            rows.append({"part": label, "b": b, "us": us, "ceiling_us": ceiling})
            report(f"{label} mixture  b {b:4d}  {us:7.1f} us  ceiling {ceiling:6.1f} ({ceiling / us:4.0%})")
            for name, ms, count in times[:6]:
                report(f"    {ms / len(ws) * 1e3:7.1f} us  {count / len(ws):3.0f} x  {name[:70]}")
    return rows


TILES = {  # to try, by the rows that an expert has on average: rows, columns, depth, warps, stages
    4: ((16, 16, 128, 4, 4), (16, 16, 256, 4, 4), (16, 32, 64, 4, 6), (16, 32, 128, 4, 3),
        (16, 32, 128, 4, 5), (16, 32, 128, 8, 4), (16, 32, 256, 4, 3), (16, 64, 64, 4, 5),
        (16, 64, 128, 4, 3), (16, 64, 128, 8, 3), (16, 128, 64, 4, 3)),
    32: ((16, 64, 128, 4, 3), (32, 32, 128, 4, 4), (32, 64, 64, 4, 4), (32, 64, 128, 4, 3),
         (32, 128, 64, 4, 3), (64, 64, 64, 4, 3)),
    1 << 20: ((64, 64, 64, 8, 3), (64, 128, 64, 4, 3), (64, 128, 64, 8, 3), (64, 64, 128, 4, 2),
              (128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (128, 128, 64, 8, 3), (128, 64, 32, 4, 4)),
}  # fmt: skip


def tiles(device: torch.device, batches: list[int], float8: bool, report: Report) -> list[dict[str, Any]]:
    """Which tile of the Thinker's two products is fastest; the other keeps its own."""
    rows = []
    stream, usual = own_stream(device), kernels.tile
    e, k, d, f = 128, 8, 2048, 768
    ws = [random_moe(e, k, 0, d, f, device) for _ in range(8)]
    if float8:
        ws = [in_float8(w) for w in ws]
    norm = torch.ones(d, device=device, dtype=torch.bfloat16)
    for b in batches:
        x = torch.randn(b, d, device=device, dtype=torch.bfloat16)
        plans = (None, *next(TILES[most] for most in TILES if b * k // e <= most))
        tried = [(gated, plan) for gated in (True, False) for plan in plans]

        def call(count: int = len(ws), x: Tensor = x) -> Tensor:
            for w in ws[:count]:
                x = moe(w, x, norm, 1e-6)
            return x

        def choose(gated: bool, plan: tuple[int, ...] | None) -> None:
            def chosen(*a: int, gated: bool, mine: bool = gated) -> tuple[int, ...]:
                return plan if plan and gated == mine else usual(*a, gated=gated)

            kernels.tile = chosen  # type: ignore[assignment]

        with compiling_ahead():
            for one in tried:
                choose(*one)
                call(1)
        found = []
        for gated, plan in tried:
            choose(gated, plan)
            pool = GraphPool(stream)
            with torch.cuda.stream(stream):
                try:
                    pool.capture("moe", call)
                except Exception as error:  # a tile that does not fit the multiprocessor
                    report(f"b {b} {'up' if gated else 'down'} {plan}: {type(error).__name__}")
                    continue
                us = event_ms(lambda: pool.replay("moe", call), 10) / len(ws) * 1e3  # noqa: B023
            found.append((us, gated, plan))
            rows.append({"b": b, "gated": gated, "tile": plan, "us": us})
        for gated in (True, False):
            own = next(us for us, which, plan in found if which == gated and plan is None)
            best = sorted(
                ((us, plan) for us, which, plan in found if which == gated and plan), key=lambda one: one[0]
            )
            told = ", ".join(f"{us:.1f} {plan}" for us, plan in best[:5])
            report(f"b {b:4d} {'up  ' if gated else 'down'} {own:6.1f} us as it is; {told}")
    kernels.tile = usual
    return rows


def states(program: ThinkerProgram, b: int, tokens: int = 512) -> Any:
    """A batch in the middle of its texts, with room for so many tokens each."""
    blocks = tokens // 16
    state = allocate(
        program.declare(), slots=b + 1, device=program.device, blocks=(b + 1) * blocks, max_blocks=blocks
    ).tensors
    state.cache.kv.normal_()
    state.cache.blocks.copy_(torch.arange((b + 1) * blocks, device=program.device).view(-1, blocks))
    state.cache.position.fill_(CONTEXT)
    state.token.copy_(torch.arange(b + 1, device=program.device) % 200)
    state.live[1:] = True
    state.limit.fill_(1 << 30)
    torch.cuda.synchronize()
    return state


def ceiling_ms(program: ThinkerProgram, b: int) -> float:
    t = program.config.thinker_config.text_config
    layer = program.w.layers[0]
    one = layer.moe.gate_up[0].nbytes + layer.moe.down[0].nbytes
    rest = layer.qkv.nbytes + layer.out.nbytes + layer.moe.router.nbytes
    kv = 2 * t.num_key_value_heads * t.head_dim * 2 * CONTEXT * b
    each = visited(t.num_experts, t.num_experts_per_tok, b) * one + rest + kv
    return (len(program.w.layers) * each + program.w.head.nbytes) / BANDWIDTH * 1e3


def steps(program: ThinkerProgram, batches: list[int], report: Report) -> list[dict[str, Any]]:
    rows = []
    stream = own_stream(program.device)
    for b in batches:
        state, slots = states(program, b), torch.arange(1, b + 1, device=program.device)
        pool = GraphPool(stream)

        def call(state: Any = state, slots: Tensor = slots) -> Any:
            return program.step(state, slots, 512, 0)

        with torch.cuda.stream(stream):
            pool.capture("step", call)
            ms = event_ms(lambda: pool.replay("step", call), 20)  # noqa: B023
            times = kernel_times(lambda: pool.replay("step", call), 2)  # noqa: B023
        ceiling = ceiling_ms(program, b)
        rows.append({"b": b, "ms": ms, "ceiling_ms": ceiling})
        report(f"token  b {b:4d}  {ms:7.2f} ms  ceiling {ceiling:6.2f} ({ceiling / ms:4.0%})")
        for name, one, count in times[:10]:
            report(f"    {one:7.3f} ms  {count:4d} x  {name[:70]}")
    return rows


def prompts(program: ThinkerProgram, report: Report) -> list[dict[str, Any]]:
    rows = []
    stream = own_stream(program.device)
    for b, n in ((1, 32), (1, 150), (4, 150), (1, 512), (1, 2048)):
        state = states(program, b, max(n, 512))
        slots = torch.arange(1, b + 1, device=program.device)
        x = torch.randn(b * n, program.width, device=program.device, dtype=program.dtype)
        places = Places(
            slot=slots.int().repeat_interleave(n),
            position=torch.arange(n, dtype=torch.int32, device=program.device).repeat(b),
            tile=torch.tensor(
                [(i * n + at, min(TILE, n - at)) for i in range(b) for at in range(0, n, TILE)],
                dtype=torch.int32,
                device=program.device,
            ),
        )

        def call(x: Tensor = x, places: Places = places, state: Any = state, n: int = n) -> None:
            program.prefill(state, x, places, max(n, 512))

        pool = GraphPool(stream)
        torch.cuda.synchronize()  # x comes from another stream
        with torch.cuda.stream(stream):
            pool.capture("prompt", call)
            ms = event_ms(lambda: pool.replay("prompt", call), 10)  # noqa: B023
            times = kernel_times(lambda: pool.replay("prompt", call), 2)  # noqa: B023
        ceiling = ceiling_ms(program, b * n)
        rows.append({"b": b, "n": n, "ms": ms, "ceiling_ms": ceiling})
        report(f"prompt  {b} x {n:4d}  {ms:7.2f} ms  ceiling of memory {ceiling:6.2f} ({ceiling / ms:4.0%})")
        for name, one, count in times[:6]:
            report(f"    {one:7.3f} ms  {count:4d} x  {name[:70]}")
    return rows


def towers(folder: Path, device: torch.device, report: Report) -> dict[str, float]:
    config = read_model_config(folder)
    t = config.thinker_config
    result = {}
    w = load_audio(folder, config, device, torch.bfloat16)
    for seconds in (3, 30, 300):
        samples = torch.randn(16000 * seconds, device=device) * 0.1
        mel = log_mel(samples, w.filters)
        result[f"log-mel {seconds} s"] = event_ms(lambda: log_mel(samples, w.filters), 10)  # noqa: B023
        result[f"audio {seconds} s"] = event_ms(lambda: hear(w, t.audio_config, [mel]), 10)  # noqa: B023
    v = load_vision(folder, config, device, torch.bfloat16)
    for side, frames in ((512, 1), (1024, 1), (512, 32)):
        n = side // 16
        x = torch.randn(frames, n * n, t.vision_config.patch_values, device=device)
        ms = event_ms(lambda: see(v, t.vision_config, x, n, n), 10)  # noqa: B023
        result[f"vision {frames} x {side} x {side}"] = ms
    for name, ms in result.items():
        report(f"{name:24s} {ms:8.2f} ms")
    return result


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.thinker", description=__doc__.splitlines()[0])
    p.add_argument("--layers", type=int, default=48)
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256])
    p.add_argument("--rows", type=int, nargs="+", default=[16, 64, 150, 2048], help="Of which to try tiles.")
    p.add_argument("--float8", action="store_true")
    p.add_argument(
        "--sections", nargs="+", default=["golden", "check", "layers", "towers", "steps", "prompts"]
    )
    p.add_argument("--out")
    a = p.parse_args()
    device = torch.device("cuda")
    begin = time.perf_counter()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}

    def report(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f}] {line}", flush=True)

    folder = synthetic.write_checkpoint(Path(mkdtemp()), size="30b", variant="thinking", drawn=True)
    content = json.loads((folder / "config.json").read_text())
    content["thinker_config"]["text_config"]["num_hidden_layers"] = a.layers
    (folder / "config.json").write_text(json.dumps(content))
    program = None
    with torch.inference_mode():
        for name in a.sections:
            if name in ("steps", "prompts") and program is None:
                config = read_model_config(folder)
                weights = load_thinker(folder, config, device, torch.bfloat16, float8=a.float8)
                program = ThinkerProgram(config, weights)
                report(f"{a.layers} layers ready, {torch.cuda.memory_allocated() / 1e9:.1f} GB")
            calls: dict[str, Callable[[], Any]] = {
                "golden": lambda: golden(device),
                "check": lambda: check(device),
                "layers": lambda: layers(device, a.batches, a.float8, report),
                "tiles": lambda: tiles(device, a.rows, a.float8, report),
                "towers": lambda: towers(folder, device, report),
                "steps": lambda: steps(program, a.batches, report),  # type: ignore[arg-type]  # noqa: B023
                "prompts": lambda: prompts(program, report),  # type: ignore[arg-type]  # noqa: B023
            }
            results[name] = calls[name]()
            if name in ("golden", "check"):
                for key, value in results[name].items():
                    report(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
            if a.out:
                Path(a.out).write_text(json.dumps(results, indent=1))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
