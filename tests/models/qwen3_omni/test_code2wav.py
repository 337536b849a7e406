"""Code2Wav against the published implementation, and against itself cut into chunks, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.core import Chunk, ChunkKind, Job
from hocket.models.qwen3_omni.code2wav import Code2WavProgram
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.speech_weights import load_code2wav
from hocket.runtime.state import State, allocate, reset
from hocket.runtime.streaming import StreamingLimits, StreamingRunner

CPU = torch.device("cpu")
LEAD, HOP, FRAMES = 555, 1920, 60
SAME = {"rtol": 0, "atol": 1e-5}  # fp32 rounding at a peak near 1
INDEX = json.loads((Path(__file__).parents[2] / "golden/qwen3_omni/speech.json").read_text("utf-8"))
WAVED = [name for name, case in INDEX["cases"].items() if case["frames"] <= 20]


@pytest.fixture(scope="module")
def program(omni: Callable[..., Path]) -> Code2WavProgram:
    folder = omni()
    config = read_model_config(folder)
    return Code2WavProgram(load_code2wav(folder, config, CPU, torch.float32), config.code2wav)


@pytest.fixture(scope="module")
def made(omni_golden: Any) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = omni_golden("speech_code2wav")
    return arrays


@pytest.fixture(scope="module")
def codes(made: dict[str, np.ndarray]) -> Tensor:
    return torch.from_numpy(made["codes"].astype(np.int32))


def new_state(program: Code2WavProgram) -> State:
    return allocate(program.declare(), slots=5, device="cpu", poison=True)


def run(
    program: Code2WavProgram, state: State, codes: Tensor, chunks: list[int], slot: int = 1
) -> np.ndarray:
    """Decode codes [t, 16] from the beginning, in chunks of so many frames -> [t * hop - lead]."""
    slots = torch.tensor([slot])
    parts = [program.step(state.tensors, slots, part[None])[0] for part in codes.split(chunks)]
    parts.append(program.flush(state.tensors, slots)[0])
    return torch.cat(parts)[program.lookahead :].numpy()


@pytest.mark.parametrize("name", WAVED)
def test_wave_is_the_published_one(name: str, program: Code2WavProgram, omni_golden: Any) -> None:
    made = omni_golden(f"speech_{name}")
    codes = torch.from_numpy(made["codes"].astype(np.int32))
    wave = run(program, new_state(program), codes, [1] * len(codes))
    assert len(wave) == len(made["wave"]) == HOP * len(codes) - LEAD
    np.testing.assert_allclose(wave, made["wave"], **SAME)


def test_long_wave_is_the_published_one(program: Code2WavProgram, made: Any, codes: Tensor) -> None:
    np.testing.assert_allclose(run(program, new_state(program), codes, [FRAMES]), made["wave"], **SAME)


@settings(max_examples=15, deadline=None)
@given(chunks=st.lists(st.integers(1, FRAMES), min_size=1, max_size=12))
def test_stream_equals_whole_wherever_it_is_cut(
    program: Code2WavProgram, made: Any, codes: Tensor, chunks: list[int]
) -> None:
    chunks = [n for n, before in zip(chunks, np.cumsum([0, *chunks]), strict=False) if before + n <= FRAMES]
    total = sum(chunks)
    wave = run(program, new_state(program), codes[:total], chunks or [1]) if total else np.zeros(0)
    np.testing.assert_allclose(wave, made["wave"][: max(0, HOP * total - LEAD)], **SAME)


def test_first_chunks_give_what_the_look_ahead_leaves(
    program: Code2WavProgram, made: Any, codes: Tensor
) -> None:
    """Through the scheduler, which drops the look-ahead and flushes."""
    out: list[Chunk] = []
    runner = StreamingRunner("code2wav", program, StreamingLimits(), CPU, out.append)
    job = Job(id="j", route=("code2wav",), inputs={}, seed=0, max_frames=9)
    runner.start(job, {})
    sizes = (1, 1, 4, 3)
    for at, n in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        for frame in range(at, at + n):
            last = frame == 8
            arrays = {"codes": codes[frame : frame + 1].numpy()}
            runner.push(
                Chunk(job="j", source="talker", index=frame, kind=ChunkKind.CODES, arrays=arrays, last=last)
            )
        while runner.tick(0.0):
            pass
    assert len(out[0].arrays["pcm"]) == HOP - LEAD
    wave = np.concatenate([chunk.arrays["pcm"] for chunk in out])
    np.testing.assert_allclose(wave, made["wave"][: 9 * HOP - LEAD], **SAME)
    assert out[-1].last


def test_cold_and_warm_streams_share_a_batch(program: Code2WavProgram, made: Any, codes: Tensor) -> None:
    state, whole = new_state(program), made["wave"]
    run(program, state, codes[:17], [17], slot=3)
    batch = torch.stack([codes[17:20], codes[:3], torch.zeros(3, 16, dtype=torch.int32), codes[:3]])
    pcm = program.step(state.tensors, torch.tensor([3, 1, 0, 4]), batch).numpy()  # 0: padding
    np.testing.assert_allclose(pcm[0], whole[17 * HOP - LEAD : 20 * HOP - LEAD], **SAME)
    for row in (1, 3):
        np.testing.assert_allclose(pcm[row, LEAD:], whole[: 3 * HOP - LEAD], **SAME)


def test_slot_starts_afresh_after_reset(program: Code2WavProgram, made: Any, codes: Tensor) -> None:
    state = new_state(program)
    run(program, state, codes.flip(0), [20, 40])
    reset(state, torch.tensor([1]))
    np.testing.assert_allclose(run(program, state, codes, [FRAMES]), made["wave"], **SAME)


def test_frames_change_nothing_before_their_look_ahead(
    program: Code2WavProgram, made: Any, codes: Tensor
) -> None:
    for t in (1, 11, 30):
        other = torch.cat([codes[:t], codes.flip(0)[t:]])
        wave, edge = run(program, new_state(program), other, [FRAMES]), t * HOP - LEAD
        np.testing.assert_allclose(wave[:edge], made["wave"][:edge], **SAME)
        assert np.abs(wave[edge : edge + 200] - made["wave"][edge : edge + 200]).max() > 1e-3


def test_rates(program: Code2WavProgram) -> None:
    assert (program.hop, program.rate_hz, program.lookahead) == (HOP, 24000, LEAD)
