// The dialog of voices: those that are known, adding one, deleting one.

import * as api from "./api.js";
import { Clip } from "./clip.js";
import * as faults from "./faults.js";

const byId = (id) => document.getElementById(id);

export class Voices {
  #dialog = byId("voices");
  #form = byId("upload");
  #changed;
  #use;
  #announce;
  #clip;
  #known = [];

  /** `changed` reads the voices anew; `use` takes the id of the one to speak with. */
  constructor({ changed, use, announce }) {
    this.#changed = changed;
    this.#use = use;
    this.#announce = announce;
    this.#clip = new Clip(byId("v-clip"), announce);
    byId("voices-open").addEventListener("click", () => {
      this.#trouble("");
      this.#dialog.showModal();
    });
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
  }

  /** List `known`; adding one makes sense where the model `clones`. */
  show(known, clones) {
    this.#known = known;
    this.#form.hidden = !clones;
    byId("voices-list").replaceChildren(...known.map((voice) => this.#item(voice)));
  }

  #item(voice) {
    const item = document.createElement("li");
    const own = voice.kind === "uploaded";
    item.innerHTML = `<div><b></b> <span class="note"></span></div>
      <button type="button" class="quiet" data-use>Use</button>
      <button type="button" class="quiet" data-delete ${own ? "" : "hidden"}>Delete</button>`;
    item.querySelector("b").textContent = voice.name;
    item.querySelector(".note").textContent = own ? "uploaded" : (voice.languages ?? []).join(", ");
    const [use, remove] = item.querySelectorAll("button");
    use.setAttribute("aria-label", `Use ${voice.name}`);
    use.onclick = () => {
      this.#use(voice.id);
      this.#dialog.close();
    };
    remove.setAttribute("aria-label", `Delete ${voice.name}`);
    remove.onclick = async () => {
      if (!remove.classList.contains("sure")) {
        remove.classList.add("sure");
        remove.textContent = "Delete for good?";
        remove.setAttribute("aria-label", `Delete ${voice.name} for good?`);
        return;
      }
      await this.#try(async () => {
        await api.remove(voice.id);
        await this.#changed();
        this.#announce(`${voice.name} is deleted.`);
        byId("voices-list").querySelector("button")?.focus();
      });
    };
    return item;
  }

  async #send() {
    faults.clear(this.#form);
    const name = byId("v-name").value.trim();
    const parts = new FormData();
    parts.set("name", name);
    parts.set("consent", byId("v-consent").value.trim());
    if (byId("v-text").value.trim()) parts.set("ref_text", byId("v-text").value.trim());
    if (this.#clip.file) parts.set("audio_sample", this.#clip.file, this.#clip.file.name ?? "recording");
    if (this.#known.some((voice) => voice.id.toLowerCase() === name.toLowerCase())) parts.set("replace", "false");
    byId("upload-send").disabled = true;
    await this.#try(async () => {
      const { id } = await api.upload(parts);
      this.#form.reset();
      this.#clip.clear();
      await this.#changed();
      this.#use(id);
      this.#announce(`${name} is added and chosen.`);
      this.#dialog.close();
    });
    byId("upload-send").disabled = false;
  }

  async #try(act) {
    this.#trouble("");
    try {
      await act();
    } catch (error) {
      if (!(error instanceof api.ApiError)) throw error;
      if (!faults.show(this.#form, error)) this.#trouble(faults.inWords(error));
    }
  }

  #trouble(message) {
    byId("voices-trouble").textContent = message;
    byId("voices-trouble").hidden = !message;
    if (message) byId("voices-trouble").scrollIntoView({ block: "nearest" });
  }
}
