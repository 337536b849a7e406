"""The bench against hocket's own server with a tiny model: figures that only the truth can give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hocket.bench import result
from hocket.cli import app
from hocket.engine.client import AsyncEngine
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings
from tests.listener import Listener

FRAMES = 6


@pytest.fixture(scope="module")
def url(checkpoint: Callable[..., Path]) -> Iterator[str]:
    listener = Listener()
    engine = AsyncEngine(checkpoint(variant="custom_voice", never_ends=True), processes=False)
    listener.run(engine.start())
    listener.app = create_app(engine, ServerSettings(model="tiny"))
    yield listener.url
    listener.run(engine.close())
    listener.stop()


@pytest.mark.parametrize("file_format", ["pcm", "wav"])
def test_every_request_brings_the_sound_it_was_asked_for(url: str, file_format: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    options = ["--max-new-tokens", str(FRAMES + 1), "--format", file_format, "--json", str(file)]
    ran = CliRunner().invoke(app, ["bench", url, "--concurrency", "2", "--requests", "6", *options])
    assert ran.exit_code == 0, (ran.output, ran.exception)
    found = result.load(file)
    (level,) = found.levels
    assert level.whole.requests == 6
    assert set(level.requests.audio_s) == {FRAMES * 0.08}
    assert found.work["model"] == "tiny"
    assert found.server["models"]["data"][0]["family"] == "qwen3_tts"
    for ttfp, smooth, e2e in zip(
        level.requests.ttfp_s, level.requests.smooth_start_s, level.requests.e2e_s, strict=True
    ):
        assert 0 < ttfp <= smooth <= e2e
