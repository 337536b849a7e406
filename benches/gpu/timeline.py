"""What does the device do, and when, while 64 listeners are served? Spans of every kernel, and their picture.

python -m benches.gpu.timeline record --out SPANS.json      # on the device
python -m benches.gpu.timeline draw SPANS.json PICTURE.png  # anywhere
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from benches.gpu.engine import Loop
from benches.gpu.model import Model

GROUPS = {  # what a kernel's name holds -> group; the first that fits
    "predictor": "predictor",
    "_gate_up": "experts",
    "_down": "experts",
    "_add_up": "experts",
    "_gather": "experts",
    "_choose": "experts",
    "_prefill": "attention",
    "_place": "attention",
    "paged": "attention",
    "attention": "attention",
    "scratch": "attention",
    "nvjet": "matrix products",
    "gemm": "matrix products",
    "cutlass": "matrix products",
    "splitK": "matrix products",
    "linear": "matrix products",
    "gated": "matrix products",
    "norm": "norms",
    "draw": "draws",
    "conv": "convolutions",
    "carry": "codec history and activation",
    "snake": "codec history and activation",
    "Memcpy": "copies",
    "copy": "copies",
}
OTHER = "the rest"


def group(name: str) -> str:
    """The group of a kernel."""
    return next((g for part, g in GROUPS.items() if part in name), OTHER)


def record(size: str, clients: int, turns_s: float) -> dict[str, Any]:
    """Kernel spans in ms, after the loop has become steady."""
    from torch.profiler import ProfilerActivity, profile

    device = torch.device("cuda")
    model = Model(size, device)
    loop = Loop(model, model.talker(), model.codec(torch.bfloat16), clients)
    for seed in range(clients):
        loop.start(seed, 137)
    begin = time.monotonic()

    def spin(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = time.monotonic()
            loop.talker.tick(now)
            loop.codec.tick(now)

    spin(0.4)  # some have slack by then, so that chunks have many sizes
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        spin(turns_s)
        torch.cuda.synchronize()
    events = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    first = min(e.time_range.start for e in events)
    streams: dict[int, int] = {}
    spans = []
    for e in sorted(events, key=lambda e: e.time_range.start):
        stream = streams.setdefault(getattr(e, "device_resource_id", 0), len(streams))
        spans.append(
            [
                stream,
                round((e.time_range.start - first) / 1e3, 4),
                round((e.time_range.end - e.time_range.start) / 1e3, 4),
                e.name[:60],
            ]
        )
    return {"clients": clients, "after_s": time.monotonic() - begin, "spans": spans}


def draw(source: Path, picture: Path, begin_ms: float | None, length_ms: float) -> None:
    """One lane a stream, one colour a group, so many ms from `begin_ms` on, or from the middle."""
    from matplotlib import pyplot as plt

    found = json.loads(source.read_text())
    spans = found["spans"]
    last = max(at + ms for _, at, ms, _ in spans)
    low = max(0.0, (last - length_ms) / 2) if begin_ms is None else begin_ms
    high = low + length_ms
    shown = [s for s in spans if low <= s[1] <= high]
    lanes = [lane for lane, _ in Counter(s[0] for s in shown).most_common(4)]
    names = sorted({group(s[3]) for s in shown})
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    figure, axes = plt.subplots(figsize=(12, 1 + 0.7 * len(lanes)))
    bars: defaultdict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for lane, at, ms, name in shown:
        if lane in lanes:
            bars[lanes.index(lane), group(name)].append((at - low, ms))
    for (lane, name), pieces in bars.items():
        axes.broken_barh(pieces, (lane - 0.4, 0.8), facecolors=colours[name], linewidth=0)
    named = found.get("lanes")  # else by their number
    labels = [named[lane] if named else f"stream {n + 1}" for n, lane in enumerate(lanes)]
    axes.set_yticks(range(len(lanes)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, high - low)
    axes.set_xlabel(f"ms; {found['clients']} listeners")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[n]) for n in names]
    axes.legend(
        handles, names, ncol=min(len(names), 6), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    figure.savefig(picture, dpi=130, bbox_inches="tight")


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.timeline", description=__doc__.partition("\n")[0])
    commands = p.add_subparsers(dest="command", required=True)
    r = commands.add_parser("record")
    r.add_argument("--out", type=Path, required=True)
    r.add_argument("--size", default="1.7b")
    r.add_argument("--clients", type=int, default=64)
    r.add_argument("--seconds", type=float, default=0.08)
    d = commands.add_parser("draw")
    d.add_argument("source", type=Path)
    d.add_argument("picture", type=Path)
    d.add_argument("--begin-ms", type=float, help="By default the middle is drawn.")
    d.add_argument("--length-ms", type=float, default=24)
    a = p.parse_args()
    if a.command == "draw":
        draw(a.source, a.picture, a.begin_ms, a.length_ms)
    else:
        a.out.write_text(json.dumps(record(a.size, a.clients, a.seconds)))


if __name__ == "__main__":
    main()
