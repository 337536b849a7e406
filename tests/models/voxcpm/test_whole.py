"""All stages through the engine: a recording and a text in, the published implementation's sound out."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hocket import AsyncEngine, Engine, Reference, SpeechRequest
from hocket.audio.decode import decode
from hocket.engine.stream import Stream
from hocket.models.voxcpm import talker
from hocket.models.voxcpm.synthetic import write_checkpoint

TESTS = Path(__file__).parents[2]
GOLDEN = TESTS / "golden/voxcpm"
WHOLE: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text("utf-8"))["whole"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("voxcpm") / "model")


def request(**fields: Any) -> SpeechRequest:
    samples, rate_hz = decode((TESTS / "data" / WHOLE["recording"]).read_bytes(), param="ref_audio")
    return SpeechRequest(
        text=WHOLE["text"],
        reference=Reference(samples=samples, rate_hz=rate_hz, text=WHOLE["said"]),
        extra={"clone_mode": "both", "min_len": WHOLE["least"]},
        max_frames=WHOLE["most"],
        **fields,
    )


def test_sound_is_the_published_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, both recordings' latents, the text between them, patches, and the primed vocoder."""
    with np.load(GOLDEN / "whole.npz") as file:
        expected = dict(file)
    noise = torch.from_numpy(expected["noise"]).flatten(1)

    def recorded(seed: Tensor, frame: Tensor, n: int) -> Tensor:
        return noise[frame.long().clamp(max=len(noise) - 1)]

    monkeypatch.setattr(talker, "frame_normal", recorded)
    with Engine(folder) as engine:
        wave = np.concatenate([audio.samples for audio in engine.speak(request(seed=1))])
        assert engine.info.sample_rate_hz == 48000
    np.testing.assert_allclose(wave, expected["wave"], atol=1e-5 + 2**-17, rtol=0)


def test_batch_mates_and_preemption_change_no_sound(folder: Path) -> None:
    """Six at once, alone and starved of blocks: streamed while others join, leave and give way."""
    requests = [
        SpeechRequest(text=f"Voice number {n}.", seed=n, max_frames=40 + n, extra={"min_len": 50})
        for n in range(5)
    ]
    requests.append(request(seed=9))

    async def heard(stream: Stream) -> np.ndarray:
        return np.concatenate([audio.samples async for audio in stream])

    async def run(gather: bool, **overrides: str) -> list[np.ndarray]:
        options = {f"stages.talker.{key}": value for key, value in overrides.items()}
        async with AsyncEngine(folder, processes=False, overrides=options) as engine:
            if gather:
                streams = [await engine.submit(r) for r in requests]
                sounds = list(await asyncio.gather(*map(heard, streams)))
            else:
                sounds = [await heard(await engine.submit(r)) for r in requests]
            if "kv_blocks" in overrides:
                end = time.monotonic() + 20  # counts come with the next heartbeat
                while not engine.status().stages["talker"][0].preemptions and time.monotonic() < end:
                    await asyncio.sleep(0.05)
                assert engine.status().stages["talker"][0].preemptions > 0
            return sounds

    alone = asyncio.run(run(False))
    together = asyncio.run(run(True))
    starved = asyncio.run(run(True, block_tokens="1", kv_blocks="100"))
    for n, sound in enumerate(alone):
        assert len(sound) == 7680 * requests[n].max_frames
        for other in (together[n], starved[n]):
            np.testing.assert_allclose(other, sound, atol=2e-5, rtol=0)
