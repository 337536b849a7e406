"""Does a server stay awake while it reads large references?

Question   how long /live takes while eight requests with references of 10 MB each are read and decoded.
Regime     the interpreter lock: JSON, base64 and audio decoding in threads beside the event loop.
Ceiling    50 ms at the 99th percentile on two cores; the same without load is the baseline.

    python benches/reference_parse.py

The matching tests: tests/server/test_references.py (what must not run on the event loop).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import time
import wave
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


async def asked(http: httpx2.AsyncClient, until: asyncio.Event) -> list[float]:
    """Milliseconds that /live took, again and again until told to stop."""
    took = []
    while not until.is_set():
        begin = time.perf_counter()
        (await http.get("/live")).raise_for_status()
        took.append(1000 * (time.perf_counter() - begin))
        await asyncio.sleep(0.002)
    return took


async def measure(address: str, requests: int) -> dict[str, Any]:
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
    async with httpx2.AsyncClient(base_url=address, timeout=120) as http:
        stop = asyncio.Event()
        asking = asyncio.create_task(asked(http, stop))
        await asyncio.sleep(2)
        stop.set()
        idle = await asking
        stop = asyncio.Event()
        asking = asyncio.create_task(asked(http, stop))
        begin = time.perf_counter()
        answers = await asyncio.gather(*(http.post("/v1/audio/speech", content=body) for body in bodies))
        seconds = time.perf_counter() - begin
        stop.set()
        busy = await asking
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    return {
        "requests": requests,
        "reference_mb": round(len(bodies[0]) / 1e6, 1),
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
        found = asyncio.run(measure(address, options.requests))
    share = found["p99_ms"] / LIMIT_MS
    print(f"/live while {found['requests']} references of {found['reference_mb']} MB (base64) are read:")
    print(f"  p50 {found['p50_ms']} ms   p99 {found['p99_ms']} ms   max {found['max_ms']} ms")
    print(f"  idle p99 {found['idle_p99_ms']} ms   p99 is {share:.0%} of the limit of {LIMIT_MS:g} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
