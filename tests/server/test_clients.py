"""Clients that were written for other servers, unchanged. Those that are not installed are skipped.

OpenAI's client for Python has a file of its own, test_sdk.py.
"""

from __future__ import annotations

import base64
import gc
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from websockets.sync.client import connect

from hocket.audio.wav import to_s16, wav_header

JS = Path(__file__).parent / "js"
SAMPLES = 10 * 1920


def clip(seconds: float = 2) -> bytes:
    samples = (0.3 * np.sin(np.arange(int(16000 * seconds)) / 20)).astype(np.float32)
    return wav_header(16000, len(samples)) + to_s16(samples).tobytes()


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# --- OpenAI ------------------------------------------------------------------------------------


def test_openai_python_stores_a_voice(serve: Callable[..., Any], engine: Any, tmp_path: Path) -> None:
    running = serve(voices_dir=tmp_path, api_keys=("key",))
    with openai.OpenAI(base_url=running.url + "/v1", api_key="key", max_retries=0) as sdk:
        sample = ("clip.wav", clip(), "audio/wav")
        voice = sdk.audio.voices.create(audio_sample=sample, consent="cons_1", name="anna")
        assert (voice.id, voice.name, voice.object) == ("anna", "anna", "audio.voice")
        assert voice.created_at > 0
        said = sdk.audio.speech.create(
            model="tts-1", voice={"id": voice.id}, input="hi", response_format="pcm"
        )
        assert len(said.content) == 2 * SAMPLES
        assert engine.requests[0].reference is not None
        with pytest.raises(openai.BadRequestError) as bad:
            sdk.audio.voices.create(audio_sample=sample, consent="cons_1", name="ada")
        assert bad.value.code == "voice_reserved"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.skipif(
    not (JS / "node_modules" / "openai").is_dir(), reason="needs: npm --prefix tests/server/js install"
)
def test_openai_javascript(serve: Callable[..., Any], tmp_path: Path) -> None:
    running = serve(voices_dir=tmp_path, api_keys=("key",))
    ran = subprocess.run(
        ["node", str(JS / "speak.mjs"), running.url, "key"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.pop("mp3") > 5000
    assert found.pop("chunks") > 1
    assert found == {
        "type": "audio/mpeg",
        "pcm": 2 * SAMPLES,
        "last": "speech.audio.done",
        "sse": 2 * SAMPLES,
        "models": ["fake-tts"],
        "chat": 2 * SAMPLES,
        "voice": ["anna", "audio.voice", "anna"],
        "cloned": 2 * SAMPLES,
        "error": ["BadRequestError", 400, "voice_not_found", "voice"],
    }


# --- LiveKit and Pipecat -----------------------------------------------------------------------

foreign = pytest.mark.filterwarnings("ignore")  # their warnings are not ours


@pytest.fixture
def swept() -> Iterator[None]:
    """Sockets that a client leaves open are collected while warnings about them are ignored."""
    yield
    gc.collect()


@foreign
@pytest.mark.skipif(not installed("livekit.plugins.openai"), reason="needs livekit-plugins-openai")
@pytest.mark.parametrize(
    "options", [{}, {"model": "tts-1"}, {"response_format": "pcm"}, {"response_format": "wav", "speed": 2}],
    ids=str,
)  # fmt: skip
async def test_livekit(serve: Callable[..., Any], swept: None, options: dict[str, Any]) -> None:
    from livekit.plugins.openai import TTS

    running = serve()
    tts = TTS(base_url=running.url + "/v1", api_key="key", **options)
    samples = 0
    async with tts.synthesize("Hello there.") as stream:
        async for event in stream:
            assert (event.frame.sample_rate, event.frame.num_channels) == (24000, 1)
            samples += event.frame.samples_per_channel
    await tts.aclose()
    expected = SAMPLES / options.get("speed", 1)
    assert expected <= samples <= expected + 1920


@foreign
@pytest.mark.skipif(not installed("pipecat"), reason="needs pipecat-ai")
async def test_pipecat(serve: Callable[..., Any], swept: None, engine: Any) -> None:
    from pipecat.frames.frames import TTSAudioRawFrame, TTSSpeakFrame
    from pipecat.services.openai.tts import OpenAITTSService
    from pipecat.tests.utils import SleepFrame, run_test

    running = serve()
    service = OpenAITTSService(api_key="key", base_url=running.url + "/v1")
    frames = [TTSSpeakFrame("Hello there."), SleepFrame(sleep=2.0)]
    down, _ = await run_test(service, frames_to_send=frames)
    heard = [frame for frame in down if isinstance(frame, TTSAudioRawFrame)]
    assert {(frame.sample_rate, frame.num_channels) for frame in heard} == {(24000, 1)}
    assert SAMPLES <= sum(len(frame.audio) // 2 for frame in heard) <= SAMPLES + 24000
    assert engine.requests[0].text.startswith("Hello there.")


# --- Open WebUI --------------------------------------------------------------------------------


def test_open_webui(serve: Callable[..., Any], engine: Any, tmp_path: Path) -> None:
    """Its calls as of 0.12.4, routers/audio.py: listings without a key, then a body with three fields."""
    running = serve(voices_dir=tmp_path, api_keys=("key",), public_listings=True)
    models = httpx2.get(f"{running.url}/v1/audio/models").json()
    assert [model["id"] for model in models["models"]] == ["fake-tts"]
    voices = httpx2.get(f"{running.url}/v1/audio/voices").json()
    names = {voice["id"]: voice["name"] for voice in voices["voices"]}
    assert names == {"ada": "Ada", "lin": "Lin", "nova": "Nova"}
    key = {"Authorization": "Bearer key", "X-OpenWebUI-User-Name": "a"}
    body = {"input": "hello", "model": "tts-1", "voice": "alloy"}
    said = httpx2.post(f"{running.url}/v1/audio/speech", json=body, headers=key)
    assert (said.status_code, said.headers["content-type"]) == (200, "audio/mpeg")
    error = httpx2.post(f"{running.url}/v1/audio/speech", json={**body, "voice": "x"}, headers=key).json()
    assert isinstance(error["error"]["message"], str)


def test_open_webui_realtime(serve: Callable[..., Any]) -> None:
    """Its realtime engine: update the session, speak one text, read until done."""
    running = serve(api_keys=("key",))
    url = running.url.replace("http", "ws") + "/v1/realtime?model=tts-1"
    with connect(url, additional_headers={"Authorization": "Bearer key"}) as socket:
        output = {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "alloy"}
        session = {"type": "realtime", "output_modalities": ["audio"], "audio": {"output": output}}
        socket.send(json.dumps({"type": "session.update", "session": session}))
        content = [{"type": "input_text", "text": "hello"}]
        response = {
            "conversation": "none",
            "input": [{"type": "message", "role": "user", "content": content}],
        }
        socket.send(json.dumps({"type": "response.create", "response": response}))
        data = b""
        while (event := json.loads(socket.recv(20)))["type"] != "response.done":
            if event["type"] == "response.output_audio.delta":
                data += base64.b64decode(event["delta"])
        assert event["response"]["status"] == "completed"
        assert len(data) == 2 * SAMPLES
