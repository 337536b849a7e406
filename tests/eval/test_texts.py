from __future__ import annotations

from pathlib import Path

import pytest

from hocket.errors import InvalidRequest
from hocket.eval.texts import HELD_OUT, Item, items_beside, limited, read_items


def test_built_in_list_has_200_texts() -> None:
    items = read_items(HELD_OUT)
    assert len({item.text for item in items}) == 200
    assert items[-1].name == "0200"


def test_lines_are_named_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n\n Three. \n")
    assert read_items(str(tmp_path / "a.txt")) == [Item("0001", "One."), Item("0003", "Three.")]


def test_seed_tts_list(tmp_path: Path) -> None:
    for name in ("p.wav", "t.wav"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "meta.lst").write_text("en/1|Said.|p.wav|To say.\n2.wav||p.wav|More.|t.wav\n3|||No voice.\n")
    assert read_items(str(tmp_path / "meta.lst")) == [
        Item("en_1", "To say.", tmp_path / "p.wav", "Said."),
        Item("2", "More.", tmp_path / "p.wav", None, tmp_path / "t.wav"),
        Item("3", "No voice."),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a|b|c", "line 1: 'a|b|c' is not name"),
        ("a|||x\n|b||x", "line 2"),
        ("a|b|gone.wav|x", "line 1: there is no file"),
        ("a|||x\na|||y", "the name 'a' twice"),
        ("\n", "holds no text"),
    ],
)
def test_what_is_no_list_is_told(lines: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "meta.lst").write_text(lines)
    with pytest.raises(InvalidRequest, match=message.replace("|", r"\|")):
        read_items(str(tmp_path / "meta.lst"))


def test_texts_beside_recordings(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.wav").write_bytes(b"")
        (tmp_path / f"{name}.txt").write_text(f"Text {name}.\n")
    assert items_beside(tmp_path) == [Item("a", "Text a."), Item("b", "Text b.")]
    (tmp_path / "c.wav").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"c\.wav has no text: put it into c\.txt"):
        items_beside(tmp_path)


@pytest.mark.parametrize(
    ("limit", "names"), [(None, "0123456789"), (20, "0123456789"), (3, "036"), (1, "0"), (5, "02468")]
)
def test_a_limit_spreads_over_the_list(limit: int | None, names: str) -> None:
    items = [Item(str(n), "x") for n in range(10)]
    assert "".join(item.name for item in limited(items, limit)) == names
