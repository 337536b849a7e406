"""Should a light request be prepared in a thread or in the event loop?

Question   milliseconds until 64 requests that came at once are prepared, beside an event loop never idle.
Regime     the interpreter's lock: a thread asks for it and waits for a switch interval each time.
Ceiling    64 times the work itself, about 0.1 ms each.

    python -m benches.prepare
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from hocket.core import SpeechRequest
from hocket.models.qwen3_tts.frontend import QwenTtsFrontEnd
from hocket.models.qwen3_tts.synthetic import write_checkpoint

AT_ONCE, ROUNDS = 64, 2  # a round in threads may take half a minute
TEXT = "The morning train left the station a little late while people waited under the grey roof and talked."


async def rounds(front_end: QwenTtsFrontEnd, threads: bool) -> list[float]:
    """Milliseconds of each round."""

    async def never_idle() -> None:
        while True:
            until = time.perf_counter() + 0.0003
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    async def one() -> None:
        request = SpeechRequest(text=TEXT, voice="ryan", language="English", max_frames=138)
        if threads:
            await asyncio.to_thread(front_end.prepare, request)
        else:
            front_end.prepare(request)

    other = asyncio.create_task(never_idle())
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
        found.append(round((time.perf_counter() - begin) * 1e3, 1))
        await asyncio.sleep(0.05)
    other.cancel()
    return found


def main() -> None:
    with TemporaryDirectory() as folder:
        front_end = QwenTtsFrontEnd(write_checkpoint(Path(folder) / "m"))
        for threads, interval in ((False, 0.005), (True, 0.0005), (True, 0.005)):
            sys.setswitchinterval(interval)
            where = f"in threads, switch interval {interval * 1e3:g} ms" if threads else "in the loop"
            print(f"{where}: {asyncio.run(rounds(front_end, threads))} ms", flush=True)


if __name__ == "__main__":
    main()
