"""Lets sequences with the same prefix use the same pages, so that the prefix is computed once.

Only full pages are shared, by segments (`prefix_tree`): a segment is a page, or where there are several kinds
of pages, some of each. Of kinds with a window only those are taken that the next token sees. At least the
last token of a sequence is computed: it is what the next one is drawn from. A page with drawn tokens is found
by the sequence that comes back for it, or by its equal, and by no prompt (`page_keys`). A page can be found
once the launch that fills it is queued: launches run in order.

A sequence whose next page is being computed by a running one *follows* it: it waits rather than compute the
same again. It follows only who ranks higher, so whoever ranks highest never waits, those who are followed
get on with every step, and nobody waits for longer than the other's prefill, which it could not beat.

What a page holds may turn out to be not numbers (`worker.runners.base`). Then all prefixes with that
beginning are dropped, and who had pages of others is computed again *alone*: it neither takes pages nor gives
any. So the one to blame is found out, and nobody else fails.

Where a runner has states, pages are not enough: a sequence goes on from the last page that has a snapshot of
them (`Snapshots`), and computes what follows. Who waits for another's pages asks that one for a snapshot
after the last chunk that they have in common; who finds pages and no snapshot computes them anew, and leaves
one where it parts from them, so that the next one with that prefix finds it. Others leave none.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.engine.page_tables import KindTable
from nightmill.worker.engine.plan import Chunk
from nightmill.worker.engine.prefix_tree import PrefixNode, PrefixTree, page_keys
from nightmill.worker.engine.request import Sequence, SequenceState
from nightmill.worker.engine.snapshots import Snapshots
from nightmill.worker.runners.base import NO_PAGE, NO_SNAPSHOT

GROUP_TOKENS = 64
"""Prompts that begin with the same so many tokens are a group."""
GROUP_WINDOW = 256
"""Most requests that may overtake another of their priority because they are of an earlier group."""


class PrefixSharing:
    """Shares the pages of equal prefixes between the sequences of one pool.

    `shared_tokens` counts prompt tokens found computed, at each admission.

    grid       states may be copied after a multiple of so many tokens of a prompt; 1: there are no states
    snapshots  places for copies of states
    """

    def __init__(self, pool: PagePool, *, grid: int = 1, snapshots: int = 0) -> None:
        self.shared_tokens = 0
        self._pool = pool
        self._segment = pool.needs.segment
        self._tree = PrefixTree(pool)
        self._grid = grid
        self._snapshots = Snapshots(snapshots)
        self._tree.on_forget = self._snapshots.forget
        self._computing: dict[tuple[PrefixNode, bytes], Sequence] = {}  # who computes the page at a place

    def find(self, sequence: Sequence) -> list[PrefixNode] | None:
        """The pages that a waiting sequence can use; None where it should wait for one that is running."""
        sequence.marks.clear()
        sequence.snapshot = NO_SNAPSHOT
        if sequence.unshared:
            return []
        if sequence.follows is not None:
            leader, pages = sequence.follows
            if self._computes(leader) and leader.findable < pages:
                return None
            sequence.follows = None
        tokens = sequence.tokens
        if sequence.page_keys is None:
            sequence.page_keys = page_keys(
                tokens, len(tokens) // self._segment, self._segment, sequence.prompt_length
            )
        keys = sequence.page_keys
        usable = (len(tokens) - 1) // self._segment
        if sequence.sharable < sequence.prompt_length:  # shared pages have no log-probabilities
            usable = min(usable, sequence.sharable // self._segment)
        nodes = self._tree.walk(keys, usable)
        found = self._usable(sequence, nodes[: self._tree.usable(nodes)])
        if len(nodes) < usable:
            place = (nodes[-1] if nodes else self._tree.root, keys[len(nodes)])
            leader_now = self._computing.get(place)
            if leader_now is not None and leader_now.rank < sequence.rank:
                pages = self._awaited(leader_now, sequence, self._common(leader_now, keys, usable))
                if pages > len(found):
                    sequence.follows = (leader_now, pages)
                    return None
        return found

    def _usable(self, sequence: Sequence, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """Return those of the found pages that a sequence can go on from; mark where it leaves a snapshot."""
        if self._grid == 1:
            return nodes
        count = len(nodes)
        while count and nodes[count - 1].snapshot == NO_SNAPSHOT:
            count -= 1
        parting = self._whole_chunks(sequence, len(nodes))
        if parting > count * self._segment:
            sequence.marks.add(parting)
        return nodes[:count]

    def _awaited(self, leader: Sequence, sequence: Sequence, pages: int) -> int:
        """Count the pages to wait for, of `pages` that a leader and a sequence have in common.

        Marks where the leader leaves a snapshot, if it is to leave one.
        """
        if self._grid == 1:
            return pages
        parting = self._whole_chunks(sequence, pages)
        if parting <= leader.computed or leader.unshared:
            return 0
        leader.marks.add(parting)
        return parting // self._segment

    def _whole_chunks(self, sequence: Sequence, pages: int) -> int:
        """The tokens of so many pages, less those that are no whole chunk of the prompt."""
        tokens = min(pages * self._segment, sequence.prompt_length)
        return tokens - tokens % self._grid

    def with_snapshot(self, chunk: Chunk) -> Chunk:
        """The chunk, which leaves a snapshot if it ends at a mark."""
        if chunk.start + chunk.length not in chunk.sequence.marks:
            return chunk
        return replace(chunk, snapshot=self._snapshots.take())

    def _leave_snapshot(self, sequence: Sequence, place: int) -> None:
        """The launch that copies a sequence's states after `computed` tokens to a place is queued."""
        pages = sequence.computed // self._segment
        keys = page_keys(sequence.tokens, pages, self._segment, sequence.prompt_length)
        nodes = self._tree.walk(keys, pages)
        self._snapshots.keep(place, nodes[-1] if len(nodes) == pages else None)

    def tables_of(self, nodes: list[PrefixNode]) -> list[KindTable]:
        """The pages of these nodes, but for those that no token after them sees."""
        tables = []
        for kind in range(len(self._pool.needs.kinds)):
            table = KindTable([page for node in nodes for page in node.pages[kind]])
            table.drop(min(self._pool.needs.first_page(kind, len(nodes) * self._segment), len(table.pages)))
            tables.append(table)
        return tables

    def idle_pages(self, nodes: list[PrefixNode]) -> int:
        """Count the pages without owners among those that a sequence takes which goes on from these nodes.

        Those of a kind without a window come last: who owns a page owns those before.
        """
        idle, needs = 0, self._pool.needs
        for kind, each in enumerate(needs.per_segment):
            whole = needs.kinds[kind].window is None
            for place in range(
                len(nodes) * each - 1, needs.first_page(kind, len(nodes) * self._segment) - 1, -1
            ):
                owned = self._pool.owners(nodes[place // each].pages[kind][place % each]) > 0
                idle += not owned
                if owned and whole:
                    break
        return idle

    def adopt(self, sequence: Sequence, nodes: list[PrefixNode]) -> list[KindTable]:
        """Give the pages that were found to a sequence that is admitted; returns them as tables."""
        tables = self.tables_of(nodes)
        if sequence.unshared:
            return tables
        for table in tables:
            self._pool.share(table.held)
        if nodes and self._grid > 1:
            sequence.snapshot = self._snapshots.use(nodes[-1])
        sequence.has_shared_pages = bool(nodes)
        sequence.node = nodes[-1] if nodes else self._tree.root
        sequence.findable = len(nodes)
        self.shared_tokens += min(len(nodes) * self._segment, sequence.prompt_length)
        self._promise(sequence)
        return tables

    def advance(self, chunk: Chunk) -> None:
        """The launch that computes a chunk is queued: let others find what it fills."""
        self._let_be_found(chunk.sequence)
        if chunk.snapshot != NO_SNAPSHOT:
            self._leave_snapshot(chunk.sequence, chunk.snapshot)

    def _let_be_found(self, sequence: Sequence) -> None:
        keys = sequence.page_keys
        if keys is None:
            return
        full = min(sequence.computed // self._segment, len(keys))
        if full > sequence.findable:
            self._withdraw(sequence)
            self._add(sequence, keys[:full])
            self._promise(sequence)
        if sequence.node is None or sequence.findable == len(keys):
            sequence.page_keys = None  # all is said

    def stop(self, sequence: Sequence) -> None:
        """A sequence stops running: nobody need wait for it any more."""
        self._withdraw(sequence)
        sequence.page_keys = None
        sequence.marks.clear()

    def leave(self, sequence: Sequence) -> None:
        """A sequence is about to release its pages. One that will come back wants to find all of them."""
        if sequence.state is SequenceState.WAITING and sequence.node is not None:
            full = sequence.computed // self._segment
            self._add(sequence, page_keys(sequence.tokens, full, self._segment, sequence.prompt_length))
        sequence.node = None
        sequence.findable = 0

    def drop(self, sequence: Sequence, holders: Iterable[Sequence]) -> None:
        """Its pages hold what is not a number: let no page be found that follows on the same first one.

        holders: all sequences that have pages. Those that have such pages keep them, and give none of theirs.
        """
        dropped = self._tree.drop(page_keys(sequence.tokens, 1, self._segment, sequence.prompt_length)[0])
        for holder in holders:
            if holder is sequence or holder.node in dropped:
                self._withdraw(holder)
                holder.node = holder.page_keys = None
                holder.marks.clear()

    def _add(self, sequence: Sequence, keys: list[bytes]) -> None:
        """Enter the pages of `keys`; where others hold the same, this one's need not be found."""
        parent = sequence.node
        for index in range(sequence.findable, len(keys)):
            if parent is None or not parent.attached:
                sequence.node = None
                return
            pages, node = self._pages_of(sequence, index), None
            if sequence.node is not None:
                node = sequence.node = self._tree.add(parent, keys[index], pages)
            if node is not None:
                sequence.findable += 1
            elif (node := parent.children.get(keys[index])) is not None:
                self._tree.complete(node, pages)  # another's, of which some may have gone
            parent = node

    def _pages_of(self, sequence: Sequence, index: int) -> list[list[int]]:
        """A sequence's pages of a segment, for each kind."""
        each = zip(sequence.tables, self._pool.needs.per_segment, strict=True)
        return [table.pages[index * count : (index + 1) * count] for table, count in each]

    def _promise(self, sequence: Sequence) -> None:
        node, keys = sequence.node, sequence.page_keys
        if node is None or keys is None or sequence.findable == len(keys):
            return
        key = keys[sequence.findable]
        if key not in node.children:
            sequence.promise = (node, key)
            self._computing[node, key] = sequence  # in place of one that ranks lower, if there is one

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence.promise is not None and self._computing.get(sequence.promise) is sequence:
            del self._computing[sequence.promise]
        sequence.promise = None

    @staticmethod
    def _computes(leader: Sequence) -> bool:
        return leader.state is SequenceState.RUNNING and leader.page_keys is not None

    @staticmethod
    def _common(leader: Sequence, keys: list[bytes], usable: int) -> int:
        """Count the pages at the beginning of `keys` that the leader will have computed, up to `usable`."""
        theirs = leader.page_keys or []
        most = min(usable, len(theirs))
        return next((index for index in range(most) if theirs[index] != keys[index]), most)

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Audit tree and promises against the sequences that hold pages; raises CacheIntegrityError."""
        self._tree.check_integrity()
        self._snapshots.check_integrity(self._tree.nodes)
        for sequence in holders:
            if sequence.node is None:
                continue
            if not sequence.node.attached:
                continue
            path = sequence.node.path()
            keys = page_keys(sequence.tokens, len(path), self._segment, sequence.prompt_length)
            if len(path) != sequence.findable or keys != [node.key for node in path]:
                raise CacheIntegrityError(f"{sequence.request.job_id} has other pages than the tree says")
            for index, node in enumerate(path):
                for own, found in zip(self._pages_of(sequence, index), node.pages, strict=True):
                    if any(page not in (NO_PAGE, other) for page, other in zip(own, found, strict=True)):
                        raise CacheIntegrityError(
                            f"{sequence.request.job_id} has other pages than the tree says"
                        )
            if sequence.findable * self._segment > sequence.computed:
                raise CacheIntegrityError(f"{sequence.request.job_id} lets pages be found too early")
        for place, sequence in self._computing.items():
            if not self._computes(sequence) or sequence.promise != place or sequence not in holders:
                raise CacheIntegrityError(f"{sequence.request.job_id} is waited for in vain")


class PrefixGroups:
    """Puts waiting requests with equal beginnings next to each other, within bounds.

    A group's place in the queue is that of its first request. It takes no more in once GROUP_WINDOW requests
    were submitted after that one: so no request is overtaken by more than that for the sake of a group.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[int, ...], int] = OrderedDict()  # the beginning -> the first's order

    def place(self, prompt_ids: tuple[int, ...], order: int) -> int:
        """The place in the queue of the request that is submitted as number `order`."""
        while self._groups and next(iter(self._groups.values())) + GROUP_WINDOW <= order:
            self._groups.popitem(last=False)
        if len(prompt_ids) <= GROUP_TOKENS:
            return order
        return self._groups.setdefault(prompt_ids[:GROUP_TOKENS], order)
