// The form: what the served model can take, what the user wants, and the request that comes of it.

import { Clip } from "./clip.js";

const OPTIONS = [
  ["seed", "Seed", "random", "The same seed gives the same sound"],
  ["speed", "Speed", "1", "0.25 to 4; the pitch stays"],
  ["temperature", "Temperature", "model’s own", "0 takes the likeliest code each time"],
  ["top_p", "Top p", "model’s own", ""],
  ["top_k", "Top k", "model’s own", ""],
  ["repetition_penalty", "Repetition penalty", "model’s own", ""],
  ["max_new_tokens", "Frames at most", "by the text", ""],
  ["initial_codec_chunk_frames", "First piece, frames", "server’s choice", "Fewer is sooner, more is steadier"],
];

const RATES = [8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000]; // that may be asked for

const byId = (id) => document.getElementById(id);

export class Form {
  #models = [];
  #voices = [];
  element = byId("form");

  constructor(announce) {
    byId("options").innerHTML = OPTIONS.map(
      ([name, label, placeholder, help]) => `
      <div class="field stack">
        <label for="${name}">${label}</label>
        <input id="${name}" name="${name}" data-param="${name}" inputmode="decimal" autocomplete="off"
          placeholder="${placeholder}" title="${help}" aria-describedby="${name}-error">
        <p class="error" id="${name}-error" hidden></p>
      </div>`,
    ).join("");
    this.clip = new Clip(byId("clip"), announce);
    this.clip.addEventListener("change", () => this.#refresh());
    for (const name of ["model", "options", "timbre"]) byId(name).addEventListener("change", () => this.#refresh());
    const input = byId("input");
    const fit = () => {
      input.style.height = "auto";
      input.style.height = `${input.scrollHeight + 2}px`;
    };
    input.addEventListener("input", fit);
    new ResizeObserver(fit).observe(input.parentElement);
  }

  /** The model that is chosen, as the server describes it; undefined before it has. */
  get model() {
    return this.#models.find((model) => model.id === byId("model").value);
  }

  setModels(models) {
    this.#models = models;
    fill(byId("model"), models.map((model) => [model.id, model.id]));
    this.#refresh();
  }

  setVoices(voices) {
    this.#voices = voices;
    const option = (voice) => [voice.id, [voice.name, ...(voice.languages ?? [])].join(" · ")];
    const own = voices.filter((voice) => voice.kind === "uploaded").map(option);
    const builtin = voices.filter((voice) => voice.kind !== "uploaded").map(option);
    fill(byId("voice"), builtin, own);
    this.#refresh();
  }

  useVoice(id) {
    byId("voice").value = id;
    this.#refresh();
  }

  /** Show what the model takes, and how what is set bears on the rest. */
  #refresh() {
    const model = this.model;
    const languages = model?.languages ?? [];
    const chosen = byId("language").value;
    if (languages.length) {
      const names = languages.some((name) => name.toLowerCase() === "auto") ? languages : ["Auto", ...languages];
      fill(byId("language"), names.map((name) => [name, name]));
      byId("language").value = names.includes(chosen) ? chosen : names[0];
    }
    byId("row-language").hidden = !languages.length;
    const can = model?.capabilities ?? {};
    byId("row-instructions").hidden = !can.instructions;
    const designs = model?.tasks?.includes("VoiceDesign");
    byId("instructions-label").textContent = designs ? "The voice is" : "Manner";
    byId("instructions").placeholder = designs ? "a calm man of sixty, a little hoarse" : "calm, a little amused";
    byId("clip-fold").hidden = !can.voice_cloning;

    const clip = this.clip.file !== null && can.voice_cloning;
    const none = this.#voices.length === 0;
    const select = byId("voice");
    select.disabled = clip || none;
    select.hidden = none && !clip;
    const note = byId("voice-note");
    note.textContent = clip
      ? "The recording’s voice is used."
      : none && can.voice_cloning ? "This model speaks with the voice of a recording." : "";
    note.hidden = !note.textContent;
    byId("row-voice").hidden = none && !can.voice_cloning;
    byId("clip-hint").textContent = clip ? "in use" : "";
    byId("ref_text").disabled = byId("timbre").checked;
    const set = OPTIONS.filter(([name]) => byId(name).value.trim()).map(([name, label]) => `${label.toLowerCase()} ${byId(name).value.trim()}`);
    byId("options-hint").textContent = set.join(", ");
  }

  /** What the user has put in, as text by field. */
  read() {
    const wanted = {};
    for (const control of this.element.elements) {
      if (!control.name) continue;
      wanted[control.name] = control.type === "checkbox" ? control.checked : control.value;
    }
    const voiceName = byId("voice").selectedOptions[0]?.text.split(" · ")[0] ?? "";
    return { ...wanted, voiceName, clip: this.clip.file, clipKind: this.clip.kind };
  }

  /** Put an earlier content back. */
  write(wanted) {
    for (const control of this.element.elements) {
      if (!(control.name in wanted)) continue;
      if (control.type === "checkbox") control.checked = wanted[control.name];
      else control.value = wanted[control.name];
    }
    if (wanted.clip) this.clip.take(wanted.clip, wanted.clip.name ?? "from the microphone");
    else this.clip.clear();
    byId("input").dispatchEvent(new Event("input"));
    this.#refresh();
  }

  /** The request for what the form holds. Fields left empty are left out: the server knows their defaults. */
  async body() {
    const wanted = this.read();
    const model = this.model;
    const body = { model: wanted.model || undefined, input: wanted.input };
    const given = (name) => !byId(name).disabled && !byId(name).closest("[hidden]") && wanted[name];
    if (given("voice")) body.voice = wanted.voice;
    if (given("language")) body.language = wanted.language;
    if (given("instructions")) body.instructions = wanted.instructions;
    body.response_format = "pcm";
    body.stream_format = "audio";
    if (RATES.includes(model?.sample_rate)) body.sample_rate = model.sample_rate;
    for (const [name] of OPTIONS) {
      if (wanted[name].trim()) body[name] = number(wanted[name].trim());
    }
    if (this.clip.file && model?.capabilities.voice_cloning) {
      body.ref_audio = await this.clip.dataUrl();
      if (wanted.x_vector_only_mode) body.x_vector_only_mode = true;
      else if (wanted.ref_text) body.ref_text = wanted.ref_text;
    }
    return [wanted, body];
  }
}

/** A number as written; what is none goes to the server as it is, and comes back as an error at its field. */
export function number(text) {
  if (/^-?\d+$/.test(text)) return Number.isSafeInteger(Number(text)) ? Number(text) : BigInt(text);
  const value = Number(text.replace(",", "."));
  return Number.isFinite(value) ? value : text;
}

/** Set a select's options, [value, text] each, in two groups where there are two; keeps the choice. */
function fill(select, first, second = []) {
  const chosen = select.value;
  const options = (pairs) => pairs.map(([value, text]) => new Option(text, value));
  const group = (label, pairs) => {
    const element = document.createElement("optgroup");
    element.label = label;
    element.append(...options(pairs));
    return element;
  };
  const two = first.length && second.length;
  select.replaceChildren(
    ...(two ? [group("Uploaded", second), group("Of the model", first)] : options([...second, ...first])),
  );
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}
