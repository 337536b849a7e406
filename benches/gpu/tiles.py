"""Which tile suits each matrix product of few rows?

Regime: memory; the ceiling is the weight's bytes over 4.3 TB/s. Each product runs over enough different
weights that none is found in the 50 MB cache, in one graph, and is compared with the library's product alone
(which leaves norm, gate and residual to others).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benches.gpu.frame import BANDWIDTH, event_ms
from hocket.kernels import linear
from hocket.runtime.graphs import GraphPool, own_stream

SHAPES = {  # form, n, k
    "talker qkv": ("norm", 4096, 2048), "talker out": ("add", 2048, 2048),
    "talker gate": ("gate", 6144, 2048), "talker down": ("add", 2048, 6144),
    "inner qkv": ("norm", 4096, 1024), "inner out": ("add", 1024, 2048),
    "inner gate": ("gate", 3072, 1024), "inner down": ("add", 1024, 3072), "inner head": ("norm", 2048, 1024),
}  # fmt: skip
TILES = ((16, 256, 4, 4), (32, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 6), (16, 256, 8, 4), (8, 512, 4, 4))


def main(device: torch.device, rows: tuple[int, ...], report: Callable[[str], None]) -> list[Any]:
    out = []
    stream = own_stream(device)
    kept = linear.tile
    for name, (form, n, k) in SHAPES.items():
        count = max(4, 150_000_000 // (n * k * 2))
        weights = (
            torch.randn(count, n * (2 if form == "gate" else 1), k, device=device, dtype=torch.bfloat16)
            / k**0.5
        )
        norm = torch.ones(k, device=device, dtype=torch.bfloat16)
        for m in rows:
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            residual = torch.randn(m, n, device=device, dtype=torch.bfloat16)
            torch.cuda.synchronize()

            def fused(
                form: str = form,
                x: Any = x,
                weights: Any = weights,
                residual: Any = residual,
                norm: Any = norm,
            ) -> None:
                for w in weights:
                    if form == "norm":
                        linear.norm_linear_triton(x, norm, w, 1e-6)
                    elif form == "gate":
                        linear.norm_gated_triton(x, norm, w, 1e-6)
                    else:
                        linear.linear_add_triton(x, w, residual)

            def library(x: Any = x, weights: Any = weights) -> None:
                for w in weights:
                    F.linear(x, w)

            floor = weights.numel() * 2 / BANDWIDTH * 1e6 / count
            row: dict[str, Any] = {"name": name, "m": m, "floor_us": floor}
            with torch.cuda.stream(stream):
                for label, tile, call in [("library", None, library), *((str(t), t, fused) for t in TILES)]:
                    linear.tile = lambda *_, tile=tile: tile  # type: ignore[assignment,misc]
                    pool = GraphPool(stream)
                    try:
                        pool.capture(0, call)
                        row[label] = (
                            event_ms(lambda pool=pool, call=call: pool.replay(0, call), 8) * 1e3 / count
                        )
                    except Exception as e:
                        row[label] = str(e)[:60]
            out.append(row)
            report(
                f"{name:12s} m {m:3d} floor {floor:5.2f} us  "
                + "  ".join(
                    f"{a} {b:.2f}" if isinstance(b, float) else f"{a} -" for a, b in list(row.items())[3:]
                )
            )
    linear.tile = kept
    return out
