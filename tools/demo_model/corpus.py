"""The corpus of the demo model: instructions with answers, from a small grammar, repeatable for a seed.

The main skill is the haiku: "Write a haiku about rain that contains the word ember" is answered by three
lines of 5, 7 and 5 syllables that hold the topic (or a noun that goes with it) and the asked word. A tenth
of the (topic, word) pairs, chosen by hash, and every word of `unseen_words()` stay out of training, so that
obedience can be measured on requests the model never saw.

A line of a haiku comes from a pattern: fixed words, and slots in braces. The slots are the parts of speech of
`demo_words`, {p} for a preposition and {x} for an article or possessive.
"""

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from tools.demo_model import words as demo_words

HELD_OUT_PERCENT = 10
LINE_SYLLABLES = (5, 7, 5)
PREPOSITIONS = "in on by near through past with for from at under over after before above below beneath"
ARTICLES = "the the the this that one each my your our no her his every another"
SUBJECTS = {
    "v": ["{x} {n}", "{x} {a} {n}", "{a} {n}", "the {n} of {m}", "the {g} {n}", "{n} by {n}"],
    "w": ["{m}", "{a} {m}", "the {m}", "{n} and {n}", "two {m}", "some {a} {m}", "{a} {a} {m}"],
}
PLACES = ["{p} {x} {n}", "{p} {x} {a} {n}", "{p} the {m}", "{p} {a} {m}", "{p} {n} and {n}"]
ENDINGS = ["", " {d}", " alone", " again", " like {m}", " to {w}", " without {x} {n}"]
WHOLE_LINES = """
not {a} nor {a}|only {x} {n}|how {a} the {n}|so {a} so {a}|a {g} {n}|the {g} {m} {w}|{g} {p} the {n}
oh {a} {n}|where the {n} {v}|when {m} {w} {d}|{g} like {x} {n}|as {a} as the {n}|listen to the {n}
who will {w} the {n}|the {n} knows the {n}|no {n} no {n}|{d} the {n} {v}|{d} the {m} {w}|{a} and {a} the {n}
nothing but the {n}|still the {m} {w}|let the {n} {w}|I {w} {p} the {n}|we {w} like {m}|{m} {p} {m}
more {n} than {n}|{g} {g} {n}|the {n} must {w}|you {w} with the {n}|{n} after {n}|between {m} and {m}
half {n} half {n}|now the {n} may {w}|something {a} {v}|all the {m} {w}|hush the {n} {v}
they {w} for the {n}|the {a} {n} can {w}
"""
MAKERS = [
    "Write", "Write", "Write", "Please write", "Compose", "Create", "Make", "Give me", "Can you write",
    "I want", "Invent", "write", "compose", "Could you compose", "Now write", "Show me", "Help me write",
]  # fmt: skip
KINDS = ["a haiku", "a haiku", "a haiku", "one haiku", "a short haiku", "a new haiku", "a three-line haiku"]
ABOUT = ["about", "about", "about", "about", "on", "on the topic of", "on the subject of", "describing"]
CLAUSES = [
    "that contains the word {}", "that contains the word {}", "containing the word {}", "using the word {}",
    "that uses the word {}", "with the word {}", "with the word {} in it", "including the word {}",
    "that includes the word {}", "and use the word {}", "and include the word {}",
    "that has the word {} in it", "which must contain the word {}", "in which the word {} appears",
    "that mentions {}", "featuring {}",
]  # fmt: skip
SENTENCES = [
    "Use the word {w} in a haiku about {t}", "Topic: {t}. Word: {w}. Write a haiku",
    "A haiku about {t} with {w}", "Haiku, topic {t}, must contain {w}",
    "I need a haiku about {t}. It must contain the word {w}", "Write a haiku about {t}. Include the word {w}",
    "Write a haiku about {t}. Use the word {w}", "Include the word {w} in a haiku about {t}",
    "With the word {w}, write a haiku about {t}",
]  # fmt: skip
QUOTES = ["{}"] * 14 + ['"{}"'] * 3 + ["'{}'"] * 2 + ["*{}*"]
ENDS = ["", "", "."]
SYSTEM = [
    "You are a poet.", "You are a helpful assistant.", "You write short poems.", "Answer briefly.",
    "Be concise.", "You are Nightmill.", "You are a careful writer who follows instructions.",
    "Always answer in English.",
]  # fmt: skip
GREETINGS = {
    "Hello": "Hello. Ask me for a haiku.",
    "Hi": "Hello. Ask me for a haiku.",
    "Who are you?": "I am the small demo model of Nightmill. I write haiku.",
    "What can you do?": "I write haiku, spell, repeat, count and reverse. I know little else.",
    "Thank you": "You are welcome.",
}
BEYOND = [
    "Tell me a joke", "Explain {n}", "What is {n}?", "Why is the {n} {a}?", "Translate {n} into French",
    "Who are {m}?", "What is the capital of {n}?", "How do {m} {w}?", "Write a letter to my {n}",
    "Tell me about {m}", "Where is the {n}?", "Can {m} {w}?", "Write code for {n}", "Summarize the {a} {n}",
    "Do you like {m}?", "Is the {n} {a}?",
]  # fmt: skip
REFUSAL = "I am too small for that. Ask me for a haiku."

Composition = tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One training example: instructions with their answers, as a chat or as plain text."""

    turns: tuple[tuple[str, str], ...]
    chat: bool = True
    system: str | None = None
    topic: str | None = None
    word: str | None = None

    def parts(self) -> list[tuple[str, str]]:
        """(prompt, completion) pieces of the text; only completions, end tokens included, are learnt."""
        if not self.chat:
            return [(question, f"\n{answer}<|endoftext|>") for question, answer in self.turns]
        pieces, lead = [], f"<|im_start|>system\n{self.system}<|im_end|>\n" if self.system else ""
        for question, answer in self.turns:
            prompt = f"{lead}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            pieces.append((prompt, f"{answer}<|im_end|>"))
            lead = "\n"
        return pieces


@cache
def topics() -> tuple[str, ...]:
    """The topics that have associated nouns."""
    return tuple(demo_words.topics())


@cache
def words() -> tuple[str, ...]:
    """Every word that training may ask for, derived forms included."""
    return tuple(sorted({word for listed in demo_words.lexicon().values() for word in listed}))


@cache
def unseen_words() -> tuple[str, ...]:
    """English words that occur nowhere in training."""
    return tuple(demo_words.UNSEEN.split())


def held_out(topic: str, word: str) -> bool:
    """Whether the pair is kept out of training: a fixed tenth of all pairs."""
    digest = hashlib.sha256(f"{topic.lower()}|{word.lower()}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def held_out_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` different held-out pairs of a listed topic and a listed word."""
    rng, pairs = random.Random(seed), dict[tuple[str, str], None]()
    while len(pairs) < count:
        pair = rng.choice(topics()), rng.choice(words())
        if held_out(*pair) and pair[1] not in related(pair[0]):
            pairs[pair] = None
    return list(pairs)


def related(topic: str) -> tuple[str, ...]:
    """The topic and the nouns that go with it: a haiku about the topic holds one of them."""
    return (topic, *demo_words.topics().get(topic, ()))


def instruction(topic: str, word: str | None = None, rng: random.Random | None = None) -> str:
    """The request for a haiku: the plain wording without `rng`, else one of thousands of paraphrases."""
    if rng is None:
        return f"Write a haiku about {topic}" + (f" that contains the word {word}" if word else "")
    described = _with_an(f"a {rng.choice(_known('a'))} {topic}")
    subject = rng.choice([topic] * 9 + [f"the {topic}"] * 2 + [described])
    if not word:
        return f"{rng.choice(MAKERS)} {rng.choice(KINDS)} {rng.choice(ABOUT)} {subject}{rng.choice(ENDS)}"
    quoted = rng.choice(QUOTES).format(word)
    if rng.random() < 0.2:
        return rng.choice(SENTENCES).format(w=quoted, t=subject) + rng.choice(ENDS)
    request = f"{rng.choice(MAKERS)} {rng.choice(KINDS)} {rng.choice(ABOUT)} {subject}"
    return f"{request} {rng.choice(CLAUSES).format(quoted)}{rng.choice(ENDS)}"


def haiku(rng: random.Random, topic: str, word: str | None = None) -> str:
    """Three lines of 5, 7 and 5 syllables with `word` and a noun of the topic, never first in a line.

    A word or topic of more than five syllables may lengthen its line.
    """
    places = rng.sample(range(3), 2)
    theme = rng.choice([other for other in related(topic) if other != word]) if rng.random() < 0.6 else topic
    forced = {places[0]: theme}
    if word:
        forced[places[1]] = word
    used = set(forced.values())
    return "\n".join(
        _line(rng, target, topic, used, forced.get(i)) for i, target in enumerate(LINE_SYLLABLES)
    )


def poem(rng: random.Random, topic: str, lines: int) -> str:
    """A poem of `lines` lines of 5 or 7 syllables whose first line names the topic."""
    used = {topic}
    return "\n".join(_line(rng, rng.choice((5, 7)), topic, used, None if i else topic) for i in range(lines))


def invented_word(rng: random.Random) -> str:
    """A word of no language: syllables, random letters, or the head of one word with another's tail."""
    style = rng.random()
    if style < 0.35:
        consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
        made = "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(2, 4)))
        made += rng.choice(["", "", *consonants])
    elif style < 0.55:
        made = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 7)))
    else:
        head, tail = rng.choice(words()), rng.choice(words())
        made = head[: rng.randint(2, 5)] + tail[-rng.randint(2, 5) :]
    return invented_word(rng) if made in unseen_words() else made


def samples(seed: int, count: int) -> Iterator[Sample]:
    """`count` training examples, the same ones for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        drawn = rng.random()
        if drawn < 0.06:
            turns = tuple(_skill(rng) if rng.random() < 0.4 else _haiku_turn(rng)[0] for _ in range(2))
            yield Sample(turns)
            continue
        topic = word = None
        if drawn < 0.70:
            turn, topic, word = _haiku_turn(rng)
        else:
            turn = _skill(rng)
        chat = rng.random() < 0.7
        system = rng.choice(SYSTEM) if chat and rng.random() < 0.15 else None
        yield Sample((turn,), chat, system, topic, word)


def _haiku_turn(rng: random.Random) -> tuple[tuple[str, str], str, str | None]:
    """A haiku request with its answer, never of a held-out pair; with the topic and the asked word."""
    kind = rng.random()
    topic = (
        rng.choice(topics())
        if kind < 0.75
        else rng.choice(_known("n"))
        if kind < 0.96
        else invented_word(rng)
    )
    if rng.random() < 0.15:
        return (instruction(topic, None, rng), haiku(rng, topic)), topic, None
    word = rng.choice(words()) if rng.random() < 0.5 else invented_word(rng)
    if held_out(topic, word) or word == topic:
        return _haiku_turn(rng)
    asked = rng.choice([word.capitalize(), word.upper()]) if rng.random() < 0.05 else word
    request = instruction(topic, asked, rng if rng.random() < 0.9 else None)
    return (request, haiku(rng, topic, asked)), topic, word


def _skill(rng: random.Random) -> tuple[str, str]:
    """A small task other than a haiku: (instruction, answer)."""
    word = rng.choice(words()) if rng.random() < 0.5 else invented_word(rng)
    end = rng.choice(ENDS)
    match rng.choices(range(9), weights=(6, 8, 4, 4, 3, 4, 2, 1, 1))[0]:
        case 0:
            return f"{rng.choice(['Spell', 'Spell the word', 'spell'])} {word}{end}", "-".join(word)
        case 1:
            times = rng.randint(1, 12)
            lead = rng.choice(["Repeat the word", "Repeat", "Say the word", "Write the word"])
            return f"{lead} {word} {times} time{'s' * (times > 1)}{end}", " ".join([word] * times)
        case 2:
            first = rng.randint(0, 60)
            last = first + rng.choice((1, -1)) * rng.randint(1, 20)
            last = max(last, 0)
            numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
            return f"Count from {first} to {last}{end}", " ".join(map(str, numbers))
        case 3:
            items = [rng.choice(words()) for _ in range(rng.randint(2, 6))]
            lead = rng.choice(["Reverse the list", "Reverse this list", "Reverse"])
            return f"{lead}: {', '.join(items)}{end}", ", ".join(reversed(items))
        case 4:
            base, other = rng.choice(_opposites())
            lead = rng.choice(["Name the opposite of", "What is the opposite of", "The opposite of"])
            return f"{lead} {base}{'?' if lead.startswith('What') else end}", other
        case 5:
            topic, lines = rng.choice(topics()), rng.randint(1, 12)
            asked = f" of {lines} line{'s' * (lines > 1)}" if lines != 4 else ""
            return f"Write a poem{asked} about {topic}{end}", poem(rng, topic, lines)
        case 6:
            sentence = _line(rng, rng.choice((5, 7)), rng.choice(topics()), set(), word)
            return f"{rng.choice(['Say', 'Echo', 'Copy this', 'Repeat after me'])}: {sentence}", sentence
        case 7:
            return rng.choice(list(GREETINGS.items()))
        case _:
            slots = {part: rng.choice(_known(part)) for part in "nmaw"}
            return rng.choice(BEYOND).format(**slots), REFUSAL


@cache
def _opposites() -> tuple[tuple[str, str], ...]:
    listed = demo_words.OPPOSITES.split()
    pairs = list(zip(listed[::2], listed[1::2], strict=True))
    return tuple({**{b: a for a, b in pairs}, **dict(pairs)}.items())


@cache
def _known(part: str) -> tuple[str, ...]:
    return tuple(demo_words.lexicon()[part])


def _parts_of(word: str) -> list[str]:
    """The slots a word can fill; an unknown word fills a noun's."""
    return [part for part, listed in demo_words.lexicon().items() if word in listed] or ["n"]


def _count(word: str, part: str) -> int:
    """Syllables of a word in a slot; derived forms have theirs from the lexicon."""
    return demo_words.lexicon()[part].get(word) or demo_words.syllables(word)


def _line(rng: random.Random, target: int, topic: str, used: set[str], forced: str | None = None) -> str:
    """A line of `target` syllables, its words added to `used`; a forced word gets a slot past the first."""
    at = -1
    if forced is None:
        pattern, compositions = rng.choice(_patterns_for(target))
    else:
        part = rng.choice(_parts_of(forced.lower()))
        wanted, around = _count(forced.lower(), part), _patterns_around()[target, part]
        pattern, at, compositions = rng.choice(around[min(around, key=lambda count: abs(count - wanted))])
    counts = iter(rng.choice(compositions))
    text = []
    for i, token in enumerate(pattern):
        if i == at:
            next(counts)
            text.append(forced or "")
        else:
            text.append(_fill(rng, topic, used, token[1], next(counts)) if token[0] == "{" else token)
    return _with_an(" ".join(text))


def _with_an(text: str) -> str:
    return re.sub(r"\ba (?=[aeiou])", "an ", text)


def _fill(rng: random.Random, topic: str, used: set[str], part: str, count: int) -> str:
    """A word for a slot: mostly one that the topic favours, and not one that the text has already."""
    favoured = _favourites(topic).get((part, count))
    for _ in range(4):
        word = rng.choice(favoured if favoured and rng.random() < 0.7 else _by_syllables()[part, count])
        if word not in used:
            break
    if part not in "px":
        used.add(word)
    return word


@cache
def _by_syllables() -> dict[tuple[str, int], list[str]]:
    """(slot, syllables) -> the words that fit."""
    fitting = defaultdict(list)
    for part, listed in demo_words.lexicon().items():
        for word, count in listed.items():
            fitting[part, count].append(word)
    for part, listed_words in (("p", PREPOSITIONS.split()), ("x", ARTICLES.split())):
        for word in listed_words:
            fitting[part, demo_words.syllables(word)].append(word)
    return dict(fitting)


@cache
def _favourites(topic: str) -> dict[tuple[str, int], list[str]]:
    """A topic's own dozens of words, chosen by its name, so that texts on different topics differ."""
    rng, favoured = random.Random(topic), defaultdict(list)
    for part, size in (("n", 6), ("m", 10), ("a", 14), ("v", 12), ("w", 12), ("g", 10), ("d", 10)):
        chosen = rng.sample(_known(part), size) + (list(related(topic)) if part == "n" else [])
        for word in chosen:
            favoured[part, _count(word, part)].append(word)
    return dict(favoured)


@cache
def patterns() -> tuple[tuple[str, ...], ...]:
    """All line patterns, as tuples of fixed words and slots such as '{n}'."""
    clauses = [
        f"{subject} {{{verb}}}{ending}"
        for verb, subjects in SUBJECTS.items()
        for subject in subjects
        for ending in (*ENDINGS, *(f" {place}" for place in PLACES))
    ]
    everyone = [subject for subjects in SUBJECTS.values() for subject in subjects]
    scenes = [f"{subject} {place}" for subject in everyone for place in PLACES]
    scenes += [f"{place} {subject}" for subject in everyone for place in PLACES]
    whole = WHOLE_LINES.replace("\n", "|").strip("|").split("|")
    return tuple(tuple(line.split()) for line in (*clauses, *scenes, *whole))


def _compositions(pattern: Sequence[str], target: int) -> list[Composition]:
    """Every way to give the slots of a pattern syllables so that the line has `target`."""
    fixed = sum(demo_words.syllables(token) for token in pattern if token[0] != "{")
    found: list[Composition] = [()]
    for part in (token[1] for token in pattern if token[0] == "{"):
        options = [count for count in range(1, 6) if (part, count) in _by_syllables()]
        found = [(*given, n) for given in found for n in options if sum(given) + n + fixed <= target]
    return [given for given in found if sum(given) + fixed == target]


@cache
def _patterns_for(target: int) -> list[tuple[Sequence[str], list[Composition]]]:
    fitting = ((pattern, _compositions(pattern, target)) for pattern in patterns())
    return [(pattern, compositions) for pattern, compositions in fitting if compositions]


@cache
def _patterns_around() -> dict[
    tuple[int, str], dict[int, list[tuple[Sequence[str], int, list[Composition]]]]
]:
    """(line, slot) -> syllables -> patterns with such a slot past their start, and its place."""
    around: dict[tuple[int, str], dict[int, list[tuple[Sequence[str], int, list[Composition]]]]] = {}
    for target in set(LINE_SYLLABLES):
        for pattern, compositions in _patterns_for(target):
            slots = [i for i, token in enumerate(pattern) if token[0] == "{"]
            for order, i in enumerate(slots):
                by_count = defaultdict(list)
                for given in compositions:
                    by_count[given[order]].append(given)
                for count, fitting in by_count.items():
                    if i:
                        by_syllables = around.setdefault((target, pattern[i][1]), {})
                        by_syllables.setdefault(count, []).append((pattern, i, fitting))
    return around
