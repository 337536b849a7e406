"""The text tokenizer: BPE from tokenizer.json, with Chinese words of several characters taken apart.

As in voxcpm 2.0.3: model/utils.py `mask_multichar_chinese_tokens`, without a token at the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from hocket.errors import StartupError

_BLANK = "\u2581"  # stands for a blank in the vocabulary


class TextTokenizer:
    """Text to ids and back. Raises StartupError when tokenizer.json cannot be read."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # tokenizers raises bare Exception
            raise StartupError(f"cannot read {path}: {e}") from e
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1
        unknown = vocabulary.get("<unk>", 0)
        self._split = {
            token: [vocabulary.get(character, unknown) for character in token]
            for token in vocabulary
            if len(token) > 1 and all("\u4e00" <= character <= "\u9fff" for character in token)
        }
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        added.sort(key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, added))) if added else None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Strings that name control tokens are left out: in a prompt they would act."""
        while self._control is not None and self._control.search(text):  # what is left may form another
            text = self._control.sub("", text)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for token, id in zip(encoding.tokens, encoding.ids, strict=True):
            ids += self._split.get(token.replace(_BLANK, ""), [id])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, which lie below `size`."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text
