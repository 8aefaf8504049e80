"""Remembers which pages hold which prefix, as a tree: each edge is the tokens of one segment.

A segment is so many tokens that they fill pages of every kind, where there is one kind a page. It is found
only by walking from the root through the tokens of every segment before it, and the tokens themselves are
compared (they are the keys), so no two prefixes can be taken for each other. There is no hash to collide.

Who owns a page of a kind without a window owns every page of it above. So idle pages of that kind are whole
subtrees, and since a sequence releases its last page first, the pool evicts leaves first. Pages with a window
come and go one by one: a prefix is of use where those are there that its next token sees (`usable`). A node
leaves the tree with its first page without a window; where all have one, with its last, if none is below it.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.runners.base import NO_PAGE, NO_SNAPSHOT

_TOKEN_BYTES = array("i").itemsize


def page_keys(tokens: Sequence[int], count: int, segment: int, prompt_length: int) -> list[bytes]:
    """The keys of the first `count` segments of `tokens`: each is the tokens of one, as bytes.

    segment  its tokens

    Keys and values of drawn tokens may differ in their last bits from those of the same tokens in a prompt,
    since other kernels computed them. So the key of a segment that reaches behind the prompt begins with the
    prompt's length, and only an equal prompt with an equal answer finds it.
    """
    packed = array("i", tokens[: count * segment]).tobytes()
    size = _TOKEN_BYTES * segment
    keys = [packed[start : start + size] for start in range(0, count * size, size)]
    mark = array("i", [prompt_length]).tobytes()
    whole = min(count, prompt_length // segment)
    return keys[:whole] + [mark + key for key in keys[whole:]]


class PrefixNode:
    """A segment of the tree.

    key       its tokens
    pages     for each kind those that hold their keys and values, or NO_PAGE; the root has none
    snapshot  the place of the states after its last token, if there is one
    attached  false once it has left the tree
    """

    __slots__ = ("attached", "children", "key", "pages", "parent", "snapshot")

    def __init__(self, pages: list[list[int]], key: bytes, parent: "PrefixNode | None") -> None:
        self.pages = pages
        self.attached = True
        self.key = key
        self.parent = parent
        self.snapshot = NO_SNAPSHOT
        self.children: dict[bytes, PrefixNode] = {}

    def path(self) -> list["PrefixNode"]:
        """The nodes from below the root down to this one."""
        nodes: list[PrefixNode] = []
        node: PrefixNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """The findable pages of a pool, owned and idle.

    on_forget: told of a node that leaves the tree
    """

    def __init__(self, pool: PagePool) -> None:
        self.root = PrefixNode([], b"", None)
        self._pool = pool
        self._needs = pool.needs
        self._nodes: dict[int, PrefixNode] = {}  # by page
        self.on_forget: Callable[[PrefixNode], None] | None = None
        pool.on_evict = self._forget

    @property
    def nodes(self) -> Iterable[PrefixNode]:
        """All that have pages."""
        return set(self._nodes.values())

    def walk(self, keys: Sequence[bytes], most: int) -> list[PrefixNode]:
        """The nodes of the longest known prefix of at most `most` segments."""
        node, found = self.root, []
        for index in range(most):
            child = node.children.get(keys[index])
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def usable(self, nodes: Sequence[PrefixNode]) -> int:
        """Return how many of a path's nodes are enough for a sequence's next token to go on from."""
        count = len(nodes)
        while count:
            lacking = self._last_lacking(nodes, count)
            if lacking is None:
                return count
            count = lacking  # from any node between, a window reaches further back
        return 0

    def _last_lacking(self, nodes: Sequence[PrefixNode], count: int) -> int | None:
        """One of the first `count` nodes that lacks a page which the token after them sees."""
        for kind, each in enumerate(self._needs.per_segment):
            if self._needs.kinds[kind].window is None:
                continue  # a node without them is not in the tree
            first = self._needs.first_page(kind, count * self._needs.segment)
            for place in range(count * each - 1, first - 1, -1):
                if nodes[place // each].pages[kind][place % each] == NO_PAGE:
                    return place // each
        return None

    def add(self, parent: PrefixNode, key: bytes, pages: list[list[int]]) -> PrefixNode | None:
        """Make a segment of owned pages findable below `parent`; None where other pages hold the same."""
        if key in parent.children:
            return None
        node = PrefixNode([list(given) for given in pages], key, parent)
        parent.children[key] = node
        for given in node.pages:
            for page in given:
                if page != NO_PAGE:
                    self._keep(page, node)
        return node

    def complete(self, node: PrefixNode, pages: list[list[int]]) -> None:
        """Make owned pages findable that hold the same as a node's own, where this one lacks them."""
        for own, given in zip(node.pages, pages, strict=True):
            for place, page in enumerate(given):
                if own[place] == NO_PAGE and page != NO_PAGE:
                    own[place] = page
                    self._keep(page, node)

    def _keep(self, page: int, node: PrefixNode) -> None:
        self._nodes[page] = node
        self._pool.keep(page)

    def drop(self, first: bytes) -> set[PrefixNode]:
        """Let no page be found any more of the prefixes that begin with this segment; returns those nodes."""
        top = self.root.children.pop(first, None)
        dropped: set[PrefixNode] = set()
        stack = [] if top is None else [top]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            dropped.add(node)
            self._detach(node)
        return dropped

    def _forget(self, page: int) -> None:
        node = self._nodes.pop(page)
        kind = next(kind for kind, pages in enumerate(node.pages) if page in pages)
        node.pages[kind][node.pages[kind].index(page)] = NO_PAGE
        whole = self._needs.kinds[kind].window is None
        if whole and node.children:
            raise CacheIntegrityError(f"page {page} is evicted before the pages that follow it")
        while node.parent is not None and not node.children and (whole or not _held(node)):
            del node.parent.children[node.key]
            self._detach(node)
            node, whole = node.parent, False

    def _detach(self, node: PrefixNode) -> None:
        for page in _held(node):
            del self._nodes[page]
            self._pool.forget(page)
        node.attached = False
        if self.on_forget is not None:
            self.on_forget(node)

    def check_integrity(self) -> None:
        """Audit the tree against the pool; raises CacheIntegrityError."""
        if self._nodes.keys() != self._pool.kept():
            raise CacheIntegrityError("the pages that are kept are not those that can be found")
        evicted_at = {page: place for place, page in enumerate(self._pool.idle())}
        owned = self._pool.pages  # after all that are evicted
        reached = 0
        stack = [self.root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                held = _held(child)
                reached += len(held)
                stack.append(child)
                if child.key != key or child.parent is not node or not child.attached:
                    raise CacheIntegrityError(
                        f"the segment of pages {held} hangs at a wrong place of the tree"
                    )
                if any(self._nodes.get(page) is not child for page in held) or not (held or child.children):
                    raise CacheIntegrityError(f"pages {held} are not known as those of their segment")
                for kind, one in enumerate(self._needs.kinds):
                    if one.window is not None or node.parent is None:
                        continue
                    first, last = _held_of(node, kind), _held_of(child, kind)
                    if last and (
                        len(first) < len(node.pages[kind])
                        or max(evicted_at.get(page, owned) for page in last)
                        > min(evicted_at.get(page, owned) for page in first)
                    ):
                        raise CacheIntegrityError(f"one of pages {first} would be evicted before {last}")
        if reached != len(self._nodes):
            raise CacheIntegrityError(f"{len(self._nodes)} pages are in the tree, {reached} can be reached")


def _held_of(node: PrefixNode, kind: int) -> list[int]:
    """A node's pages of a kind."""
    return [page for page in node.pages[kind] if page != NO_PAGE] if node.pages else []


def _held(node: PrefixNode) -> list[int]:
    """A node's pages of all kinds."""
    return [page for pages in node.pages for page in pages if page != NO_PAGE]
