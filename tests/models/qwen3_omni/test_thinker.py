"""The Thinker against the published implementation: hidden rows, logits, tokens; and its own rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hocket.core import TILE, Chunk, ChunkKind, Entry, Job, Places, Span
from hocket.kernels.linear import norm_linear
from hocket.models.qwen3_omni.audio import AudioProgram
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.processing import Processor
from hocket.models.qwen3_omni.prompt import ThinkerInput
from hocket.models.qwen3_omni.thinker import ThinkerProgram
from hocket.models.qwen3_omni.vision import VisionProgram
from hocket.models.qwen3_omni.weights import load_audio, load_thinker, load_vision
from hocket.runtime.autoregressive import AutoregressiveLimits, AutoregressiveRunner
from hocket.runtime.state import allocate
from tests.models.qwen3_omni.conftest import CASES, messages

CPU = torch.device("cpu")
Golden = Callable[[str], dict[str, np.ndarray]]


def load(folder: Path) -> ThinkerProgram:
    config = read_model_config(folder)
    return ThinkerProgram(config, load_thinker(folder, config, CPU, torch.float32))


def job_of(expected: dict[str, np.ndarray], number: int = 0, tokens: int = 12, **options: Any) -> Job:
    """A job as the front end would make it, with ids and positions of the golden file."""
    linear = (expected["positions"] == np.arange(len(expected["ids"]))[:, None]).all()
    asked = ThinkerInput(
        ids=expected["ids"].astype(np.int32).tobytes(),
        positions=b"" if linear else expected["positions"].astype(np.float32).tobytes(),
        **{"stops": [274], **options},
    )
    return Job(
        id=f"job{number}",
        route=("thinker", "talker"),
        inputs={"thinker": msgspec.msgpack.encode(asked)},
        seed=number,
        max_frames=tokens,
    )


def run(
    program: ThinkerProgram, jobs: list[Job], arrived: dict[str, Chunk], **limits: Any
) -> dict[str, list[int]]:
    """Tokens of each job."""
    made: dict[str, list[int]] = {job.id: [] for job in jobs}
    ends: dict[str, str] = {}

    def hear(chunk: Chunk) -> None:
        if chunk.kind is ChunkKind.TOKENS:
            made[chunk.job] += chunk.arrays["tokens"][:, 0].tolist()
            if chunk.last:
                ends[chunk.job] = chunk.finish_reason

    runner = AutoregressiveRunner(
        "thinker", program, AutoregressiveLimits(**{"kv_blocks": 128, **limits}), CPU, hear
    )
    for job in jobs:
        runner.start(job, arrived)
    while runner.tick(time.monotonic()):
        pass
    assert set(ends) == set(made)
    return made


def prefilled(program: ThinkerProgram, job: Job, arrived: dict[str, Chunk], block: int) -> tuple[Any, Any]:
    """State and prompt after all rows but the last, `block` at a time, in slot 1; memory unwritten is NaN."""
    prompt = program.begin(job, arrived)
    rows = len(prompt.row_keys)
    blocks = -(-rows // 16) + 1
    state = allocate(
        program.declare(), slots=2, device=CPU, blocks=blocks + 1, max_blocks=blocks, poison=True
    ).tensors
    state.cache.kv.nan_to_num_()  # a hidden token has no weight, but must be finite
    state.cache.blocks[1] = torch.arange(1, blocks + 1).flip(0)
    state.cache.position[1] = rows - 1  # the first step's
    none = np.zeros((0, 1), np.int32)
    program.join(state, [Entry(1, job, prompt, none)])
    for start in range(0, rows - 1, block):
        stop = min(start + block, rows - 1)
        count = stop - start
        tiles = [(at, min(TILE, count - at)) for at in range(0, count, TILE)]
        places = Places(
            slot=torch.ones(count, dtype=torch.int32),
            position=torch.arange(start, stop, dtype=torch.int32),
            tile=torch.tensor(tiles, dtype=torch.int32),
        )
        program.prefill(state, program.rows([Span(prompt, none, start, stop)]), places, -(-stop // 16) * 16)
    return state, prompt


def chunk(stage: str, rows: np.ndarray) -> Chunk:
    kind = ChunkKind.CONDITIONING
    return Chunk(job="job0", source=stage, index=0, kind=kind, arrays={"rows": rows}, last=True)


def with_media(folder: Path, name: str, **options: Any) -> tuple[Job, dict[str, Chunk]]:
    """A job and what the towers send it, all of it ours."""
    case = CASES[name]
    reading = Processor(folder).read(
        messages(case), case.get("tools", ()), audio_in_video=case.get("audio_in_video", False)
    )
    config, arrived = read_model_config(folder), {}
    asked = reading.thinker(**{"stops": [config.im_end_token_id], **options})
    inputs = {"thinker": msgspec.msgpack.encode(asked)}
    if reading.audio is not None:
        inputs["audio"] = msgspec.msgpack.encode(reading.audio)
    if reading.vision is not None:
        inputs["vision"] = msgspec.msgpack.encode(reading.vision)
    job = Job(id="job0", route=("thinker", "talker"), inputs=inputs, seed=0, max_frames=12)
    t = config.thinker_config
    if reading.audio is not None:
        hears = AudioProgram(t.audio_config, load_audio(folder, config, CPU, torch.float32))
        arrived["audio"] = chunk("audio", hears.run([hears.begin(job, {})])[0]["rows"])
    if reading.vision is not None:
        sees = VisionProgram(t.vision_config, load_vision(folder, config, CPU, torch.float32))
        arrived["vision"] = chunk("vision", sees.run([sees.begin(job, {})])[0]["rows"])
    return job, arrived


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_is_answered_as_by_the_reference(name: str, omni: Any, omni_golden: Golden) -> None:
    expected, program = omni_golden(f"thinker_{name}"), load(omni())
    job, arrived = with_media(omni(), name)
    assert run(program, [job], arrived)["job0"] == expected["tokens"].tolist()


@pytest.mark.parametrize("block", [512, 37, 1])
@pytest.mark.parametrize("name", ["text", "image", "audio_in_video"])
def test_prefill_may_be_cut_anywhere(name: str, block: int, omni: Any, omni_golden: Golden) -> None:
    """Rows for the Talker, logits and the next token are the reference's whatever the cuts."""
    expected, program = omni_golden(f"thinker_{name}"), load(omni())
    state, prompt = prefilled(program, *with_media(omni(), name), block)
    handed = program.hand_over(state, 1, prompt)
    if len(expected["hidden"]):
        np.testing.assert_allclose(handed["rows"].numpy(), expected["hidden"], atol=2e-5)
    else:
        assert handed == {}
    logits, token = stepped(program, state)
    np.testing.assert_allclose(logits, expected["logits"], atol=5e-5)
    assert token == int(expected["tokens"][0])


def stepped(program: ThinkerProgram, state: Any) -> tuple[np.ndarray, int]:
    """Logits of the next token of slot 1, and the token."""
    seen: list[np.ndarray] = []

    def listen(x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        product = norm_linear(x, norm, weight, eps)
        if weight is program.w.head:
            seen.append(product[0].numpy().copy())
        return product

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hocket.models.qwen3_omni.thinker.norm_linear", listen)
        out = program.step(state, torch.tensor([1]), state.cache.blocks.shape[1] * 16, 0)
    (logits,) = seen
    return logits, int(out.chunk[0, 0])


@pytest.mark.parametrize(
    "limits",
    [{}, {"prefill_tokens": 7}, {"kv_blocks": 10, "slots": 4}, {"max_batch": 2, "prefix_cache": False}],
    ids=["plain", "short-prefill", "starved", "small-batch"],
)
def test_batch_mates_and_preemption_change_no_token(limits: Any, omni: Any, omni_golden: Golden) -> None:
    program = load(omni())
    drawn = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3, "stops": []}
    jobs = [
        job_of(omni_golden(f"thinker_{name}"), i, **options)
        for i, (name, options) in enumerate(
            [("text", {}), ("turns", drawn), ("text", drawn | {"top_k": 0, "top_p": 1.0}), ("turns", {})]
        )
    ]
    alone = {job.id: run(program, [job], {})[job.id] for job in jobs}
    assert alone["job0"] == omni_golden("thinker_text")["tokens"].tolist()
    assert len({tuple(tokens) for tokens in alone.values()}) == 4
    assert run(program, jobs, {}, **limits) == alone


@pytest.mark.parametrize(("prompts", "heard"), [(1, ["job0"]), (3, ["job0", "job1", "job2"])])
def test_a_burst_is_begun_in_groups(prompts: int, heard: list[str], omni: Any, omni_golden: Golden) -> None:
    """The first need not wait for the last: after so many prompts comes a step."""
    expected, program = omni_golden("thinker_turns"), load(omni())
    rows = len(expected["ids"])
    program.burst_rows = prompts * rows
    out: list[str] = []
    limits = AutoregressiveLimits(kv_blocks=128, prefill_tokens=rows, prefix_cache=False)
    runner = AutoregressiveRunner("thinker", program, limits, CPU, lambda chunk: out.append(chunk.job))
    for number in range(3):
        runner.start(job_of(expected, number), {})
    runner.tick(0.0)
    assert out == heard


def test_a_stop_id_ends_the_text_and_is_not_part_of_it(omni: Any, omni_golden: Golden) -> None:
    expected = omni_golden("thinker_text")
    tokens = expected["tokens"].tolist()
    made = run(load(omni()), [job_of(expected, stops=[5, tokens[4]])], {})
    assert made["job0"] == tokens[: tokens.index(tokens[4])]


def test_a_penalty_spares_no_id_of_the_prompt(omni: Any, omni_golden: Golden) -> None:
    """At 10 every id seen so far loses to one that is new, while there are new ones with positive logits."""
    expected = omni_golden("thinker_text")
    made = run(load(omni()), [job_of(expected, repetition_penalty=10.0, stops=[])], {})["job0"]
    assert len(set(made)) == len(made)
    assert not set(made) & set(expected["ids"].tolist())


@pytest.mark.parametrize("name", [name for name in CASES if name != "turns"])
def test_experts_in_float8_say_nearly_the_same(name: str, omni: Any, omni_golden: Golden) -> None:
    """Three bits of mantissa cost 2.5 to 5.4 % of the logits' spread, and the likeliest token stays.

    Not in `turns`: there two experts are chosen with almost equal right, the error swaps them, and the logits
    move by 34 % of their spread. A router of a trained model is as free to do so.
    """
    config, expected = read_model_config(omni()), omni_golden(f"thinker_{name}")
    weights = load_thinker(omni(), config, CPU, torch.float32, float8=True)
    assert weights.layers[0].moe.down.dtype is torch.float8_e4m3fn
    program = ThinkerProgram(config, weights)
    state, _ = prefilled(program, *with_media(omni(), name), 512)
    logits, token = stepped(program, state)
    apart = (logits - expected["logits"]).std() / expected["logits"].std()
    assert 0.01 < apart < 0.06
    assert token == int(expected["tokens"][0])


def test_text_only_checkpoints_keep_no_rows_for_a_talker(omni: Any, omni_golden: Golden) -> None:
    program = load(omni(variant="thinking"))
    assert program.declare().hidden == []
    expected = omni_golden("thinker_text")
    assert run(program, [job_of(expected)], {})["job0"] == expected["tokens"].tolist()


def test_other_media_under_the_same_pads_are_other_rows(omni: Any) -> None:
    program = load(omni())
    job, arrived = with_media(omni(), "mixed")
    other = msgspec.msgpack.decode(job.inputs["thinker"], type=ThinkerInput)
    other.audio = [(b"another recording", other.audio[0][1])]
    changed = Job(id="b", route=(), inputs={"thinker": msgspec.msgpack.encode(other)}, seed=0, max_frames=1)
    one, two = (program.begin(j, arrived) for j in (job, changed))
    unlike = [i for i, (a, b) in enumerate(zip(one.row_keys, two.row_keys, strict=True)) if a != b]
    assert unlike == one.audio_at.tolist()
    assert len(set(one.row_keys)) == len(one.row_keys)
