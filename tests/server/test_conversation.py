"""Chats with a model that understands, over HTTP: the real engine and a tiny Qwen3-Omni."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx2
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hocket.engine.client import AsyncEngine
from hocket.models.qwen3_omni.synthetic import write_checkpoint
from hocket.server.app import create_app
from hocket.server.conversation import Thoughts, ToolCalls
from hocket.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_omni"
CASES: dict[str, Any] = json.loads((GOLDEN / "speech.json").read_text("utf-8"))["cases"]
WAIT_S = 120
GREEDY_SPEECH: list[dict[str, Any]] = [{}, {"temperature": 0}]


@pytest.fixture(scope="module")
def http(listener: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = write_checkpoint(tmp_path_factory.mktemp("omni"))
    engine = AsyncEngine(folder, processes=False)
    listener.run(engine.start())
    listener.app = create_app(engine, ServerSettings(model="tiny-omni"))
    with httpx2.Client(base_url=listener.url, timeout=WAIT_S) as client:
        client.engine = engine
        yield client
    listener.run(engine.close())


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"speech_{name}.npz") as file:
        return dict(file)


def body(name: str = "text_7", **fields: Any) -> dict[str, Any]:
    """A request for what a golden case holds."""
    made = golden(name)
    return {
        "messages": CASES[name]["messages"],
        "max_tokens": len(made["text"]),
        "max_new_tokens": CASES[name]["frames"],
        "sampling_params_list": GREEDY_SPEECH,
        "audio": {"format": "pcm16"},
        "seed": 1,
        **fields,
    }


def ask(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json=fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chunks(text: str) -> list[dict[str, Any]]:
    *lines, done = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(http: httpx2.Client, name: str) -> str:
    text: str = http.engine.front_end.detokenize(golden(name)["text"].tolist())
    return text


def pcm(data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data), "<i2")


# --- answers -----------------------------------------------------------------------------------


def test_text_and_sound_are_in_one_choice(http: httpx2.Client) -> None:
    made = golden("text_7")
    answer = ask(http, **body())
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["role"], choice["finish_reason"]) == ("assistant", "length")
    assert message["content"] == message["audio"]["transcript"] == text_of(http, "text_7")
    sound = pcm(message["audio"]["data"]) / 32768
    np.testing.assert_allclose(sound, made["wave"], rtol=0, atol=2 / 32768)
    assert answer["usage"] == {
        "prompt_tokens": len(made["prompt"]),
        "completion_tokens": 7 + 14,
        "total_tokens": len(made["prompt"]) + 21,
        "prompt_tokens_details": {"audio_tokens": 0, "cached_tokens": 0},
        "completion_tokens_details": {"audio_tokens": 14, "reasoning_tokens": 0},
    }


def test_streaming_equals_buffered_sample_for_sample(http: httpx2.Client) -> None:
    whole = ask(http, **body())["choices"][0]["message"]
    response = http.post(CHAT, json=body(stream=True, stream_options={"include_usage": True}))
    *got, usage = chunks(response.text)
    deltas = [(c["modality"], c["choices"][0]) for c in got]
    text = "".join(c["delta"].get("content") or "" for kind, c in deltas if kind == "text")
    sound = [c["delta"].get("audio", {}).get("data", "") for kind, c in deltas if kind == "audio"]
    assert text == whole["content"]
    assert b"".join(map(base64.b64decode, sound)) == base64.b64decode(whole["audio"]["data"])
    assert {len({c["id"] for c in got}), len({c["created"] for c in got})} == {1}
    kinds = "".join(kind[0] for kind, _ in deltas)
    assert "ta" in kinds
    assert "at" in kinds  # sound begins before the text ends
    reasons = [c["finish_reason"] for _, c in deltas]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert next(c for kind, c in deltas if kind == "text")["delta"]["role"] == "assistant"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 21)
    frames = sum(c["audio_metadata"]["frame_count"] for kind, c in deltas if kind == "audio")
    assert frames == 14 * 1920 - 555


@pytest.mark.parametrize("stop", ["Uw", ["no such text", "Uw"]], ids=["one", "several"])
def test_a_stop_ends_text_and_sound(stop: Any, http: httpx2.Client) -> None:
    """Whole and streamed; no chunk holds a part of it."""
    fields = body("text_300", max_tokens=64, max_new_tokens=40)
    plain = ask(http, **fields)["choices"][0]["message"]["content"]
    expected = plain[: plain.index("Uw")]
    (choice,) = ask(http, **fields, stop=stop)["choices"]
    message = choice["message"]
    assert message["content"] == message["audio"]["transcript"] == expected
    *got, _ = chunks(http.post(CHAT, json={**fields, "stop": stop, "stream": True}).text)
    texts = [c["choices"][0]["delta"].get("content", "") for c in got if c["modality"] == "text"]
    assert "".join(texts) == expected
    ids, spell = golden("text_300")["text"].tolist(), http.engine.front_end.detokenize
    tokens = next(n for n in range(64) if spell(ids[: n + 2]) == expected + "Uw")
    cut = ask(http, **{**fields, "max_tokens": tokens})["choices"][0]["message"]
    assert (cut["content"], cut["audio"]["data"]) == (expected, message["audio"]["data"])


def test_text_alone(http: httpx2.Client) -> None:
    answer = ask(http, **body(modalities=["text"]))
    message = answer["choices"][0]["message"]
    assert (message["content"], "audio" in message) == (text_of(http, "text_7"), False)
    assert answer["usage"]["completion_tokens"] == 7
    got = chunks(http.post(CHAT, json=body(modalities=["text"], stream=True)).text)
    assert {c["modality"] for c in got} == {"text"}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in got) == text_of(http, "text_7")
    assert got[-1]["choices"][0]["finish_reason"] == "length"


def test_sound_alone_brings_its_transcript(http: httpx2.Client) -> None:
    message = ask(http, **body(modalities=["audio"]))["choices"][0]["message"]
    assert (message["content"], message["audio"]["transcript"]) == (None, text_of(http, "text_7"))
    got = chunks(http.post(CHAT, json=body(modalities=["audio"], stream=True)).text)
    assert {c["modality"] for c in got} == {"audio"}
    audio = [c["choices"][0]["delta"].get("audio", {}) for c in got]
    assert "".join(a.get("transcript", "") for a in audio) == text_of(http, "text_7")
    assert "".join(a.get("data", "") for a in audio)


def test_sound_may_be_in_the_content(http: httpx2.Client) -> None:
    got = chunks(http.post(CHAT, json=body(stream=True, audio_delta="content")).text)
    assert all("audio" not in c["choices"][0]["delta"] for c in got)
    sound = [c["choices"][0]["delta"].get("content", "") for c in got if c["modality"] == "audio"]
    assert len(b"".join(map(base64.b64decode, sound))) == 2 * (14 * 1920 - 555)


def test_usage_may_come_with_each_chunk(http: httpx2.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = chunks(http.post(CHAT, json=body(stream=True, stream_options=options)).text)
    made = [c["usage"]["completion_tokens"] for c in got]
    assert made == sorted(made)
    assert made[-1] == 21


def test_sdk(http: httpx2.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as sdk:
        wanted: dict[str, Any] = {
            "model": "tiny-omni",
            "modalities": ["text", "audio"],
            "audio": {"voice": "alloy", "format": "pcm16"},
            "messages": [{"role": "user", "content": "hello"}],
            "max_completion_tokens": 5,
            "extra_body": {"max_new_tokens": 6},
        }
        message = sdk.chat.completions.create(**wanted).choices[0].message
        assert message.content
        assert len(base64.b64decode(message.audio.data)) == 2 * (6 * 1920 - 555)
        data, text = b"", ""
        for chunk in sdk.chat.completions.create(**wanted, stream=True):
            delta = chunk.choices[0].delta
            audio = getattr(delta, "audio", None) or {}
            data += base64.b64decode(audio.get("data", "") if isinstance(audio, dict) else audio.data or "")
            text += delta.content or ""
        assert (text, len(data)) == (message.content, 2 * (6 * 1920 - 555))


def test_a_voice_is_chosen_by_name(http: httpx2.Client) -> None:
    sounds = set()
    for voice in ("Chelsie", "ethan", "aiden"):
        audio = {"format": "pcm16", "voice": voice}
        sounds.add(ask(http, **body("chelsie", audio=audio))["choices"][0]["message"]["audio"]["data"])
    assert len(sounds) == 3


def test_fields_without_a_meaning_are_named(http: httpx2.Client) -> None:
    response = http.post(CHAT, json=body("text_1", language="English", task_type="Base", ref_text="x"))
    assert response.status_code == 200, response.text
    assert response.headers["x-hocket-ignored"] == "language,task_type,ref_text"


def test_speech_route_speaks_an_answer(http: httpx2.Client) -> None:
    wanted = {
        "input": "Hello there",
        "response_format": "pcm",
        "seed": 1,
        "max_new_tokens": 5,
        "temperature": 0,
    }
    wanted["extra_params"] = {"max_tokens": 4}
    response = http.post("/v1/audio/speech", json=wanted)
    assert response.status_code == 200, response.text
    assert len(response.content) == 2 * (5 * 1920 - 555)


async def _held(engine: AsyncEngine) -> list[int]:
    """Slots, blocks and jobs by heartbeats that are younger than this call."""
    seats = list(engine.fleet.seats.values())
    before = {id(seat.status) for seat in seats}
    while any(seat.status is None or id(seat.status) in before for seat in seats):
        await asyncio.sleep(0.05)
    stages = [stage for seat in seats for stage in seat.status.stages]
    return [
        sum(s.slots_used for s in stages),
        sum(s.kv_blocks_used for s in stages),
        sum(seat.status.jobs for seat in seats),
        engine.status().running,
    ]


def test_who_leaves_frees_all_stages(http: httpx2.Client, listener: Any) -> None:
    endless = body(stream=True, max_tokens=4000, max_new_tokens=4000)
    with http.stream("POST", CHAT, json=endless) as response:
        seen = b""
        for piece in response.iter_bytes():
            seen += piece
            if b'"data":"' in seen and b'"modality":"text"' in seen:
                break
    while listener.run(_held(http.engine)) != [0, 0, 0, 0]:
        pass


@pytest.mark.parametrize("path", ["/v1/models", "/v1/audio/voices", "/ready", "/health", "/metrics", "/"])
def test_other_routes_know_the_family(path: str, http: httpx2.Client) -> None:
    response = http.get(path)
    assert response.status_code == 200, response.text
    if path == "/v1/audio/voices":
        assert "chelsie" in response.text


# --- media -------------------------------------------------------------------------------------


def url(kind: str, data: bytes) -> dict[str, Any]:
    return {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}


def float_wav(samples: np.ndarray, rate: int) -> bytes:
    content = samples.astype("<f4").tobytes()
    head = struct.pack(
        "<4sI4s4sIHHIIHH", b"RIFF", 36 + len(content), b"WAVE", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32
    )
    return head + struct.pack("<4sI", b"data", len(content)) + content


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def film(frames: np.ndarray, rate: int) -> bytes:
    """Without loss: RGB as it is."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        track = container.add_stream("libx264rgb", rate=rate, options={"qp": "0"})
        track.height, track.width = frames.shape[1:3]
        track.pix_fmt = "rgb24"
        for frame in frames:
            container.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(track.encode())
    return file.getvalue()


def drawn(name: str) -> dict[str, Any]:
    """The content part of each kind of medium, with what the case's oracle drew."""
    rng = np.random.default_rng(7)
    kinds = [p["type"] for m in CASES[name]["messages"] for p in m["content"]]
    parts: dict[str, Any] = {}
    if "audio" in kinds:
        wav = float_wav(rng.normal(0, 0.2, 17_600).astype(np.float32), 16000)
        parts["audio"] = {"type": "audio_url", "audio_url": url("audio/wav", wav)}
        bare = {"data": base64.b64encode(wav).decode(), "format": "wav"}
        parts["input_audio"] = {"type": "input_audio", "input_audio": bare}
    if "image" in kinds:
        picture = png(rng.integers(0, 256, (96, 64, 3), dtype=np.uint8))
        parts["image"] = {"type": "image_url", "image_url": url("image/png", picture)}
    if "video" in kinds:
        pictures = film(rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8), 1)
        parts["video"] = {"type": "video_url", "video_url": url("video/mp4", pictures)}
    return parts


@pytest.mark.parametrize(
    ("name", "instead"),
    [("audio", {}), ("audio", {"audio": "input_audio"}), ("image", {}), ("video", {}), ("mixed", {})],
    ids=["audio_url", "input_audio", "image_url", "video_url", "mixed"],
)
def test_media_are_heard_and_seen(name: str, instead: dict[str, str], http: httpx2.Client) -> None:
    made, parts = golden(name), drawn(name)
    (message,) = CASES[name]["messages"]
    content = [
        p if p["type"] == "text" else parts[instead.get(p["type"], p["type"])] for p in message["content"]
    ]
    answer = ask(http, **body(name, messages=[{"role": "user", "content": content}]))
    said = answer["choices"][0]["message"]
    assert said["content"] == text_of(http, name)
    np.testing.assert_allclose(pcm(said["audio"]["data"]) / 32768, made["wave"], rtol=0, atol=2 / 32768)
    assert answer["usage"]["prompt_tokens"] == len(made["prompt"])


def talking_film(seconds: int, *, sound: bool) -> bytes:
    """A film of two pictures a second, with a tone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        track = out.add_stream("libx264rgb", rate=2, options={"qp": "0"})
        track.height, track.width, track.pix_fmt = 64, 64, "rgb24"
        tone = out.add_stream("aac", rate=16000) if sound else None
        for i in range(2 * seconds):
            pixels = np.full((64, 64, 3), 20 * i, np.uint8)
            out.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(track.encode())
        if tone is not None:
            wave = np.sin(np.arange(16000 * seconds) / 20).astype(np.float32)[None]
            frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
            frame.sample_rate = 16000
            out.mux(tone.encode(frame))
            out.mux(tone.encode())
    return file.getvalue()


def test_films_may_be_heard_too(http: httpx2.Client) -> None:
    def answer(heard: bool) -> dict[str, Any]:
        content = [{"type": "video_url", "video_url": url("video/mp4", talking_film(2, sound=True))}]
        options = {"use_audio_in_video": heard}
        asked = body("text_1", messages=[{"role": "user", "content": content}], mm_processor_kwargs=options)
        return ask(http, **asked)["usage"]

    seen, both = answer(heard=False), answer(heard=True)
    assert seen["prompt_tokens_details"]["audio_tokens"] == 0
    assert 25 <= both["prompt_tokens_details"]["audio_tokens"] <= 28  # thirteen a second
    assert both["prompt_tokens"] > seen["prompt_tokens"] + 25


def test_a_silent_film_cannot_be_heard(http: httpx2.Client) -> None:
    content = [{"type": "video_url", "video_url": url("video/mp4", talking_film(1, sound=False))}]
    asked = body("text_1", messages=[{"role": "user", "content": content}])
    response = http.post(CHAT, json={**asked, "mm_processor_kwargs": {"use_audio_in_video": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.0.content.0.video_url"


def part(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields]}]


PNG, STRIP = (png(np.zeros(size, np.uint8)) for size in ((40, 40, 3), (2, 500, 3)))
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "unknown part": ({"messages": part(type="file")}, "messages.0.content.0.type", "unsupported_content"),
    "part without content": (
        {"messages": part(type="image_url")}, "messages.0.content.0.image_url", "invalid_value",
    ),
    "bare base64": (
        {"messages": part(type="image_url", image_url={"url": "AAAA"})},
        "messages.0.content.0.image_url", "bad_reference",
    ),
    "a picture as sound": (
        {"messages": part(type="audio_url", audio_url=url("image/png", PNG))},
        "messages.0.content.0.audio_url", "bad_reference",
    ),
    "not a picture": (
        {"messages": part(type="image_url", image_url=url("image/png", b"nothing"))},
        "messages.0.content.0.image_url", "bad_media",
    ),
    "not a film": (
        {"messages": part(type="video_url", video_url=url("video/mp4", b"nothing"))},
        "messages.0.content.0.video_url", "bad_media",
    ),
    "damaged sound": (
        {"messages": part(type="input_audio", input_audio={"data": "////", "format": "wav"})},
        "messages.0.content.0.input_audio.data", "bad_reference",
    ),
    "forbidden place": (
        {"messages": part(type="image_url", image_url="http://127.0.0.1/x.png")},
        "messages.0.content.0.image_url", "forbidden_source",
    ),
    "a strip": (
        {"messages": part(type="image_url", image_url=url("image/png", STRIP))},
        "messages.0.content.0", "invalid_value",
    ),
    "voice": ({"audio": {"voice": "nobody"}}, "audio.voice", "voice_not_found"),
    "two choices": ({"n": 2}, "n", "invalid_value"),
    "empty stop": ({"stop": ["a", ""]}, "stop.1", "invalid_value"),
    "many stops": ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    "stops of numbers": ({"stop": [1]}, "stop.0", "invalid_value"),
    "modality": ({"modalities": ["video"]}, "modalities.0", "invalid_value"),
    "too many tokens": ({"max_tokens": 100_000}, "max_tokens", "invalid_value"),
    "draws": ({"sampling_params_list": [{"top_p": 0}]}, "sampling_params_list.0.top_p", "invalid_value"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "code"), BAD.values(), ids=BAD)
def test_bad_chat(fields: Any, param: str, code: str, stream: bool, http: httpx2.Client) -> None:
    response = http.post(CHAT, json={**body("text_1"), "stream": stream, **fields})
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert 400 <= response.status_code < 500


# --- tools -------------------------------------------------------------------------------------

CALLS = """It is
<tool_call>
{"name": "sky", "arguments": {"of": "Ulm"}}
</tool_call>
<tool_call>x</tool_call> < end <tool"""


def parsed(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    tools, text, calls = ToolCalls(True), "", []
    for at, piece in enumerate(pieces):
        more, new = tools.add(piece, last=at == len(pieces) - 1)
        text += more
        calls += [(call["function"]["name"], call["function"]["arguments"]) for call in new]
    return text, calls


@given(st.lists(st.integers(1, 30), max_size=20))
def test_calls_of_tools_are_found_wherever_text_is_cut(sizes: list[int]) -> None:
    pieces, rest = [], CALLS
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert parsed([*pieces, rest]) == parsed([CALLS])
    text, calls = parsed([CALLS])
    assert calls == [("sky", '{"of": "Ulm"}')]
    assert text == "It is\n<tool_call>x</tool_call> < end <tool"


def test_without_tools_all_is_text() -> None:
    assert ToolCalls(False).add(CALLS, last=False) == (CALLS, [])


@pytest.mark.parametrize(
    ("inside", "text", "wanted"),
    [
        (True, "So. </thin no.</think>\n\nYes.", ("So. </thin no.", "Yes.")),
        (False, "<think>So.</think>Yes.", ("So.", "Yes.")),
        (False, " <thin air", ("", " <thin air")),
        (False, "Yes.", ("", "Yes.")),
        (True, "cut in the middle </th", ("cut in the middle </th", "")),
        (False, "", ("", "")),
    ],
    ids=["opened by the prompt", "marked", "no thoughts", "plain", "cut", "empty"],
)
@given(sizes=st.lists(st.integers(1, 9), max_size=20))
def test_thoughts_are_apart_wherever_text_is_cut(
    inside: bool, text: str, wanted: tuple[str, str], sizes: list[int]
) -> None:
    thoughts, thought, said, rest = Thoughts(inside), "", "", text
    for size in [*sizes, len(text)]:
        piece, rest = rest[:size], rest[size:]
        parts = thoughts.add(piece, last=not rest)
        thought, said = thought + parts[0], said + parts[1]
        if not rest:
            break
    assert (thought, said) == wanted
