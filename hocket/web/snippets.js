// A request as code that others can run: a shell command with curl, and Python with OpenAI's SDK.
//
// A recording is too long for a command line: the code reads it from a file, which the page offers to save.

import { key, url } from "./api.js";

const PLACE = "\u0000recording\u0000"; // where the recording goes

/** JSON of a request; integers beyond 2^53 are BigInt and keep every digit. */
export function toJson(body, indent) {
  const mark = "\u0001";
  const text = JSON.stringify(body, (_, value) => (typeof value === "bigint" ? `${mark}${value}${mark}` : value), indent);
  return text.replace(/"\\u0001(-?\d+)\\u0001"/g, "$1");
}

/** The file name that the code expects for the recording of `body`. */
export const clipName = (body) => `voice.${clipKind(body).split("/")[1].replace("mpeg", "mp3").replace("mp4", "m4a")}`;

const clipKind = (body) => /^data:([^;,]+)/.exec(body.ref_audio)?.[1] ?? "audio/wav";

export function curl(body) {
  const secret = key.get() ? ` \\\n  -H "Authorization: Bearer $HOCKET_API_KEY"` : "";
  const start = `curl ${quoted(url("v1/audio/speech"))} --fail-with-body${secret} \\
  -H 'Content-Type: application/json' \\
  -o speech.pcm`;
  if (!body.ref_audio) return `${start} \\\n  --data-raw ${quoted(toJson(body, 2))}\n${listen(body)}`;
  // Within an open here-document the shell would expand $, ` and \.
  const json = toJson({ ...body, ref_audio: PLACE }, 2).replace(/[\\$`]/g, "\\$&");
  const recording = `data:${clipKind(body)};base64,$(base64 < ${clipName(body)} | tr -d '\\n')`;
  return `${start} \\\n  --data-binary @- <<JSON\n${json.replace(/\\\\u0000recording\\\\u0000/, () => recording)}\nJSON\n${listen(body)}`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const listen = (body) => `# listen: ffplay -f s16le -ar ${body.sample_rate ?? 24000} -ch_layout mono speech.pcm\n`;

const OPENAI = ["model", "voice", "input", "instructions", "response_format", "speed", "stream_format"];

export function python(body) {
  const own = Object.entries({ voice: "default", ...body }).filter(([name]) => OPENAI.includes(name));
  const more = Object.entries(body).filter(([name]) => !OPENAI.includes(name));
  const value = (name, it) => (name === "ref_audio" ? `"data:${clipKind(body)};base64," + recording` : literal(it));
  const lines = own.map(([name, it]) => `    ${name}=${literal(it)},`);
  if (more.length) {
    lines.push("    extra_body={", ...more.map(([name, it]) => `        "${name}": ${value(name, it)},`), "    },");
  }
  const secret = key.get() ? 'os.environ["HOCKET_API_KEY"]' : '"none"';
  const imports = [body.ref_audio && "import base64", key.get() && "import os", "import wave"].filter(Boolean);
  const recording = body.ref_audio
    ? `with open("${clipName(body)}", "rb") as file:\n    recording = base64.b64encode(file.read()).decode()\n\n`
    : "";
  return `${imports.join("\n")}

from openai import OpenAI

client = OpenAI(base_url="${url("v1")}", api_key=${secret})

${recording}speech = client.audio.speech.with_streaming_response.create(
${lines.join("\n")}
)
with speech as answer, wave.open("speech.wav", "wb") as file:
    file.setnchannels(1)
    file.setsampwidth(2)
    file.setframerate(int(answer.headers["X-Sample-Rate"]))
    for piece in answer.iter_bytes():  # as it is made
        file.writeframes(piece)
`;
}

// JSON's strings and numbers are Python's too; its words are not.
const literal = (value) => (value === true ? "True" : value === false ? "False" : toJson(value));
