"""The corpus of the demo model: repeatable, honest about what it holds out, and rich enough not to repeat."""

import random
import re

import pytest

from tools import demo_corpus, demo_words


@pytest.fixture(scope="module")
def training() -> list[demo_corpus.Sample]:
    return list(demo_corpus.samples(seed=7, count=4_000))


def test_same_seed_gives_the_same_samples() -> None:
    assert list(demo_corpus.samples(3, 200)) == list(demo_corpus.samples(3, 200))
    assert list(demo_corpus.samples(3, 200)) != list(demo_corpus.samples(4, 200))


def test_held_out_pairs_are_a_fixed_tenth_and_repeatable() -> None:
    pairs = [(topic, word) for topic in demo_corpus.topics()[:50] for word in demo_corpus.words()[::20]]
    share = sum(demo_corpus.held_out(*pair) for pair in pairs) / len(pairs)
    assert share == pytest.approx(0.10, abs=0.01)
    chosen = demo_corpus.held_out_pairs(100, seed=5)
    assert chosen == demo_corpus.held_out_pairs(100, seed=5)
    assert len(set(chosen)) == 100
    assert all(demo_corpus.held_out(*pair) for pair in chosen)


def test_held_out_pairs_never_occur_in_training(training: list[demo_corpus.Sample]) -> None:
    asked = [(s.topic, s.word) for s in training if s.topic and s.word]
    assert len(asked) > 1_500
    assert not [pair for pair in asked if demo_corpus.held_out(*pair)]


def test_unseen_words_never_occur_in_training(training: list[demo_corpus.Sample]) -> None:
    unseen = set(demo_corpus.unseen_words())
    assert len(unseen) > 100
    assert unseen.isdisjoint(demo_corpus.words())
    text = " ".join(part for s in training for turn in s.turns for part in turn).lower()
    assert unseen.isdisjoint(re.findall(r"[a-z]+", text))


def test_haiku_holds_the_asked_word_and_its_topic() -> None:
    rng = random.Random(1)
    for _ in range(500):
        topic = rng.choice(demo_corpus.topics())
        word = rng.choice([rng.choice(demo_corpus.words()), demo_corpus.invented_word(rng)])
        text = demo_corpus.haiku(rng, topic, word)
        assert word in text.split()
        assert set(demo_corpus.related(topic)) & set(text.split())


def test_haiku_has_lines_of_five_seven_and_five_syllables() -> None:
    counts = {w: n for listed in demo_words.lexicon().values() for w, n in listed.items()}
    rng = random.Random(2)
    for topic in demo_corpus.topics():
        lines = demo_corpus.haiku(rng, topic).split("\n")
        measured = [sum(counts.get(w) or demo_words.syllables(w) for w in line.split()) for line in lines]
        assert measured == [5, 7, 5], lines


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("moon", 1),
        ("apple", 2),
        ("violet", 3),
        ("fire", 1),
        ("lighthouse", 2),
        ("antique", 2),
        ("horizon", 3),
    ],
)
def test_syllables_of_known_words(word: str, count: int) -> None:
    assert demo_words.syllables(word) == count


@pytest.mark.parametrize(
    ("derive", "base", "form"),
    [
        (demo_words.plural, "leaf", "leaves"),
        (demo_words.plural, "berry", "berries"),
        (demo_words.third_person, "brush", "brushes"),
        (demo_words.gerund, "run", "running"),
        (demo_words.gerund, "whisper", "whispering"),
        (demo_words.gerund, "dance", "dancing"),
        (demo_words.adverb, "gentle", "gently"),
        (demo_words.adverb, "happy", "happily"),
    ],
)
def test_derived_forms(derive: object, base: str, form: str) -> None:
    assert callable(derive)
    assert derive(base) == form


def test_there_are_thousands_of_words_and_hundreds_of_topics_and_patterns() -> None:
    assert len(demo_corpus.words()) > 3_000
    assert len(demo_corpus.topics()) >= 100
    assert len(demo_corpus.patterns()) >= 200


def test_texts_of_one_request_differ() -> None:
    rng = random.Random(3)
    assert len({demo_corpus.haiku(rng, "rain", "ember") for _ in range(300)}) == 300
    assert len({demo_corpus.instruction("rain", "ember", rng) for _ in range(300)}) > 200


def test_plain_instruction_has_the_wording_that_people_use() -> None:
    assert demo_corpus.instruction("rain") == "Write a haiku about rain"
    assert demo_corpus.instruction("rain", "ember") == "Write a haiku about rain that contains the word ember"


def test_chat_and_plain_samples_end_with_their_end_token() -> None:
    turns = (("Say: hush", "hush"), ("Spell owl", "o-w-l"))
    chat = "".join(text for part in demo_corpus.Sample(turns, system="Be brief.").parts() for text in part)
    assert chat == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nSay: hush<|im_end|>\n<|im_start|>assistant\nhush<|im_end|>\n"
        "<|im_start|>user\nSpell owl<|im_end|>\n<|im_start|>assistant\no-w-l<|im_end|>"
    )
    assert demo_corpus.Sample(turns[:1], chat=False).parts() == [("Say: hush", "\nhush<|endoftext|>")]


def test_some_samples_are_plain_text_and_most_are_chats(training: list[demo_corpus.Sample]) -> None:
    plain = sum(not s.chat for s in training) / len(training)
    assert 0.2 < plain < 0.4
