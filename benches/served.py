"""A server of a tiny model in a process of its own, for benches that ask it over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from hocket.models.qwen3_tts.synthetic import write_checkpoint


@contextmanager
def served(variant: str, *options: str, **checkpoint: object) -> Iterator[str]:
    """The address of a server that is ready, started with `options` of `hocket serve`."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "tiny", variant=variant, **checkpoint)
        command = [
            str(Path(sys.executable).with_name("hocket")),
            "serve",
            str(model),
            "--port",
            "0",
            "--set",
            "threads=1",
        ]
        command += ["--voices-dir", f"{folder}/voices", *options]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            address = ""
            for line in process.stderr:
                found = re.search(r"(http://\S+) is ready", line)
                if found:
                    address = found[1]
                    break
            # Its log goes on: a full pipe would stop the server.
            reader = threading.Thread(target=process.stderr.read, daemon=True)
            reader.start()
            try:
                assert address, "the server did not start"
                httpx2.get(f"{address}/live").raise_for_status()
                yield address
            finally:
                process.terminate()
                process.wait()
                reader.join()
