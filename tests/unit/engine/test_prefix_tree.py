"""The tree of findable pages: whole prefixes only, leaves evicted first, and an audit that notices faults."""

import pytest

from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.prefix_tree import PrefixNode, PrefixTree, page_keys


def grow(tree: PrefixTree, pool: PagePool, tokens: list[int]) -> list[PrefixNode]:
    """Enter the pages of a sequence that owns them, two tokens each; those known before are shared."""
    keys = page_keys(tokens, len(tokens) // 2, 2, len(tokens))
    nodes = tree.walk(keys, len(keys))
    pool.share(pages(nodes))
    for key in keys[len(nodes) :]:
        (page,) = pool.allocate(1)
        node = tree.add(nodes[-1] if nodes else tree.root, key, [[page]])
        assert node is not None
        nodes.append(node)
    return nodes


def pages(nodes: list[PrefixNode]) -> list[int]:
    return [page for node in nodes for held in node.pages for page in held]


def test_a_page_is_found_only_behind_the_same_pages() -> None:
    pool = PagePool(8, 2)
    tree = PrefixTree(pool)
    nodes = grow(tree, pool, [1, 2, 3, 4])
    found = [
        pages(tree.walk(page_keys(tokens, 2, 2, 4), 2))
        for tokens in ([1, 2, 3, 4], [1, 2, 9, 4], [3, 4, 1, 2], [1, 3, 3, 4])
    ]
    assert found == [pages(nodes), pages(nodes[:1]), [], []]
    assert tree.walk(page_keys([1, 2, 3, 4], 2, 2, 4), 1) == nodes[:1]
    assert nodes[-1].path() == nodes


def test_keys_hold_the_tokens_themselves() -> None:
    # Whatever two lists of tokens are, their keys are equal only if they are.
    assert page_keys([1, 256, 7], 1, 2, 3) != page_keys([257, 0, 7], 1, 2, 3)
    assert page_keys([-1, 5], 1, 2, 2) == page_keys([-1, 5, 6, 7], 1, 2, 4)


def test_a_second_page_with_the_same_tokens_is_not_entered() -> None:
    pool = PagePool(8, 2)
    tree = PrefixTree(pool)
    (node,) = grow(tree, pool, [1, 2])
    (other,) = pool.allocate(1)
    assert tree.add(tree.root, node.key, [[other]]) is None
    assert pool.kept() == set(pages([node]))
    tree.check_integrity()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = PagePool(4, 2)
    tree = PrefixTree(pool)
    long, short = grow(tree, pool, [1, 2, 3, 4, 5, 6]), grow(tree, pool, [1, 2, 7, 8])
    pool.release(pages(short))
    pool.release(pages(long))
    tree.check_integrity()
    left = []
    for _ in range(4):
        pool.allocate(1)
        tree.check_integrity()
        left.append(len(tree.walk(page_keys([1, 2, 3, 4, 5, 6], 3, 2, 6), 3)))
    assert left == [3, 2, 1, 0]  # the branch that was used least recently went first


def test_audit_notices_faults() -> None:
    pool = PagePool(4, 2)
    tree = PrefixTree(pool)
    first, second = grow(tree, pool, [1, 2, 3, 4])
    (page,) = pages([first])
    pool._kept[page] = False
    with pytest.raises(CacheIntegrityError, match="kept"):
        tree.check_integrity()
    pool._kept[page] = True
    second.parent = tree.root
    with pytest.raises(CacheIntegrityError, match="wrong place"):
        tree.check_integrity()
    second.parent = first
    pool.release([page])
    with pytest.raises(CacheIntegrityError, match="would be evicted before"):
        tree.check_integrity()
    with pytest.raises(CacheIntegrityError, match="before the pages that follow it"):
        pool.allocate(3)


def test_pages_with_drawn_tokens_are_no_pages_of_a_prompt() -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    whole, answered, again = (page_keys(tokens, 3, 2, length) for length in (6, 3, 3))
    assert answered == again
    assert answered[0] == whole[0]  # the prompt's own full page
    assert not set(answered[1:]) & set(whole)
    assert not set(answered[1:]) & set(page_keys(tokens, 3, 2, 2))
