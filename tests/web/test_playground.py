"""The playground in a real browser: what is clicked, what is heard, what is shown.

Sound is compared where the page hands it to Web Audio, and where Web Audio renders it.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("selenium", reason="Selenium is not installed")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from hocket.engine.client import AsyncEngine
from hocket.server.app import create_app
from hocket.server.settings import ServerSettings

WAIT_S = 60
RATE_HZ = 24000
FRAMES = 25  # two seconds
TEXT = "Good morning, $HOME."


class Page:
    """The playground as a user meets it."""

    def __init__(self, browser: Any, url: str, *, clock: bool = True, ready: bool = True) -> None:
        self.browser = browser
        browser.get(f"{url}/live")  # an origin, for its storage
        browser.execute_script("sessionStorage.clear(); localStorage.clear();")
        if not clock:
            browser.execute_script("sessionStorage.setItem('test.stopped', '1')")
        browser.get(url)
        if ready:
            self.until("document.querySelector('#state-text').textContent.startsWith('ready')")

    def js(self, expression: str, *arguments: Any) -> Any:
        return self.browser.execute_script(f"return {expression}", *arguments)

    def until(self, expression: str) -> Any:
        return WebDriverWait(self.browser, WAIT_S, 0.02).until(lambda _: self.js(expression), expression)

    def phase(self, *names: str) -> None:
        self.until(f"{list(names)}.includes(document.body.dataset.phase)")

    def __getitem__(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.js("document.querySelector(arguments[0]).textContent", selector)

    def fill(self, **fields: str) -> None:
        for name, value in fields.items():
            field = self[f"#{name}"]
            if not field.is_displayed():
                fold = self.js("arguments[0].closest('details').querySelector('summary')", field)
                fold.click()
            field.clear()
            field.send_keys(value)

    def heard(self) -> list[dict[str, Any]]:
        return self.js("window.sources")


def samples(sources: list[dict[str, Any]]) -> np.ndarray:
    return np.concatenate([source["pcm"] for source in sources])


def assert_same_sound(heard: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for rounding: a codec step over fewer frames may add up in another order."""
    assert len(heard) == len(expected)
    np.testing.assert_allclose(heard, expected, rtol=0, atol=1)


def gaps(sources: list[dict[str, Any]]) -> int:
    """How often a piece does not start at the very frame where the piece before it ended."""
    found = 0
    for before, source in itertools.pairwise(sources):
        frame = source["when"] * source["rate"]
        assert abs(frame - round(frame)) < 1e-6
        found += round(frame) != round(before["when"] * before["rate"]) + len(before["pcm"])
    return found


# --- from the click to the sound ---------------------------------------------------------------


def test_click_plays_the_samples_of_the_api_without_a_gap(site: Any, browser: Any) -> None:
    page = Page(browser, site.url, clock=False)
    page.fill(input=TEXT, seed="5", max_new_tokens=str(FRAMES))
    page["#speak"].click()
    page.phase("playing")  # all has come; nothing has been played, since the clock stands
    sources = page.heard()
    assert len(sources) > 1
    assert {source["rate"] for source in sources} == {source["own"] for source in sources} == {RATE_HZ}
    voice = page.js("document.querySelector('#voice').value")
    expected = site.pcm(input=TEXT, seed=5, max_new_tokens=FRAMES, voice=voice)
    assert_same_sound(samples(sources), expected)
    assert gaps(sources) == 0
    assert page.text("#f-underruns") == "0"
    assert page.text("#f-ahead") == page.text("#f-length") == f"{len(expected) / RATE_HZ:.2f} s"
    page.js("window.goOn()")
    page.phase("idle")
    length = f"{len(expected) / RATE_HZ:.1f}"
    page.until(f"document.querySelector('#clock').textContent === '{length} / {length} s'")
    assert re.fullmatch(r"\d+ ms|\d+\.\d s", page.text("#f-first"))
    assert re.fullmatch(r"\d+\.\d\d", page.text("#f-rtf"))
    assert page.js(
        "document.querySelector('#canvas').getContext('2d').getImageData(0, 0, 900, 300).data.some(Boolean)"
    )
    assert "Ended by its limit" in page.text("#news")  # the frames that were asked for


def test_throttled_stream_shows_each_gap_as_an_underrun(site: Any, browser: Any) -> None:
    page = Page(browser, site.url)
    page.fill(seed="5", max_new_tokens=str(FRAMES))
    throttle = {"offline": False, "latency": 0, "uploadThroughput": -1}
    browser.execute_cdp_cmd("Network.enable", {})
    # Half of what the sound needs.
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**throttle, "downloadThroughput": RATE_HZ})
    try:
        page["#speak"].click()
        page.phase("streaming")
        page.phase("idle")
    finally:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**throttle, "downloadThroughput": -1})
    sources = page.heard()
    underruns = int(page.text("#f-underruns"))
    assert underruns == gaps(sources) > 0
    assert len(samples(sources)) == len(site.pcm(input="Good morning.", seed=5, max_new_tokens=FRAMES))


# Runs the page's own player in an offline context, whose clock is the test's.
RENDER = """
const [pcm, cuts, lateAt, done] = arguments;
(async () => {
  const { Player } = await import(new URL("player.js", document.querySelector("script[type=module]").src));
  const offline = new OfflineAudioContext(1, pcm.length + 24000, 24000);
  window.AudioContext = function () { return offline; };
  offline.resume = () => {};  // the player's; it may not be called before the rendering starts
  const player = new Player();
  player.open(24000);
  player.begin();
  const pieces = cuts.map((cut, i) => Int16Array.from(pcm.slice(cut, cuts[i + 1] ?? pcm.length)));
  const late = lateAt === null ? [] : pieces.splice(1);
  for (const piece of pieces) player.push(piece);
  if (late.length) {
    offline.suspend(lateAt).then(() => {
      for (const piece of late) player.push(piece);
      OfflineAudioContext.prototype.resume.call(offline);
    });
  }
  const rendered = await offline.startRendering();
  done({ underruns: player.underruns, pcm: Array.from(rendered.getChannelData(0), (x) => x * 32768) });
})().catch((error) => done(String(error)));
"""


def render(
    page: Page, pcm: np.ndarray, cuts: list[int], late_at: float | None = None
) -> tuple[int, np.ndarray]:
    """What is heard of `pcm` in pieces; after the first piece, the others come at second `late_at`."""
    result = page.browser.execute_async_script(RENDER, pcm.tolist(), cuts, late_at)
    assert isinstance(result, dict), result
    return result["underruns"], np.array(result["pcm"])


def test_pieces_sound_as_one_wherever_they_are_cut(site: Any, browser: Any) -> None:
    page = Page(browser, site.url)
    random = np.random.default_rng(3)
    pcm = random.integers(1, 1 << 15, 30_000)  # no zeros: silence is not taken for sound
    cuts = [0, *sorted(random.choice(np.arange(1, len(pcm)), 40, replace=False).tolist())]
    underruns, heard = render(page, pcm, cuts)
    start = int(np.flatnonzero(heard)[0])
    np.testing.assert_array_equal(heard[start : start + len(pcm)], pcm)
    assert not heard[start + len(pcm) :].any()
    assert underruns == 0


def test_late_piece_is_an_underrun_and_loses_nothing(site: Any, browser: Any) -> None:
    page = Page(browser, site.url)
    pcm = np.random.default_rng(4).integers(1, 1 << 15, 9_000)
    underruns, heard = render(page, pcm, [0, 3_000, 6_000], late_at=0.5)
    np.testing.assert_array_equal(heard[heard != 0], pcm)
    breaks = np.flatnonzero(np.diff((heard != 0).astype(int)))
    assert underruns == 1
    assert len(breaks) == 4  # sound, silence, sound
    assert breaks[1] - breaks[0] == 3_000


# --- ends ----------------------------------------------------------------------------------------


def metric(site: Any, name: str, **labels: str) -> float:
    total = 0.0
    for line in site.http.get("/metrics").text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def test_stop_ends_the_request_and_frees_its_slot(site: Any, browser: Any) -> None:
    page = Page(browser, site.url)
    page.fill(max_new_tokens="4000")
    page["#speak"].click()
    page.phase("streaming")
    WebDriverWait(browser, WAIT_S, 0.05).until(lambda _: metric(site, "hocket_slots_used") > 0)
    page["#speak"].click()
    page.phase("idle")
    WebDriverWait(browser, WAIT_S, 0.05).until(
        lambda _: metric(site, "hocket_requests_total", outcome="aborted") == 1
    )
    assert metric(site, "hocket_requests_running") == 0
    WebDriverWait(browser, WAIT_S, 0.05).until(lambda _: metric(site, "hocket_slots_used") == 0)
    page.until("document.querySelector('#history .note')?.textContent.endsWith('stopped')")
    assert "Stopped" in page.text("#news")


ERRORS = {
    "option": (
        {"temperature": "20"},
        "temperature",
        "The temperature must be a number from 0 to 10; got 20.",
    ),
    "no number": ({"top_p": "half"}, "top_p", "Top p must be a number above 0 and at most 1; got 'half'."),
    "text": ({"input": "…"}, "input", "The text holds nothing to say: no letter and no digit."),
}


@pytest.mark.parametrize(("fields", "at", "message"), ERRORS.values(), ids=ERRORS)
def test_error_stands_at_the_field_it_names(
    site: Any, browser: Any, fields: dict[str, str], at: str, message: str
) -> None:
    page = Page(browser, site.url)
    page.fill(**fields)
    page["#speak"].click()
    page.until(f"!document.querySelector('#{at}-error').hidden")
    assert page[f"#{at}-error"].text == message
    field = page[f"#{at}"]
    assert field.get_attribute("aria-invalid") == "true"
    assert f"{at}-error" in field.get_attribute("aria-describedby").split()
    assert page.js("document.activeElement.id") == at
    assert message in page.text("#news")
    page.phase("idle")
    assert not page.heard()
    page.fill(**({"input": "Well."} if at == "input" else {at: "1"}), max_new_tokens="2")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    assert not page[f"#{at}-error"].is_displayed()
    assert field.get_attribute("aria-invalid") is None


def test_draining_server_says_so_and_refuses_in_words(site: Any, browser: Any) -> None:
    site.serving.draining = True
    page = Page(browser, site.url, ready=False)
    page.until("document.body.dataset.server === 'draining'")
    assert page["#state"].text == "shutting down: takes no new requests"
    page["#speak"].click()
    page.until("!document.querySelector('#trouble').hidden")
    assert page["#trouble"].text == "The server is shutting down."


def test_loading_server_is_waited_for(site: Any, browser: Any) -> None:
    site.listener.app = create_app(AsyncEngine("nowhere"), ServerSettings(model="nowhere"))
    page = Page(browser, site.url, ready=False)
    page.until("document.body.dataset.server === 'loading'")
    page["#speak"].click()
    page.until("!document.querySelector('#trouble').hidden")
    assert page["#trouble"].text == "The model is still being loaded; it will take a moment."
    site.serve()
    page.until("document.querySelector('#state-text').textContent.startsWith('ready')")
    assert page.js("document.querySelector('#voice').options.length") > 0


# --- what is kept --------------------------------------------------------------------------------


def test_history_plays_saves_and_uses_again(site: Any, browser: Any, tmp_path: Path) -> None:
    page = Page(browser, site.url)
    page.fill(
        input="First.", seed="9007199254740993", max_new_tokens="5"
    )  # beyond what a JavaScript number holds
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    page.phase("idle")
    first = samples(page.heard())
    assert_same_sound(first, site.pcm(input="First.", seed=9007199254740993, max_new_tokens=5))
    page.fill(input="Second.", seed="")
    page["#input"].send_keys(Keys.CONTROL, Keys.ENTER)
    page.until("document.querySelectorAll('#history li').length === 2")
    page.phase("idle")

    browser.execute_script("window.sources = []")
    page["#history li:last-child [data-play]"].click()
    page.phase("playing")
    np.testing.assert_array_equal(samples(page.heard()), first)
    page["body"].send_keys(Keys.ESCAPE)
    page.phase("idle")

    page["#history li:last-child [data-use]"].click()
    assert page.js("document.querySelector('#input').value") == "First."
    assert page.js("document.querySelector('#seed').value") == "9007199254740993"

    browser.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    page["#history li:last-child [data-save]"].click()
    file = tmp_path / "first.wav"
    WebDriverWait(browser, WAIT_S, 0.05).until(lambda _: file.exists() and file.stat().st_size)
    with wave.open(str(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, RATE_HZ)
        np.testing.assert_array_equal(np.frombuffer(sound.readframes(1 << 20), "<i2"), first)


def _run_curl(code: str, folder: Path) -> np.ndarray:
    subprocess.run(["bash", "-c", code], cwd=folder, check=True, capture_output=True, timeout=WAIT_S)
    return np.frombuffer((folder / "speech.pcm").read_bytes(), "<i2")


def _run_python(code: str, folder: Path) -> np.ndarray:
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, timeout=WAIT_S)
    with wave.open(str(folder / "speech.wav")) as sound:
        return np.frombuffer(sound.readframes(1 << 24), "<i2")


RUNS = {"curl": _run_curl, "python": _run_python}


@pytest.mark.parametrize("dialect", RUNS)
def test_copied_code_gives_the_sound_that_was_heard(
    site: Any, browser: Any, tmp_path: Path, dialect: str
) -> None:
    page = Page(browser, site.url)
    text = """It's "$HOME", `id` & C:\\new \\ 5%; 早上好 ☀."""
    page.js("document.querySelector('#input').value = arguments[0]", text + "\nTwo lines.")
    page.fill(max_new_tokens="5")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    page.phase("idle")
    page["#history [data-code]"].click()  # the seed that the server drew is in it
    page.js("document.querySelector(arguments[0]).click()", f"[value={dialect}]")
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    page["#code-copy"].click()
    page.until("document.querySelector('#code-copy').textContent === 'Copied'")
    code = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert_same_sound(RUNS[dialect](code, tmp_path), samples(page.heard()))


# --- keys, voices, recordings --------------------------------------------------------------------


def test_key_is_asked_for_and_forgotten_with_the_tab(site: Any, browser: Any) -> None:
    site.serve(api_keys=("secret-1",))
    page = Page(browser, site.url, ready=False)
    page.until("!document.querySelector('#key').hidden")
    page.fill(**{"key-value": "wrong"})
    page["#key button"].click()
    page.until("document.querySelector('#key-error').textContent")
    assert page["#key-error"].text == "The server does not know this key."
    page.fill(**{"key-value": "secret-1"})
    page["#key-value"].send_keys(Keys.ENTER)
    page.until("document.querySelector('#voice').options.length")
    assert not page["#key"].is_displayed()
    page.fill(max_new_tokens="2")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    assert page.js("Object.values(sessionStorage)") == ["secret-1"]
    assert page.js("Object.values(localStorage)") == []
    assert page.js("document.cookie") == ""
    page["#code-open"].click()
    assert "$HOCKET_API_KEY" in page.text("#code-text")
    assert "secret-1" not in page.text("#code-text")


def test_voices_are_listed_with_their_languages(site: Any, browser: Any) -> None:
    page = Page(browser, site.url)
    known = site.http.get("/v1/audio/voices").json()["voices"]
    shown = page.js("Array.from(document.querySelectorAll('#voice option'), (o) => [o.value, o.textContent])")
    assert shown == [[v["id"], " · ".join([v["name"], *v["languages"]])] for v in known]
    page["#voices-open"].click()
    last = page["#voices-list li:last-child"]
    assert known[-1]["name"] in last.text
    last.find_element(By.CSS_SELECTOR, "[data-use]").click()
    assert page.js("document.querySelector('#voice').value") == known[-1]["id"]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    t = np.arange(2 * RATE_HZ) / RATE_HZ
    sound = (8000 * np.sin(2 * np.pi * 180 * t) * (1 + np.sin(2 * np.pi * 3 * t)) / 2).astype("<i2")
    path = tmp_path / "anna.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE_HZ, len(sound), "NONE", ""))
        file.writeframes(sound.tobytes())
    return path


def test_file_gives_the_voice_and_its_code_runs(
    cloner: Any, browser: Any, recording: Path, tmp_path: Path
) -> None:
    page = Page(browser, cloner.url)
    page["#clip-fold summary"].click()
    page["#clip input[type=file]"].send_keys(str(recording))
    page.until("document.querySelector('#clip .what').textContent.includes('2.0 s')")
    page.fill(ref_text="Hum.", max_new_tokens="6", seed="3")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    heard = samples(page.heard())
    page["#history [data-code]"].click()
    (tmp_path / "voice.wav").write_bytes(recording.read_bytes())
    assert_same_sound(_run_curl(page.text("#code-text"), tmp_path), heard)
    page["#code [data-close]"].click()
    page["#timbre"].click()
    assert not page["#ref_text"].is_enabled()
    browser.execute_script("window.sources = []")
    page.phase("idle")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 2")
    assert not np.array_equal(samples(page.heard()), heard)


def test_microphone_gives_the_voice(cloner: Any, browser: Any) -> None:
    page = Page(browser, cloner.url)
    page["#clip-fold summary"].click()
    record = page["#clip [data-record]"]
    record.click()
    page.until("/Stop, [2-9] s/.test(document.querySelector('#clip [data-record]').textContent)")
    record.click()
    page.until("/from the microphone, \\d/.test(document.querySelector('#clip .what').textContent)")
    page["#timbre"].click()
    page.fill(max_new_tokens="3")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    assert len(page.heard())


def test_voice_is_added_used_and_deleted(cloner: Any, browser: Any, recording: Path, tmp_path: Path) -> None:
    cloner.serve(voices_dir=tmp_path / "voices")
    page = Page(browser, cloner.url)
    page["#voices-open"].click()
    page.fill(**{"v-name": "anna"})
    page["#v-clip input[type=file]"].send_keys(str(recording))
    page["#upload-send"].click()
    page.until("!document.querySelector('#v-consent-error').hidden")
    assert page.js("document.activeElement.id") == "v-consent"
    page.fill(**{"v-consent": "I, Anna, agree.", "v-text": "Hum."})
    page["#upload-send"].click()
    page.until("!document.querySelector('#voices').open")
    assert page.js("document.querySelector('#voice').value") == "anna"
    page.fill(max_new_tokens="4", seed="3")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    heard = cloner.pcm(
        input=page.js("document.querySelector('#input').value"), voice="anna", max_new_tokens=4, seed=3
    )
    assert_same_sound(samples(page.heard()), heard)
    page["#voices-open"].click()
    page.fill(**{"v-name": "Anna", "v-consent": "I agree."})
    page["#v-clip input[type=file]"].send_keys(str(recording))
    page["#upload-send"].click()
    page.until("document.querySelector('#voices .error:not([hidden])')")  # it does not replace unasked
    remove = page["#voices-list [data-delete]"]
    remove.click()
    remove.click()
    page.until("!document.querySelector('#voices-list li')")
    assert cloner.http.get("/v1/audio/voices").json()["voices"] == []


# --- for everybody -------------------------------------------------------------------------------


def test_keyboard_alone_speaks_and_stops(site: Any, browser: Any) -> None:
    page = Page(browser, site.url)
    reached: list[str] = []
    while "code-open" not in reached:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.js("document.activeElement.id || document.activeElement.name"))
    order = [
        "theme",
        "input",
        "voice",
        "voices-open",
        "language",
        "instructions",
        "model",
        "speak",
        "code-open",
    ]
    assert [name for name in reached if name in order] == order
    page.fill(max_new_tokens="4000")
    page["#input"].send_keys(Keys.CONTROL, Keys.ENTER)
    page.phase("streaming")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.phase("idle")


def test_every_control_has_a_name_and_fits_a_phone(site: Any, browser: Any) -> None:
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page = Page(browser, site.url)
    page.fill(max_new_tokens="2")
    page["#speak"].click()
    page.until("document.querySelectorAll('#history li').length === 1")
    for control in browser.find_elements(By.CSS_SELECTOR, "button, input, select, textarea, canvas, dialog"):
        if control.is_displayed() and control.get_attribute("aria-hidden") is None:
            assert control.accessible_name, control.get_attribute("outerHTML")
    assert page.js("document.documentElement.scrollWidth") <= 360
    assert page["#speak"].is_displayed()


def _luminance(colour: str) -> float:
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_contrast_in_both_themes(site: Any, browser: Any, theme: str) -> None:
    page = Page(browser, site.url)
    page.js("document.querySelector(arguments[0]).click()", f"[name=theme][value={theme}]")
    browser.refresh()
    assert page.js("document.documentElement.dataset.theme") == theme
    style = "getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()"
    for ground in ("--paper", "--surface"):
        for ink in ("--ink", "--muted", "--a", "--b", "--bad"):
            light, dark = sorted((_luminance(page.js(style, name)) for name in (ground, ink)), reverse=True)
            contrast = (light + 0.05) / (dark + 0.05)
            assert contrast >= 4.5, f"{ink} on {ground}: {contrast:.2f}"
