"""How fast does a full server say no, and is it well afterwards?

Question   the time to a 503 while 1000 posts arrive in 2 s at a server whose queue holds 32.
Regime     connections and parsing on one event loop, beside a model that is busy.
Ceiling    50 ms for each refusal; a request that meets nobody else is the baseline, before and after.

    python -m benches.overload

The matching test: tests/server/test_overload.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import urllib.parse
from typing import Any

import numpy as np

from benches.served import served

LIMIT_MS = 50.0
QUEUE = 32


async def post(address: str, frames: int, at: float) -> tuple[int, float]:
    """One request on a connection of its own, sent `at` seconds from now: its status and milliseconds."""
    await asyncio.sleep(at)
    where = urllib.parse.urlsplit(address)
    body = {"input": "Good morning.", "max_new_tokens": frames + 1, "response_format": "pcm", "stream": False}
    data = json.dumps(body).encode()
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    answer = await reader.read()
    writer.close()
    return int(answer[9:12]), 1000 * (time.perf_counter() - begin)


async def measure(address: str, posts: int, seconds: float, frames: int) -> dict[str, Any]:
    async def alone() -> float:
        return float(np.median([(await post(address, frames, 0))[1] for _ in range(5)]))

    before = await alone()
    answers = await asyncio.gather(*(post(address, frames, n * seconds / posts) for n in range(posts)))
    after = await alone()
    refused = [ms for status, ms in answers if status == 503]
    served_ms = [ms for status, ms in answers if status == 200]
    assert len(refused) + len(served_ms) == posts
    return {
        "posts": posts,
        "accepted": len(served_ms),
        "refused": len(refused),
        "refusal_p50_ms": round(float(np.percentile(refused, 50)), 2),
        "refusal_p99_ms": round(float(np.percentile(refused, 99)), 2),
        "refusal_max_ms": round(max(refused), 2),
        "accepted_p50_ms": round(float(np.percentile(served_ms, 50)), 2),
        "alone_before_ms": round(before, 2),
        "alone_after_ms": round(after, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--posts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--frames", type=int, default=10)
    options = parser.parse_args()
    limits = ("--max-waiting", str(QUEUE), "--set", "talker.slots=4", "--set", "talker.max_batch=4")
    with served("custom_voice", *limits, never_ends=True) as address:
        found = asyncio.run(measure(address, options.posts, options.seconds, options.frames))
    print(f"{found['posts']} posts in {options.seconds:g} s, queue of {QUEUE}:")
    print(f"  {found['accepted']} accepted (p50 {found['accepted_p50_ms']} ms), {found['refused']} refused")
    print(f"  refusal p50 {found['refusal_p50_ms']} ms   p99 {found['refusal_p99_ms']} ms   ", end="")
    print(f"max {found['refusal_max_ms']} ms, {found['refusal_p99_ms'] / LIMIT_MS:.0%} of the limit at p99")
    print(f"  alone before {found['alone_before_ms']} ms, after {found['alone_after_ms']} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
