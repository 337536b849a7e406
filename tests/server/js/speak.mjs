// What OpenAI's client for JavaScript gets from a server: node speak.mjs ADDRESS KEY, one line of JSON out.

import OpenAI from "openai";

const [address, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: key, maxRetries: 0 });
const speech = (more) => client.audio.speech.create({ model: "gpt-4o-mini-tts", voice: "ash", input: "hello", ...more });
const found = {};

const whole = await speech({});
found.type = whole.headers.get("content-type");
found.mp3 = (await whole.arrayBuffer()).byteLength;

found.chunks = 0;
found.pcm = 0;
for await (const chunk of (await speech({ response_format: "pcm" })).body) {
  found.chunks += 1;
  found.pcm += chunk.length;
}

const events = await (await speech({ response_format: "pcm", stream_format: "sse" })).text();
const data = events.split("\n").filter((line) => line.startsWith("data: ")).map((line) => JSON.parse(line.slice(6)));
found.last = data.at(-1).type;
found.sse = data
  .filter((event) => event.type === "speech.audio.delta")
  .reduce((bytes, event) => bytes + Buffer.from(event.audio, "base64").length, 0);

found.models = [];
for await (const model of client.models.list()) found.models.push(model.id);

const chat = await client.chat.completions.create({
  model: "gpt-4o-mini-tts",
  modalities: ["text", "audio"],
  audio: { voice: "alloy", format: "pcm16" },
  messages: [{ role: "user", content: "hello" }],
});
found.chat = Buffer.from(chat.choices[0].message.audio.data, "base64").length;

const samples = Buffer.alloc(2 * 32000);
for (let i = 0; i < 32000; i++) samples.writeInt16LE(Math.round(9000 * Math.sin(i / 20)), 2 * i);
const header = Buffer.alloc(44);
header.write("RIFF", 0);
header.writeUInt32LE(36 + samples.length, 4);
header.write("WAVEfmt ", 8);
header.writeUInt32LE(16, 16);
header.writeUInt16LE(1, 20);
header.writeUInt16LE(1, 22);
header.writeUInt32LE(16000, 24);
header.writeUInt32LE(32000, 28);
header.writeUInt16LE(2, 32);
header.writeUInt16LE(16, 34);
header.write("data", 36);
header.writeUInt32LE(samples.length, 40);
const form = new FormData(); // this client has no method for voices
form.set("name", "anna");
form.set("consent", "cons_1");
form.set("audio_sample", new File([header, samples], "clip.wav", { type: "audio/wav" }));
const voice = await client.post("/audio/voices", { body: form });
found.voice = [voice.id, voice.object, voice.name];
found.cloned = (await (await speech({ voice: { id: voice.id }, response_format: "pcm" })).arrayBuffer()).byteLength;

try {
  await speech({ voice: "nobody" });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.code, error.param];
}
console.log(JSON.stringify(found));
