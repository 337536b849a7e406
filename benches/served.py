"""A server in a process of its own, for benches that ask it over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.request import urlopen

from hocket.models.qwen3_tts.synthetic import write_checkpoint


@contextmanager
def served(variant: str, *options: str, **checkpoint: object) -> Iterator[str]:
    """The address of a server of a tiny model that is ready, started with `options` of `hocket serve`."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "tiny", variant=variant, **checkpoint)
        voices = ("--voices-dir", f"{folder}/voices")
        with serving(str(model), "--set", "threads=1", *voices, *options) as address:
            yield address


@contextmanager
def serving(model: str, *options: str, log: Path | None = None) -> Iterator[str]:
    """The address of a server of `model` that is ready; what it prints is kept in `log`."""
    command = [sys.executable, "-m", "hocket", "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address, lines = "", []
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"(http://\S+) is ready", line)
            if found:
                address = found[1]
                break

        def read(stream: IO[str]) -> None:  # its log goes on: a full pipe would stop the server
            lines.extend(stream)

        reader = threading.Thread(target=read, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            assert address, "the server did not start:\n" + "".join(lines[-40:])
            urlopen(f"{address}/live").close()
            yield address
        finally:
            process.terminate()
            process.wait()
            reader.join()
            if log is not None:
                log.write_text("".join(lines))
