"""VoxCPM2's short stacks as one kernel each: are they right, how long do they take, and why?

Regime: drawing a patch is nine estimates of twelve layers, 3.7 GB of weights in all, 0.87 ms at 4.3 TB/s;
and a chain of 450 phases, each with a meeting of the grid (1.3 us or more). Reading it back is twelve layers
more. `no meetings` and `no weights` show the two apart; their results are wrong. Each variant runs in a
process of its own, so that one that hangs or faults stops nothing else.

    python -m benches.gpu.voxcpm_loop --out results.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from benches.gpu.check import kernels
from benches.gpu.frame import event_ms, kernel_times
from benches.gpu.voxcpm import CONTEXT, TEN, Model, _state
from hocket.kernels import cuda
from hocket.kernels.clusters import Cut
from hocket.kernels.flow import Geometry
from hocket.kernels.language import USUAL
from hocket.kernels.language import Geometry as LanguageGeometry
from hocket.models.voxcpm.patches import Diffusion, Encoder, diffuse, encode_patches
from hocket.models.voxcpm.talker import TalkerProgram, drawn_whole, languages_whole, read_whole
from hocket.runtime.graphs import GraphPool, own_stream

VARIANTS: dict[str, dict[str, Any]] = {
    "layers": {},
    "loop": {"streams": 8},
    "reading": {"streams": 16},
    "language": {},
    "steps": {"draw": 4, "read": 16},
    "loop, no meetings": {"measure": "NO_MEETINGS"},
    "loop, no weights": {"measure": "NO_WEIGHTS"},
    "language, no meetings": {"measure": "NO_MEETINGS"},
    "language, no weights": {"measure": "NO_WEIGHTS"},
}
BATCHES = (1, 2, 4, 6, 8, 16, 64)
STACK: dict[str, Any] = {
    "d": 1024, "f": 4096, "heads": 16, "kv_heads": 2, "head_dim": 128, "layers": 12, "patch": 4, "feat": 64,
}  # fmt: skip
DRAWING: dict[str, Any] = {"tokens": 11, "first": 7, "read": 4, "leave": 64, "moves": True}
READING: dict[str, Any] = {"tokens": 5, "first": 0, "read": 1, "leave": 2048, "moves": False}

LANGUAGE: dict[str, Any] = {"d": 2048, "f": 6144, "heads": 16, "kv_heads": 2, "head_dim": 128}

Found = dict[str, Any]


def wide(value: Any) -> Any:
    """All tensors under a dataclass or list in fp32; no loop."""
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, list | tuple):
        return type(value)(wide(v) for v in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: wide(getattr(value, f.name)) for f in fields(value)})


def given(w: Diffusion, b: int) -> dict[str, Any]:
    """Arguments of `diffuse` but for its weights."""
    d, feat = w.enter.weight.shape
    dtype, device = w.enter.weight.dtype, w.enter.weight.device
    g = torch.Generator(device).manual_seed(b)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    return {
        "mu": normal(b, 2, d).to(dtype), "before": normal(b, 4, feat).to(dtype), "noise": normal(b, 4, feat),
        "guidance": 1 + torch.rand(b, generator=g, device=device) * 2,
        "steps": torch.full((b,), 10, device=device), "calls": TEN, "guided": True, "share": None,
    }  # fmt: skip


def draw(w: Diffusion, arguments: dict[str, Any]) -> Tensor:
    return diffuse(w, **arguments | {"noise": arguments["noise"].clone()})


def one(name: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """A variant: errors against fp32 beside those of the layers one by one, then milliseconds in a graph."""
    device = torch.device("cuda")
    talker = Model("2", device).talker(torch.bfloat16)
    call = {"reading": reading, "language": language, "steps": steps}.get(name.partition(",")[0], drawing)
    return call(talker, VARIANTS[name], name == "layers", batches)


def drawing(talker: TalkerProgram, sizes: Found, plain: bool, batches: tuple[int, ...]) -> Found:
    layers, patch = talker.w.diffusion, talker.config.patch_size
    w = layers if plain else drawn_whole(layers, patch, **sizes)
    found: dict[str, Any] = {}
    most = max(batches) if w.whole is None else w.whole.geometry.streams
    batches = tuple(b for b in batches if b <= most)
    if not plain and "measure" not in sizes:
        exact = wide(layers)
        for b in batches:
            a = given(w, b)
            got, again, twin = draw(w, a), draw(w, a), draw(layers, a)
            with kernels("torch"):
                wanted = draw(exact, {k: v.float() if k in ("mu", "before") else v for k, v in a.items()})
            moved = (wanted - a["noise"]).norm()
            error, its = ((x - wanted).norm() / moved for x in (got, twin))
            far = draw(w, a | {"guided": False}) - draw(layers, a | {"guided": False})
            found[f"b {b}: error, the layers' error, unguided from the layers, the same twice"] = [
                float(error), float(its), float(far.norm() / moved), torch.equal(got, again),
            ]  # fmt: skip
        del exact
    for b in batches:
        call = partial(draw, w, given(w, b))
        found[f"b {b}: ms"], pool = graph_ms(call)
        if not plain:
            found[f"b {b}: ms layer by layer"] = graph_ms(partial(draw, layers, given(layers, b)))[0]
        elif b in (1, 16, 64):
            times = kernel_times(partial(pool.replay, 0, call), 3)
            found[f"b {b}: kernels"] = [f"{k[:44]} {ms:.3f} ms {n} x" for k, ms, n in times[:12]]
        del pool
    if plain:
        for b in batches:
            patches = some_patches(talker.w.encoder, b)
            back = partial(encode_patches, talker.w.encoder, patches, None)
            found[f"b {b}: reading ms"] = graph_ms(back)[0]
            found[f"b {b}: language ms"] = graph_ms(partial(stepped(talker, b), None))[0]
            slots = torch.arange(1, b + 1, device=talker.device)
            step = partial(talker.step, _state(talker, b, CONTEXT), slots, 256, talker.usual_variant)
            found[f"b {b}: ms a step"] = graph_ms(step)[0]
    return found


def reading(talker: TalkerProgram, sizes: Found, plain: bool, batches: tuple[int, ...]) -> Found:
    layers = talker.w.encoder
    w, exact = read_whole(layers, talker.config.patch_size, **sizes), wide(layers)
    found: dict[str, Any] = {}
    for b in (b for b in batches if b <= sizes["streams"]):
        patches = some_patches(layers, b)
        got, again, twin = (encode_patches(x, patches, None) for x in (w, w, layers))
        with kernels("torch"):
            wanted = encode_patches(exact, patches.float(), None)
        error, its = ((x - wanted).norm() / wanted.norm() for x in (got, twin))
        found[f"b {b}: error, the layers' error, the same twice"] = [
            float(error), float(its), torch.equal(got, again),
        ]  # fmt: skip
        found[f"b {b}: ms"] = graph_ms(partial(encode_patches, w, patches, None))[0]
        found[f"b {b}: ms layer by layer"] = graph_ms(partial(encode_patches, layers, patches, None))[0]
    return found


def steps(talker: TalkerProgram, sizes: Found, plain: bool, batches: tuple[int, ...]) -> Found:
    """Whole steps with all of it, as `TalkerProgram` takes it once it is switched on."""
    w, patch = talker.w, talker.config.patch_size
    talker.w = replace(
        w,
        diffusion=drawn_whole(w.diffusion, patch, streams=sizes["draw"]),
        encoder=read_whole(w.encoder, patch, streams=sizes["read"]),
    )
    talker.languages = languages_whole(talker.w)
    found: dict[str, Any] = {}
    for b in batches:
        slots = torch.arange(1, b + 1, device=talker.device)
        call = partial(talker.step, _state(talker, b, CONTEXT), slots, 256, talker.usual_variant)
        found[f"b {b}: ms a step"] = graph_ms(call)[0]
    return found


def some_patches(w: Encoder, b: int) -> Tensor:
    weight = w.enter.weight
    g = torch.Generator(weight.device).manual_seed(b)
    return torch.randn(b, 4, weight.shape[1], generator=g, device=weight.device).to(weight.dtype)


def language(talker: TalkerProgram, sizes: Found, plain: bool, batches: tuple[int, ...]) -> Found:
    """Both language models: an error is that of the base's rows on the grid, where small ones turn codes."""
    kernels_of = languages_whole(talker.w, **sizes)
    exact = TalkerProgram(talker.config, wide(talker.w), talker.frame_rate_hz)
    found: dict[str, Any] = {}
    for b in (b for b in batches if b <= kernels_of[0].most_rows):
        run = stepped(talker, b)
        if "measure" not in sizes:
            got, again, twin = (run(which)[0].float() for which in (kernels_of, kernels_of, None))
            with kernels("torch"):
                wanted = stepped(exact, b)(None)[0]
            error, its = ((x - wanted).norm() / wanted.norm() for x in (got, twin))
            found[f"b {b}: error, the layers' error, the same twice"] = [
                float(error), float(its), torch.equal(got, again),
            ]  # fmt: skip
        found[f"b {b}: ms"] = graph_ms(partial(run, kernels_of))[0]
        found[f"b {b}: ms layer by layer"] = graph_ms(partial(run, None))[0]
    return found


def stepped(talker: TalkerProgram, b: int) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """The language models' part of a step for b rows with CONTEXT positions behind them."""
    state = _state(talker, b, CONTEXT)
    slots = torch.arange(1, b + 1, device=talker.device)
    g = torch.Generator(talker.device).manual_seed(b)

    def drawn(shape: torch.Size) -> Tensor:  # of equal values in every dtype
        made = torch.randn(shape, generator=g, device=talker.device)
        return made.bfloat16().to(talker.dtype)

    for layer in state.cache.kv:
        layer.copy_(drawn(layer.shape))
    x = drawn(torch.Size((b, talker.width)))

    def run(whole: Any) -> tuple[Tensor, Tensor]:
        talker.languages = whole
        live, position = state.live[slots], state.cache.position[slots]
        return talker._decode(state, slots, x.clone(), live, position, 256, None)

    return run


def graph_ms(call: Callable[[], Any]) -> tuple[float, GraphPool]:
    """Milliseconds of a replay, and the graph under the key 0."""
    stream = own_stream(torch.device("cuda"))
    pool = GraphPool(stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        pool.capture(0, call)
        return event_ms(partial(pool.replay, 0, call), 20), pool


def compiled(name: str) -> str:
    """Make a variant's machine code; the next process finds it on disk."""
    begin = time.perf_counter()
    try:
        kind, sizes = name.partition(",")[0], VARIANTS[name]
        if kind == "language":
            cuts: list[Cut] = [LanguageGeometry(**LANGUAGE, **USUAL | {"layers": n} | sizes) for n in (28, 8)]
        else:
            cuts = [Geometry(**STACK, **(READING if kind == "reading" else DRAWING), **sizes)]
        for g in cuts:
            file = "language.cu" if kind == "language" else "flow.cu"
            text = cuda.source("device.cuh", "grid.cuh", "clusters.cuh", file)
            cuda.compile_cubin(text, g.defines, (9, 0))
    except cuda.Unavailable as e:
        return str(e)
    return f"{time.perf_counter() - begin:.1f} s"


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.voxcpm_loop")
    p.add_argument("--out", default=str(Path(mkdtemp()) / "loop.json"))
    p.add_argument("--one")
    p.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    p.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    p.add_argument("--timeout", type=float, default=40)
    a = p.parse_args()
    if a.one:
        Path(a.out).write_text(json.dumps(one(a.one, tuple(a.batches))))
        return
    begin = time.perf_counter()
    results: dict[str, Any] = {}

    def report(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f}] {line}", flush=True)

    in_one = [name for name in a.variants if name not in ("layers", "steps")]
    with ProcessPoolExecutor(max(1, len(in_one))) as pool:
        for name, said in zip(in_one, pool.map(compiled, in_one), strict=True):
            report(f"compiled {name}: {said}")
    for name in a.variants:
        part = Path(mkdtemp()) / "part.json"
        command = [sys.executable, "-m", "benches.gpu.voxcpm_loop", "--one", name, "--out", str(part)]
        try:
            done = subprocess.run(
                [*command, "--batches", *map(str, a.batches)],
                timeout=a.timeout,
                capture_output=True,
                text=True,
            )
            results[name] = json.loads(part.read_text()) if part.exists() else done.stderr[-4000:]
        except subprocess.TimeoutExpired as e:
            results[name] = f"still running after {a.timeout} s: {(e.stderr or b'')[-2000:]!r}"
        except Exception:
            results[name] = traceback.format_exc()
        said = results[name]
        if isinstance(said, str):
            report(f"{name} FAILED\n{said}")
        else:
            for key, value in said.items():
                report(f"{name:14s} {key}: {json.dumps(value)}")
        Path(a.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
