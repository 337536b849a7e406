"""Text that is still being written gives the tokens of the whole text, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.models.qwen3_tts.frontend import QwenTextFeed
from hocket.models.qwen3_tts.prompt import TextUpdate
from hocket.tokenizer import TextTokenizer

ALPHABET = "ab' \n\t.,!1é\u0301你好👩\u200d💻ſ" + "\r"


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> TextTokenizer:
    return TextTokenizer(checkpoint(variant="custom_voice"))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(alphabet=ALPHABET, max_size=12), max_size=12))
def test_tokens_do_not_depend_on_the_cuts(tokenizer: TextTokenizer, pieces: list[str]) -> None:
    feed = QwenTextFeed(tokenizer)
    ids: list[int] = []
    for piece in pieces:
        update = feed.add(piece)
        ids += msgspec.msgpack.decode(update, type=TextUpdate).ids if update else []
    ids += msgspec.msgpack.decode(feed.close(), type=TextUpdate).ids
    assert ids == tokenizer.encode("".join(pieces))


def test_what_is_settled_is_not_kept(tokenizer: TextTokenizer) -> None:
    """Else each word would cost as much as all before it."""
    feed = QwenTextFeed(tokenizer)
    for _ in range(1000):
        feed.add("word ")
    assert len(feed.text) < 12
