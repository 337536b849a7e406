"""The talker against the published implementation: prompt rows, codes, end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hocket.core import Chunk, ChunkKind, Job, Reference, Sampling, Span, SpeechRequest
from hocket.models.qwen3_tts.config import read_model_config
from hocket.models.qwen3_tts.frontend import QwenTtsFrontEnd
from hocket.models.qwen3_tts.talker import TalkerProgram
from hocket.models.qwen3_tts.weights import load_talker
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner

CPU = torch.device("cpu")
NAMES = tuple(
    json.loads((Path(__file__).parents[2] / "golden/qwen3_tts/cases.json").read_text("utf-8"))["cases"]
)


def load(folder: Path) -> TalkerProgram:
    config = read_model_config(folder)
    return TalkerProgram(config, load_talker(folder, config, CPU, torch.float32))


def job_of(folder: Path, request: dict[str, Any], max_frames: int = 14) -> Job:
    reference = None
    if "ref_audio" in request:  # what the recording gives is taken from the golden file
        silence = np.zeros(24000, np.float32)
        text = request.get("ref_text")
        reference = Reference(samples=silence, rate_hz=24000, text=text, speaker_only=text is None)
    return QwenTtsFrontEnd(folder).prepare(
        SpeechRequest(
            text=request["text"],
            voice=request.get("speaker"),
            language=request["language"],
            instructions=request.get("instruct"),
            reference=reference,
            text_first=request["full"],
            max_frames=max_frames,
            sampling=Sampling(temperature=0),
            seed=0,
        )
    )


def voice(job: Job, expected: dict[str, np.ndarray]) -> dict[str, Chunk]:
    arrays = {"speaker": expected.get("speaker"), "codes": expected.get("ref_codes")}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    if not arrays:
        return {}
    kind = ChunkKind.CONDITIONING
    return {"reference": Chunk(job=job.id, source="reference", index=0, kind=kind, arrays=arrays, last=True)}


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_codes_are_the_references(name: str, cases: Any, golden: Any, checkpoint: Any) -> None:
    folder, expected = checkpoint(**cases[name]["checkpoint"]), golden(name)
    program = load(folder)
    job = job_of(folder, cases[name]["request"])
    arrived = voice(job, expected)
    prompt = program.begin(job, arrived)
    rows = program.rows([Span(prompt, np.zeros((0, 16), np.int32), 0, len(prompt.row_keys))])
    np.testing.assert_allclose(rows.numpy(), expected["rows"], atol=1e-6)

    chunks: list[Chunk] = []
    runner = AutoregressiveRunner("talker", program, AutoregressiveLimits(kv_blocks=64), CPU, chunks.append)
    runner.start(job, arrived)
    while runner.tick(time.monotonic()):
        pass
    codes = np.concatenate([c.arrays["codes"] for c in chunks])
    np.testing.assert_array_equal(codes, expected["codes"])
    assert chunks[-1].last
    assert chunks[-1].finish_reason == ("stop" if name.endswith("_end") else "length")


def test_prompts_of_different_voices_share_no_row_key_behind_the_speaker(
    checkpoint: Any, golden: Any
) -> None:
    """Their ids are the same; only the vectors differ."""
    program = load(checkpoint(size="tiny", variant="base"))
    expected = golden("icl_streaming")
    other = {"speaker": expected["speaker"] + 1, "ref_codes": expected["ref_codes"] ^ 1}
    request = {"text": "Hello.", "language": "Auto", "full": False, "ref_audio": "", "ref_text": "One two."}
    job = job_of(checkpoint(size="tiny", variant="base"), request)
    one, two = (program.begin(job, voice(job, e)) for e in (expected, other))
    assert one.text.tolist() == two.text.tolist()
    changed = [i for i, (a, b) in enumerate(zip(one.row_keys, two.row_keys, strict=True)) if a != b]
    codec = one.codec.tolist()
    assert changed == [i for i, c in enumerate(codec) if c in (-2, -3)]  # speaker row and reference frames


def test_released_head_holds_codes_and_end_only(checkpoint: Any) -> None:
    program = load(checkpoint(size="tiny", variant="custom_voice"))
    assert program.w.head.shape[0] == 2049
