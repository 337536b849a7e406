// Errors beside the field they are about. A field is an element with `data-param`, the name it has in the API;
// its message stands in the `.error` of its `.field`.

const SAME = { speaker: "voice", references: "ref_audio", speaker_embedding: "ref_audio", task_type: "model" };

const NAMES = {
  input: "The text", voice: "The voice", language: "The language", instructions: "The manner", model: "The model",
  ref_audio: "The recording", ref_text: "The transcript", x_vector_only_mode: "“Timbre only”", seed: "The seed",
  speed: "The speed", temperature: "The temperature", top_p: "Top p", top_k: "Top k",
  repetition_penalty: "The repetition penalty", max_new_tokens: "The number of frames",
  initial_codec_chunk_frames: "The number of frames", name: "The name", consent: "The consent",
  audio_sample: "The recording",
};

/** Show `error` (an ApiError) beside its field in `form`. -> whether there is such a field. */
export function show(form, error) {
  const parts = (error.param ?? "").split(".");
  const param = SAME[parts[0]] ?? parts[0];
  const target = param ? form.querySelector(`[data-param="${CSS.escape(param)}"]`) : null;
  const field = target?.closest(".field");
  if (!field || field.hidden) return false;
  const fold = field.closest("details");
  if (fold) fold.open = true;
  const message = field.querySelector(".error");
  message.textContent = inWords(error);
  message.hidden = false;
  const control = target.matches("input, select, textarea") ? target : target.querySelector("input");
  control.setAttribute("aria-invalid", "true");
  field.classList.add("wrong");
  control.focus();
  return true;
}

export function clear(form) {
  for (const field of form.querySelectorAll(".wrong")) {
    field.classList.remove("wrong");
    field.querySelector(".error").hidden = true;
    field.querySelector("[aria-invalid]")?.removeAttribute("aria-invalid");
  }
}

/** The server's sentence with the page's name of the field instead of the API's. */
export function inWords(error) {
  let message = error.message;
  for (const [param, name] of Object.entries(NAMES)) {
    message = message.replace(new RegExp(`^'?${param}'?(?=\\s)`), name);
  }
  message = message[0].toUpperCase() + message.slice(1);
  return /[.!?]$/.test(message) ? message : `${message}.`;
}
