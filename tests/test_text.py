"""Where text may be cut, and that nothing is lost by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.text import Cutter, sentences, units, weight


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(["One. ", "Two! ", "Three?"], id="plain"),
        pytest.param(
            ["Dr. Smith met Mr. J. R. Jones at 3.14 p.m. sharp. ", "Then he left."], id="abbreviations"
        ),
        pytest.param(["Version 2.0.1 is out. ", "See example.com for more."], id="points inside words"),
        pytest.param(['She said "Stop!" ', "And he did."], id="closing quote stays"),
        pytest.param(["(It rained.) ", "We stayed."], id="closing bracket stays"),
        pytest.param(["Wait... ", "What?! ", "No."], id="runs of marks"),
        pytest.param(["你好。", "再见！", "「好吗？」", "好"], id="ideographs need no blank"),
        pytest.param(["नमस्ते। ", "फिर मिलेंगे।"], id="danda"),
        pytest.param(["كيف حالك؟ ", "بخير."], id="arabic"),
        pytest.param(["First paragraph\n\n", "Second paragraph"], id="paragraphs"),
        pytest.param(["On the 2. attempt it worked."], id="ordinal before a small letter"),
        pytest.param(["It cost 1,000.50 dollars."], id="number"),
        pytest.param(["no mark at all"], id="no mark"),
    ],
)
def test_sentences(parts: list[str]) -> None:
    assert sentences("".join(parts)) == parts


@given(st.text(alphabet="ab .!?,\n。，é\u0301👩\u200d💻\"'1", max_size=300), st.integers(5, 60))
def test_units_joined_give_the_text(text: str, limit: int) -> None:
    pieces = units(text, limit)
    assert "".join(pieces) == text
    assert all(piece.strip() for piece in pieces) or len(pieces) <= 1


def test_short_text_stays_whole() -> None:
    assert units("One. Two. Three.", 400) == ["One. Two. Three."]


def test_units_end_at_sentences_where_they_can() -> None:
    text = "A sentence of some length here. " * 6
    assert all(piece.rstrip().endswith(".") for piece in units(text, 70))
    assert all(weight(piece) <= 70 for piece in units(text, 70))


def test_a_sentence_too_long_is_cut_at_a_clause_and_not_inside_a_number() -> None:
    text = "the list has 1,000,000 entries and goes on, " + "word " * 10
    pieces = units(text, 50)
    assert pieces[0].endswith("goes on, ")
    assert all("1,000,000" in p or "000" not in p for p in pieces)


def test_grapheme_is_never_cut() -> None:
    text = "e\u0301" * 50
    assert all(not piece.startswith("\u0301") for piece in units(text, 9))


def cut(text: str, sizes: list[int], *, clauses: bool) -> list[str]:
    cutter = Cutter(clauses=clauses)
    out: list[str] = []
    start = 0
    for size in sizes:
        out += cutter.add(text[start : start + size])
        start += size
    return out + cutter.add(text[start:]) + cutter.close()


@given(
    st.text(alphabet="ab .!?,;\n\"'12", max_size=200),
    st.lists(st.integers(1, 20), max_size=40),
    st.booleans(),
)
def test_units_of_growing_text_do_not_depend_on_its_pieces(
    text: str, sizes: list[int], clauses: bool
) -> None:
    whole = cut(text, [], clauses=clauses)
    assert cut(text, sizes, clauses=clauses) == whole
    assert text.startswith("".join(whole))
    assert all(any(c.isalnum() for c in unit) for unit in whole)
    assert not any(c.isalnum() for c in text[len("".join(whole)) :])


@given(st.text(alphabet="ab .!?，。”」\n", max_size=200), st.lists(st.integers(1, 20), max_size=40))
def test_growing_text_loses_nothing(text: str, sizes: list[int]) -> None:
    for clauses in (True, False):
        whole = "".join(cut(text, sizes, clauses=clauses))
        assert text.startswith(whole)
        assert not any(c.isalnum() for c in text[len(whole) :])


@pytest.mark.parametrize(
    ("text", "clauses", "given_at_once"),
    [
        ("Hello. ", False, ["Hello. "]),
        ("Hello.", False, []),  # it may be "Hello.com"
        ("Dr. ", False, []),
        ("on the 2. ", False, []),  # "attempt" may follow
        ("What?! ", False, ["What?! "]),
        ('"Stop!" ', False, ['"Stop!" ']),
        ("你好。", False, ["你好。"]),
        ("你好，", False, []),
        ("你好，", True, ["你好，"]),
        ("well, ", True, ["well, "]),
        ("1,", True, []),
        ("no mark ", True, []),
        ("... ", False, []),
    ],
)
def test_unit_is_given_as_soon_as_it_is_certain(text: str, clauses: bool, given_at_once: list[str]) -> None:
    assert Cutter(clauses=clauses).add(text) == given_at_once


def test_text_without_a_mark_is_cut_in_the_end() -> None:
    cutter = Cutter()
    given_early = cutter.add("word " * 1000)
    assert given_early
    assert "".join([*given_early, *cutter.close()]) == "word " * 1000
