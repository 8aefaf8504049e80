"""The generator that both runners must share, against Random123's own vectors."""

import numpy as np
import pytest

from nightmill.worker.runners.philox import philox4x32, token_words, uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123 1.14, tests/kat_vectors, philox4x32 10
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: str, key: str, words: str) -> None:
    def parse(text: str) -> tuple[np.ndarray, ...]:
        return tuple(np.array([int(word, 16)], dtype=np.uint32) for word in text.split())

    assert [f"{word[0]:08x}" for word in philox4x32(parse(counter), parse(key))] == words.split()


def test_layout_of_key_and_counter() -> None:
    seed, position, token = 0x299F31D0A4093822, 0x85A308D3, 4 * 0x243F6A88 + 2
    words = token_words(
        np.array([seed], dtype=np.uint64),
        np.array([position], dtype=np.uint32),
        np.array([token // 4], dtype=np.uint32),
    )
    as_array = [
        np.array([word], dtype=np.uint32) for word in (token // 4, position, 0, 0, 0xA4093822, 0x299F31D0)
    ]
    expected = philox4x32(tuple(as_array[:4]), tuple(as_array[4:]))
    assert words[0, token % 4] == expected[2][0]


def test_uniforms_lie_inside_the_interval_and_are_exact_where_small() -> None:
    words = np.array([0, 1, 2, 1000, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32)
    values = uniform(words)
    assert values.dtype == np.float32
    assert values[0] == 2.0**-33
    np.testing.assert_allclose(values, (words.astype(float) + 0.5) / 2**32, rtol=6e-8)
    assert (values > 0).all()
    assert values[-1] == np.float32(1 - 2**-24) < 1


def test_words_are_spread_evenly() -> None:
    words = token_words(
        np.array([7], np.uint64), np.arange(1 << 14, dtype=np.uint32), np.array([3], np.uint32)
    )
    values = uniform(words).astype(float)
    assert abs(values.mean() - 0.5) < 4 * (1 / 12) ** 0.5 / values.size**0.5
    counts = np.histogram(values, bins=64, range=(0, 1))[0]
    chi_square = ((counts - values.size / 64) ** 2 / (values.size / 64)).sum()
    assert chi_square < 120  # 63 degrees of freedom: exceeded by chance in 2e-5 of cases
