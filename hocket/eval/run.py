"""One run: every item spoken with every seed, some at a time, and judged as the sounds come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

import numpy as np

from hocket.errors import HocketError
from hocket.eval.judge import Judge, Utterance
from hocket.eval.likeness import Likeness, mean_voice
from hocket.eval.sound import read_wav, write_wav
from hocket.eval.speakers import RUNAWAY, Speak, Spoken, file_name
from hocket.eval.texts import Item

Watch = Callable[[str], None]
Pair = tuple[Item, int | None]


def evaluate(
    pairs: Sequence[Pair],
    speak: Speak,
    judge: Judge,
    *,
    concurrency: int = 1,
    lengths: Mapping[str, float] = MappingProxyType({}),
    voice_of: Callable[[Item], np.ndarray | None] = lambda item: None,
    keep: Path | None = None,
    watch: Watch = lambda text: None,
) -> Generator[Utterance, None, None]:
    """Judge `pairs` in their order; up to `concurrency` are spoken at once.

    `lengths` says how long each item should take, by name. With `keep`, sounds and texts are left in that
    folder. A HocketError of `speak` becomes an utterance with its message as `failure`.
    """
    several = len({seed for _, seed in pairs}) > 1
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    for done, (pair, spoken) in enumerate(_spoken(pairs, speak, concurrency), 1):
        item, seed = pair
        watch(f"{done} of {len(pairs)}: {item.name}")
        if isinstance(spoken, HocketError):
            missed = "limit" if spoken.code == RUNAWAY else ""
            yield Utterance(
                name=item.name, seed=seed, text=item.text, failure=spoken.message, missed_end=missed
            )
            continue
        if keep is not None:
            file = keep / file_name(item, seed, several=several)
            write_wav(file, spoken.sound)
            file.with_suffix(".txt").write_text(item.text + "\n", "utf-8")
        yield judge(item, seed, spoken, lengths.get(item.name), voice_of(item))


def _spoken(
    pairs: Sequence[Pair], speak: Speak, concurrency: int
) -> Iterator[tuple[Pair, Spoken | HocketError]]:
    """Sounds in the order of `pairs`, at most twice `concurrency` of them asked for and not yet taken."""
    jobs: SimpleQueue[tuple[Pair, Future[Spoken]] | None] = SimpleQueue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            pair, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(speak(*pair))
                except BaseException as error:  # whoever waits for it raises it
                    future.set_exception(error)

    # Daemons, unlike the threads of a ThreadPoolExecutor: an interrupt does not wait for a slow server.
    for n in range(concurrency):
        threading.Thread(target=work, name=f"speaks {n}", daemon=True).start()
    waiting: deque[tuple[Pair, Future[Spoken]]] = deque()
    left = iter(pairs)
    try:
        while True:
            while len(waiting) < 2 * concurrency and (pair := next(left, None)) is not None:
                waiting.append((pair, Future()))
                jobs.put(waiting[-1])
            if not waiting:
                return
            pair, future = waiting.popleft()
            try:
                yield pair, future.result()
            except HocketError as error:
                yield pair, error
    finally:
        for _, future in waiting:
            future.cancel()
        for _ in range(concurrency):
            jobs.put(None)


def teacher_files(items: Sequence[Item], folder: Path | None) -> dict[str, Path]:
    """The teacher's recording of each item, by name: the folder's NAME.wav, else the list's own."""
    found = {}
    for item in items:
        path = folder / f"{item.name}.wav" if folder is not None else item.target
        if path is not None and path.is_file():
            found[item.name] = path
    return found


def voices(
    likeness: Likeness | None,
    items: Sequence[Item],
    given: Path | None,
    teacher: Mapping[str, Path],
    *,
    cloned: bool,
    watch: Watch = lambda text: None,
) -> Callable[[Item], np.ndarray | None]:
    """The voice that an item should be spoken in: of the first there is of

    - the recording `given`, or NAME.wav in the folder given, else the mean voice of all recordings in it,
    - the item's own reference, if the target was to imitate it (`cloned`),
    - the mean voice of the teacher.

    None throughout without a `likeness` to tell voices apart.
    """
    if likeness is None:
        return lambda item: None
    ear = likeness
    known: dict[Path, np.ndarray | None] = {}

    def embed(path: Path) -> np.ndarray | None:
        if path not in known:
            watch(f"the voice in {path.name}")
            known[path] = ear.embed(read_wav(path))
        return known[path]

    recordings = sorted(given.glob("*.wav")) if given is not None and given.is_dir() else []
    files: dict[str, Path] = {path.stem: path for path in recordings}
    if recordings and any(item.name in files for item in items):
        shared = None
    elif given is not None:
        shared = mean_voice([embed(path) for path in recordings or [given]])
    elif cloned and any(item.reference for item in items):
        files = {item.name: item.reference for item in items if item.reference}
        shared = None
    else:
        shared = mean_voice([embed(path) for path in teacher.values()])
        files = {}
    return lambda item: embed(files[item.name]) if item.name in files else shared
