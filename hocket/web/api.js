// The server's API as the page uses it. Addresses are relative to the page, so a proxy may add a prefix.

const KEY = "hocket.key";

/** An answer that is not 2xx, in the server's own words. `param` names the field it is about, or is null. */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null }) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

export const url = (path) => new URL(path, new URL(".", document.baseURI)).href;

/** The key that requests carry; it lives as long as the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The response if it is 2xx. Throws ApiError for any other; status 0: nobody answered. */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key.get()) headers.set("Authorization", `Bearer ${key.get()}`);
  let response;
  try {
    response = await fetch(url(path), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server does not answer. Is it running?" });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error ?? { message: `The server answered ${response.status}.` });
}

const json = async (path, options) => (await call(path, options)).json();

export const models = async () => (await json("v1/audio/models")).data;

export const voices = async () => json("v1/audio/voices");

export const upload = (form) => json("v1/audio/voices", { method: "POST", body: form });

export const remove = (name) => json(`v1/audio/voices/${encodeURIComponent(name)}`, { method: "DELETE" });

/** How a finished stream ended, or null if the server no longer knows. */
export const outcome = (id) => json(`v1/audio/speech/${encodeURIComponent(id)}`).catch(() => null);

/** Ask for speech; `body` is JSON text. The response's body is the raw stream. */
export const speech = (body, signal) =>
  call("v1/audio/speech", { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });

/** "ready", "loading", "draining", "asleep" or "unreachable". */
export async function readiness() {
  try {
    const response = await fetch(url("ready"), { cache: "no-store" });
    return (await response.json()).status ?? "unreachable";
  } catch {
    return "unreachable";
  }
}
