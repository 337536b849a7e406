"""A model without codes behind the whole server: 48 kHz, every way to give a voice, its own options."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from hocket.audio.decode import decode
from hocket.engine.client import AsyncEngine
from hocket.models.voxcpm.synthetic import model_config, write_checkpoint, write_lora
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings

SPEECH = "/v1/audio/speech"
CLIP = Path(__file__).parents[1] / "data" / "weasels.wav"  # 2.95 s
SAID = "Weasels have eaten our phone system."
PATCHES, HOP = 5, 7680
BODY = {"input": "Over there.", "seed": 1, "max_new_tokens": PATCHES, "response_format": "pcm"}


@pytest.fixture(scope="module")
def http(listener: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = write_checkpoint(tmp_path_factory.mktemp("voxcpm") / "model", never_ends=True)
    write_lora(folder / "lora" / "calm", model_config("tiny"))
    engine = AsyncEngine(folder, processes=False)
    listener.run(engine.start())
    listener.app = create_app(
        engine,
        ServerSettings(model="tiny", pcm_native_rate=True, voices_dir=tmp_path_factory.mktemp("voices")),
    )
    with httpx2.Client(base_url=listener.url, timeout=60) as http:
        http.engine = engine
        yield http
    listener.run(engine.close())


def speak(http: httpx2.Client, **fields: Any) -> np.ndarray:
    response = http.post(SPEECH, json=BODY | fields)
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2").astype(int)


def clip() -> str:
    return "data:audio/wav;base64," + base64.b64encode(CLIP.read_bytes()).decode()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal but for the last bit: the vocoder's chunks follow the clock, and so does the order of a sum."""
    return len(a) == len(b) and np.abs(a - b).max() <= 1


def test_speech_is_48_khz_and_as_long_as_its_patches(http: httpx2.Client) -> None:
    assert len(speak(http)) == PATCHES * HOP
    response = http.post(SPEECH, json=BODY | {"response_format": "wav"})
    sound, rate = decode(response.content, param="answer")
    assert (len(sound), rate) == (PATCHES * HOP, 48000)
    assert response.headers["x-output-tokens"] == str(PATCHES)
    assert response.headers["x-finish-reason"] == "length"


def test_streamed_is_the_whole(http: httpx2.Client) -> None:
    assert same(speak(http), speak(http, stream=False))


def test_every_way_to_give_a_voice_sounds_different(http: httpx2.Client) -> None:
    recording = {"ref_audio": clip()}
    ways = {
        "none": {},
        "described": {"instructions": "a low voice"},
        "reference": recording,
        "continued": recording | {"ref_text": SAID},
        "both": recording | {"ref_text": SAID, "extra_params": {"clone_mode": "both"}},
        "lora": {"extra_params": {"lora": "calm"}},
        "guidance": {"extra_params": {"cfg_value": 1.0}},
        "steps": {"extra_params": {"inference_timesteps": 4}},
    }
    sounds = {name: speak(http, **fields) for name, fields in ways.items()}
    for name, sound in sounds.items():
        assert len(sound) == PATCHES * HOP, name
        assert [other for other in sounds if same(sound, sounds[other])] == [name]


def test_recording_counts_in_patches(http: httpx2.Client) -> None:
    body = BODY | {"ref_audio": clip(), "ref_text": SAID, "stream": False}
    assert (
        http.post(SPEECH, json=body).headers["x-input-audio-tokens"] == "19"
    )  # 2.95 s at 6.25 Hz, begun ones too


def test_uploaded_voice_is_the_voice_that_was_sent(http: httpx2.Client) -> None:
    form = {"name": "weasel", "consent": "c-1", "ref_text": SAID}
    files = {"audio_sample": ("weasels.wav", CLIP.read_bytes())}
    assert http.post("/v1/audio/voices", data=form, files=files).status_code == 200
    assert same(speak(http, voice="weasel"), speak(http, ref_audio=clip(), ref_text=SAID))


def test_many_at_once_sound_as_alone(http: httpx2.Client) -> None:
    items = [{"input": f"Number {n}.", "seed": n} for n in range(6)]
    fields = {"max_new_tokens": PATCHES, "response_format": "pcm"}
    batch = http.post(f"{SPEECH}/batch", json={"items": items} | fields).json()
    assert batch["succeeded"] == len(items)
    for item, result in zip(items, batch["results"], strict=True):
        alone = speak(http, **item)
        assert same(np.frombuffer(base64.b64decode(result["audio_data"]), "<i2").astype(int), alone)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_params": {"cfg_value": 99}}, "extra_params.cfg_value"),
        ({"extra_params": {"lora": "other"}}, "extra_params.lora"),
        ({"language": "Klingon"}, "language"),
        ({"voice": "nobody"}, "voice"),
        ({"top_k": 5}, "top_k"),
        ({"input": "word " * 400, "max_new_tokens": 500}, "input"),
    ],
)
def test_what_the_model_cannot_do_is_400(http: httpx2.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post(SPEECH, json=BODY | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
