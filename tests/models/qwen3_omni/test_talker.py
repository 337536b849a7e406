"""The Talker against the published implementation, and against itself however its text comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hocket.core import Chunk, ChunkKind, Job, Span
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.handoff import HEAD, TalkerInput, user_turns
from hocket.models.qwen3_omni.speech_weights import load_talker
from hocket.models.qwen3_omni.talker import TalkerProgram
from hocket.nn.talker import DrawInput
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner

CPU = torch.device("cpu")
GREEDY = DrawInput(temperature=0, top_k=0, top_p=1)
INDEX = json.loads((Path(__file__).parents[2] / "golden/qwen3_omni/speech.json").read_text("utf-8"))
CASES: dict[str, Any] = INDEX["cases"]
WITH_MEDIA = ("audio", "image", "video", "mixed", "audio_in_video")


@pytest.fixture(scope="module")
def program(omni: Callable[..., Path]) -> TalkerProgram:
    folder = omni()
    config = read_model_config(folder)
    return TalkerProgram(config, load_talker(folder, config, CPU, torch.float32))


def job_of(program: TalkerProgram, name: str, made: dict[str, np.ndarray], **options: Any) -> Job:
    c, case, frames = program.config, CASES[name], CASES[name]["frames"]
    ids = made["prompt"]
    counted = np.arange(len(made["positions"]))[:, None]
    asked = TalkerInput(
        user=ids[user_turns(c, ids)].tobytes(),
        role=ids[-3:].tolist(),
        speaker=c.talker.speaker_id[case.get("speaker", "ethan")],
        positions=b"" if (made["positions"] == counted).all() else made["positions"].tobytes(),
        drops_cut=bool(case.get("cut")),
        **{"first": GREEDY, "inner": GREEDY, "repetition_penalty": 1.05, **options},
    )
    job = Job(
        id=name, route=("thinker", "talker"), inputs={}, seed=0, max_frames=1, limits={"talker": frames}
    )
    job.inputs["talker"] = msgspec.msgpack.encode(asked)
    return job


def thought(job: str, made: dict[str, np.ndarray], pieces: list[int], cut: bool) -> list[Chunk]:
    """The Thinker's chunks: hidden rows of media, then the text in pieces of so many tokens."""
    out = []
    if "hidden" in made:
        rows = {"rows": made["hidden"]}
        out.append(Chunk(job=job, source="thinker", index=0, kind=ChunkKind.ROWS, arrays=rows))
    parts = np.split(made["text"], np.cumsum(pieces)[:-1]) if pieces else [made["text"]]
    if not cut:  # the token that ends a text is not part of it, and comes as an empty last chunk
        parts.append(made["text"][:0])
    for k, part in enumerate(parts):
        last = k == len(parts) - 1
        reason = ("length" if cut else "stop") if last else ""
        tokens = {"tokens": part[:, None].astype(np.int32)}
        out.append(
            Chunk(
                job=job, source="thinker", index=len(out), kind=ChunkKind.TOKENS, arrays=tokens, last=last,
                finish_reason=reason,
            )
        )  # fmt: skip
    return out


class Driver:
    def __init__(self, program: TalkerProgram, **limits: Any) -> None:
        self.out: list[Chunk] = []
        options = {"kv_blocks": 256, **limits}
        self.runner = AutoregressiveRunner(
            "talker", program, AutoregressiveLimits(**options), CPU, self.out.append
        )

    def finish(self) -> None:
        while self.runner.tick(time.monotonic()):
            pass

    def codes(self, job: str) -> np.ndarray:
        return np.concatenate([c.arrays["codes"] for c in self.out if c.job == job])


@pytest.mark.parametrize("name", CASES)
def test_rows_and_codes_are_the_references(name: str, program: TalkerProgram, omni_golden: Any) -> None:
    made, driver = omni_golden(f"speech_{name}"), Driver(program)
    job = job_of(program, name, made)
    prompt = program.begin(job, {})
    assert len(prompt.row_keys) == len(made["rows"])
    driver.runner.start(job, {})
    for chunk in thought(name, made, [1] * len(made["text"]), bool(CASES[name].get("cut"))):
        prompt.take(chunk)
        driver.runner.push(chunk)
        driver.finish()  # as fast as the text comes
    rows = program.rows([Span(prompt, np.zeros((0, 16), np.int32), 0, len(made["rows"]))])
    np.testing.assert_allclose(rows.numpy(), made["rows"], atol=2e-6)
    np.testing.assert_array_equal(driver.codes(name), made["codes"])
    assert driver.out[-1].finish_reason == ("stop" if CASES[name]["ended"] else "length")


@pytest.mark.parametrize(
    ("name", "pieces"), [("text_64", [65]), ("text_64", [1, 64]), ("text_300", [100, 1, 200])], ids=str
)
def test_it_does_not_matter_how_text_comes(
    name: str, pieces: list[int], program: TalkerProgram, omni_golden: Any
) -> None:
    made, driver = omni_golden(f"speech_{name}"), Driver(program)
    driver.runner.start(job_of(program, name, made), {})
    for chunk in thought(name, made, pieces, bool(CASES[name].get("cut"))):
        driver.runner.push(chunk)
        driver.runner.tick(time.monotonic())
    driver.finish()
    np.testing.assert_array_equal(driver.codes(name), made["codes"])


def test_frames_wait_for_their_text(program: TalkerProgram, omni_golden: Any) -> None:
    made, driver = omni_golden("speech_text_7"), Driver(program)
    driver.runner.start(job_of(program, "text_7", made), {})
    driver.finish()
    assert driver.out == []
    assert driver.runner.refresh_stats().slots_used == 0
    for number, chunk in enumerate(thought("text_7", made, [1] * 7, cut=False)[:-1], 1):
        driver.runner.push(chunk)
        driver.finish()
        assert len(driver.codes("text_7")) == number


@pytest.mark.parametrize("name", WITH_MEDIA)
def test_frames_wait_for_the_rows_of_media(name: str, program: TalkerProgram, omni_golden: Any) -> None:
    made, driver = omni_golden(f"speech_{name}"), Driver(program)
    driver.runner.start(job_of(program, name, made), {})
    rows, *text = thought(name, made, [1] * len(made["text"]), cut=False)
    for chunk in text:
        driver.runner.push(chunk)
    driver.finish()
    assert driver.out == []
    driver.runner.push(rows)
    driver.finish()
    np.testing.assert_array_equal(driver.codes(name), made["codes"])


def test_an_empty_text_gives_no_frame(program: TalkerProgram, omni_golden: Any) -> None:
    made, driver = omni_golden("speech_text_1"), Driver(program)
    driver.runner.start(job_of(program, "text_1", made), {})
    empty = {"tokens": np.zeros((0, 1), np.int32)}
    driver.runner.push(
        Chunk(
            job="text_1", source="thinker", index=0, kind=ChunkKind.TOKENS, arrays=empty, last=True,
            finish_reason="stop",
        )
    )  # fmt: skip
    driver.finish()
    (only,) = driver.out
    assert (only.last, only.finish_reason, only.arrays["codes"].size) == (True, "stop", 0)
    assert driver.runner.jobs() == []


def test_the_last_token_of_a_cut_text_is_spoken_unless_parity_is_asked_for(
    program: TalkerProgram, omni_golden: Any
) -> None:
    made = omni_golden("speech_text_7_cut")
    prompts = {}
    for drops in (False, True):
        job = job_of(program, "text_7_cut", made)
        asked = msgspec.msgpack.decode(job.inputs["talker"], type=TalkerInput)
        job.inputs["talker"] = msgspec.msgpack.encode(msgspec.structs.replace(asked, drops_cut=drops))
        prompts[drops] = program.begin(job, {})
        for chunk in thought("text_7_cut", made, [1] * 7, cut=True):
            prompts[drops].take(chunk)
    end = program.config.tts_eos_token_id
    text = made["text"].tolist()
    spoken = {drops: [int(p.text[-1]), *p.trailing] for drops, p in prompts.items()}
    assert spoken == {False: [*text, end], True: [*text[:-1], end]}


@pytest.mark.parametrize("kv_blocks", [256, 24], ids=["room", "starved"])
def test_batch_mates_and_preemption_change_nothing(
    kv_blocks: int, program: TalkerProgram, omni_golden: Any
) -> None:
    driver = Driver(program, kv_blocks=kv_blocks, block_tokens=8, prefill_tokens=40, slots=6, max_batch=6)
    names = {"a": "text_64", "b": "image", "c": "text_64", "d": "text_7", "e": "text_64", "f": "mixed"}
    queues = []
    for job, name in names.items():
        made = omni_golden(f"speech_{name}")
        driver.runner.start(msgspec.structs.replace(job_of(program, name, made), id=job), {})
        queues.append(thought(job, made, [1] * len(made["text"]), bool(CASES[name].get("cut"))))
    while any(queues):
        for queue in queues:
            if queue:
                driver.runner.push(queue.pop(0))
        driver.runner.tick(time.monotonic())
    driver.finish()
    for job, name in names.items():
        np.testing.assert_array_equal(driver.codes(job), omni_golden(f"speech_{name}")["codes"], name)
    stats = driver.runner.refresh_stats()
    assert (stats.slots_used, stats.kv_blocks_used) == (0, 0)
    assert (stats.preemptions > 0) == (kv_blocks == 24)


def test_rows_are_shared_by_content_and_place(program: TalkerProgram, omni_golden: Any) -> None:
    """Media rows stand under equal ids for everybody."""
    made = omni_golden("speech_image")
    other = {**made, "hidden": made["hidden"] + 1}
    steps = np.arange(len(made["positions"]), dtype=np.float32)[:, None] // 8
    moved = {**made, "positions": made["positions"] + steps}
    keys = []
    for given in (made, other, moved):
        prompt = program.begin(job_of(program, "image", given), {})
        for chunk in thought("image", given, [], cut=False):
            prompt.take(chunk)
        keys.append(prompt.row_keys)
    media = np.flatnonzero(np.isin(prompt.text, [program.config.thinker_config.image_token_id])).tolist()
    changed = [i for i, (a, b) in enumerate(zip(keys[0], keys[1], strict=True)) if a != b]
    assert changed == media
    changed = [i for i, (a, b) in enumerate(zip(keys[0], keys[2], strict=True)) if a != b]
    assert changed == list(range(8, len(keys[0])))


def test_system_and_earlier_answers_are_not_read(program: TalkerProgram, omni_golden: Any) -> None:
    c, ids = program.config, omni_golden("speech_text_7")["prompt"]
    given = ids[user_turns(c, ids)]
    starts = np.flatnonzero(given == c.im_start_token_id)
    assert given[starts + 1].tolist() == [c.user_token_id] * 2
    assert len(given) == len(omni_golden("speech_text_7")["rows"]) - HEAD
