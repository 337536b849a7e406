"""Texts brought to the words that are spoken, so that what was written and what was heard can be compared.

A recogniser writes `$1,300`, `Dr.`, `colour` and `it's` as it pleases; none of that can be heard. The idea
is that of Whisper's EnglishTextNormalizer (Radford et al. 2022, appendix C); the rules are our own. The main
difference: numbers become single digits (see `hocket.eval.numbers`), so that no reading of one is an error.
A rule that turns both sides into the same odd spelling ("promize") does no harm: only words that sound
different must stay apart.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from hocket.eval.numbers import PAUSE, digits_apart, spell, value_of

_IDEOGRAPHIC = (
    "\u0e00-\u0e7f"  # Thai, Lao, Khmer, Burmese: written without blanks between words
    "\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
)
_ONE = re.compile(f"[{_IDEOGRAPHIC}]")
_UNIT = re.compile(
    f"[{_IDEOGRAPHIC}][\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]*|[^\\W_{_IDEOGRAPHIC}]+(?:'[^\\W_]+)*"
)


def units(text: str, language: str = "en") -> list[str]:
    """The units in which errors are counted: words, but characters of scripts without blanks between words.

    English is brought to spoken words; of other languages, case and punctuation are dropped.
    """
    text = unicodedata.normalize("NFKC", _vulgar(text))
    if language == "en" and not _ONE.search(text):
        return _english(text)
    return _UNIT.findall(text.lower().replace("’", "'"))


def is_ideographic(text: str) -> bool:
    """Whether most of `text` is of a script whose errors are counted by character."""
    letters = [c for c in text if c.isalpha()]
    return 2 * sum(bool(_ONE.match(c)) for c in letters) > len(letters)


# --- English -----------------------------------------------------------------------------------

_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
    "november", "december",
)  # fmt: skip
_MONEY = {"$": ("dollars", "cents"), "£": ("pounds", "pence"), "€": ("euros", "cents"), "¥": ("yen", "")}
_SCALE = r"(?:\s(thousand|million|billion|trillion))?"
_SUPER = {"½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"}
_PARTS = {"2": "half", "3": "third", "4": "quarter", "5": "fifth", "6": "sixth", "8": "eighth", "10": "tenth"}


def _vulgar(text: str) -> str:
    for sign, plain in _SUPER.items():
        text = re.sub(rf"(?<=\d){sign}", f" and {plain}", text).replace(sign, plain)
    return text


def _money(match: re.Match[str]) -> str:
    sign, whole, part, scale = match.groups()
    many, small = _MONEY[sign]
    whole = whole.replace(",", "")
    if scale or (part and len(part) != 2):
        return f" {whole}{'.' + part if part else ''} {scale or ''} {many} "
    cents = f"{int(part)} {small}" if part and int(part) else ""
    return f" {cents} " if cents and not int(whole) else f" {whole} {many} {cents} "


def _date(match: re.Match[str]) -> str:
    found = match.groupdict()
    month = int(found["month"])
    if not 1 <= month <= 12 or not 1 <= int(found["day"]) <= 31:
        return match[0]
    return f"{_MONTHS[month - 1]} {int(found['day'])} {found['year']}"


def _grouped(match: re.Match[str]) -> str:
    """`1,200,000` as 1 million 200000."""
    groups = match[0].split(",")
    parts = []
    for scale in ("million", "billion", "trillion")[: max(0, len(groups) - 2)][::-1]:
        parts.append(f"{int(groups[0])} {scale}" if int(groups[0]) else "")
        groups = groups[1:]
    rest = int("".join(groups))
    return " ".join([*parts, str(rest) if rest or not parts else ""])


def _round(match: re.Match[str]) -> str:
    """`5000000` as 5 million."""
    zeros = len(match[2]) // 3
    return f"{match[1]} {('million', 'billion', 'trillion')[zeros - 2]}" if zeros <= 4 else match[0]


def _clock(match: re.Match[str]) -> str:
    return match[1] if match[2] == "00" else f"{match[1]} {match[2]}"


def _fraction(match: re.Match[str]) -> str:
    above, below = match.groups()
    if below not in _PARTS:
        return f"{above} over {below}"
    return "half" if (above, below) == ("1", "2") else f"{above} {_PARTS[below]}"


def _past(match: re.Match[str]) -> str:
    part, side, word = match.groups()
    hour = value_of(word)
    if hour is None or not 1 <= hour <= 12 or (part == "half" and side == "to"):
        return match[0]
    if side == "to":
        return f"{hour - 1 or 12} 45"
    return f"{hour} {'30' if part == 'half' else '15'}"


def _undotted(match: re.Match[str]) -> str:
    return _DOTTED.get(match[1], match[1]) + " "


_Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _rules(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[_Rule]:
    return [(re.compile(pattern), made) for pattern, made in pairs]


# Each rule sees what the ones before it made.
_CASED = _rules(
    (r"[‘’ʼ`´]", "'"),
    (r"\[[^\]]*\]|♪+", " "),  # what a recogniser says about noises
    (r"\b(?:e\.\s?g\.|eg\.)", " for example "),
    (r"\b(?:i\.\s?e\.|ie\.)", " that is "),
    (r"\b(?:[A-Za-z]\.\s?){2,}", lambda m: re.sub(r"[.\s]", "", m[0]) + " "),  # U.S., a.m.
    (r"\b[A-Z](?:[ -][A-Z])+\b(?!')", lambda m: re.sub(r"[ -]", "", m[0])),  # F B I
)
_LOWER = _rules(
    (rf"([$£€¥])\s?(\d[\d,]*)(?:\.(\d+))?{_SCALE}", _money),
    (r"\b(?P<year>\d{4})-(?P<month>\d\d?)-(?P<day>\d\d?)\b", _date),
    (r"\b(?P<month>\d\d?)/(?P<day>\d\d?)/(?P<year>\d{4}|\d\d)\b", _date),
    (r"\b(\d{1,2})[:.](\d\d)(?=\s?(?:am|pm|o'clock)\b)", _clock),
    (r"\b(\d{1,2}):(\d\d)\b", _clock),
    (r"(?<=\bat )(\d{1,2})\.([0-5]\d)\b(?!\s?(?:%|per))", _clock),  # at 9.25 on Friday
    (r"(?<![\d-])\b(\d{1,2})[-–](\d{1,2})\b(?!-)", r"\1 to \2"),  # the score was 3-10
    (r"\b\d{1,3}(?:,\d{3})+(?!\d)", _grouped),
    (r"\b([1-9]\d{0,2})((?:000){2,})(?!\d)", _round),
    (r"\b(\d+)/(\d+)\b", _fraction),
    (r"\band half\b", "and a half"),
    (r"\b(?:one|1) half\b", "half"),
    (r"\b(half|quarter) (past|to) (\w+)", _past),
    (r"\ba (?=\d{1,2} (?:15|45)\b)", ""),  # (a) quarter past
    (r"\bo'clock\b", " "),
    (r"(?<=\d)\s?%", " percent "),
    (r"\bper cent\b", "percent"),
    (r"(?<![\d\w])0?\.(?=\d)", " point "),
    (r"(?<=\d)\.(?=\d)", " point "),
    (r"\b(?:zero|0) point\b", "point"),
    (r"\b(?:no|nr)\.\s?(?=\d)|#(?=\d)", " number "),
    (r"°\s?f\b", " degrees fahrenheit "),
    (r"°\s?c\b", " degrees celsius "),
    (r"°", " degrees "),
    (r"&", " and "),
    (r"@", " at "),
    (r"(?<=\s)\+(?=\s?\d)|(?<=\d)\+(?=\d)", " plus "),
    (r"\ba(?= (?:million|billion|trillion)\b)", "1"),
    (r"\b(mon|tues?|wed|thu|thurs?|fri|sat|sun|no|gen|rep|sen|rev|hon|col|co|mar|jun|jul|ave|fig|vol)\.",
     _undotted),
)  # fmt: skip
_DOTTED = {
    "mon": "monday", "tue": "tuesday", "tues": "tuesday", "wed": "wednesday", "thu": "thursday",
    "thur": "thursday", "thurs": "thursday", "fri": "friday", "sat": "saturday", "sun": "sunday",
    "gen": "general", "rep": "representative", "sen": "senator", "rev": "reverend", "hon": "honorable",
    "col": "colonel", "co": "company", "mar": "march", "jun": "june", "jul": "july", "ave": "avenue",
    "fig": "figure", "vol": "volume",
}  # fmt: skip
_MEASURES = {
    "km": "kilometers", "m": "meters", "cm": "centimeters", "mm": "millimeters", "kg": "kilograms",
    "g": "grams",
    "mg": "milligrams", "lb": "pounds", "lbs": "pounds", "oz": "ounces", "ft": "feet", "mi": "miles",
    "mph": "miles per hour", "kmh": "kilometers per hour", "ml": "milliliters", "l": "liters",
    "kb": "kilobytes", "mb": "megabytes", "gb": "gigabytes", "tb": "terabytes", "hz": "hertz",
    "khz": "kilohertz", "mhz": "megahertz", "ghz": "gigahertz", "ms": "milliseconds", "min": "minutes",
    "hr": "hours", "hrs": "hours", "sec": "seconds", "secs": "seconds", "yrs": "years",
}  # fmt: skip
_MEASURE = re.compile(rf"(?<=\d)\s?({'|'.join(sorted(_MEASURES, key=len, reverse=True))})\b")
_CONTRACTED = _rules(
    (r"\b(?:can't|cannot|cant)\b", "can not"),
    (r"\bwon't\b", "will not"),
    (r"\bshan't\b", "shall not"),
    (r"\bain't\b", "aint"),
    (r"(\w)n't\b", r"\1 not"),
    (r"\blet's\b", "let us"),
    (r"\b(it|he|she|that|there|here|what|who|where|when|why|how|this)'s\b", r"\1 is"),
    (r"'re\b", " are"),
    (r"'ve\b", " have"),
    (r"'ll\b", " will"),
    (r"\b(i|you|he|she|it|we|they|who|that|there|what)'d\b", r"\1 would"),
    (r"\bi'm\b", "i am"),
    (r"'em\b", "them"),
    (r"\b'?(?:tis|twas)\b", lambda m: "it is" if "tis" in m[0] else "it was"),
    (r"\bgonna\b", "going to"),
    (r"\bwanna\b", "want to"),
    (r"\bgotta\b", "got to"),
    (r"\ball right\b", "alright"),
    (r"\b(\w{2,}in)'(?!\w)", r"\1g"),  # goin'
    (r"(?<=\d)'(?=s\b)", ""),  # the 1990's
    (r"'", ""),  # possessives sound like plurals
)
# One spelling of a word for both ways in which it is written.
_WORDS = {
    "mister": "mr", "missus": "mrs", "doctor": "dr", "saint": "st", "street": "st", "professor": "prof",
    "junior": "jr", "senior": "sr", "versus": "vs", "etcetera": "etc", "mount": "mt", "avenue": "ave",
    "boulevard": "blvd", "captain": "capt", "sergeant": "sgt", "lieutenant": "lt", "governor": "gov",
    "department": "dept", "approximately": "approx", "incorporated": "inc", "limited": "ltd",
    "corporation": "corp", "jan": "january", "feb": "february", "apr": "april", "aug": "august",
    "sep": "september", "sept": "september", "oct": "october", "nov": "november", "dec": "december",
    "dollar": "dollars", "cent": "cents", "penny": "pence", "pound": "pounds", "euro": "euros",
    "o": "oh", "ok": "okay", "grey": "gray", "defence": "defense", "offence": "offense", "licence": "license",
    "practise": "practice", "pretence": "pretense", "programme": "program", "programmes": "programs",
    "cheque": "check", "cheques": "checks", "tyre": "tire", "tyres": "tires", "kerb": "curb",
    "plough": "plow", "ploughs": "plows", "ploughed": "plowed", "sceptic": "skeptic",
    "sceptical": "skeptical", "mould": "mold", "moulds": "molds", "moustache": "mustache", "storey": "story",
    "judgement": "judgment", "judgements": "judgments", "acknowledgement": "acknowledgment",
    "harken": "hearken", "harkened": "hearkened", "harkening": "hearkening", "qaeda": "qaida",
    "ageing": "aging", "whiskey": "whisky", "yoghurt": "yogurt", "pyjamas": "pajamas", "draught": "draft",
    "jewellery": "jewelry", "fulfil": "fulfill", "skilful": "skillful", "enrol": "enroll",
    "wilful": "willful", "instalment": "installment", "manoeuvre": "maneuver", "manoeuvres": "maneuvers",
    "encyclopaedia": "encyclopedia", "archaeology": "archeology", "paediatric": "pediatric",
    "anaesthetic": "anesthetic", "haemorrhage": "hemorrhage", "oesophagus": "esophagus",
    "foetus": "fetus", "aluminium": "aluminum", "artefact": "artifact", "artefacts": "artifacts",
    "cosy": "cozy", "disc": "disk", "discs": "disks", "drily": "dryly", "furore": "furor", "gaol": "jail",
    "gauge": "gage", "hiccough": "hiccup", "liquorice": "licorice", "mollusc": "mollusk",
    "phoney": "phony", "smoulder": "smolder", "sulphur": "sulfur", "tonne": "ton", "tonnes": "tons",
    "travelogue": "travelog", "wagon": "waggon", "woollen": "woolen", "goodbye": "goodby", "bye": "by",
    "burnt": "burned", "learnt": "learned", "spelt": "spelled", "dreamt": "dreamed",
     "adviser": "advisor", "advisers": "advisors", "grandad": "granddad", "blonde": "blond",
    "theatre": "theater", "theatres": "theaters", "racket": "racquet", "vice": "vise", "omelet": "omelette",
}  # fmt: skip
_SPELLING = _rules(
    (r"our(s|ed|ing|able|ful|ite|ites|er|ers|ly|less|hood|hoods|al)?$", r"or\1"),  # colour
    (r"([^aeiou]|ual|ial)is(e|es|ed|er|ers|ing|ation|ations)$", r"\1iz\2"),  # realise
    (r"lys(e|es|ed|er|ers|ing)$", r"lyz\1"),
    (r"([bht])re(s|d)?$", r"\1er\2"),  # centre
    (r"ogue(s)?$", r"og\1"),
    (r"^(trave|cance|labe|mode|signa|leve|fue|marve|counse|jewe|quarre|tota|riva|equa|dia|she|tunne|channe|"
     r"pane|due|pencil|unrave|ename|initia)ll(ed|ing|er|ers|or|ors)$", r"\1l\2"),
)  # fmt: skip
_FILLERS = {"hmm", "hm", "mm", "mhm", "mmm", "uh", "um", "er", "erm"}
_MARK = re.compile(r"[.,;:!?…—–()\"“”]+")


def _english(text: str) -> list[str]:
    text = _apply(_CASED, text).lower()
    text = _MEASURE.sub(lambda m: f" {_MEASURES[m[1]]} ", _apply(_LOWER, text))
    text = re.sub(r"[-‐‑/]", " ", text)
    text = _apply(_CONTRACTED, text)
    text = _MARK.sub(f" {PAUSE} ", text)
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    words = [_spelled(word) for word in re.findall(r"[^\W_]+|,", text) if word not in _FILLERS]
    return _one_form(digits_apart(words))


def _apply(rules: list[_Rule], text: str) -> str:
    for pattern, made in rules:
        text = pattern.sub(made, text)
    return text


def _spelled(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    return _apply(_SPELLING, word) if len(word) > 4 else word


def _one_form(words: list[str]) -> list[str]:
    """`july the 4 th` and `the 4 th of july` as july 4; `5 dollars and 4 cents` without *and*."""
    text = " ".join(words)
    months = "|".join(_MONTHS)
    day = r"(\d(?: \d)?)"
    text = re.sub(rf"\b(?:the )?{day} th (?:of )?({months})\b", r"\2 \1", text)
    text = re.sub(rf"(?<!\d )\b{day} (?:of )?({months})\b(?! \d\b(?: \d\b)?(?! \d))", r"\2 \1", text)
    text = re.sub(rf"\b({months}) (?:the )?{day} th\b", r"\1 \2", text)
    text = re.sub(r"\b(dollars|pounds|euros) and (?=(?:\d ){1,2}(?:cents|pence)\b)", r"\1 ", text)
    return text.split()


# --- how long it takes to say ------------------------------------------------------------------


def spoken(text: str) -> list[str]:
    """The words that a reader of an English text says, numbers spelled out."""
    text = _apply(_LOWER, _apply(_CASED, unicodedata.normalize("NFKC", _vulgar(text))).lower())
    words: list[str] = []
    for word in re.findall(r"\d+|[^\W\d_]+(?:'[^\W_]+)*", text):
        if not word.isdecimal():
            words.append(word)
        elif word.startswith("0") or len(word) > 15:
            words += [part for digit in word for part in spell(int(digit))]
        else:
            words += spell(int(word))
    return words


def syllables(text: str) -> int:
    """About how many syllables a text has: its characters in scripts without blanks, else groups of vowels.

    For English within some per cent over a sentence; good for a rate of speech, not for verse.
    """
    single = len(_ONE.findall(text))
    return single + sum(_of_word(word) for word in spoken(_ONE.sub(" ", text)))


def _of_word(word: str) -> int:
    word = re.sub("(?<=nin)e(?=t)", "", word.replace("'", ""))  # ninety
    if len(word) > 1 and not re.search(r"[aeiouy]", unicodedata.normalize("NFKD", word)):
        return len(word) + 2 * word.count("w") if word.isascii() else 1  # spelled: TV, WWW
    word = unicodedata.normalize("NFKD", word)
    found = len(re.findall(r"[aeiouy]+", word))
    found += len(
        re.findall(r"i[ao](?!u)|[aeiou]ing\b|eo(?=r|$)|ua(?!r)|[^ct]ie(?:t|n[ct])|[ts]h?m$", word)
    ) - len(re.findall(r"[ct]i[ao]", word))
    if re.search(r"[^aeiouyl]e$|[^aeiouytd]ed$|[^aeiouysxz]es$", word) and not re.search(
        r"(?:[cgsxz]|[sc]h)es$", word
    ):
        found -= 1
    return max(1, found)
