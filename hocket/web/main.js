// The page put together: a press of the button, the stream that answers it, and what is shown meanwhile.

import * as api from "./api.js";
import * as faults from "./faults.js";
import { Flow } from "./flow.js";
import { Form } from "./form.js";
import { History } from "./history.js";
import { Player } from "./player.js";
import { clipName, curl, python, toJson } from "./snippets.js";
import { Stage } from "./stage.js";
import { Utterance } from "./utterance.js";
import { Voices } from "./voices.js";
import { save } from "./wav.js";

const ASK_READY_MS = 15_000;
const ASK_UNREADY_MS = 2_000;

const SPEAK_KEYS = navigator.platform.startsWith("Mac") ? "⌘ ↵" : "Ctrl ↵";
const SMALL = matchMedia("(max-width: 62rem)"); // as in the style sheet: sound stands below the text
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

const byId = (id) => document.getElementById(id);
const announce = (message) => (byId("news").textContent = message);

const player = new Player();
const stage = new Stage(byId("canvas"));
const flow = new Flow(byId("flow"));
const form = new Form(announce);
const voices = new Voices({ changed: readVoices, use: (id) => form.useVoice(id), announce });
const history = new History(byId("history"), {
  play: (utterance) => replay(utterance, 0),
  use: (utterance) => {
    form.write(utterance.wanted);
    byId("input").focus();
    announce("The text and its settings are in the form again.");
  },
  code: (utterance) => showCode(utterance.body, utterance.wanted),
});

let shown = null; // the utterance on the stage
let live = null; // the utterance that is heard while it comes
let rest = 0; // the sample where the playhead stands while nothing plays
let request = null; // AbortController of the stream that comes
let pressed = 0; // when the button was pressed
let drawing = false;

// --- speaking ----------------------------------------------------------------------------------

async function speak() {
  stop();
  faults.clear(form.element);
  trouble("");
  if (document.body.dataset.server === "loading") return trouble("The model is still being loaded; it will take a moment.");
  pressed = performance.now();
  player.open(form.model?.sample_rate ?? 24000); // here, while the press still counts
  const mine = (request = new AbortController());
  setPhase("asking");
  announce("Asking for speech.");
  draw();
  const [wanted, body] = await form.body();
  const utterance = new Utterance(wanted, body);
  try {
    const response = await api.speech(toJson(body), mine.signal);
    await hear(utterance, response, mine);
  } catch (error) {
    if (mine.signal.aborted) finish(utterance, "aborted");
    else if (error instanceof api.ApiError) refused(error);
    else if (utterance.samples || utterance.rate) {
      finish(utterance, "cut");
      trouble(`The stream broke off after ${utterance.seconds.toFixed(1)} s. What came is kept below.`);
    } else throw error;
  } finally {
    if (request === mine) request = null;
    settle();
  }
}

/** Take the stream to its end. */
async function hear(utterance, response, mine) {
  const { headers } = response;
  const rate = Number(headers.get("X-Sample-Rate"));
  utterance.body.seed = BigInt(headers.get("X-Seed"));
  utterance.open(rate, headers.get("X-Request-Id"));
  player.open(rate);
  player.begin();
  live = utterance;
  show(utterance);
  if (SMALL.matches) byId("h-sound").scrollIntoView({ behavior: STILL.matches ? "auto" : "smooth" });
  const reader = response.body.getReader();
  let half = new Uint8Array(0); // a sample may be cut by the network
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const bytes = new Uint8Array(half.length + value.length);
    bytes.set(half);
    bytes.set(value, half.length);
    const whole = bytes.length & ~1;
    half = bytes.slice(whole);
    if (whole === 0) continue;
    const pcm = new Int16Array(bytes.buffer, 0, whole / 2); // little-endian, as every browser's machine
    player.push(pcm);
    const now = performance.now() - pressed;
    if (utterance.first_ms === null) {
      utterance.first_ms = now + player.startsIn * 1000;
      setPhase("streaming");
      announce(`Sound after ${Math.round(utterance.first_ms)} milliseconds.`);
    }
    utterance.add(pcm, now);
    noteFlow();
    draw();
  }
  player.finish();
  const ended = await api.outcome(utterance.id);
  if (mine.signal.aborted) return finish(utterance, "aborted");
  finish(utterance, ended?.finish_reason ?? "stop");
}

function finish(utterance, end) {
  if (utterance.end) return;
  utterance.finish(end);
  if (utterance.samples) {
    history.add(utterance);
    if (shown === utterance) history.mark(utterance);
  }
  const said = { aborted: "Stopped", cut: "Broken off", length: "Ended by its limit" }[end] ?? "Complete";
  announce(`${said}: ${utterance.seconds.toFixed(1)} seconds of sound.`);
  draw();
}

function refused(error) {
  if (error.status === 401) return askKey(error);
  if (!faults.show(form.element, error)) {
    trouble(faults.inWords(error));
    byId("trouble").focus();
  }
  announce(faults.inWords(error));
}

/** End the request, if one runs, and the sound. */
function stop() {
  if (player.playing) rest = player.position;
  request?.abort();
  request = null;
  live = null;
  player.stop();
  settle();
  draw();
}

/** Bring the buttons in line with what goes on. */
function settle() {
  setPhase(request ? (live?.samples ? "streaming" : "asking") : player.playing ? "playing" : "idle");
}

function setPhase(phase) {
  document.body.dataset.phase = phase;
  const icon = (button, name) => button.querySelector("use").setAttribute("href", `#i-${name}`);
  const busy = phase !== "idle";
  byId("speak-text").textContent = busy ? "Stop" : "Speak";
  byId("speak").querySelector("kbd").textContent = busy ? "Esc" : SPEAK_KEYS;
  icon(byId("speak"), busy ? "stop" : "play");
  const whole = Boolean(shown?.end && shown.samples);
  byId("replay").disabled = !whole;
  byId("position").disabled = !whole;
  byId("replay").setAttribute("aria-label", phase === "playing" ? "Pause" : "Play");
  icon(byId("replay"), phase === "playing" ? "pause" : "play");
}

function trouble(message) {
  byId("trouble").textContent = message;
  byId("trouble").hidden = !message;
}

// --- the sound on the stage ----------------------------------------------------------------------

function show(utterance) {
  shown = utterance;
  rest = 0;
  byId("stage").dataset.state = "full";
  stage.show(utterance);
  flow.show(utterance);
  history.mark(utterance);
  draw();
}

function replay(utterance, from) {
  stop();
  if (shown !== utterance) show(utterance);
  player.open(utterance.rate);
  player.begin(from);
  player.push(utterance.pcm.subarray(from));
  player.finish();
  settle();
  draw();
}

function seek(sample) {
  if (player.playing) return replay(shown, sample);
  rest = sample;
  draw();
}

player.addEventListener("ended", () => {
  noteFlow();
  live = null;
  rest = shown.samples;
  settle();
  draw();
});

player.addEventListener("underrun", () => {
  live.underruns = player.underruns;
  live.dry.push(performance.now() - pressed);
});

function noteFlow() {
  live?.note(performance.now() - pressed, player.position);
}

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(frame);
}

function frame() {
  drawing = false;
  if (live) {
    noteFlow();
    flow.draw();
  }
  const head = !shown?.samples ? null : player.playing ? player.position : shown.end ? Math.min(rest, shown.samples) : null;
  const moving = stage.draw(head);
  figures(head);
  if (player.playing || request || moving) draw();
}

const milliseconds = (ms) => (ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
const inSeconds = (seconds) => `${seconds.toFixed(seconds < 100 ? 2 : 1)} s`;

function figures(head) {
  const text = (id, value) => {
    if (byId(id).textContent !== value) byId(id).textContent = value;
  };
  if (document.body.dataset.phase === "asking") {
    for (const name of ["rtf", "length", "ahead", "underruns"]) text(`f-${name}`, "–");
    return text("f-first", milliseconds(performance.now() - pressed));
  }
  if (!shown) return text("f-first", "–");
  const { first_ms: first, rtf, seconds, underruns, samples, rate } = shown;
  text("f-first", first === null ? "–" : milliseconds(first));
  text("f-rtf", rtf === null ? "–" : rtf.toFixed(2));
  text("f-length", inSeconds(seconds));
  text("f-ahead", player.playing ? inSeconds(player.ahead) : "–");
  text("f-underruns", String(underruns));
  byId("f-underruns-box").classList.toggle("bad", underruns > 0);
  const at = head === null ? 0 : head / rate;
  text("clock", `${at.toFixed(1)} / ${seconds.toFixed(1)} s`);
  byId("position").value = samples ? Math.round((1000 * (head ?? 0)) / samples) : 0;
  byId("position").setAttribute("aria-valuetext", `${at.toFixed(1)} of ${seconds.toFixed(1)} seconds`);
  const drawn = `${seconds.toFixed(1)} seconds of sound`;
  byId("canvas").setAttribute("aria-label", `Waveform and spectrogram of ${drawn} in ${shown.arrivals.length} pieces`);
  byId("flow").setAttribute("aria-label", `Sound received against sound played: ${drawn}, ${underruns} underruns`);
}

// --- code ----------------------------------------------------------------------------------------

let coded = null; // {body, wanted} of the request in the dialog

function showCode(body, wanted) {
  coded = { body, wanted };
  writeCode();
  byId("code").showModal();
}

function writeCode() {
  const { body } = coded;
  const dialect = document.querySelector("[name=dialect]:checked").value;
  byId("code-text").textContent = dialect === "curl" ? curl(body) : python(body);
  const notes = [];
  if (body.seed === undefined) notes.push("Without a seed every run sounds different.");
  if (api.key.get()) notes.push("The key is read from HOCKET_API_KEY.");
  if (body.ref_audio) notes.push(`The recording is read from ${clipName(body)}.`);
  byId("code-note").textContent = notes.join(" ");
  byId("code-clip").hidden = !body.ref_audio;
}

async function copyCode() {
  const text = byId("code-text").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not of https or localhost have no clipboard; what is selected can be copied.
    getSelection().selectAllChildren(byId("code-text"));
    document.execCommand("copy");
  }
  byId("code-copy").textContent = "Copied";
  announce("The code is copied.");
}

// --- the server ----------------------------------------------------------------------------------

const STATES = {
  ready: "ready",
  loading: "loading the model …",
  draining: "shutting down: takes no new requests",
  asleep: "asleep: its model is not in memory",
  unreachable: "does not answer",
};

let asking = 0;

async function watchServer() {
  clearTimeout(asking);
  const state = document.hidden ? document.body.dataset.server : await api.readiness();
  if (state !== document.body.dataset.server) {
    document.body.dataset.server = state;
    byId("state").dataset.state = state;
    if (state === "ready") await readServer();
    describeServer();
  }
  asking = setTimeout(watchServer, state === "ready" ? ASK_READY_MS : ASK_UNREADY_MS);
}

function describeServer() {
  const state = document.body.dataset.server;
  const model = form.model;
  byId("state-text").textContent = state === "ready" && model
    ? `ready · ${model.sample_rate / 1000} kHz`
    : STATES[state] ?? state;
}

/** Read what the server has; ask for a key if it wants one. */
async function readServer() {
  try {
    form.setModels(await api.models());
    await readVoices();
    byId("key").hidden = true;
    byId("key-open").hidden = !api.key.get();
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    if (error.status === 401) askKey(error);
    else if (error.status !== 503) trouble(faults.inWords(error));
  }
}

async function readVoices() {
  const known = (await api.voices()).voices;
  form.setVoices(known);
  voices.show(known, form.model?.capabilities.voice_cloning);
}

function askKey(error) {
  byId("key").hidden = false;
  byId("key-open").hidden = true;
  const wrong = Boolean(api.key.get()) && error;
  byId("key-error").textContent = wrong ? "The server does not know this key." : "";
  byId("key-error").hidden = !wrong;
  byId("key-value").setAttribute("aria-invalid", String(Boolean(wrong)));
  byId("key-value").value = api.key.get();
  byId("key-value").focus();
}

// --- what the user does --------------------------------------------------------------------------

form.element.addEventListener("submit", (event) => {
  event.preventDefault();
  if (document.body.dataset.phase === "idle") speak();
  else stop();
});

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    speak();
  } else if (event.key === "Escape" && document.body.dataset.phase !== "idle") stop();
});

byId("replay").addEventListener("click", () => {
  if (player.playing) stop();
  else replay(shown, rest < shown.samples ? rest : 0);
});

byId("position").addEventListener("input", (event) => seek(Math.round((event.target.value / 1000) * shown.samples)));

byId("canvas").addEventListener("click", (event) => {
  if (!shown?.end || !shown.samples) return;
  const sample = Math.round(stage.secondsAt(event.offsetX) * shown.rate);
  seek(Math.min(sample, shown.samples));
});

byId("code-open").addEventListener("click", async () => {
  const [wanted, body] = await form.body();
  showCode(body, wanted);
});
byId("code-copy").addEventListener("click", copyCode);
byId("code-clip").addEventListener("click", () => save(coded.wanted.clip, clipName(coded.body)));
byId("code").addEventListener("close", () => (byId("code-copy").textContent = "Copy"));
for (const choice of document.querySelectorAll("[name=dialect]")) {
  choice.addEventListener("change", () => {
    byId("code-copy").textContent = "Copy";
    writeCode();
  });
}

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key.set(byId("key-value").value.trim());
  readServer().then(describeServer);
});
byId("key-open").addEventListener("click", () => askKey(null));

// A file that misses its field would replace the page.
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());

function repaint() {
  stage.repaint();
  flow.draw();
  history.repaint();
}

for (const choice of document.querySelectorAll("[name=theme]")) {
  choice.checked = choice.value === (document.documentElement.dataset.theme ?? "");
  choice.addEventListener("change", () => {
    if (choice.value) document.documentElement.dataset.theme = choice.value;
    else delete document.documentElement.dataset.theme;
    try {
      localStorage.setItem("hocket.theme", choice.value);
    } catch {
      // The choice then holds for this visit.
    }
    repaint();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
document.addEventListener("visibilitychange", () => document.hidden || watchServer());

settle();
watchServer();
