"""The corpus of the demo model: repeatable, and honest about what it holds out of training."""

import re

import pytest

from tools.demo_model import corpus


@pytest.fixture(scope="module")
def training() -> list[corpus.Sample]:
    return list(corpus.samples(seed=7, count=4_000))


def test_same_seed_gives_the_same_samples() -> None:
    assert list(corpus.samples(3, 200)) == list(corpus.samples(3, 200))
    assert list(corpus.samples(3, 200)) != list(corpus.samples(4, 200))


def test_held_out_pairs_are_a_fixed_tenth_and_repeatable() -> None:
    pairs = [(topic, word) for topic in corpus.topics()[:50] for word in corpus.words()[::20]]
    share = sum(corpus.held_out(*pair) for pair in pairs) / len(pairs)
    assert share == pytest.approx(0.10, abs=0.01)
    chosen = corpus.held_out_pairs(100, seed=5)
    assert chosen == corpus.held_out_pairs(100, seed=5)
    assert len(set(chosen)) == 100
    assert all(corpus.held_out(*pair) for pair in chosen)


def test_held_out_pairs_never_occur_in_training(training: list[corpus.Sample]) -> None:
    asked = [(s.topic, s.word) for s in training if s.topic and s.word]
    assert len(asked) > 1_500
    assert not [pair for pair in asked if corpus.held_out(*pair)]


def test_unseen_words_never_occur_in_training(training: list[corpus.Sample]) -> None:
    unseen = set(corpus.unseen_words())
    assert len(unseen) > 100
    assert unseen.isdisjoint(corpus.words())
    text = " ".join(part for s in training for turn in s.turns for part in turn).lower()
    assert unseen.isdisjoint(re.findall(r"[a-z]+", text))
