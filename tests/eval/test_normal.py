"""What is written and what a recogniser writes for it are the same words."""

from __future__ import annotations

import pytest

from hocket.eval.normal import is_ideographic, spoken, syllables, units

SAME = [
    # numbers
    ("7179", "seven thousand one hundred and seventy-nine"),
    ("7179", "seventy-one seventy nine"),
    ("7179", "seven one seven nine"),
    ("My phone number is 6 2 9 7.", "My phone number is 6297"),
    ("51027 miles", "fifty-one thousand twenty-seven miles"),
    ("27,095 minutes", "twenty-seven thousand ninety-five minutes"),
    ("a hundred men", "100 men"),
    ("one thousand", "1,000"),
    ("one hundred and twenty-three thousand four hundred", "123400"),
    ("1,200,000 people", "one million two hundred thousand people"),
    ("5000000", "five million"),
    ("a million", "one million"),
    ("twenty, five", "20, 5"),
    ("The score was 3 to 10.", "The score was 3-10."),
    ("call 555-1234", "call five five five one two three four"),
    ("one, two, three", "1 2 3"),
    ("007", "zero zero seven"),
    ("3.14", "three point one four"),
    ("0.5", "zero point five"),
    ("2/3 of it", "two thirds of it"),
    ("1/2", "one half"),
    ("2½ miles", "two and a half miles"),
    # ordinals
    ("the sixth chapter", "the 6th chapter"),
    ("the twenty-first", "the 21st"),
    ("one hundredth", "100th"),
    # years and dates
    ("In 1956, Dix moved", "in nineteen fifty six Dix moved"),
    ("In 2025", "in twenty twenty-five"),
    ("2005", "two thousand and five"),
    ("1905", "nineteen oh five"),
    ("fourteen hundred", "1400"),
    ("the 1990s", "the nineteen nineties"),
    ("July 4, 2000", "July fourth two thousand"),
    ("the fourth of July", "July the 4th"),
    ("4 July 2000", "July 4, 2000"),
    ("2000-07-04", "July fourth, two thousand"),
    ("12/25/1999", "December 25th, nineteen ninety-nine"),
    # times
    ("at 9:25", "at nine twenty-five"),
    ("at 9:25 on Friday", "At 9.25 on Friday"),
    ("at 9.25 percent", "at nine point two five percent"),
    ("9:05 a.m.", "nine oh five AM"),
    ("10:00", "ten o'clock"),
    ("half past eight", "8:30"),
    ("a quarter past six", "6:15"),
    ("quarter to nine", "8:45"),
    # money and measures
    ("$15728, including tax", "fifteen thousand, seven hundred and twenty-eight dollars including tax"),
    ("$15,341.70", "fifteen thousand three hundred and forty-one dollars and seventy cents"),
    ("65 cents", "$0.65"),
    ("$4.50", "four dollars fifty cents"),
    ("one out of every $6", "1 out of every six dollars"),
    ("$5 billion", "five billion dollars"),
    ("$1.5 million", "one point five million dollars"),
    ("15%", "15 per cent"),
    ("5 km", "five kilometres"),
    ("80 mph", "eighty miles per hour"),
    ("20°C", "twenty degrees Celsius"),
    # abbreviations
    ("Dr. Smith and Mrs. Jones", "Doctor Smith and missus Jones"),
    ("St. Mary", "Saint Mary"),
    ("No. 5", "number five"),
    ("the U.S. army", "the US army"),
    ("F.B.I.", "F B I"),
    ("salt & pepper", "salt and pepper"),
    # contractions
    ("I won't, and they can't", "I will not and they cannot"),
    ("It's what I'd say", "It is what I would say"),
    ("goin' on", "going on"),
    ("the dogs' house", "the dog's house"),
    # spelling
    ("the colour of the theatre", "the color of the theater"),
    ("we realised it", "we realized it"),
    ("travelled through grey harbours", "traveled through gray harbors"),
    ("O Lord", "Oh Lord"),
    ("café", "cafe"),
    ("“Well,” she said—twice…", "well she said twice"),
    ("um, hello [Music]", "hello"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "heard"), SAME, ids=[written for written, _ in SAME])
def test_readings_of_one_text_are_equal(written: str, heard: str) -> None:
    assert units(written) == units(heard)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fifteen", "fifty"), ("the first", "the 2nd"), ("9:25", "9:35"), ("will", "will not"),
        ("9.25 meters", "9:25"),
        ("filled", "filed"), ("1956", "1965"), ("sixty", "sixteen"), ("dollars", "cents"), ("half", "third"),
        ("third", "three"), ("no", "number"), ("hundred", "thousand"), ("us", "them"),
    ],
)  # fmt: skip
def test_what_sounds_different_stays_different(one: str, other: str) -> None:
    assert units(one) != units(other)


def test_every_digit_is_a_word() -> None:
    assert units("Room 7179.") == ["room", "7", "1", "7", "9"]


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("你好，世界！", "zh", ["你", "好", "世", "界"]),
        ("カタカナ ひらがな", "ja", list("カタカナひらがな")),
        ("买iPhone，１２个", "zh", ["买", "iphone", "12", "个"]),
        ("สวัสดี", "th", ["ส", "วั", "ส", "ดี"]),
        ("Où est l'école?", "fr", ["où", "est", "l'école"]),
        ("안녕 세계", "ko", ["안녕", "세계"]),
    ],
    ids=["chinese", "japanese", "mixed", "thai", "french", "korean"],
)
def test_scripts_without_blanks_are_counted_by_character(
    text: str, language: str, expected: list[str]
) -> None:
    assert units(text, language) == expected


def test_a_text_is_ideographic_by_most_of_its_letters() -> None:
    assert is_ideographic("你好 OK 世界")
    assert not is_ideographic("He said 你好 to everyone")
    assert not is_ideographic("12")


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("one", 1), ("seven", 2), ("people", 2), ("education", 4), ("beautiful", 3),
        ("quiet", 2), ("table", 2), ("wanted", 2), ("walked", 1), ("houses", 2), ("makes", 1), ("little", 2),
        ("the", 1), ("TV", 2), ("21", 3), ("1956", 5), ("$5", 3), ("你好", 2),
    ],
)  # fmt: skip
def test_syllables_are_about_right(word: str, count: int) -> None:
    assert syllables(word) == count


def test_spoken_words_spell_numbers_out() -> None:
    assert " ".join(spoken("In 1956 she paid $1,250 at 9:05.")) == (
        "in nineteen fifty six she paid twelve fifty dollars at nine zero five"
    )
