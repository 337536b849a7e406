from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.eval.align import align, looped, marked


@pytest.mark.parametrize(
    ("written", "heard", "counts"),
    [
        ("a b c", "a b c", (0, 0, 0)),
        ("a b c", "a x c", (1, 0, 0)),
        ("a b c", "a c", (0, 0, 1)),
        ("a c", "a b c", (0, 1, 0)),
        ("a b c d", "", (0, 0, 4)),
        ("", "a b", (0, 2, 0)),
        ("a b", "b a", (2, 0, 0)),  # as cheap as one inserted and one deleted
        ("every one came", "everyone came", (0, 0, 0)),
        ("everyone came", "every one came", (0, 0, 0)),
        ("every one came", "everyone left", (1, 0, 0)),
    ],
)
def test_errors_by_kind(written: str, heard: str, counts: tuple[int, int, int]) -> None:
    found = align(written.split(), heard.split())
    assert (found.count("substituted"), found.count("inserted"), found.count("deleted")) == counts


words = st.lists(st.sampled_from(["p", "q", "r"]), max_size=7)


@given(words, words)
def test_alignment_is_a_shortest_edit_and_keeps_both_sides(written: list[str], heard: list[str]) -> None:
    found = align(written, heard)
    assert [w for step in found.steps for w in step.written] == written
    assert [w for step in found.steps for w in step.heard] == heard
    row = list(range(len(heard) + 1))
    for i, w in enumerate(written, 1):
        before, row = row, [i]
        for j, h in enumerate(heard, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (w != h)))
    assert found.errors == row[-1]


def test_errors_are_marked() -> None:
    found = align(["the", "cat", "sat", "down"], ["the", "hat", "sat", "down", "there"])
    assert marked(found) == "the [cat→hat] sat down [+there]"
    assert marked(align(list("你好吗"), list("你吗")), apart="") == "你[−好]吗"


def test_longest_drop_is_of_words_in_a_row() -> None:
    assert align(["a", "b", "c", "d", "e", "f", "g"], ["a", "d", "g"]).longest_drop == 2


@pytest.mark.parametrize(
    ("written", "heard", "extra"),
    [
        ("so it goes", "so it goes", 0),
        ("so it goes", "so it goes so it goes", 3),
        ("so it goes", "so it so it so it goes", 4),
        ("very very good", "very very good", 0),
        ("go", "go go go go", 3),
        ("go", "go go", 0),
        ("no no no no", "no no no no", 0),
        ("nothing here", "something else", 0),
    ],
)
def test_loops_are_words_said_again(written: str, heard: str, extra: int) -> None:
    assert looped(written.split(), heard.split()) == extra
