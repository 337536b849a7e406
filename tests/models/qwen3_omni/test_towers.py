"""The two towers against the published implementation, and what batching may not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hocket.core import Item, Job
from hocket.models.qwen3_omni.audio import AudioProgram
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.processing import Processor, Reading
from hocket.models.qwen3_omni.tower import Kept
from hocket.models.qwen3_omni.vision import VisionProgram
from hocket.models.qwen3_omni.weights import load_audio, load_vision
from tests.models.qwen3_omni.conftest import CASES, messages

CPU = torch.device("cpu")
Golden = Callable[[str], dict[str, np.ndarray]]
HEARD = ["audio", "audio_short", "audio_in_video", "mixed"]
SEEN = ["image", "video", "audio_in_video", "mixed"]


def hears(folder: Path) -> AudioProgram:
    config = read_model_config(folder)
    return AudioProgram(config.thinker_config.audio_config, load_audio(folder, config, CPU, torch.float32))


def sees(folder: Path) -> VisionProgram:
    config = read_model_config(folder)
    return VisionProgram(config.thinker_config.vision_config, load_vision(folder, config, CPU, torch.float32))


def reading(folder: Path, name: str) -> Reading:
    return Processor(folder).read(
        messages(CASES[name]), audio_in_video=CASES[name].get("audio_in_video", False)
    )


def item(program: Any, stage: str, asked: Any) -> Item:
    job = Job(id="a", route=(), inputs={stage: msgspec.msgpack.encode(asked)}, seed=0, max_frames=1)
    return program.begin(job, {})


@pytest.mark.parametrize("name", HEARD)
def test_audio_rows_are_the_references(name: str, omni: Any, omni_golden: Golden) -> None:
    program = hears(omni())
    (made,) = program.run([item(program, "audio", reading(omni(), name).audio)])
    np.testing.assert_allclose(made["rows"], omni_golden(f"thinker_{name}")["audio"], atol=1e-5)


@pytest.mark.parametrize("name", SEEN)
def test_visual_rows_and_deepstack_maps_are_the_references(name: str, omni: Any, omni_golden: Golden) -> None:
    program, expected = sees(omni()), omni_golden(f"thinker_{name}")
    (made,) = program.run([item(program, "vision", reading(omni(), name).vision)])
    np.testing.assert_allclose(made["rows"][0, ::4], expected["vision"], atol=1e-5)
    np.testing.assert_allclose(made["rows"][1:, ::4], expected["deep"], atol=1e-5)


@pytest.mark.parametrize(("make", "stage", "names"), [(hears, "audio", HEARD), (sees, "vision", SEEN)])
def test_batch_mates_change_nothing(make: Any, stage: str, names: list[str], omni: Any) -> None:
    together, alone = make(omni()), make(omni())
    items = [item(together, stage, getattr(reading(omni(), name), stage)) for name in names]
    batch = together.run([*items, items[0]])
    again = together.run(items[1:])  # from what was kept
    for i, one in enumerate(items):
        (expected,) = alone.run([one])
        np.testing.assert_allclose(batch[i]["rows"], expected["rows"], atol=1e-5)
        if i:
            np.testing.assert_array_equal(batch[i]["rows"], again[i - 1]["rows"])
    np.testing.assert_array_equal(batch[0]["rows"], batch[-1]["rows"])


def test_what_was_kept_longest_unused_is_forgotten() -> None:
    made: list[int] = []

    def make(items: list[int]) -> list[np.ndarray]:
        made.extend(items)
        return [np.full(10, i, np.uint8) for i in items]

    kept: Kept[int] = Kept(20)
    for items, fresh in (([1, 2, 1], [1, 2]), ([1, 3], [3]), ([1, 3], []), ([2, 4, 5], [2, 4, 5]), ([5], [])):
        made.clear()
        assert [array[0] for array in kept.get(items, lambda i: bytes([i]), make)] == items
        assert made == fresh
