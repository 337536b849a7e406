"""The text tokenizer: byte-level BPE built from vocab.json and merges.txt.

Special tokens are not registered: what a user writes is always text, and the few control ids that
a prompt needs come from config.json. Pre-tokenisation pattern and NFC normalisation as in
transformers 4.57.3: models/qwen2/tokenization_qwen2.py.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from hocket.errors import StartupError

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_SYMBOLS = {b: chr(b) for b in _PRINTABLE}
_SYMBOLS |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _SYMBOLS)}
_BYTES = {symbol: b for b, symbol in _SYMBOLS.items()}
"""A byte and the symbol that stands for it in the vocabulary, as in GPT-2."""

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TextTokenizer:
    """Text to ids and back. Raises StartupError when vocab.json or merges.txt cannot be read."""

    def __init__(self, folder: Path) -> None:
        try:
            model = BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        except Exception as e:  # tokenizers raises bare Exception
            raise StartupError(f"cannot read vocab.json and merges.txt in {folder}: {e}") from e
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; strings that look like special tokens are text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that form no character are replaced."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def spelled(self, id: int) -> bytes:
        """The bytes that one id stands for; none if the vocabulary lacks it."""
        token = self._tokenizer.id_to_token(id) or ""
        return bytes(_BYTES[symbol] for symbol in token)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids that stand for these bytes, byte by byte where they are no whole characters."""
        try:
            return self.encode(data.decode())
        except UnicodeDecodeError:
            ids = [self._tokenizer.token_to_id(_SYMBOLS[b]) for b in data]
            return [id for id in ids if id is not None]  # a vocabulary has every byte

    def settled(self, text: str) -> tuple[list[int], str]:
        """The leading tokens of `text` that no text appended later can change, and the text after them.

        BPE never merges across pre-tokens, and what is appended can change the last one only
        (it may grow, or the blanks before a word may be cut differently). Pre-tokens depend on nothing
        before them, so whoever goes on may go on from the rest alone.
        """
        text = unicodedata.normalize("NFC", text)
        pieces = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        start = pieces[-1][1][0] if len(pieces) > 1 else 0
        return self.encode(text[:start]) if start else [], text[start:]
