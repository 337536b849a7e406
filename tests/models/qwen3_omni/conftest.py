"""The tiny Qwen3-Omni checkpoint, and what the published implementation makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.core import Media, Message
from hocket.models.qwen3_omni.synthetic import write_checkpoint
from tests.media import film, picture, recording

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_omni"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="session")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a tiny checkpoint once per set of options: `omni(variant="thinking")`."""
    made: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp("omni") / "model", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def omni_golden() -> Callable[[str], dict[str, np.ndarray]]:
    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / f"{name}.npz") as file:
            return dict(file)

    return load


def messages(case: dict[str, Any]) -> list[Message]:
    """A case's conversation as the front end gets it."""
    return [
        Message(
            role=m["role"],
            parts=[m["content"]] if isinstance(m["content"], str) else [part(p) for p in m["content"]],
            tool_calls=m.get("tool_calls", ()),
        )
        for m in case["messages"]
    ]


def part(given: dict[str, Any]) -> str | Media:
    """One part of a message, media made from their seeds."""
    kind = given["type"]
    if kind == "text":
        return str(given["text"])
    m = given[kind]
    sound = None
    if "samples" in m:
        sound = Media(kind="audio", data=recording(m["samples"], m["seed"]), rate_hz=16000)
    if kind == "audio":
        assert sound is not None
        return sound
    if kind == "image":
        return Media(kind="image", data=picture(*m["size"], m["seed"]))
    return Media(kind="video", data=film(m["frames"], *m["size"], m["seed"]), rate_hz=m["fps"], sound=sound)
