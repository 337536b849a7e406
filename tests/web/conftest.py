"""A browser, and servers of tiny models for it.

The browser is Debian's Chromium without a window, driven by Selenium. What the page gives to Web Audio is
recorded on its way there, and its clock can be stopped: while it stands, no sound can come too late, however
slow the machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import numpy as np
import pytest

from hocket.engine.client import AsyncEngine
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings
from tests.listener import Listener

T = TypeVar("T")

WAIT_S = 60  # for anything at all to happen on a slow and busy machine
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
)  # fmt: skip

# Runs before the page's own scripts. `sources` is all that was scheduled, in order.
HOOKS = """
window.sources = [];
window.stopped = sessionStorage.getItem("test.stopped") !== null;  // the clock of sound
const contexts = [];
const Original = window.AudioContext;
window.AudioContext = class extends Original {
  constructor(options) {
    super(options);
    contexts.push(this);
    if (window.stopped) super.suspend();
  }
  resume() { return window.stopped ? Promise.resolve() : super.resume(); }
};
window.goOn = () => { window.stopped = false; for (const context of contexts) context.resume(); };
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (when) {
  const pcm = Array.from(this.buffer.getChannelData(0), (x) => x * 32768);
  window.sources.push({ when, rate: this.context.sampleRate, own: this.buffer.sampleRate, pcm });
  return start.call(this, when);
};
"""


@dataclass
class Site:
    """A server with a model behind it."""

    listener: Listener
    engine: AsyncEngine
    http: httpx2.Client
    folder: Path

    @property
    def url(self) -> str:
        return self.listener.url

    @property
    def serving(self) -> Any:
        return self.listener.app.state.serving

    def serve(self, **settings: Any) -> Site:
        self.listener.app = create_app(self.engine, ServerSettings(model="tiny", **settings))
        return self

    def pcm(self, **body: Any) -> np.ndarray:
        """What the API answers."""
        answer = self.http.post("/v1/audio/speech", json={"response_format": "pcm", **body})
        assert answer.status_code == 200, answer.text
        return np.frombuffer(answer.content, "<i2")


def _site(folder: Path) -> Iterator[Site]:
    listener = Listener()
    engine = AsyncEngine(folder, processes=False)
    listener.run(engine.start())
    with httpx2.Client(base_url=listener.url, timeout=WAIT_S) as http:
        yield Site(listener, engine, http, folder)
    listener.run(engine.close())
    listener.stop()


@pytest.fixture(scope="session")
def _speaker(checkpoint: Callable[..., Path]) -> Iterator[Site]:
    yield from _site(checkpoint(variant="custom_voice", never_ends=True))


@pytest.fixture(scope="session")
def _cloner(checkpoint: Callable[..., Path]) -> Iterator[Site]:
    yield from _site(checkpoint(variant="base", never_ends=True))


@pytest.fixture
def site(_speaker: Site) -> Site:
    """A model with voices of its own."""
    return _speaker.serve()


@pytest.fixture
def cloner(_cloner: Site) -> Site:
    """A model that takes its voice from a recording."""
    return _cloner.serve()


@pytest.fixture(scope="session")
def _browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="Selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium is missing: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_script_timeout(WAIT_S)
    browser.execute_cdp_cmd("Page.enable", {})
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HOOKS})
    yield browser
    browser.quit()


@pytest.fixture
def browser(_browser: Any) -> Iterator[Any]:
    """Sees no page yet. Fails the test if the page's scripts failed."""
    _browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    _browser.get_log("browser")
    yield _browser
    said = [entry["message"] for entry in _browser.get_log("browser") if entry["source"] == "javascript"]
    # Ends what the page still asks for.
    _browser.get("about:blank")
    assert not said
