"""docs/api.md does what it says: its examples are run in order, against servers of tiny models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.engine.client import AsyncEngine
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "api.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
SOON = [0, 30.0]  # the end is drawn after a few frames
SERVERS = {
    8000: {"size": "tiny", "variant": "custom_voice", "end_like": SOON},
    8001: {"size": "tiny-0.6b", "variant": "base", "end_like": SOON},
}


@pytest.fixture
def addresses(listener: Any, checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[dict[int, str]]:
    """By the port that the document gives a server: where it is in truth."""
    found, ends = {}, []
    for port, options in SERVERS.items():
        engine = AsyncEngine(checkpoint(**options), processes=False)
        here = type(listener)()
        here.run(engine.start())
        here.app = create_app(engine, ServerSettings(model="tiny", voices_dir=tmp_path / "voices"))
        found[port] = here.url
        ends.append((here, engine))
    yield found
    for here, engine in ends:
        here.run(engine.close())
        here.stop()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # examples leave clients open, as readers do
def test_examples(addresses: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(ROOT / "tests/data/please_hold.wav", tmp_path / "voice.wav")
    text = DOCUMENT.read_text("utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    run = 0
    for block in BLOCK.finditer(text):
        kind, body = block.groups()
        line = text.count("\n", 0, block.start(2))
        for port, address in addresses.items():
            body = body.replace(f"http://localhost:{port}", address)
            body = body.replace(f"ws://localhost:{port}", address.replace("http", "ws"))
        if kind == "python":
            exec(compile("\n" * line + body, DOCUMENT, "exec"), namespace)
        elif kind == "sh":
            commands = [each for each in body.splitlines() if "# not run" not in each]
            for command in commands:
                ran = subprocess.run(["bash", "-c", command], capture_output=True, check=False, timeout=60)
                assert ran.returncode == 0, (command, ran.stdout[:500], ran.stderr[:500])
        else:
            assert kind == "json"
            json.loads(body)
        run += 1
    assert run > 15
    for name in ("good-morning.mp3", "a.mp3", "anna.mp3", "ben.mp3"):
        assert (tmp_path / name).stat().st_size > 500
