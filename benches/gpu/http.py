"""What does a listener get through HTTP, from a server that loads full-size weights of random numbers?

Question   audio-s/s, time to first sound and smooth start of 137-frame utterances, preset voice, 10-40 words.
Regime     server and client in processes of their own; closed loop, then listeners who play in real time,
           then a long mixed load under which the memory of the device must not grow.
Ceiling    the frame and codec rows of docs/performance.md; the baseline is vLLM-Omni's on the same GPU.

    python -m benches.gpu.http --out FOLDER [closed] [listeners] [memory] [again]
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from benches.served import serving

WORK = {  # size, fields of a request, frames of the published comparison, span of the long load
    "qwen3_tts": ("1.7b", {"voice": "ryan", "language": "English"}, "138", "2-260"),
    "voxcpm": ("2", {}, "39", "2-75"),
}
CLOSED = (("1", "12"), ("16", "96"), ("64", "256"), ("128", "512"), ("256", "768"))


def bench(address: str, out: Path, *options: str) -> None:
    """Run `hocket bench`; its table and its complaints go to the terminal."""
    command = [sys.executable, "-m", "hocket", "bench", address, "--max-failures", "1000000", *options]
    subprocess.run([*command, "--json", str(out)], check=False, timeout=400)


def used_mib() -> int:
    """Memory in use on the first device, by whichever process."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])


class Memory(threading.Thread):
    """Samples the device's memory twice a second until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._begin = time.monotonic()

    def run(self) -> None:
        while not self._over.wait(0.5):
            self.samples.append((round(time.monotonic() - self._begin, 1), used_mib()))

    def stop(self) -> None:
        self._over.set()
        self.join()


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benches.gpu.http", description=__doc__.partition("\n")[0])
    p.add_argument("parts", nargs="*", default=["closed"], choices=["closed", "listeners", "memory", "again"])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--model", type=Path, help="A checkpoint that is there already.")
    p.add_argument("--family", choices=WORK, default="qwen3_tts")
    p.add_argument("--size", help="By default the one of the published comparison.")
    p.add_argument("--levels", type=int, default=len(CLOSED), help="How many of the closed levels.")
    p.add_argument("--listeners", default="300,500,700")
    p.add_argument("--duration", default="60")
    p.add_argument("--processes", default="4", help="Client processes.")
    p.add_argument("--set", action="append", default=[], help="As of `hocket serve`.")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}

    size, fields, most, spread = WORK[a.family]
    extra = [word for key, value in fields.items() for word in ("--extra", f"{key}={json.dumps(value)}")]
    frames = ("--max-new-tokens", most, *extra)

    begin = time.perf_counter()
    maker = importlib.import_module(f"hocket.models.{a.family}.synthetic")
    folder = Path(mkdtemp()) / "m"
    model = a.model or maker.write_checkpoint(folder, size=a.size or size, never_ends=True, device=device)
    print(f"checkpoint in {time.perf_counter() - begin:.1f} s: {model}", flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
    settings = [word for each in a.set for word in ("--set", each)]

    def start(log: str) -> Any:
        return serving(str(model), *settings, log=a.out / log)

    begin = time.perf_counter()
    with start("serve.log") as address:
        found["start_s"] = time.perf_counter() - begin
        print(f"ready after {found['start_s']:.1f} s", flush=True)
        if device == "cuda":
            found["used_mib"] = used_mib()
        if "closed" in a.parts:
            levels = CLOSED[: a.levels]
            clients, counts = (",".join(each) for each in zip(*levels, strict=True))
            load = ("--concurrency", clients, "--requests", counts, "--processes", a.processes)
            bench(address, a.out / "closed.json", *load, *frames)
        if "listeners" in a.parts:
            load = ("--listeners", a.listeners, "--duration", a.duration, "--processes", a.processes)
            bench(address, a.out / "listeners.json", *load, *frames)
        if "memory" in a.parts:
            memory = Memory()
            memory.start()
            load = ("--concurrency", "64", "--requests", "2000", "--processes", a.processes)
            bench(address, a.out / "memory.json", *load, "--max-new-tokens", spread, *extra)
            memory.stop()
            found["memory_mib"] = memory.samples
            print(f"memory {memory.samples[:: max(1, len(memory.samples) // 12)]}", flush=True)
    if "again" in a.parts:
        begin = time.perf_counter()
        with start("again.log") as address:
            found["start_again_s"] = time.perf_counter() - begin
            print(f"ready again after {found['start_again_s']:.1f} s", flush=True)
            bench(
                address,
                a.out / "first.json",
                "--concurrency",
                "1",
                "--requests",
                "3",
                "--warmup",
                "0",
                *frames,
            )
    (a.out / "http.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
