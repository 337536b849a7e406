"""The server around the real engine and a tiny model: the SDK, a cloned voice, who leaves and who dies."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import psutil
import pytest
from websockets.sync.client import connect

from hocket.audio.decode import decode
from hocket.engine.client import AsyncEngine
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings

SPEECH = "/v1/audio/speech"
DATA = Path(__file__).parents[1] / "data"
FORMATS = ["mp3", "opus", "aac", "flac", "wav", "pcm"]
FRAMES = 6
WANTED = {"input": "Good morning.", "seed": 1, "max_new_tokens": FRAMES + 1}
WAIT_S = 60


@contextmanager
def served(
    listener: Any, folder: Path, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[httpx2.Client]:
    """A client of a server with an engine of its own."""
    engine = AsyncEngine(folder, **options)
    listener.run(engine.start())
    listener.app = create_app(engine, ServerSettings(model="tiny", **(settings or {})))
    with httpx2.Client(base_url=listener.url, timeout=WAIT_S) as http:
        http.engine = engine
        yield http
    listener.run(engine.close())


@pytest.fixture(scope="module")
def http(listener: Any, checkpoint: Callable[..., Path]) -> Iterator[httpx2.Client]:
    with served(listener, checkpoint(variant="custom_voice", never_ends=True), processes=False) as http:
        yield http


@pytest.fixture(scope="module")
def sdk(http: httpx2.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("file_format", FORMATS)
def test_sdk_speaks_streamed_and_whole(sdk: openai.OpenAI, file_format: str) -> None:
    wanted = {
        "model": "gpt-4o-mini-tts",
        "voice": "alloy",
        "input": WANTED["input"],
        "response_format": file_format,
        "extra_body": {"seed": 1, "max_new_tokens": FRAMES + 1},
    }
    with sdk.audio.speech.with_streaming_response.create(**wanted) as response:
        streamed = b"".join(response.iter_bytes())
    whole = sdk.audio.speech.create(**wanted).content
    least, rate, frame = FRAMES * 1920, 24000, {"mp3": 1152, "aac": 1024}.get(file_format, 0)
    for data in (streamed, whole):
        if file_format == "pcm":
            samples = len(data) // 2
        else:
            sound, rate = decode(data, param="answer")
            samples = len(sound)
        assert least * rate // 24000 <= samples <= least * rate // 24000 + 3 * frame


def test_three_modes_give_the_same_sound(http: httpx2.Client) -> None:
    body = {**WANTED, "response_format": "pcm"}
    raw = http.post(SPEECH, json=body).content
    whole = http.post(SPEECH, json={**body, "stream": False}).content
    events = http.post(SPEECH, json={**body, "stream_format": "sse"}).text
    deltas = [
        line[6:] for line in events.split("\n") if line.startswith('data: {"type":"speech.audio.delta"')
    ]
    joined = b"".join(base64.b64decode(msgspec.json.decode(delta)["audio"]) for delta in deltas)
    assert len(raw) == 2 * 1920 * FRAMES
    assert whole == raw
    assert joined == raw


def test_outcome_and_counts(http: httpx2.Client) -> None:
    response = http.post(SPEECH, json={**WANTED, "request_id": "counted", "stream": False})
    assert response.headers["x-output-tokens"] == str(FRAMES)
    assert response.headers["x-finish-reason"] == "length"
    outcome = http.get(f"{SPEECH}/counted").json()
    assert outcome["usage"]["output_tokens"] == FRAMES
    assert outcome["audio_seconds"] == pytest.approx(FRAMES / 12.5)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"voice": "nobody"}, "voice", "voice_not_found"),
        ({"language": "Klingon"}, "language", "language_not_found"),
        ({"task_type": "Base"}, "task_type", "unsupported_task"),
        ({"task_type": "Other"}, "task_type", "invalid_value"),
        ({"speaker_embedding": [0.0]}, "speaker_embedding", "unsupported_task"),
        ({"extra_params": {"emo_alpha": 1}}, "extra_params.emo_alpha", "invalid_value"),
        ({"max_new_tokens": 100_000}, "max_new_tokens", "invalid_value"),
    ],
)
def test_what_the_model_cannot_do_is_400(
    http: httpx2.Client, fields: dict[str, Any], param: str, code: str
) -> None:
    response = http.post(SPEECH, json={**WANTED, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)


def test_leaving_client_frees_its_slot(http: httpx2.Client) -> None:
    body = {"input": "Good morning.", "response_format": "pcm", "max_new_tokens": 3000}
    with http.stream("POST", SPEECH, json=body) as response:
        pieces = response.iter_raw()  # kept: an iterator that is dropped closes the connection
        next(pieces)
        assert http.engine.status().running == 1
    settle(lambda: http.engine.status().running == 0 and slots(http) == 0)


def slots(http: httpx2.Client) -> int:
    return sum(stage.slots_used for stages in http.engine.status().stages.values() for stage in stages)


def settle(done: Callable[[], bool]) -> None:
    """Wait for what has no event to wait for: another process's heartbeat."""
    ticks = threading.Event()
    for _ in range(20 * WAIT_S):
        if done():
            return
        ticks.wait(0.05)
    raise AssertionError("it did not come to rest")


def test_sleep_frees_the_workers_and_wake_brings_them_back(http: httpx2.Client) -> None:
    assert http.post("/admin/sleep").json() == {"status": "asleep", "level": 1}
    assert http.engine.fleet is None
    assert (http.get("/ready").status_code, http.get("/ready").json()["status"]) == (503, "asleep")
    assert http.post(SPEECH, json=WANTED).json()["error"]["code"] == "asleep"
    assert http.post("/admin/wake").json() == {"status": "ready"}
    assert http.post(SPEECH, json=WANTED).status_code == 200


def test_profile_is_written(http: httpx2.Client) -> None:
    assert http.post("/admin/profile/stop").json()["error"]["code"] == "profile_not_running"
    assert http.post("/admin/profile/start").json() == {"status": "recording"}
    assert http.post("/admin/profile/start").json()["error"]["code"] == "profile_running"
    assert http.post(SPEECH, json=WANTED).status_code == 200
    written = http.post("/admin/profile/stop").json()
    try:
        (file,) = written["files"]
        names = {event.get("name") for event in json.loads(Path(file).read_bytes())["traceEvents"]}
        assert any(name and name.startswith("aten::") for name in names)
    finally:
        shutil.rmtree(written["path"])
    assert http.post(SPEECH, json=WANTED).status_code == 200


def test_tokens_there_and_back(http: httpx2.Client) -> None:
    text = "Good morning, 你好!"
    got = http.post("/tokenize", json={"prompt": text}).json()
    assert got["count"] == len(got["tokens"]) > 1
    assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": [2_000_000_000]}).status_code == 200


def test_batch_chat_and_socket(http: httpx2.Client) -> None:
    short = {"max_new_tokens": FRAMES + 1, "seed": 1}
    batch = http.post(
        f"{SPEECH}/batch", json={"items": [{"input": f"Number {n}."} for n in range(9)], **short}
    )
    assert batch.json()["succeeded"] == 9, batch.text
    chat = {"messages": [{"role": "user", "content": "Hello."}], "audio": {"format": "pcm16"}, **short}
    data = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["audio"]["data"]
    assert len(base64.b64decode(data)) == 2 * 1920 * FRAMES
    settle(lambda: slots(http) == 0)


# --- text that is being written ----------------------------------------------------------------


def spoken(http: httpx2.Client, pieces: list[str], **config: Any) -> bytes:
    """The PCM of one utterance over the WebSocket."""
    url = str(http.base_url).replace("http", "ws").rstrip("/")
    with connect(f"{url}{SPEECH}/stream") as socket:
        fields = {
            "stream_audio": True,
            "temperature": 0,
            "seed": 1,
            "max_new_tokens": 40,
            "non_streaming_mode": False,
        }
        socket.send(json.dumps({"type": "session.config", **fields, **config}))
        for piece in pieces:
            socket.send(json.dumps({"type": "input.text", "text": piece}))
        socket.send('{"type":"input.done"}')
        data = b""
        while True:
            message = socket.recv(WAIT_S)
            if isinstance(message, bytes):
                data += message
            elif json.loads(message)["type"] == "session.done":
                return data
            else:
                assert json.loads(message)["type"] != "error", message


def test_live_text_sounds_as_text_at_once(http: httpx2.Client) -> None:
    words = ["Each ", "voice ", "fills ", "the ", "rests ", "of ", "the ", "others."]
    whole = spoken(http, ["".join(words)])
    live = spoken(http, words, split_granularity="live")
    letters = spoken(http, list("".join(words)), split_granularity="live")
    assert len(whole) == 2 * 1920 * 39
    assert live == whole
    assert letters == whole


@pytest.mark.parametrize("granularity", ["none", "sentence", "live"])
def test_cancel_frees_everything(http: httpx2.Client, granularity: str) -> None:
    url = str(http.base_url).replace("http", "ws").rstrip("/")
    with connect(f"{url}{SPEECH}/stream") as socket:
        config = {"split_granularity": granularity, "stream_audio": True, "max_new_tokens": 3000}
        socket.send(json.dumps({"type": "session.config", **config}))
        socket.send('{"type":"input.text","text":"Good morning to you. And to you. And you. "}')
        if granularity == "none":
            socket.send('{"type":"input.done"}')
        while not isinstance(socket.recv(WAIT_S), bytes):
            pass
        socket.send('{"type":"input.cancel"}')
        while True:
            message = socket.recv(WAIT_S)
            if not isinstance(message, bytes) and json.loads(message)["type"] == "session.done":
                break
        settle(lambda: http.engine.status().running == 0 and slots(http) == 0)


# --- voices ------------------------------------------------------------------------------------


def test_uploaded_voice_is_the_voice_that_was_sent_and_is_encoded_once(
    listener: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    clip = (DATA / "weasels.wav").read_bytes()
    said = "Weasels have eaten our phone system."
    with served(listener, checkpoint(variant="base"), {"voices_dir": tmp_path}, processes=False) as http:
        files = {"audio_sample": ("weasels.wav", clip)}
        form = {"name": "weasel", "consent": "c-1", "ref_text": said}
        assert http.post("/v1/audio/voices", data=form, files=files).status_code == 200
        body = {**WANTED, "response_format": "pcm"}
        stored = [http.post(SPEECH, json={**body, "voice": "weasel"}).content for _ in range(2)]
        url = "data:audio/wav;base64," + base64.b64encode(clip).decode()
        sent = http.post(SPEECH, json={**body, "ref_audio": url, "ref_text": said}).content
        assert len(sent) == 2 * 1920 * FRAMES
        assert stored == [sent, sent]

        def hits() -> int:
            return sum(s.cache_hits for s in http.engine.status().stages.get("reference", []))

        settle(lambda: hits() == 2)
        width = http.engine.front_end.config.talker_config.hidden_size
        form = {"name": "vector", "consent": "c-1", "speaker_embedding": json.dumps([0.01] * width)}
        assert http.post("/v1/audio/voices", data=form, files={"x": b""}).status_code == 200
        assert http.post(SPEECH, json={**body, "voice": "vector"}).status_code == 200
        form |= {"name": "short", "speaker_embedding": "[1, 2]"}
        assert http.post("/v1/audio/voices", data=form, files={"x": b""}).status_code == 200
        wrong = http.post(SPEECH, json={**body, "voice": "short"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "speaker_embedding")


def test_cloned_voice(listener: Any, checkpoint: Callable[..., Path]) -> None:
    url = "data:audio/wav;base64," + base64.b64encode((DATA / "weasels.wav").read_bytes()).decode()
    with served(listener, checkpoint(variant="base"), processes=False) as http:
        said = "Weasels have eaten our phone system."
        body = {**WANTED, "ref_audio": url, "ref_text": said, "response_format": "pcm", "stream": False}
        response = http.post(SPEECH, json=body)
        assert response.status_code == 200, response.text
        assert int(response.headers["x-input-audio-tokens"]) == 37  # 2.95 s at 12.5 Hz
        pcm = np.frombuffer(response.content, "<i2")
        assert len(pcm) == 1920 * FRAMES
        missing = http.post(SPEECH, json={**WANTED, "ref_audio": url})
        assert missing.json()["error"]["code"] == "ref_text_required"


def test_killed_worker_is_one_clear_error_and_then_a_new_worker(
    listener: Any, checkpoint: Callable[..., Path]
) -> None:
    with served(listener, checkpoint(variant="custom_voice", never_ends=True), processes=True) as http:
        (worker,) = [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]
        body = {"input": "Good morning.", "response_format": "pcm", "max_new_tokens": 3000}
        with http.stream("POST", SPEECH, json={**body, "stream_format": "sse"}) as response:
            text = response.iter_text()
            next(text)
            worker.kill()
            assert '"code":"worker_died","partial_audio":true' in "".join(text)
        assert http.get("/health").status_code == 503
        refused = http.post(SPEECH, json=WANTED)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        settle(lambda: http.get("/ready").status_code == 200)
        assert http.post(SPEECH, json=WANTED).status_code == 200
        assert http.get("/health").json() == {"status": "healthy"}
