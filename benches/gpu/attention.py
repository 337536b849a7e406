"""Which cut of the work suits paged decode attention?

Regime: memory; the ceiling is keys and values over 4.3 TB/s. Eight caches take turns in one graph, so that
none is found in the 60 MB cache. Every cut is compared with the twin first.

    python -m benches.gpu.attention --out results.json
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from hocket.kernels import attention

Plan = tuple[int, int, int, int]  # splits, tokens, warps, stages
PLANS: tuple[Plan, ...] = (
    (1, 64, 4, 3), (1, 64, 4, 2), (1, 64, 4, 1), (1, 128, 4, 1), (1, 128, 8, 1), (1, 128, 8, 2),
    (1, 32, 2, 3), (1, 32, 4, 3), (1, 32, 1, 4), (1, 64, 2, 2), (2, 64, 4, 2), (2, 64, 4, 1),
    (2, 128, 4, 1), (4, 64, 4, 1), (4, 32, 2, 2), (4, 64, 2, 1), (8, 32, 2, 1), (8, 32, 4, 2),
    (16, 32, 2, 1), (16, 16, 1, 2), (16, 32, 4, 3),
)  # fmt: skip
HEADS, KV, D, BLOCK, CACHES, BANDWIDTH = 16, 8, 128, 16, 8, 4.3e12


class Case:
    """Rows in the middle of their utterances."""

    def __init__(self, b: int, context: int) -> None:
        device, half = torch.device("cuda"), torch.bfloat16
        per_row = context // BLOCK + 1
        self.bytes = b * context * 2 * KV * D * 2
        self.kv = torch.randn(CACHES, 2, b * per_row + 1, BLOCK, KV, D, device=device, dtype=half)
        order = torch.randperm(b * per_row, device=device).int() + 1
        self.blocks = torch.zeros(b + 1, 256, dtype=torch.int32, device=device)
        self.blocks[1:, :per_row] = order.view(b, per_row)
        self.slots = torch.arange(1, b + 1, device=device)
        self.position = torch.full((b,), context, dtype=torch.int32, device=device)
        last = self.blocks[1:, context // BLOCK].long()
        self.index = last * BLOCK + context % BLOCK
        self.qkv = torch.randn(b, (HEADS + 2 * KV) * D, device=device, dtype=half)
        self.norms = [torch.rand(D, device=device).to(half) + 0.5 for _ in range(2)]
        self.tables = [torch.randn(b, D, device=device).to(half) for _ in range(2)]

    def call(self, kv: Tensor, twin: bool = False) -> Tensor:
        run = attention.paged_decode_torch if twin else attention.paged_decode_triton
        m = self.blocks.shape[1] if not twin else int(self.position[0]) // BLOCK + 1
        return run(
            self.qkv, *self.norms, 1e-6, *self.tables, kv, self.blocks[:, :m], self.slots, self.position,
            self.index,
        )  # fmt: skip

    def us(self) -> float:
        for _ in range(2):
            self.call(self.kv[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for kv in self.kv:
                self.call(kv)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(16)]
        for mark in marks:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) for a, b in pairwise(marks[3:]))
        return times[len(times) // 2] * 1e3 / CACHES


def compiled(plan: Plan) -> str:
    attention.plan = lambda pairs: plan  # type: ignore[assignment]
    begin = time.perf_counter()
    case = Case(1, 64)
    case.call(case.kv[0])
    return f"{time.perf_counter() - begin:.1f}"


def main() -> None:
    a = argparse.ArgumentParser(prog="python -m benches.gpu.attention")
    a.add_argument("--out", default=str(Path(mkdtemp()) / "attention.json"))
    o = a.parse_args()
    begin = time.perf_counter()
    with ProcessPoolExecutor(11, mp_context=get_context("spawn")) as pool:
        print("compiled, s:", *pool.map(compiled, PLANS), f"in {time.perf_counter() - begin:.1f}", flush=True)
    results: dict[str, Any] = {}
    for b, context in (
        (1, 200),
        (4, 200),
        (16, 200),
        (64, 200),
        (128, 200),
        (256, 200),
        (1, 1000),
        (64, 1000),
    ):
        case = Case(b, context)
        wanted = case.call(case.kv[0].clone(), twin=True).float()
        floor = case.bytes / BANDWIDTH * 1e6
        rows: dict[str, Any] = {}
        for plan in PLANS:
            if plan[0] > 2 and b * KV * plan[0] > 4096:
                continue
            attention.plan = lambda pairs, plan=plan: plan  # type: ignore[assignment]
            try:
                got = case.call(case.kv[0]).float()
                error = ((got - wanted).norm() / wanted.norm()).item()
                rows[str(plan)] = case.us() if error < 2e-2 else f"WRONG {error:.3g}"
            except Exception:
                rows[str(plan)] = traceback.format_exc()[-1500:]
        results[f"b {b} context {context}"] = {"floor_us": floor} | rows
        best = sorted((v, k) for k, v in rows.items() if isinstance(v, float))
        wrong = {k: v for k, v in rows.items() if not isinstance(v, float)}
        print(
            f"[{time.perf_counter() - begin:5.1f}] b {b} context {context} floor {floor:.2f} us  "
            + "  ".join(f"{k} {v:.2f}" for v, k in best),
            wrong or "",
            flush=True,
        )
        Path(o.out).write_text(json.dumps(results, indent=1))
        del case


if __name__ == "__main__":
    main()
