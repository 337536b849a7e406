"""All stages together, as a caller has them: the published text and sound, however stages are placed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hocket import AsyncEngine, Sampling, SpeechRequest
from hocket.core import Chat, ChunkKind, Media, Message
from hocket.engine import client
from hocket.engine.connector import LocalMailbox, encode
from hocket.engine.messages import Deliver
from hocket.engine.stream import Audio, Text, _Spelling
from hocket.errors import InvalidRequest
from hocket.models.qwen3_omni.config import read_model_config
from hocket.models.qwen3_omni.frontend import QwenOmniFrontEnd
from hocket.models.qwen3_omni.talker import TalkerProgram
from hocket.models.qwen3_omni.thinker import ThinkerProgram
from hocket.models.qwen3_omni.weights import load_thinker
from tests.models.qwen3_omni.conftest import CASES as THINKER_CASES
from tests.models.qwen3_omni.conftest import messages
from tests.models.qwen3_omni.test_thinker import CPU, job_of, run

INDEX = json.loads((Path(__file__).parents[2] / "golden/qwen3_omni/speech.json").read_text("utf-8"))
CASES: dict[str, Any] = INDEX["cases"]
GREEDY = Sampling(temperature=0)
SPLIT = """\
family: qwen3_omni
stages:
  audio: {device: "cpu:0", dtype: float32}
  vision: {device: "cpu:0", dtype: float32}
  thinker: {device: "cpu:0", dtype: float32, kv_blocks: 256}
  talker: {device: "cpu:1", dtype: float32, kv_blocks: 256, max_context: 4096}
  code2wav: {device: "cpu:2", dtype: float32}
"""


def conversation(case: dict[str, Any]) -> Chat:
    """The messages of a golden case, with the media that its oracle drew."""
    in_video = case.get("audio_in_video", False)
    rng = np.random.default_rng(7)
    media: dict[str, Media] = {}

    def kinds() -> set[str]:
        parts = [p for m in case["messages"] if not isinstance(m["content"], str) for p in m["content"]]
        return {p["type"] for p in parts} | ({"audio"} if in_video else set())

    if "audio" in kinds():
        clip = rng.normal(0, 0.2, 17_600).astype(np.float32)
        media["audio"] = Media(kind="audio", data=clip, rate_hz=16000)
    if "image" in kinds():
        media["image"] = Media(kind="image", data=rng.integers(0, 256, (96, 64, 3), dtype=np.uint8))
    if "video" in kinds():
        frames = rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
        media["video"] = Media(kind="video", data=frames, rate_hz=1.0, sound=media.get("audio"))

    def parts(content: Any) -> list[str | Media]:
        if isinstance(content, str):
            return [content]
        return [p["text"] if p["type"] == "text" else media[p["type"]] for p in content]

    messages = [Message(role=m["role"], parts=parts(m["content"])) for m in case["messages"]]
    return Chat(messages=messages, audio_in_video=in_video)


def request(name: str, tokens: int, **options: Any) -> SpeechRequest:
    case = CASES[name]
    chat = conversation(case)
    chat.max_tokens = tokens
    fields = {
        "voice": case.get("speaker"),
        "sampling": GREEDY,
        "max_frames": case["frames"] if not case["ended"] else 40,
        "extra": {"drops_cut_token": True} if case.get("cut") else {},
    }
    return SpeechRequest(chat=chat, **{**fields, **options})


@dataclass
class Heard:
    text: str
    codes: np.ndarray
    wave: np.ndarray
    order: str  # T and A, as they came
    reason: str | None


async def hear(engine: AsyncEngine, asked: SpeechRequest) -> Heard:
    stream = await engine.submit(asked, want_codes=True)
    text, wave, order = "", [np.zeros(0, np.float32)], ""
    async for piece in stream.pieces():
        order += type(piece).__name__[0]
        if isinstance(piece, Text):
            text += piece.text
        else:
            assert isinstance(piece, Audio)
            wave.append(piece.samples)
    return Heard(text, stream.codes, np.concatenate(wave), order, stream.finish_reason)


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(folder, **{"processes": False, **options}) as engine:
        yield engine


def test_text_and_sound_are_the_published_ones(omni: Callable[..., Path], omni_golden: Any) -> None:
    async def main() -> None:
        async with served(omni()) as engine:
            for name in CASES:
                made = omni_golden(f"speech_{name}")
                heard = await hear(engine, request(name, len(made["text"])))
                assert heard.text == engine.front_end.detokenize(made["text"].tolist()), name
                np.testing.assert_array_equal(heard.codes, made["codes"], name)
                assert len(heard.wave) == 1920 * len(made["codes"]) - 555
                if "wave" in made:
                    np.testing.assert_allclose(heard.wave, made["wave"], rtol=0, atol=1e-5, err_msg=name)
                assert heard.reason == "length", name  # of the text
                assert heard.order.rstrip("A").endswith("T")

    asyncio.run(main())


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_stages_on_three_devices_say_the_same(
    processes: bool, omni: Callable[..., Path], omni_golden: Any, tmp_path: Path
) -> None:
    (tmp_path / "split.yaml").write_text(SPLIT)

    async def main() -> None:
        profile = str(tmp_path / "split.yaml")
        async with served(omni(), profile=profile, processes=processes) as engine:
            names = ("text_7", "mixed", "text_7_cut")
            all_made = [omni_golden(f"speech_{name}") for name in names]
            asked = [request(name, len(made["text"])) for name, made in zip(names, all_made, strict=True)]
            for heard, made in zip(
                await asyncio.gather(*(hear(engine, r) for r in asked)), all_made, strict=True
            ):
                np.testing.assert_array_equal(heard.codes, made["codes"])
                np.testing.assert_allclose(heard.wave, made["wave"], rtol=0, atol=1e-5)

    asyncio.run(main())


def test_sound_covers_exactly_the_text_of_a_cut_answer(omni: Callable[..., Path], omni_golden: Any) -> None:
    """A text cut at n tokens is spoken as one of n tokens that ended there."""
    made = omni_golden("speech_text_64")

    async def main() -> None:
        async with served(omni()) as engine:
            for tokens in (1, 7, 20):
                cut = await hear(engine, request("text_64", tokens, extra={}))
                one_more = await hear(engine, request("text_64", tokens + 1))  # whose last is not spoken
                assert cut.text == engine.front_end.detokenize(made["text"][:tokens].tolist())
                np.testing.assert_array_equal(cut.codes, one_more.codes)
                assert cut.reason == "length"

    asyncio.run(main())


def test_a_talker_that_has_all_its_text_may_take_its_time(
    omni: Callable[..., Path], omni_golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more comes from the Thinker's worker, and that is no fault."""
    (tmp_path / "split.yaml").write_text(SPLIT)
    plan, step = client.plan_workers, TalkerProgram.step

    def hasty(*args: Any) -> Any:
        return [msgspec.structs.replace(p, handoff_timeout_s=0.5) for p in plan(*args)]

    def slow(*args: Any) -> Any:
        time.sleep(0.25)
        return step(*args)

    monkeypatch.setattr(client, "plan_workers", hasty)
    monkeypatch.setattr(TalkerProgram, "step", slow)

    async def main() -> None:
        async with served(omni(), profile=str(tmp_path / "split.yaml")) as engine:
            heard = await hear(engine, request("text_7", 7))
            np.testing.assert_array_equal(heard.codes, omni_golden("speech_text_7")["codes"])

    asyncio.run(main())


def test_bytes_between_stages_grow_with_the_text_and_no_faster(
    omni: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "split.yaml").write_text(SPLIT)
    sent: dict[str, list[int]] = {}
    send = LocalMailbox.send

    def counted(box: LocalMailbox, address: str, message: Any) -> None:
        if isinstance(message, Deliver):
            size = sum(len(bytes(frame)) for frame in encode([message]))
            sent.setdefault(f"{message.chunk.source} to {message.stage}", []).append(size)
        send(box, address, message)

    monkeypatch.setattr(LocalMailbox, "send", counted)

    async def main() -> dict[int, dict[str, int]]:
        totals = {}
        async with served(omni(never_ends=True), profile=str(tmp_path / "split.yaml")) as engine:
            for tokens in (10, 20, 40):
                sent.clear()
                asked = request("text_1", tokens, extra={}, max_frames=tokens, request_id=f"chat-{tokens}")
                await hear(engine, asked)
                totals[tokens] = {way: sum(sizes) for way, sizes in sent.items()}
        return totals

    totals = asyncio.run(main())
    for way in ("thinker to talker", "talker to code2wav"):
        small, middle, large = (totals[tokens][way] for tokens in (10, 20, 40))
        assert abs((large - middle) / 20 - (middle - small) / 10) < 1, way  # so many bytes a token, or frame
        assert (large - middle) / 20 < 300, way


def test_rows_of_media_cross_once(
    omni: Callable[..., Path], omni_golden: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "split.yaml").write_text(SPLIT)
    crossed: list[Deliver] = []
    send = LocalMailbox.send

    def seen(box: LocalMailbox, address: str, message: Any) -> None:
        if isinstance(message, Deliver) and message.chunk.kind is ChunkKind.ROWS:
            crossed.append(message)
        send(box, address, message)

    monkeypatch.setattr(LocalMailbox, "send", seen)

    async def main() -> None:
        async with served(omni(), profile=str(tmp_path / "split.yaml")) as engine:
            for name, modalities in (("mixed", ("text",)), ("text_1", None), ("mixed", None)):
                asked = request(name, 4)
                assert asked.chat is not None
                asked.chat.modalities = modalities
                await hear(engine, asked)

    asyncio.run(main())
    (message,) = crossed  # only where sound is made, and there are media
    rows = message.chunk.arrays["rows"]
    assert (message.stage, rows.shape) == ("talker", omni_golden("speech_mixed")["hidden"].shape)
    np.testing.assert_allclose(rows, omni_golden("speech_mixed")["hidden"], atol=1e-4)


def test_text_alone_visits_no_talker(omni: Callable[..., Path], omni_golden: Any) -> None:
    made = omni_golden("speech_mixed")

    async def main() -> None:
        async with served(omni()) as engine:
            asked = request("mixed", len(made["text"]))
            assert asked.chat is not None
            asked.chat.modalities = ("text",)
            heard = await hear(engine, asked)
            assert heard.text == engine.front_end.detokenize(made["text"].tolist())
            assert set(heard.order) == {"T"}
            assert len(heard.codes) == 0
            status = engine.status()
            assert status.stages == {} or status.stages["talker"][0].steps == 0

    asyncio.run(main())


def test_a_profile_may_leave_speech_out(omni: Callable[..., Path], omni_golden: Any) -> None:
    made = omni_golden("speech_text_7")

    async def main() -> None:
        async with served(omni(), profile="qwen3_omni_text") as engine:
            assert engine.info.answers == ("text",)
            assert engine.fleet is not None
            assert [list(seat.plan.stages) for seat in engine.fleet.seats.values()] == [
                ["audio", "vision", "thinker"]
            ]
            heard = await hear(engine, request("text_7", 7))  # modalities left out: all that can be had
            assert (heard.text, set(heard.order)) == (
                engine.front_end.detokenize(made["text"].tolist()),
                {"T"},
            )
            asked = request("text_7", 7)
            assert asked.chat is not None
            asked.chat.modalities = ("text", "audio")
            with pytest.raises(InvalidRequest, match="without the stage talker") as refused:
                await engine.submit(asked)
            assert refused.value.param == "modalities"

    asyncio.run(main())


def test_a_profile_may_ask_for_experts_in_float8(omni: Callable[..., Path], omni_golden: Any) -> None:
    config, expected = read_model_config(omni()), omni_golden("thinker_turns")
    weights = load_thinker(omni(), config, CPU, torch.float32, float8=True)
    tokens = run(ThinkerProgram(config, weights), [job_of(expected, tokens=12)], {})["job0"]

    async def main() -> None:
        overrides = {"stages.thinker.weights": "float8"}
        async with served(omni(), overrides=overrides) as engine:
            chat = Chat(messages=messages(THINKER_CASES["turns"]), modalities=("text",), max_tokens=12)
            heard = await hear(engine, SpeechRequest(chat=chat))
            assert heard.text == engine.front_end.detokenize(tokens)

    asyncio.run(main())
    assert tokens != expected["tokens"].tolist()  # else this would show nothing


@pytest.mark.parametrize("variant", ["thinking", "captioner"])
def test_checkpoints_without_a_talker_write_text(variant: str, omni: Callable[..., Path]) -> None:
    async def main() -> None:
        async with served(omni(variant=variant)) as engine:
            assert (engine.info.answers, engine.info.voices) == (("text",), ())
            heard = await hear(engine, request("audio", 5))
            assert (set(heard.order), heard.reason) == ({"T"}, "length")
            asked = request("audio", 5)
            assert asked.chat is not None
            asked.chat.modalities = ("audio",)
            with pytest.raises(InvalidRequest) as refused:
                await engine.submit(asked)
            assert refused.value.param == "modalities"
            with pytest.raises(InvalidRequest, match="only writes text"):
                await engine.submit(SpeechRequest(text="Hello."))

    asyncio.run(main())


def test_seeds_and_batch_mates(omni: Callable[..., Path]) -> None:
    """Drawn, not greedy: equal seeds are equal, alone and in company; other seeds are not."""

    def asked(seed: int) -> SpeechRequest:
        chat = conversation(CASES["text_1"])
        chat.max_tokens, chat.sampling = 6, Sampling(temperature=1.0, top_k=40)
        return SpeechRequest(chat=chat, seed=seed, max_frames=10)

    async def main() -> None:
        async with served(omni(never_ends=True)) as engine:
            alone = [await hear(engine, asked(seed)) for seed in (1, 2, 3)]
            together = await asyncio.gather(*(hear(engine, asked(seed)) for seed in (1, 2, 3)))
            for a, b in zip(alone, together, strict=True):
                assert a.text == b.text
                np.testing.assert_array_equal(a.codes, b.codes)
                np.testing.assert_allclose(a.wave, b.wave, rtol=0, atol=1e-5)
            assert len({a.text for a in alone}) > 1
            assert len({a.codes.tobytes() for a in alone}) == 3

    asyncio.run(main())


def test_text_of_tokens(omni: Callable[..., Path]) -> None:
    front = QwenOmniFrontEnd(omni())
    special = front.processor.specials
    ids = [
        special["<think>"], *front.tokenize("Grüße"), special["<|im_end|>"], special["</think>"],
        *front.tokenize(" 你好"), front.config.thinker_config.text_config.vocab_size - 1,
    ]  # fmt: skip
    assert front.detokenize(ids) == "<think>Grüße</think> 你好"
    spelling = _Spelling(front.detokenize)
    pieces = [spelling.add([id], last=False) for id in ids]
    assert "".join(pieces) + spelling.add([], last=True) == "<think>Grüße</think> 你好"
    assert not any("\ufffd" in piece for piece in pieces)
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        front.detokenize([1 << 20])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "voice": ({"voice": "nobody"}, "voice"),
    "language": ({"language": "French"}, "language"),
    "speaker_embedding": ({"speaker_embedding": [0.0]}, "speaker_embedding"),
    "max_frames": ({"max_frames": 5000}, "max_new_tokens"),
    "extra": ({"extra": {"x": 1}}, "extra_params.x"),
    "temperature": ({"sampling": Sampling(temperature=11)}, "temperature"),
}


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=BAD)
def test_bad_fields_are_named(fields: dict[str, Any], param: str, omni: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        QwenOmniFrontEnd(omni()).prepare(request("text_1", 3, **fields))
    assert refused.value.param == param
