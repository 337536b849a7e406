"""How long does a worker take from weights to ready, with an empty and with a full cache of kernels?

    python -m benches.gpu.start --out results.json

Each start is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

STARTS = ("empty", "full")


def one(batch: int) -> dict[str, Any]:
    begin = time.perf_counter()
    import torch

    from benches.gpu.model import Model
    from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
    from hocket.runtime.streaming import StreamingLimits, StreamingRunner

    device = torch.device("cuda")
    found: dict[str, Any] = {}

    def mark(name: str) -> None:
        nonlocal begin
        torch.cuda.synchronize()
        now = time.perf_counter()
        found[name], begin = round(now - begin, 2), now

    torch.zeros(1, device=device)
    mark("imports and context")
    model = Model("1.7b", device)
    talker, codec = model.talker(), model.codec(torch.bfloat16)
    mark("weights")
    limits = AutoregressiveLimits(slots=batch, max_batch=batch, kv_blocks=64 * batch, in_flight=2)
    first = AutoregressiveRunner("talker", talker, limits, device, lambda chunk: None)
    second = StreamingRunner(
        "codec", codec,
        StreamingLimits(slots=batch, max_batch=min(batch, 64), max_chunk_frames=8, in_flight=2),
        device, lambda chunk: None,
    )  # fmt: skip
    mark("state")
    first.warm()
    mark("talker warm")
    second.warm()
    mark("codec warm")
    return found


def main() -> None:
    a = argparse.ArgumentParser(prog="python -m benches.gpu.start")
    a.add_argument("--out", default=str(Path(mkdtemp()) / "start.json"))
    a.add_argument("--batch", type=int, default=128)
    a.add_argument("--one", action="store_true")
    o = a.parse_args()
    if o.one:
        Path(o.out).write_text(json.dumps(one(o.batch)))
        return
    results: dict[str, Any] = {}
    cache = mkdtemp()
    for name in STARTS:
        part = Path(mkdtemp()) / "part.json"
        command = [sys.executable, "-m", "benches.gpu.start", "--one"]
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, "--out", str(part), "--batch", str(o.batch)],
            capture_output=True,
            text=True,
            env=environment,
        )
        results[name] = json.loads(part.read_text()) if part.exists() else done.stderr[-4000:]
        print(f"{name}: {time.perf_counter() - begin:.1f} s in all, {results[name]}", flush=True)
        Path(o.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
