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
