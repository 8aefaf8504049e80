"""Many texts and few are asked in other ways, one after the other or by threads, and obey the same."""

from collections.abc import Iterator

import numpy as np
import pytest

from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.grammar import Grammars
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary
from nightmill.worker.runners.base import IntArray, mask_words
from tests.support.ggufs import byte_vocabulary, write_model

VOCAB = len(byte_vocabulary().tokens)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    vocabulary = Vocabulary.from_gguf(
        GgufFile.open(write_model(tmp_path_factory.mktemp("model") / "bytes.gguf"))
    )
    vocabulary.spell_all()
    made = Grammars(vocabulary, VOCAB, threads=3)
    yield made
    made.close()


def walk(grammars: Grammars, texts: int, steps: int) -> list[tuple[list[int], IntArray, list[int]]]:
    """Of each step: the tokens, the masks behind them, and the texts that cannot go on.

    Text n takes in turn each token that may follow, from the n-th on; every seventh one that may not.
    """
    asked = JobSpec.parse({"prompt": "x", "regex": "([a-m]{2,5}[n-z]){1,9}"}).constrained
    assert asked is not None
    matchers = {n: grammars.compile(asked).result()() for n in range(texts)}
    found = []
    for step in range(steps):
        masks = np.zeros((texts, mask_words(VOCAB)), dtype=np.int32)
        assert not grammars.masks(matchers, masks)
        tokens = []
        for n in matchers:
            bits = np.unpackbits(masks[n].view(np.uint8), bitorder="little")[:VOCAB]
            allowed = np.flatnonzero(bits if n % 7 or step + 1 < steps else bits == 0)
            tokens.append(int(allowed[(n + step) % len(allowed)]))
        faults = grammars.accept(list(matchers.values()), tokens)
        found.append((tokens, masks, sorted(faults)))
    return found


def test_few_texts_obey_as_many_do(grammars: Grammars) -> None:
    """On the last step every seventh text has a token that may not follow: it fails, and no other does."""
    few, many = walk(grammars, 9, 6), walk(grammars, 150, 6)
    for (tokens, masks, failed), (all_tokens, all_masks, all_failed) in zip(few, many, strict=True):
        assert tokens == all_tokens[:9]
        np.testing.assert_array_equal(masks, all_masks[:9])
        assert failed == [n for n in all_failed if n < 9]
    assert few[-1][2] == [0, 7]
    assert many[-1][2] == list(range(0, 150, 7))
