from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benches.gpu import check, codec, engine, frame, voxcpm, voxcpm_vae
from benches.gpu.model import Model

CODEC_GRID = tuple((n, b) for n in (1, 4, 16) for b in (1, 16, 64))
SECTIONS = ["golden", "check", "frame", "breakdown", "codec", "codec32", "engine"]
SECTIONS += ["voxcpm", "voxcpm-vae"]


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu", description=sys.modules["benches.gpu"].__doc__)
    p.add_argument("sections", nargs="+", choices=SECTIONS)
    p.add_argument("--size", help="1.7b, or 2 of VoxCPM")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    p.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 128])
    p.add_argument("--seconds", type=float, default=4.0)
    p.add_argument("--voice", default="float16", help="dtype of VoxCPM's vocoder in the closed loop")
    p.add_argument("--out")
    a = p.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}

    def report(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f}] {line}", flush=True)

    def section(name: str, call: Callable[[], Any]) -> None:
        try:
            results[name] = call()
        except Exception:
            results[name] = traceback.format_exc()
            report(f"{name} FAILED\n{results[name]}")
        if isinstance(results[name], dict):
            for key, value in results[name].items():
                report(f"{key}: {value}")
        if a.out:
            with open(a.out, "w") as f:
                json.dump(results, f, indent=1)

    if set(a.sections) - {"voxcpm", "voxcpm-vae"}:
        model = Model(a.size or "1.7b", device)
        talker, half = model.talker(), model.codec(torch.bfloat16)
        report("weights ready")

    def listed(name: str, call: Callable[[], Any], label: str) -> None:
        section(name, call)
        for kernel, ms, count in results[name][:16] if isinstance(results[name], list) else ():
            report(f"{label}  {ms:7.3f} ms  {count:4d} x  {kernel}")

    for name in a.sections:  # in the order asked for
        if name == "golden":
            section(name, lambda: check.golden(device))
        elif name == "check":
            section(name, lambda: check.full_size(model, talker))
        elif name == "frame":
            section(name, lambda: frame.main(model, talker, tuple(a.batches), report))
        elif name == "breakdown":
            for b, skinny in ((1, 2), (64, 0)):
                listed(
                    f"breakdown {b}",
                    lambda b=b, skinny=skinny: frame.breakdown(model, talker, b, skinny),
                    f"b {b:3d}",
                )
        elif name == "codec":
            section("codec bf16", lambda: codec.main(model, half, CODEC_GRID, "bf16", report))
            listed("codec breakdown", lambda: codec.breakdown(model, half, 4, 64), "codec 4 x 64")
        elif name == "codec32":
            full = model.codec(torch.float32)
            section("codec fp32", lambda: codec.main(model, full, ((1, 1), (4, 16), (4, 64)), "fp32", report))  # noqa: B023
            del full
        elif name == "engine":
            section(name, lambda: engine.main(model, talker, half, tuple(a.clients), a.seconds, report))
        elif name == "voxcpm":
            sizes = (tuple(a.batches), tuple(a.clients))
            voxcpm.main(a.size or "2", device, *sizes, a.seconds, a.voice, section, report)
        elif name == "voxcpm-vae":
            section(name, lambda: voxcpm_vae.main(device, report))
            listed(f"{name} breakdown", lambda: voxcpm_vae.breakdown(device), "vocoder 1 x 64")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
