"""How long do the code predictor's passes take as one kernel, and why?

Regime: 15 passes over 157 MB, 2.4 GB a frame with the heads, 0.56 ms at 4.3 TB/s; and a chain of 375 products
and attention steps, each of which needs all of the one before: what a meeting of the grid or a trip to L2
costs, 375 times, is the other floor. `no meetings` and `no weights` show the two apart; their results are
wrong. Each variant runs in a process of its own, so that one that hangs or faults stops nothing else.

    python -m benches.gpu.resident --out results.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.kernels import choice, cuda, linear
from hocket.kernels.draw import DrawOptions
from hocket.kernels.resident import Geometry, Predictor
from hocket.nn.rotary import rotary_tables
from hocket.nn.talker import FrameTalker
from hocket.nn.transformer import LayerWeights, Shape

CLUSTERS: dict[str, Any] = {"grid": 120, "cluster": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "clusters": CLUSTERS,
    "layers, library": {"skinny": 0},
    "layers, fused": {"skinny": 2},
    "stamps": {"measure": "STAMPS"},
    "clusters, stamps": CLUSTERS | {"measure": "STAMPS"},
    "no weights": {"measure": "NO_WEIGHTS"},
    "no meetings": {"measure": "NO_MEETINGS"},
}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FULL = {"d": 1024, "f": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "layers": 5, "vocab": 2048}
TINY = {"d": 64, "f": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2, "vocab": 512}
SMALL: dict[str, Any] = {
    "grid": 8,
    "slot": 32768,
    "slots": 3,
}  # for TINY: programs that all have features of every product
BOOKS, EPS, SLOTS = 16, 1e-6, 257
POINTS = (
    (0, 24, "qkv: rows in"), (24, 25, "qkv: product"), (25, 26, "qkv: sums meet"), (26, 1, "qkv: out"),
    (1, 2, "meeting"), (2, 3, "attention"), (3, 4, "meeting"),
    (4, 28, "out: rows asked for"), (28, 29, "out: product"), (29, 30, "out: sums meet"), (30, 5, "out: out"),
    (5, 6, "meeting"),
    (6, 16, "gate: rows in"), (16, 17, "gate: product"), (17, 18, "gate: sums meet"), (18, 7, "gate: out"),
    (7, 8, "meeting"),
    (8, 20, "down: rows asked for"), (20, 21, "down: product"), (21, 22, "down: sums meet"),
    (22, 9, "down: out"), (9, 10, "meeting"),
    (11, 12, "head"), (12, 13, "meeting"), (13, 14, "draw"), (14, 15, "meeting"),
)  # fmt: skip


def made(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> SimpleNamespace:
    """A predictor of random weights, as `FrameTalker` names its parts."""
    g = torch.Generator(device).manual_seed(0)
    s = SimpleNamespace(**sizes)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g, device=device) / shape[-1] ** 0.5).to(dtype)

    def norm(n: int) -> Tensor:
        return (torch.randn(n, generator=g, device=device) * 0.1 + 1).to(dtype)

    qkv, out = (s.heads + 2 * s.kv_heads) * s.head_dim, s.heads * s.head_dim
    layers = [
        LayerWeights(
            norm_in=norm(s.d), qkv=normal(qkv, s.d), q_norm=norm(s.head_dim), k_norm=norm(s.head_dim),
            out=normal(s.d, out), norm_mlp=norm(s.d), gate_up=normal(2 * s.f, s.d), down=normal(s.d, s.f),
        )
        for _ in range(s.layers)
    ]  # fmt: skip
    w = SimpleNamespace(
        inner_layers=layers, inner_norm=norm(s.d), inner_heads=normal(BOOKS - 1, s.vocab, s.d) * 3,
        inner_embed=normal(BOOKS - 1, s.vocab, s.d) * s.d**0.5,
    )  # fmt: skip
    tables = rotary_tables(s.head_dim, 1e6, torch.arange(BOOKS, device=device), dtype)
    cos, sin = (t.squeeze(1) for t in tables)
    shape = Shape(s.heads, s.kv_heads, s.head_dim, EPS)
    return SimpleNamespace(w=w, inner=shape, books=BOOKS, inner_cos=cos, inner_sin=sin)


def whole(p: SimpleNamespace, **sizes: Any) -> Predictor:
    """The kernel over the weights of `p`."""
    return Predictor(
        p.w.inner_layers, p.w.inner_norm, p.w.inner_heads, p.w.inner_embed, p.inner_cos, p.inner_sin,
        p.inner.kv_heads, EPS, **sizes,
    )  # fmt: skip


def inputs(b: int, d: int, dtype: torch.dtype, device: torch.device, heat: float) -> tuple[Any, ...]:
    """x, options, slots, keys."""
    o = DrawOptions(
        torch.full((SLOTS, 2), heat, device=device)[:, 1],
        torch.full((SLOTS, 2), 50, dtype=torch.int32, device=device)[:, 1],
        torch.ones(SLOTS, 2, device=device)[:, 1],
    )
    x = torch.randn(b, 2, d, device=device).to(dtype)
    key = torch.randint(1 << 32, (b, BOOKS), device=device)
    return x, o, torch.arange(1, b + 1, device=device), key


def reference(p: SimpleNamespace, x: Tensor, codes: Tensor) -> Tensor:
    """Logits of every pass, given the codes: float64, all positions at once -> [b, books - 1, vocab]."""
    wide = torch.float64
    s, w = p.inner, p.w
    read = [w.inner_embed[k][codes[:, k]] for k in range(1, BOOKS - 1)]
    h = torch.cat([x, torch.stack(read, dim=1)], dim=1).to(wide)  # [b, books, d]
    cos, sin = p.inner_cos.to(wide)[:, None], p.inner_sin.to(wide)[:, None]

    def turn(q: Tensor) -> Tensor:
        low, high = q.chunk(2, dim=-1)
        return q * cos + torch.cat([-high, low], dim=-1) * sin

    def norm(q: Tensor, weight: Tensor) -> Tensor:
        return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS) * weight.to(wide)

    for layer in w.inner_layers:
        qkv = norm(h, layer.norm_in) @ layer.qkv.to(wide).T
        q, k, v = qkv.unflatten(-1, (-1, s.head_dim)).split((s.heads, s.kv_heads, s.kv_heads), dim=2)
        q, k = turn(norm(q, layer.q_norm)), turn(norm(k, layer.k_norm))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        h = h + out.transpose(1, 2).flatten(2) @ layer.out.to(wide).T
        gate, up = (norm(h, layer.norm_mlp) @ layer.gate_up.to(wide).T).chunk(2, dim=-1)
        h = h + (F.silu(gate) * up) @ layer.down.to(wide).T
    h = norm(h[:, 1:], w.inner_norm)
    return torch.einsum("bkd,kvd->bkv", h, w.inner_heads.to(wide))


def error(got: Tensor, exact: Tensor) -> list[float]:
    """Relative error of the logits of each codebook."""
    return [((got[:, k].double() - exact[:, k]).norm() / exact[:, k].norm()).item() for k in range(BOOKS - 1)]


def check(p: SimpleNamespace, predictor: Predictor, device: torch.device) -> dict[str, Any]:
    """bf16 logits against float64, those of the passes kernel by kernel beside them; draws that repeat."""
    found: dict[str, Any] = {}
    for b in (1, 7, 8, 9, 16, 17, 33, 64):
        x, o, slots, key = inputs(b, FULL["d"], torch.bfloat16, device, 0.9)
        codes = torch.full((2, b, BOOKS), -1, device=device)
        logits = x.new_full((b, BOOKS - 1, FULL["vocab"]), float("nan"))
        predictor(x.clone(), o, slots, key, codes[0], logits)
        predictor(x.clone(), o, slots, key, codes[1])
        torch.cuda.synchronize()
        errors = error(logits, reference(p, x, codes[0]))
        ok = torch.equal(codes[0, :, 1:], codes[1, :, 1:]) and bool((codes[0, :, 1:] >= 0).all())
        found[f"b {b}"] = {"errors": errors, "largest": max(errors), "repeats": ok}
    return found


def small_steps_error(p: SimpleNamespace, device: torch.device) -> float:
    """The largest error of a codebook's logits, passes kernel by kernel."""
    import hocket.nn.talker as module

    seen: list[Tensor] = []
    kept = module.norm_linear

    def spy(*a: Any) -> Tensor:
        seen.append(kept(*a))
        return seen[-1]

    module.norm_linear = spy
    try:
        x, o, slots, key = inputs(16, FULL["d"], torch.bfloat16, device, 0.9)
        codes = torch.full((16, BOOKS), -1, device=device)
        FrameTalker._predict_by_layers(p, x.clone(), o, slots, key, 0, codes)  # type: ignore[arg-type]
    finally:
        module.norm_linear = kept
    return max(error(torch.stack(seen, dim=1), reference(p, x, codes)))


def exact_codes(device: torch.device, cluster: int) -> dict[str, str]:
    """fp32: codes of the kernel and of the twin, greedy and warm."""
    torch.backends.cuda.matmul.allow_tf32 = False
    p = made(TINY, torch.float32, device)
    predictor = whole(p, **SMALL, cluster=cluster)
    found = {}
    choice._WANTED = "torch"
    try:
        for heat in (0.0, 0.9):
            for b in (1, 5, 16, 33, 64):
                x, o, slots, key = inputs(b, TINY["d"], torch.float32, device, heat)
                codes = torch.full((2, b, BOOKS), -1, device=device)
                predictor(x.clone(), o, slots, key, codes[0])
                FrameTalker._predict_by_layers(p, x.clone(), o, slots, key, 0, codes[1])  # type: ignore[arg-type]
                rows = (codes[0] == codes[1]).all(1).sum().item()
                found[f"fp32, temperature {heat}, b {b}"] = f"{rows} of {b} rows equal"
    finally:
        choice._WANTED = "auto"
    return found


def graph_ms(call: Any, repeat: int = 30) -> float:
    """Median time of a replayed graph of `call`."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 4)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(marks[3:]))
    return times[len(times) // 2]


def spans(cycles: Tensor, points: tuple[tuple[int, int, str], ...]) -> dict[str, list[int]]:
    """Cycles between points of a layer: least, median and most over programs."""
    t, at = cycles.cpu(), torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    return {
        f"{i:2d} {what}": [round(v) for v in (t[:, end] - t[:, start]).double().quantile(at).tolist()]
        for i, (start, end, what) in enumerate(points)
    }


def one(name: str, batches: tuple[int, ...]) -> dict[str, Any]:
    device = torch.device("cuda")
    o = dict(VARIANTS[name])
    skinny = o.pop("skinny", None)
    found: dict[str, Any] = {}
    p = made(FULL, torch.bfloat16, device)
    if skinny is not None:
        linear.SKINNY = skinny
        found["largest error"] = small_steps_error(p, device)
    else:
        begin = time.perf_counter()
        predictor = whole(p, **o)
        torch.cuda.synchronize()
        found["ready_s"] = time.perf_counter() - begin
        if not batches:  # under a profiler
            for b in (1, 1, 16):
                x, options, slots, key = inputs(b, FULL["d"], torch.bfloat16, device, 0.9)
                predictor(x, options, slots, key, torch.zeros(b, BOOKS, dtype=torch.int64, device=device))
            torch.cuda.synchronize()
            return found
        if "measure" not in o:
            found["exact"] = exact_codes(device, o.get("cluster", 1))
            found["check"] = check(p, predictor, device)
    for b in batches:
        try:
            x, options, slots, key = inputs(b, FULL["d"], torch.bfloat16, device, 0.9)
            codes = torch.zeros(b, BOOKS, dtype=torch.int64, device=device)
            if skinny is not None:

                def call() -> None:
                    FrameTalker._predict_by_layers(p, x.clone(), options, slots, key, 0, codes)  # type: ignore[arg-type]  # noqa: B023
            elif name.endswith("stamps"):
                stamps = torch.zeros(b, BOOKS - 1, FULL["vocab"], dtype=torch.bfloat16, device=device)
                cycles = torch.zeros(128, 32, dtype=torch.int64, device=device)
                for _ in range(3):
                    predictor(x.clone(), options, slots, key, codes, cycles)
                torch.cuda.synchronize()
                del stamps
                found[f"b {b}"] = spans(cycles, POINTS)
                continue
            else:

                def call() -> None:
                    predictor(x.clone(), options, slots, key, codes)  # noqa: B023

            found[f"b {b}"] = graph_ms(call)
        except Exception:
            found[f"b {b}"] = traceback.format_exc()
            if "CUDA error" in found[f"b {b}"] or "driver gives" in found[f"b {b}"]:
                break
    return found


def compiled(name: str) -> str:
    """Make a variant's machine code; the next process finds it on disk."""
    o = VARIANTS[name]
    text = cuda.source("device.cuh", "grid.cuh", "phases.cuh", "predictor.cu")
    begin = time.perf_counter()
    try:
        g = Geometry(**FULL, tokens=BOOKS, half=True, **o)
        geometries = [g.roomy() if g.cluster > 1 else g]
        if "measure" not in o:
            geometries += [Geometry(**TINY, **SMALL, cluster=g.cluster, tokens=BOOKS, half=False)]
        for g in geometries:
            cuda.compile_cubin(text, g.defines, (9, 0))
    except cuda.Unavailable as e:
        return str(e)
    return f"{time.perf_counter() - begin:.1f} s"


def main() -> None:
    a = argparse.ArgumentParser(prog="python -m benches.gpu.resident")
    a.add_argument("--out", default=str(Path(mkdtemp()) / "predictor.json"))
    a.add_argument("--one")
    a.add_argument("--variants", nargs="+", default=list(VARIANTS))
    a.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    a.add_argument("--timeout", type=float, default=45)
    o = a.parse_args()
    if o.one:
        Path(o.out).write_text(json.dumps(one(o.one, tuple(o.batches))))
        return
    begin = time.perf_counter()
    results: dict[str, Any] = {}

    def report(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f}] {line}", flush=True)

    kernels = [v for v in o.variants if "skinny" not in VARIANTS[v]]
    with ProcessPoolExecutor(max(1, len(kernels))) as pool:
        for name, said in zip(kernels, pool.map(compiled, kernels), strict=True):
            report(f"compiled {name}: {said}")
    for name in o.variants:
        part = Path(mkdtemp()) / "part.json"
        command = [sys.executable, "-m", "benches.gpu.resident", "--one", name, "--out", str(part)]
        try:
            done = subprocess.run(
                [*command, "--batches", *map(str, o.batches)],
                timeout=o.timeout,
                capture_output=True,
                text=True,
            )
            results[name] = json.loads(part.read_text()) if part.exists() else done.stderr[-6000:]
        except subprocess.TimeoutExpired as e:
            results[name] = f"still running after {o.timeout} s: {(e.stderr or b'')[-2000:]!r}"
        said = results[name]
        if isinstance(said, str):
            report(f"{name} FAILED\n{said}")
        else:
            for key, value in said.items():
                report(
                    f"{name:16s} {key}: {json.dumps(value) if not isinstance(value, str) else value}"[:1500]
                )
        Path(o.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
