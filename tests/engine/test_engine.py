"""The whole way through the engine: text in, streamed sound out, as the published package makes it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hocket.audio.decode import decode
from hocket.core import Chat, Reference, Sampling, SpeechRequest
from hocket.engine.blocking import Engine
from hocket.engine.client import AsyncEngine
from hocket.engine.stream import Stream
from hocket.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    StartupError,
    WorkerDied,
)
from hocket.models.qwen3_tts.codec import CodecProgram
from hocket.models.qwen3_tts.talker import TalkerProgram

ROOT = Path(__file__).parents[1]
NAMES = tuple(json.loads((ROOT / "golden/qwen3_tts/cases.json").read_text("utf-8"))["cases"])
GREEDY = Sampling(temperature=0)


async def hear(stream: Stream) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *[audio.samples async for audio in stream]])


def request_of(case: dict[str, Any], **changes: Any) -> SpeechRequest:
    r = case["request"]
    reference = None
    if "ref_audio" in r:
        samples, rate = decode(ROOT / "data" / Path(r["ref_audio"]).name, param="ref_audio")
        reference = Reference(
            samples=samples, rate_hz=rate, text=r.get("ref_text"), speaker_only="ref_text" not in r
        )
    options: dict[str, Any] = {
        "text": r["text"],
        "voice": r.get("speaker"),
        "language": r["language"],
        "instructions": r.get("instruct"),
        "reference": reference,
        "text_first": r["full"],
        "max_frames": 14,
        "sampling": GREEDY,
    }
    return SpeechRequest(**{**options, **changes})


@pytest.fixture(scope="module")
def endless(checkpoint: Callable[..., Path]) -> Path:
    """A checkpoint that speaks until it is told to stop."""
    return checkpoint(size="tiny", variant="custom_voice", never_ends=True)


async def settled(engine: AsyncEngine) -> dict[str, int]:
    """The gauges once a heartbeat that is younger than this call has come."""
    workers = engine.fleet.seats.values()
    before = {id(seat.status) for seat in workers}
    while any(seat.status is None or id(seat.status) in before for seat in workers):
        await asyncio.sleep(0.05)
    s = engine.status()
    flat = [x for replicas in s.stages.values() for x in replicas]
    return {
        "slots": sum(x.slots_used for x in flat),
        "blocks": sum(x.kv_blocks_used for x in flat),
        "stage queues": sum(x.waiting for x in flat),
        "jobs": sum(seat.status.jobs for seat in workers if seat.status),
        "running": s.running,
        "waiting": s.waiting,
    }


def small_pool(slots: int) -> dict[str, str]:
    fields = ("talker.slots", "talker.max_batch", "codec.slots", "codec.max_batch")
    return {f"stages.{field}": str(slots) for field in fields}


NOTHING = {"slots": 0, "blocks": 0, "stage queues": 0, "jobs": 0, "running": 0, "waiting": 0}


@pytest.mark.parametrize("name", NAMES)
async def test_sound_is_the_references(name: str, cases: Any, golden: Any, checkpoint: Any) -> None:
    expected = golden(name)
    async with AsyncEngine(checkpoint(**cases[name]["checkpoint"]), processes=False) as engine:
        stream = await engine.submit(request_of(cases[name]), want_codes=True)
        sound = await hear(stream)
    np.testing.assert_array_equal(stream.codes, expected["codes"])
    assert sound.shape == expected["wave"].shape
    np.testing.assert_allclose(sound, expected["wave"], atol=1e-4)
    assert stream.usage.frames == len(expected["codes"])
    assert stream.finish_reason == ("stop" if name.endswith("_end") else "length")


@pytest.mark.parametrize("first", [0, 1, 3, 30])
async def test_first_chunk_is_as_long_as_asked_for_and_the_sound_the_same(endless: Path, first: int) -> None:
    async with AsyncEngine(endless, processes=False) as engine:
        plain = await hear(await engine.submit(SpeechRequest(text="Hello there.", seed=1, max_frames=40)))
        stream = await engine.submit(
            SpeechRequest(text="Hello there.", seed=1, max_frames=40, first_chunk_frames=first)
        )
        pieces = [audio.samples async for audio in stream]
    assert len(pieces[0]) == {0: 1, 1: 1, 3: 2, 30: 8}[first] * 1920
    np.testing.assert_allclose(np.concatenate(pieces), plain, atol=1e-4)


async def test_voices_of_several_processes_and_stages_apart(checkpoint: Any, cases: Any, golden: Any) -> None:
    """The codec in a process of its own: chunks cross a socket, the sound is the same."""
    name = "icl_streaming"
    folder = checkpoint(**cases[name]["checkpoint"])
    async with AsyncEngine(folder, overrides={"stages.codec.device": "cpu:1"}) as engine:
        assert sorted(engine.status().workers) == ["cpu:0", "cpu:1"]
        stream = await engine.submit(request_of(cases[name]), want_codes=True)
        sound = await hear(stream)
        assert await settled(engine) == NOTHING
    np.testing.assert_array_equal(stream.codes, golden(name)["codes"])
    np.testing.assert_allclose(sound, golden(name)["wave"], atol=1e-4)


async def test_long_text_is_one_stream_in_order(endless: Path) -> None:
    sentences = [
        f"This is sentence number {n} of a text that is far too long to be spoken in one go."
        for n in range(12)
    ]
    async with AsyncEngine(endless, processes=False) as engine:
        units = engine.front_end.units(" ".join(sentences))
        assert len(units) > 2
        stream = await engine.submit(SpeechRequest(text=" ".join(sentences), seed=5, max_frames=9))
        whole = await hear(stream)
        parts = []
        for n, unit in enumerate(units):
            seed = (5 + n * 0x9E3779B97F4A7C15) % (1 << 63)
            parts.append(await hear(await engine.submit(SpeechRequest(text=unit, seed=seed, max_frames=9))))
        assert await settled(engine) == NOTHING
    np.testing.assert_allclose(whole, np.concatenate(parts), atol=1e-4)
    assert stream.finish_reason == "length"


async def test_text_that_grows_sounds_like_text_at_once(endless: Path) -> None:
    text = "Hello there, this is being written while you listen to it."
    options: dict[str, Any] = {"seed": 8, "max_frames": 40, "text_first": False}
    async with AsyncEngine(endless, processes=False) as engine:
        whole = await hear(await engine.submit(SpeechRequest(text=text, **options)))
        live = await engine.submit_live(SpeechRequest(text="Hello there, ", **options))
        for word in text.removeprefix("Hello there, ").split(" "):
            await live.add_text(word if word.startswith("it") else f"{word} ")
        await live.close_text()
        grown = await hear(live)
        with pytest.raises(InvalidRequest, match="closed"):
            await live.add_text("more")
    np.testing.assert_allclose(grown, whole, atol=1e-4)


async def test_five_hundred_aborts_leave_nothing_behind(checkpoint: Callable[..., Path]) -> None:
    """Aborted while queued, in prefill, in the middle and after the last frame."""
    folder = checkpoint(size="tiny", variant="base", never_ends=True)
    rng = random.Random(1)
    voice = np.sin(np.arange(30000) / 9).astype(np.float32)
    limits = small_pool(6) | {"stages.talker.kv_blocks": "80"}
    async with AsyncEngine(folder, processes=False, overrides=limits) as engine:

        async def one(n: int) -> str:
            reference = Reference(samples=voice, rate_hz=24000, text="A sine.", speaker_only=n % 2 == 0)
            request = SpeechRequest(text="Say something.", reference=reference, seed=n, max_frames=1 + n % 12)
            stream = await engine.submit(request)
            how = rng.choice(["at once", "later", "in the middle", "after the end"])
            if how == "later":
                await asyncio.sleep(rng.random() * 0.3)
            elif how == "in the middle":
                async for _ in stream:
                    if rng.random() < 0.3:
                        break
            elif how == "after the end":
                await hear(stream)
            await stream.aclose()
            return how

        memory: list[int] = []
        seen: set[str] = set()
        for start in range(0, 500, 20):
            seen.update(await asyncio.gather(*(one(n) for n in range(start, start + 20))))
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)
        assert await settled(engine) == NOTHING
    assert len(seen) == 4
    half = len(memory) // 2
    growth = (np.mean(memory[-3:]) - np.mean(memory[half : half + 3])) / 2**20
    assert growth < 8, f"grew by {growth:.1f} MiB over the second half"


async def test_killed_worker_fails_its_requests_and_comes_back(endless: Path) -> None:
    async with AsyncEngine(endless) as engine:
        streams = [
            await engine.submit(SpeechRequest(text="Go on.", seed=n, max_frames=4000)) for n in range(4)
        ]
        for stream in streams:
            await anext(stream)
        (seat,) = engine.fleet.seats.values()
        assert seat.launched is not None
        os.kill(seat.launched.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        for stream in streams:
            with pytest.raises(WorkerDied, match="ended unexpectedly"):
                await hear(stream)
        status = engine.status()
        assert not status.healthy
        assert status.reason == "worker cpu:0 is restarting"
        with pytest.raises(Overloaded):
            await engine.submit(SpeechRequest(text="Too early."))
        while not engine.status().ready:
            await asyncio.sleep(0.05)
        sound = await hear(await engine.submit(SpeechRequest(text="Here again.", seed=1, max_frames=6)))
        assert len(sound) == 5 * 1920
        assert engine.status().restarts == 1
        assert await settled(engine) == NOTHING


async def test_full_queue_refuses_at_once_and_serves_the_others(endless: Path) -> None:
    limits = small_pool(2)
    async with AsyncEngine(endless, processes=False, max_waiting=1, overrides=limits) as engine:
        accepted = [
            await engine.submit(SpeechRequest(text="Go on.", seed=n, max_frames=20)) for n in range(3)
        ]
        with pytest.raises(Overloaded, match="queue is full") as e:
            await engine.submit(SpeechRequest(text="No room."))
        assert e.value.retry_after_s >= 1
        lengths = [len(await hear(stream)) for stream in accepted]
        assert lengths == [19 * 1920] * 3
        assert await settled(engine) == NOTHING


async def test_deadline_before_the_first_audio(endless: Path) -> None:
    limits = small_pool(1)
    async with AsyncEngine(endless, processes=False, overrides=limits) as engine:
        blocker = await engine.submit(SpeechRequest(text="Go on.", max_frames=4000))
        await anext(blocker)
        late = await engine.submit(SpeechRequest(text="Too late.", timeout_s=0.2))
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            await hear(late)
        await blocker.aclose()
        assert await settled(engine) == NOTHING


async def test_slow_listener_pauses_generation_and_loses_nothing(endless: Path) -> None:
    async with AsyncEngine(endless, processes=False, buffer_s=2.0) as engine:
        plain = await hear(await engine.submit(SpeechRequest(text="Go on.", seed=2, max_frames=120)))
        slow = await engine.submit(SpeechRequest(text="Go on.", seed=2, max_frames=120))
        while not slow.paused:
            await asyncio.sleep(0.02)
        held = 0.0
        while held != slow.waiting_s:  # the codec still has frames, and decodes them in time
            held = slow.waiting_s
            assert await settled(engine) != NOTHING
        assert 2 < held < 6, "the rest is not made while nobody listens"
        np.testing.assert_allclose(await hear(slow), plain, atol=1e-4)


async def test_abort_by_id(endless: Path) -> None:
    async with AsyncEngine(endless, processes=False) as engine:
        stream = await engine.submit(SpeechRequest(text="Go on.", max_frames=4000, request_id="mine"))
        with pytest.raises(InvalidRequest, match="is running"):
            await engine.submit(SpeechRequest(text="Go on.", request_id="mine"))
        assert await engine.abort("mine")
        with pytest.raises(Cancelled):
            await hear(stream)
        assert not await engine.abort("mine")
        assert await settled(engine) == NOTHING


@pytest.mark.parametrize(
    ("change", "param"),
    [
        pytest.param({"text": " \n…!"}, "input", id="nothing to say"),
        pytest.param({"voice": "nobody"}, "voice", id="unknown voice"),
        pytest.param({"language": "Klingon"}, "language", id="unknown language"),
        pytest.param({"task": "Base"}, "task_type", id="another task"),
        pytest.param({"task": "Song"}, "task_type", id="no task at all"),
        pytest.param({"max_frames": 0}, "max_new_tokens", id="no frames"),
        pytest.param({"max_frames": 5000}, "max_new_tokens", id="too many frames"),
        pytest.param({"seed": 1 << 63}, "seed", id="seed beyond 64 bits"),
        pytest.param({"sampling": Sampling(temperature=float("nan"))}, "temperature", id="not a number"),
        pytest.param({"sampling": Sampling(top_p=0.0)}, "top_p", id="empty nucleus"),
        pytest.param({"sampling": Sampling(top_k=-1)}, "top_k", id="negative top_k"),
        pytest.param(
            {"sampling": Sampling(repetition_penalty=0.0)}, "repetition_penalty", id="penalty of zero"
        ),
        pytest.param(
            {"speaker_embedding": [1.0] * 64}, "speaker_embedding", id="vector for a checkpoint with presets"
        ),
        pytest.param({"extra": {"emo": 1}}, "extra_params.emo", id="another family's option"),
        pytest.param({"text": "", "chat": Chat(messages=[])}, "messages", id="chat with a speech model"),
    ],
)
async def test_bad_request_names_its_field(endless: Path, change: dict[str, Any], param: str) -> None:
    async with AsyncEngine(endless, processes=False) as engine:
        with pytest.raises(InvalidRequest) as e:
            await engine.submit(SpeechRequest(**{"text": "Hello.", **change}))
        assert e.value.param == param
        assert engine.status().running == 0


async def test_checkpoint_that_cannot_be_loaded_says_why(checkpoint: Any, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(checkpoint(size="tiny", variant="custom_voice"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["talker.codec_head.weight"]
    save_file(weights, folder / "model.safetensors")
    for processes in (False, True):
        with pytest.raises(StartupError, match=r"talker\.codec_head\.weight"):
            await AsyncEngine(folder, processes=processes).start()


def test_engine_without_a_loop(endless: Path) -> None:
    with Engine(endless) as engine:
        assert engine.info.default_voice == "serena"
        stream = engine.speak(SpeechRequest(text="Hello.", seed=4, max_frames=6), want_codes=True)
        sound = np.concatenate([audio.samples for audio in stream])
        assert stream.stream.codes.shape == (5, 16)
        speech = engine.speech(SpeechRequest(text="Hello.", seed=4, max_frames=6))
        np.testing.assert_allclose(speech.samples, sound, atol=1e-4)
        assert (speech.sample_rate_hz, speech.finish_reason, speech.seed) == (24000, "length", 4)
        endless_one = engine.speak(SpeechRequest(text="Hello.", max_frames=4000))
        next(endless_one)
        endless_one.close()


async def test_engine_closed_while_it_loads(endless: Path) -> None:
    engine = AsyncEngine(endless)
    await engine.close()  # before it began: nothing to do
    loading = asyncio.create_task(engine.start())
    while engine.fleet is None or not any(seat.launched for seat in engine.fleet.seats.values()):
        await asyncio.sleep(0.01)
    assert not engine.status().ready
    await engine.close()
    with pytest.raises(StartupError, match="closed while"):
        await loading


@pytest.mark.parametrize("stage", ["talker", "codec"])
async def test_a_step_that_fails_fails_its_requests_only(
    endless: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    program = {"talker": TalkerProgram, "codec": CodecProgram}[stage]
    step = program.step
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise FloatingPointError("a planted fault")
        return step(*args)

    monkeypatch.setattr(program, "step", failing)
    async with AsyncEngine(endless, processes=False) as engine:
        streams = [await engine.submit(SpeechRequest(text="Go on.", seed=n, max_frames=40)) for n in range(3)]
        for stream in streams:
            with pytest.raises(RequestFailed, match=rf"stage {stage} failed: FloatingPointError"):
                await hear(stream)
        assert "a planted fault" in caplog.text
        assert engine.status().healthy
        assert len(await hear(await engine.submit(SpeechRequest(text="Go on.", max_frames=6)))) == 5 * 1920
        assert await settled(engine) == NOTHING


async def test_waiting_and_transfers_are_measured(endless: Path) -> None:
    async with AsyncEngine(endless, overrides=small_pool(1)) as engine:
        streams = [await engine.submit(SpeechRequest(text="Go on.", seed=n, max_frames=8)) for n in range(2)]
        for stream in streams:
            await hear(stream)
        await settled(engine)
        status = engine.status()
        (talker,) = status.stages["talker"]
        assert talker.queued == 2
        assert talker.queue_seconds > talker.step_seconds / 4, "the second waited while the first spoke"
        assert talker.graph_steps == 0
        codec = status.transfers["codec"]
        assert codec.count >= 2
        assert 0 < codec.seconds / codec.count < 5
