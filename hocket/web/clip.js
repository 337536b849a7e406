// A recording of a voice: dropped, chosen as a file, or spoken into the microphone.

const MOST_BYTES = 10 << 20;
const MOST_S = 30;
const KINDS = {
  wav: "audio/wav", mp3: "audio/mpeg", flac: "audio/flac", ogg: "audio/ogg", opus: "audio/ogg",
  aac: "audio/aac", m4a: "audio/mp4", mp4: "audio/mp4", webm: "audio/webm",
};

/** Fills a `.field` element. Event "change": there is another clip, or none. */
export class Clip extends EventTarget {
  file = null; // Blob
  kind = ""; // its media type
  seconds = null; // null: the browser cannot decode it; the server may
  #root;
  #recorder = null;
  #announce;

  constructor(root, announce) {
    super();
    this.#root = root;
    this.#announce = announce;
    root.classList.add("clip");
    root.innerHTML = `
      <div class="drop">
        <p class="what"><b>Recording</b> <span>drop a file here, 1 to 30 s</span></p>
        <audio controls hidden></audio>
        <div class="buttons">
          <label class="plain"><input class="unseen" type="file" accept="audio/*,.webm,.opus,.flac,.m4a"
            aria-label="Recording of the voice" aria-describedby="${root.id}-error"><span>Choose a file</span></label>
          <button type="button" class="plain" data-record><svg aria-hidden="true"><use href="#i-record"/></svg><span>Record</span></button>
          <button type="button" class="quiet" data-clear hidden>Remove</button>
        </div>
      </div>
      <p class="error" id="${root.id}-error" hidden></p>`;
    const input = this.#part("input");
    input.addEventListener("change", () => input.files[0] && this.take(input.files[0]));
    this.#part("[data-clear]").addEventListener("click", () => {
      this.clear();
      input.focus();
    });
    this.#part("[data-record]").addEventListener("click", () => this.#record());
    if (!navigator.mediaDevices) {
      this.#part("[data-record]").disabled = true;
      this.#part("[data-record]").title = "Browsers give the microphone to pages of https or localhost only";
    }
    root.addEventListener("dragover", (event) => {
      event.preventDefault();
      root.classList.add("over");
    });
    root.addEventListener("dragleave", () => root.classList.remove("over"));
    root.addEventListener("drop", (event) => {
      event.preventDefault();
      root.classList.remove("over");
      if (event.dataTransfer.files[0]) this.take(event.dataTransfer.files[0]);
    });
  }

  async take(file, name = file.name) {
    this.#fault("");
    const kind = KINDS[/\.(\w+)$/.exec(file.name ?? "")?.[1].toLowerCase()] ?? file.type.split(";")[0];
    if (!kind.startsWith("audio/")) return this.#fault(`${name} is not a sound file.`);
    if (file.size > MOST_BYTES) return this.#fault(`${name} is larger than the 10 MiB that are accepted.`);
    [this.file, this.kind, this.seconds] = [file, kind, null];
    this.#show(name);
    this.dispatchEvent(new Event("change"));
    try {
      const context = new OfflineAudioContext(1, 1, 24000);
      this.seconds = (await context.decodeAudioData(await file.arrayBuffer())).duration;
    } catch {
      return; // the server decodes more types than a browser
    }
    if (this.file !== file) return;
    this.#show(`${name}, ${this.seconds.toFixed(1)} s`);
    if (this.seconds < 1 || this.seconds > MOST_S) {
      this.#fault(`The recording lasts ${this.seconds.toFixed(1)} s; 1 to 30 s are accepted.`);
    }
  }

  clear() {
    [this.file, this.kind, this.seconds] = [null, "", null];
    this.#part("input").value = "";
    this.#fault("");
    this.#show("");
    this.dispatchEvent(new Event("change"));
  }

  /** The clip as a data URL, or null. */
  async dataUrl() {
    if (!this.file) return null;
    const bytes = new Uint8Array(await this.file.arrayBuffer());
    let text = "";
    for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
    return `data:${this.kind};base64,${btoa(text)}`;
  }

  async #record() {
    if (this.#recorder) return this.#recorder.stop();
    this.#fault("");
    const button = this.#part("[data-record]");
    let microphone;
    try {
      microphone = await navigator.mediaDevices.getUserMedia({
        audio: { echoCancellation: false, noiseSuppression: false, autoGainControl: false },
      });
    } catch (error) {
      const denied = error.name === "NotAllowedError";
      return this.#fault(denied ? "The browser was told not to use the microphone." : "There is no microphone to record from.");
    }
    const recorder = new MediaRecorder(microphone);
    const parts = [];
    const began = performance.now();
    const words = button.querySelector("span");
    const tick = setInterval(() => {
      const seconds = (performance.now() - began) / 1000;
      words.textContent = `Stop, ${seconds.toFixed(0)} s`;
      if (seconds > MOST_S - 0.5) recorder.stop();
    }, 200);
    recorder.ondataavailable = (event) => parts.push(event.data);
    recorder.onstop = () => {
      clearInterval(tick);
      for (const track of microphone.getTracks()) track.stop();
      this.#recorder = null;
      button.classList.remove("on");
      words.textContent = "Record";
      this.#announce("Recording stopped.");
      this.take(new Blob(parts, { type: recorder.mimeType.split(";")[0].replace("video/", "audio/") }), "from the microphone");
    };
    this.#recorder = recorder;
    button.classList.add("on");
    words.textContent = "Stop";
    this.#announce("Recording. Press the button again to stop.");
    recorder.start();
  }

  #show(what) {
    const audio = this.#part("audio");
    if (audio.src) URL.revokeObjectURL(audio.src);
    audio.hidden = !this.file;
    if (this.file) audio.src = URL.createObjectURL(this.file);
    else audio.removeAttribute("src");
    this.#part(".what span").textContent = what || "drop a file here, 1 to 30 s";
    this.#part("[data-clear]").hidden = !this.file;
  }

  #fault(message) {
    const error = this.#part(".error");
    error.textContent = message;
    error.hidden = !message;
    if (message) this.#announce(message);
  }

  #part(selector) {
    return this.#root.querySelector(selector);
  }
}
