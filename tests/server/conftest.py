"""A fake engine with the interface of `hocket.engine.client.AsyncEngine`, and a server around it.

The fake says a sine for every text, ten frames long, and can be told to wait, to fail or to refuse. What it
gave must have been closed by the end of a test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from hocket.core import ModelInfo, SpeechRequest, Voice
from hocket.engine.messages import StageStatus
from hocket.errors import Cancelled, InvalidRequest, Overloaded, clip
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings
from tests.listener import Listener

T = TypeVar("T")

WAIT_S = 20  # for what happens at once
RATE_HZ = 24000
HOP = 1920

INFO = ModelInfo(
    family="fake",
    sample_rate_hz=RATE_HZ,
    frame_rate_hz=12.5,
    codebooks=16,
    tasks=("CustomVoice",),
    languages=("Auto", "English"),
    voices=(Voice("ada", "Ada", ("English",)), Voice("lin", "Lin", ("Chinese",)), Voice("nova", "Nova")),
    default_voice="ada",
    max_frames=4096,
    clones=True,
    instructions=True,
    streams_text=True,
)


@dataclass
class Audio:
    samples: np.ndarray
    index: int
    last: bool
    finish_reason: str = ""


@dataclass
class Usage:
    text_tokens: int = 0
    audio_tokens: int = 0
    frames: int = 0


@dataclass
class Status:
    ready: bool = True
    healthy: bool = True
    reason: str | None = None
    stages: dict[str, list[StageStatus]] = field(
        default_factory=lambda: {"talker": [StageStatus(stage="talker", slots_total=4)]}
    )
    workers: dict[str, str] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    restarts: int = 0
    overhead_seconds: float = 0.0
    transfers: dict[str, Any] = field(default_factory=dict)


def sine(frames: int, frequency: float = 220.0) -> np.ndarray:
    t = np.arange(frames * HOP) / RATE_HZ
    return (0.4 * np.sin(2 * np.pi * frequency * t)).astype(np.float32)


class FakeFrontEnd:
    """A token is a character."""

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids if i < 0x110000)


class FakeStream:
    def __init__(self, engine: FakeEngine, request: SpeechRequest) -> None:
        self.engine = engine
        self.id = request.request_id
        self.seed = 7 if request.seed is None else request.seed
        self.sample_rate_hz = RATE_HZ
        self.finish_reason: str | None = None
        self.usage = Usage(text_tokens=len(request.text), audio_tokens=0)
        self.made = 0
        self.aborted = False
        self.over = False
        self.texts: list[str] = [request.text]
        self.text_open = False
        self.wake = asyncio.Event()
        self.samples = engine.samples if engine.samples is not None else sine(engine.frames)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Audio:
        engine = self.engine
        while self.made == engine.hold_at and not self.aborted:
            engine.held.set()
            self.wake.clear()
            await self.wake.wait()
        while self.text_open and self.made >= sum(len(text.split()) for text in self.texts):
            self.wake.clear()  # a frame for each word
            await self.wake.wait()
        if self.aborted:
            raise Cancelled("the request was cancelled")
        if self.made == engine.fail_at:
            assert engine.error is not None
            raise engine.error
        if self.finish_reason is not None:
            raise StopAsyncIteration
        start = self.made * HOP
        self.made += 1
        self.usage.frames = self.made
        last = self.made * HOP >= len(self.samples)
        if last:
            self.finish_reason = engine.finish_reasons.pop(0) if engine.finish_reasons else "stop"
        return Audio(self.samples[start : start + HOP], self.made - 1, last, self.finish_reason or "")

    async def add_text(self, text: str) -> None:
        self.texts.append(text)
        self.wake.set()

    async def close_text(self) -> None:
        self.text_open = False
        self.wake.set()

    async def aclose(self) -> None:
        self.over = True
        self.engine.open.pop(self.id, None)
        if not self.engine.open:
            self.engine.idle.set()


class FakeEngine:
    """Set an attribute to change what the next requests meet."""

    def __init__(self) -> None:
        self.info = INFO
        self.front_end = FakeFrontEnd()
        self.state = Status()
        self.frames = 10
        self.samples: np.ndarray | None = None  # instead of the sine
        self.hold_at = -1  # the frame before which every stream waits for `release`
        self.fail_at = -1  # the frame before which every stream raises `error`
        self.error: Exception | None = None
        self.refusal: Exception | None = None  # raised by submit
        self.finish_reasons: list[str] = []  # of the next streams, then "stop"
        self.requests: list[SpeechRequest] = []
        self.open: dict[str, FakeStream] = {}
        self.held = threading.Event()  # a stream has come to `hold_at`
        self.idle = threading.Event()  # every stream has been closed
        self.idle.set()
        self.loop: asyncio.AbstractEventLoop | None = None

    def status(self) -> Status:
        self.state.running = len(self.open)
        return self.state

    def check_room(self) -> None:
        if isinstance(self.refusal, Overloaded):
            raise self.refusal

    async def submit(self, request: SpeechRequest) -> FakeStream:
        self.loop = asyncio.get_running_loop()
        if self.refusal is not None:
            raise self.refusal
        if request.extra:
            name = clip(next(iter(request.extra)))
            raise InvalidRequest(f"extra_params.{name} is not known", param=f"extra_params.{name}")
        assert request.request_id not in self.open
        self.requests.append(request)
        self.idle.clear()
        stream = FakeStream(self, request)
        self.open[request.request_id] = stream
        return stream

    async def submit_live(self, request: SpeechRequest) -> FakeStream:
        if " " not in request.text.strip(" ") + request.text[-1:]:
            raise InvalidRequest("not a whole word", param="input", code="empty_input")
        stream = await self.submit(request)
        stream.text_open = True
        return stream

    async def close(self) -> None:
        self.state.ready = False

    async def start(self) -> None:
        self.state.ready = True

    async def abort(self, request_id: str) -> bool:
        stream = self.open.get(request_id)
        if stream is None:
            return False
        stream.aborted = True
        stream.wake.set()
        return True

    def release(self) -> None:
        """Let all streams go on. May be called from any thread."""
        self.hold_at = -1
        for stream in list(self.open.values()):
            assert self.loop is not None
            self.loop.call_soon_threadsafe(stream.wake.set)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    assert not engine.open, "a stream was left open"


@pytest.fixture
def app(engine: FakeEngine) -> Callable[..., FastAPI]:
    def make(**settings: object) -> FastAPI:
        return create_app(engine, ServerSettings(model="org/fake-tts", **settings))

    return make


@pytest.fixture
def client(app: Callable[..., FastAPI]) -> TestClient:
    """Talks to the application without a socket."""
    return TestClient(app())


@dataclass
class Running:
    """An application behind a socket, and a client for it."""

    url: str
    app: FastAPI
    http: httpx2.Client


@pytest.fixture(scope="session")
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.stop()


@pytest.fixture
def serve(
    app: Callable[..., FastAPI], engine: FakeEngine, listener: Listener
) -> Iterator[Callable[..., Running]]:
    """Puts the application behind a socket; takes server settings."""
    clients = []

    def start(**settings: object) -> Running:
        listener.app = app(**settings)
        clients.append(httpx2.Client(base_url=listener.url, timeout=WAIT_S))
        return Running(listener.url, listener.app, clients[-1])

    yield start
    for client in clients:
        client.close()
    engine.release()
    assert engine.idle.wait(WAIT_S)
