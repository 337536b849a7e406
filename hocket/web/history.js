// The utterances of this visit, the newest first.

import { thumbnail } from "./stage.js";
import { save, wav } from "./wav.js";

const KEPT = 40;
const ENDS = { length: "ended by its limit", aborted: "stopped", cut: "cut off" };

export class History {
  #list;
  #entries = []; // {utterance, item}
  #act;

  /** `act` has play(utterance), use(utterance) and code(utterance). */
  constructor(list, act) {
    this.#list = list;
    this.#act = act;
  }

  add(utterance) {
    const item = document.createElement("li");
    item.innerHTML = `
      <button type="button" class="round" data-play><svg aria-hidden="true"><use href="#i-play"/></svg></button>
      <div class="said"><p class="words" dir="auto"></p><p class="note"></p></div>
      <canvas aria-hidden="true"></canvas>
      <div class="buttons">
        <button type="button" class="quiet" data-save><svg aria-hidden="true"><use href="#i-save"/></svg>WAV</button>
        <button type="button" class="quiet" data-use><svg aria-hidden="true"><use href="#i-again"/></svg>Use again</button>
        <button type="button" class="quiet" data-code><svg aria-hidden="true"><use href="#i-code"/></svg>Code</button>
        <button type="button" class="quiet" data-drop aria-label="Remove"><svg aria-hidden="true"><use href="#i-close"/></svg></button>
      </div>`;
    const { wanted, body } = utterance;
    const words = wanted.input.trim();
    const part = (selector) => item.querySelector(selector);
    const short = words.length > 40 ? `${words.slice(0, 40)} …` : words;
    part(".words").textContent = words;
    part(".note").textContent = [
      body.ref_audio ? "a recording’s voice" : body.voice && wanted.voiceName,
      body.language === "Auto" ? "" : body.language,
      `${utterance.seconds.toFixed(1)} s`,
      `seed ${body.seed}`,
      ENDS[utterance.end],
    ].filter(Boolean).join(" · ");
    part("[data-play]").setAttribute("aria-label", `Play: ${short}`);
    for (const [name, verb] of [["save", "Download as WAV"], ["use", "Use again"], ["code", "As code"], ["drop", "Remove"]]) {
      part(`[data-${name}]`).setAttribute("aria-label", `${verb}: ${short}`);
    }
    part("[data-play]").onclick = () => this.#act.play(utterance);
    part("[data-save]").onclick = () => save(wav(utterance.pcm, utterance.rate), `${fileName(words)}.wav`);
    part("[data-use]").onclick = () => this.#act.use(utterance);
    part("[data-code]").onclick = () => this.#act.code(utterance);
    part("[data-drop]").onclick = () => this.#drop(item);
    this.#list.prepend(item);
    this.#entries.unshift({ utterance, item });
    for (const { item: old } of this.#entries.slice(KEPT)) this.#drop(old);
    this.repaint();
  }

  /** Mark the utterance that is shown on the stage. */
  mark(utterance) {
    for (const entry of this.#entries) {
      if (entry.utterance === utterance) entry.item.setAttribute("aria-current", "true");
      else entry.item.removeAttribute("aria-current");
    }
  }

  repaint() {
    for (const { utterance, item } of this.#entries) thumbnail(item.querySelector("canvas"), utterance);
    document.getElementById("history-empty").hidden = this.#entries.length > 0;
  }

  #drop(item) {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    this.#entries = this.#entries.filter((entry) => entry.item !== item);
    this.repaint();
    next?.querySelector("[data-play]").focus();
  }
}

const fileName = (words) => words.toLowerCase().match(/[\p{L}\p{N}]+/gu)?.slice(0, 5).join("-").slice(0, 60) ?? "speech";
