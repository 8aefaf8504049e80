"""How keys and values of a model lie in pages: kinds, their sizes, and that no two parts meet."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nightmill.worker.model.spec import Attention, LatentAttention, ModelSpec
from nightmill.worker.runners.base import PageKind
from nightmill.worker.runners.page_layout import page_layout
from nightmill.worker.runners.reference.kv_cache import ReferenceKvCache, reference_layout
from tests.support.specs import GEMMAS, HYBRIDS, MIXTURES, PLAIN, VARIANTS

ALL = VARIANTS | HYBRIDS | MIXTURES | GEMMAS | {"plain": PLAIN}


def numbers(mixer: Attention | LatentAttention) -> int:
    assert isinstance(mixer, Attention)
    return 16 * mixer.keys


def stacked(*layers: tuple[int, dict[str, Any]]) -> ModelSpec:
    """PLAIN with so many layers of attention with these fields, one kind after the other."""
    plain, attention = PLAIN.layers[0], PLAIN.layers[0].attention
    return replace(
        PLAIN,
        layers=tuple(
            replace(plain, mixer=replace(attention, **fields))
            for count, fields in layers
            for _ in range(count)
        ),
    )


def test_layers_that_see_all_and_are_alike_have_pages_as_long_as_a_table_s_entry() -> None:
    layout = page_layout(PLAIN, 16, numbers)
    assert layout.kinds == (PageKind(None, 16),)
    assert layout.apart
    assert layout.numbers == 2 * 2 * 16 * 32


def test_as_many_layers_with_a_window_as_without_have_pages_of_as_many_tokens() -> None:
    layout = page_layout(stacked((3, {"window": 128}), (3, {})), 16, numbers)
    assert layout.kinds == (PageKind(None, 16, 6), PageKind(128, 16, 6))
    assert [part and part.kind for part in layout.layers] == [1, 1, 1, 0, 0, 0]


def test_a_few_layers_that_see_all_have_more_tokens_in_a_page() -> None:
    """29 and 5, as in Gemma 3 4B: 6 times as many tokens, for which a page has room for 30 layers."""
    layout = page_layout(stacked((29, {"window": 1024}), (5, {})), 16, numbers)
    assert layout.kinds == (PageKind(None, 96, 60), PageKind(1024, 16, 60))
    assert layout.numbers == 60 * 16 * 32
    assert layout.pages_for(8192) == 86 + 512
    assert layout.pages_at(8192) == 86 + 64


def test_a_window_past_the_context_hides_nothing() -> None:
    layout = page_layout(stacked((1, {"window": PLAIN.context_length}), (1, {})), 16, numbers)
    assert [kind.window for kind in layout.kinds] == [None]


def test_layers_that_keep_more_of_a_token_are_a_kind() -> None:
    """25 layers that keep 2,048 numbers of a token and 5 that keep 1,024, as in Gemma 4 26B."""
    spec = stacked(
        (25, {"kv_heads": 8, "head_dim": 256, "window": 1024}), (5, {"kv_heads": 2, "head_dim": 512})
    )
    layout = page_layout(spec, 16, numbers)
    assert layout.kinds == (PageKind(None, 128, 100), PageKind(1024, 16, 50))
    assert layout.numbers == 50 * 16 * 2048


def test_layers_that_read_others_keys_take_nothing() -> None:
    spec = GEMMAS["layers that read others' keys"]
    layout = reference_layout(spec, 16)
    assert [part is None for part in layout.layers] == [False, False, True, True]
    assert layout.numbers == 2 * (2 * 16 * 24)  # two parts of the layer that sees all, one of the other
    assert layout.kinds == (PageKind(None, 32, 4), PageKind(20, 16, 3))


@pytest.mark.parametrize("name", ALL)
def test_no_two_parts_of_pages_meet(name: str) -> None:
    """Each number of each page is written once by the layers of each kind, and by no other page's."""
    spec, pages, page_size = ALL[name], 3, 4
    cache = ReferenceKvCache(spec, pages=pages, page_size=page_size)
    layout, memory = cache.layout, cache._memory
    for number, kind in enumerate(layout.kinds):
        written = np.zeros(len(memory), dtype=np.int32)
        for page in range(pages):
            parts = page * kind.stride + np.arange(kind.tokens // page_size)
            rows = (parts[:, None] * page_size + np.arange(page_size)).reshape(-1)
            for index, part in enumerate(layout.layers):
                if part is None or part.kind != number:
                    continue
                arrays = [cache.keys[index]]
                if part.values != part.keys:
                    arrays.append(cache.values[index])
                for array in arrays:
                    memory[:] = 0
                    array[rows] = 1
                    if not layout.apart:
                        assert set((np.flatnonzero(memory) // layout.numbers).tolist()) == {page}
                    assert np.count_nonzero(memory) == len(rows) * array[0].size
                    written += memory.astype(np.int32)
        assert written.max() == 1
    memory[:] = 0
    cache.fill(1)
    assert memory.sum() == pages * layout.numbers
    for index, part in enumerate(layout.layers):
        if part is not None:
            zeros = pages * layout.kinds[part.kind].stride * page_size
            assert not cache.keys[index][zeros].any() and not cache.values[index][zeros].any()
    assert not any(zeros.any() for zeros in cache.zeros)
