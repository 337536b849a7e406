"""Does a server stay awake while it reads large references?

Question   how long /live takes while eight requests with references of 10 MB each are read and decoded.
Regime     the interpreter lock: JSON, base64 and audio decoding in threads beside the event loop.
Ceiling    50 ms at the 99th percentile on two cores; the same without load is the baseline.

    python -m benches.reference_parse

The matching tests: tests/server/test_references.py (what must not run on the event loop).
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import multiprocessing
import time
import urllib.parse
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from typing import Any

import httpx2
import numpy as np

from benches.served import served

LIMIT_MS = 50.0


def recording(number: int) -> str:
    """A data URL of 27 s of stereo sound at 48 kHz and 32 bits, 10.4 MB, unlike any other."""
    t = np.arange(27 * 48000) / 48000
    tone = (2**29 * np.sin(2 * np.pi * (200 + 10 * number) * t)).astype("<i4")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(4)
        out.setframerate(48000)
        out.writeframes(np.stack([tone, tone], axis=1).tobytes())
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


def ask(address: str, connection: Connection) -> None:
    """Milliseconds that /live took, again and again until told to stop. In a process of its own: the one
    that sends the recordings is busy with that."""
    where = urllib.parse.urlsplit(address)
    http = HTTPConnection(where.hostname or "", where.port or 80)
    took = []
    connection.send(None)
    while not connection.poll():
        begin = time.perf_counter()
        http.request("GET", "/live")
        http.getresponse().read()
        took.append(1000 * (time.perf_counter() - begin))
        time.sleep(0.002)
    connection.send(took)


@contextmanager
def asked(address: str) -> Iterator[list[float]]:
    """What /live took in the length of the block; filled when it ends."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ask, args=(address, there))
    process.start()
    here.recv()
    took: list[float] = []
    yield took
    here.send(None)
    took += here.recv()
    process.join()


def measure(address: str, requests: int) -> dict[str, Any]:
    bodies = [
        json.dumps(
            {
                "input": "Hello.",
                "ref_audio": recording(n),
                "x_vector_only_mode": True,
                "max_new_tokens": 2,
                "response_format": "pcm",
            }
        ).encode()
        for n in range(requests)
    ]

    def post(body: bytes) -> None:
        httpx2.post(f"{address}/v1/audio/speech", content=body, timeout=120).raise_for_status()

    with asked(address) as idle:
        time.sleep(2)
    with asked(address) as busy, ThreadPoolExecutor(requests) as pool:
        begin = time.perf_counter()
        list(pool.map(post, bodies))
        seconds = time.perf_counter() - begin
    return {
        "requests": requests,
        "body_mb": round(len(bodies[0]) / 1e6, 1),
        "seconds": round(seconds, 2),
        "asked": len(busy),
        "idle_p99_ms": round(float(np.percentile(idle, 99)), 2),
        "p50_ms": round(float(np.percentile(busy, 50)), 2),
        "p99_ms": round(float(np.percentile(busy, 99)), 2),
        "max_ms": round(max(busy), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    options = parser.parse_args()
    with served("base") as address:
        found = measure(address, options.requests)
    share = found["p99_ms"] / LIMIT_MS
    print(f"/live while {found['requests']} references of {found['body_mb']} MB (in base64) are read:")
    print(f"  p50 {found['p50_ms']} ms   p99 {found['p99_ms']} ms   max {found['max_ms']} ms")
    print(f"  idle p99 {found['idle_p99_ms']} ms   p99 is {share:.0%} of the limit of {LIMIT_MS:g} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
