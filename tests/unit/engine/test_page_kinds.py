"""Kinds of pages: what sequences have of each, what they give back, and what beginnings share of it."""

import pytest

from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.page_tables import KindTable, PageNeeds, held_pages
from nightmill.worker.engine.prefix_tree import PrefixNode, PrefixTree, page_keys
from nightmill.worker.runners.base import NO_PAGE, PageKind
from tests.unit.engine.by_definition import expected
from tests.unit.engine.scripted import ScriptedRunner, make_engine, make_request, run

WHOLE, WINDOW = PageKind(None, 8, 2), PageKind(6, 4, 2)
BOTH = (WHOLE, WINDOW)


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 2), (4, 2), (5, 3), (8, 3), (9, 5), (16, 6), (17, 8)]
)
def test_a_sequence_needs_pages_of_each_kind(tokens: int, pages: int) -> None:
    needs = PageNeeds(BOTH)
    assert (needs.segment, needs.per_segment) == (8, [1, 2])
    assert needs.pages_for(tokens) == pages
    most = needs.most_tokens(pages)
    assert needs.pages_for(most) <= pages < needs.pages_for(most + 1)


def test_what_no_later_token_sees_is_taken_out() -> None:
    needs = PageNeeds(BOTH)
    tables = [KindTable([1, 2, 3]), KindTable([4, 5, 6, 7, 8])]
    assert needs.room(tables) == 20
    assert needs.lacking(tables, 20) == [tables[1]]
    assert list(needs.unseen(tables, 8)) == []  # the token at 8 sees 3 to 8
    assert list(needs.unseen(tables, 9)) == [[4]]  # and that at 9 sees 4
    assert list(needs.unseen(tables, 19)) == [[5, 6]]
    assert tables[1].pages == [NO_PAGE, NO_PAGE, NO_PAGE, 7, 8]
    assert tables[1].held == [7, 8]
    assert held_pages(tables) == 5
    assert list(needs.unseen(tables, 19)) == []


def test_a_long_answer_has_no_more_pages_of_a_window_than_it_sees() -> None:
    """A pool that holds 3 sequences with all of their tokens holds 8 that have come so far."""
    runner = ScriptedRunner(kv_pages=8 * (8 + 3), page_size=4, slots=8, page_kinds=BOTH)
    needs = PageNeeds(BOTH)
    assert needs.pages_for(60) * 3 < runner.kv_pages < needs.pages_for(60) * 4
    engine = make_engine(runner)
    requests = [make_request(f"j{n}", (n, 1, 2), seed=n, max_tokens=57, ignore_eos=True) for n in range(8)]
    for request in requests:
        engine.submit(request)
    most = 0
    done = []
    while engine.has_work:
        done += engine.step()
        engine.check_integrity()
        most = max(most, engine.stats.pages - engine.stats.free_pages)
    assert engine.stats.preemptions == 0
    assert most <= 8 * (8 + 3)
    assert len(done) == 8
    for request, completion in zip(requests, sorted(done, key=lambda one: one.job_id), strict=True):
        assert (completion.token_ids, completion.text, completion.stop_reason) == expected(request, 64)


def test_a_beginning_is_shared_by_whole_segments_and_the_last_window() -> None:
    """The second takes 3 segments: their 3 pages that are all seen, and of the window's 6 the last 2."""
    system = tuple(range(4)) * 6 + (5,)
    runner = ScriptedRunner(kv_pages=60, page_size=4, slots=2, page_kinds=BOTH)
    engine = make_engine(runner)
    engine.submit(make_request("first", (*system, 6), max_tokens=20, ignore_eos=True))
    run(engine)
    assert engine.stats.shared_tokens == 0
    engine.submit(make_request("second", (*system, 7), seed=3, max_tokens=3, ignore_eos=True))
    done = run(engine)
    assert engine.stats.shared_tokens == 24
    assert done[0].cached_tokens == 24
    assert len(runner.batches[-3].tokens) == len(system) + 1 - 24
    table = runner.batches[-3].further[0].page_tables[0]
    assert (table[:4] == 60 * 2).all()  # the page behind the last one
    assert (table[4:] < 60 * 2).all() and (table[4:] >= 0).all()


def test_a_beginning_whose_window_is_gone_is_computed_again_and_found_afterwards() -> None:
    system = tuple(range(4)) * 6
    runner = ScriptedRunner(kv_pages=20, page_size=4, slots=2, page_kinds=BOTH)
    engine = make_engine(runner)
    shared = []
    for number, prompt in enumerate(((*system, 6), (9,) * 30, (*system, 7), (*system, 8))):
        engine.submit(make_request(f"j{number}", prompt, seed=number, max_tokens=2, ignore_eos=True))
        done = run(engine)
        shared.append(done[0].cached_tokens)
        request = make_request(f"j{number}", prompt, seed=number, max_tokens=2, ignore_eos=True)
        assert done[0].token_ids == expected(request, 64)[0]
    assert shared == [0, 0, 16, 24]  # the second took what the window saw of the last segment


class Forest:
    """A tree over a pool, with a path of segments whose pages it has let go."""

    def __init__(self, kinds: tuple[PageKind, ...], segments: int) -> None:
        self.pool = PagePool(40, 4, kinds)
        self.tree = PrefixTree(self.pool)
        needs = self.pool.needs
        tokens = list(range(segments * needs.segment))
        self.keys = page_keys(tokens, segments, needs.segment, len(tokens))
        self.nodes: list[PrefixNode] = []
        for key in self.keys:
            pages = [self.pool.allocate(count) for count in needs.per_segment]
            node = self.tree.add(self.nodes[-1] if self.nodes else self.tree.root, key, pages)
            assert node is not None
            self.nodes.append(node)

    def pages(self, kind: int) -> list[int]:
        return [page for node in self.nodes for page in node.pages[kind]]

    def found(self) -> int:
        nodes = self.tree.walk(self.keys, len(self.keys))
        return self.tree.usable(nodes)

    def evict(self, page: int) -> None:
        """Let this be the first to go, and go to somebody else."""
        self.pool.release([page])
        taken = self.pool.allocate(self.pool.free)
        assert taken[-1] == page
        self.pool.release(taken[:-1])
        self.tree.check_integrity()


def test_a_path_is_of_use_up_to_where_a_window_is_there() -> None:
    forest = Forest(BOTH, 4)  # 8 pages of the window
    window = forest.pages(1)
    assert forest.found() == 4
    forest.evict(window[1])  # tokens 4 to 7: seen by 8 to 12
    assert forest.found() == 4
    forest.evict(window[6])  # tokens 24 to 27
    assert forest.found() == 3
    forest.evict(window[5])
    assert forest.found() == 2
    forest.evict(window[3])  # tokens 12 to 15
    assert forest.found() == 0  # after the first segment 3 to 7 are seen


def test_a_window_that_went_may_come_back() -> None:
    forest = Forest(BOTH, 2)
    forest.evict(forest.pages(1)[2])
    assert forest.found() == 1
    (again,) = forest.pool.allocate(1)
    forest.tree.complete(forest.nodes[1], [[again], [again, NO_PAGE]])
    assert forest.nodes[1].pages[1][0] == again
    assert forest.nodes[1].pages[0] != [again]
    assert forest.found() == 2
    forest.tree.check_integrity()


def test_a_node_goes_with_its_first_page_that_is_all_seen() -> None:
    forest = Forest(BOTH, 2)
    first, second = forest.nodes
    whole = forest.pages(0)
    forest.pool.release(forest.pages(1))
    forest.pool.release(whole)
    while second.attached:
        forest.pool.allocate(1)
        forest.tree.check_integrity()
    assert first.attached and forest.tree.nodes == {first}
    while first.attached:
        forest.pool.allocate(1)
        forest.tree.check_integrity()
    assert not forest.pool.kept()


def test_where_all_pages_have_windows_a_node_goes_with_its_last_one() -> None:
    forest = Forest((PageKind(6, 4),), 3)
    first, second, third = (node.pages[0][0] for node in forest.nodes)
    forest.evict(first)
    assert forest.found() == 3 and forest.nodes[0].attached
    forest.evict(third)
    assert forest.found() == 0  # after the second, tokens 3 to 7 are seen
    forest.evict(second)
    assert not any(node.attached for node in forest.nodes)
    assert not forest.tree.root.children


def test_the_audit_notices_pages_that_were_given_back_too_early() -> None:
    runner = ScriptedRunner(kv_pages=40, page_size=4, slots=2, page_kinds=BOTH)
    engine = make_engine(runner)
    engine.submit(make_request("j", tuple(range(9)), max_tokens=30, ignore_eos=True))
    for _ in range(5):
        engine.step()
    (sequence,) = engine._live
    seen = engine._pool.needs.first_page(1, sequence.computed)
    engine._pool.release(sequence.tables[1].drop(seen + 1))
    with pytest.raises(CacheIntegrityError, match="gave pages back that it needs"):
        engine.check_integrity()
