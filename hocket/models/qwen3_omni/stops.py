"""Strings that end a text. What comes before one is the text; what might yet be part of one is held back, and
so neither shown nor spoken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hocket.models.qwen3_omni.config import read_json
from hocket.tokenizer import TextTokenizer


class Words:
    """What the ids of a vocabulary stand for. Raises StartupError when the folder's files are wrong."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = TextTokenizer(folder)
        added = read_json(folder / "tokenizer_config.json")["added_tokens_decoder"]
        self._first_added = min(int(id) for id in added)
        self._shown = {
            int(id): token["content"].encode()
            for id, token in added.items()
            if not token.get("special", True)
        }

    def spelled(self, id: int) -> bytes:
        """Bytes of a text. Control tokens, and ids that the tokenizer lacks, have none; those that stand for
        something in a text (<think>) have."""
        if id >= self._first_added:
            return self._shown.get(id, b"")
        return self.tokenizer.spelled(id)


class StopTexts:
    """Watches one text for the strings that end it, of which there is at least one."""

    def __init__(self, stops: Sequence[str], words: Words) -> None:
        self._stops, self._words = [stop.encode() for stop in stops], words
        self._held: list[tuple[int, bytes]] = []  # from the first that may be the beginning of a stop

    def add(self, ids: Sequence[int], *, last: bool) -> tuple[list[int], bool]:
        """-> ids that belong to the text for certain; whether it ends with them, since a stop was found.

        Of an id in which a stop begins, what comes before it is put into other ids.
        """
        self._held += [(id, self._words.spelled(id)) for id in ids]
        text = b"".join(spelled for _, spelled in self._held)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            kept, rest = self._before(min(found))
            return kept + self._words.tokenizer.encode_bytes(rest), True
        safe = len(text) if last else min(_open(text, stop) for stop in self._stops)
        kept, _ = self._before(safe)
        self._held = self._held[len(kept) :]
        return kept, False

    def _before(self, end: int) -> tuple[list[int], bytes]:
        """Ids whose bytes lie before `end`, and the bytes behind them up to `end`."""
        kept = list[int]()
        for id, spelled in self._held:
            if len(spelled) > end:
                return kept, spelled[:end]
            kept.append(id)
            end -= len(spelled)
        return kept, b""


def _open(text: bytes, stop: bytes) -> int:
    """Where what may be the beginning of `stop` begins in a text that goes on."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((len(text) - n for n in sizes if text.endswith(stop[:n])), len(text))
