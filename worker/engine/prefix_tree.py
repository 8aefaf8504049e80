"""Remembers which pages hold which prefix, as a tree: each edge is the tokens of one full page.

A page is found only by walking from the root through the tokens of every page before it, and the tokens
themselves are compared (they are the keys), so no two prefixes can be taken for each other. There is no
hash to collide.

Who owns a page of the tree owns every page above it. So idle pages are whole subtrees, and since a sequence
releases its last page first, the pool evicts leaves first: what is in the tree can always be reached.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from nightmill.worker.engine.kv_cache import CacheIntegrityError, PagePool
from nightmill.worker.runners.base import NO_SNAPSHOT

_TOKEN_BYTES = array("i").itemsize


def page_keys(tokens: Sequence[int], count: int, page_size: int, prompt_length: int) -> list[bytes]:
    """The keys of the first `count` pages of `tokens`: each is the tokens of one page, as bytes.

    Keys and values of drawn tokens may differ in their last bits from those of the same tokens in a prompt,
    since other kernels computed them. So the key of a page that reaches behind the prompt begins with the
    prompt's length, and only an equal prompt with an equal answer finds it.
    """
    packed = array("i", tokens[: count * page_size]).tobytes()
    size = _TOKEN_BYTES * page_size
    keys = [packed[start : start + size] for start in range(0, count * size, size)]
    mark = array("i", [prompt_length]).tobytes()
    whole = min(count, prompt_length // page_size)
    return keys[:whole] + [mark + key for key in keys[whole:]]


class PrefixNode:
    """A page of the tree. `key`: its tokens; `page`: where their keys and values are (-1: the root).

    `snapshot`: the place of the states after its last token, if there is one.
    """

    __slots__ = ("children", "key", "page", "parent", "snapshot")

    def __init__(self, page: int, key: bytes, parent: "PrefixNode | None") -> None:
        self.page = page
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
    """The findable pages of one pool, owned and idle.

    on_forget: told of a node that leaves the tree
    """

    def __init__(self, pool: PagePool) -> None:
        self.root = PrefixNode(-1, b"", None)
        self._pool = pool
        self._nodes: dict[int, PrefixNode] = {}
        self.on_forget: Callable[[PrefixNode], None] | None = None
        pool.on_evict = self._forget

    @property
    def nodes(self) -> Iterable[PrefixNode]:
        """All but the root."""
        return self._nodes.values()

    def walk(self, keys: Sequence[bytes], most: int) -> list[PrefixNode]:
        """The nodes of the longest known prefix of at most `most` pages."""
        node, found = self.root, []
        for index in range(most):
            child = node.children.get(keys[index])
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def add(self, parent: PrefixNode, key: bytes, page: int) -> PrefixNode | None:
        """Make an owned page findable below `parent`; None where another page holds the same prefix."""
        if key in parent.children:
            return None
        node = PrefixNode(page, key, parent)
        parent.children[key] = node
        self._nodes[page] = node
        self._pool.keep(page)
        return node

    def drop(self, first: bytes) -> set[PrefixNode]:
        """Let no page be found any more of the prefixes whose first page is `first`; returns those nodes."""
        top = self.root.children.pop(first, None)
        dropped: set[PrefixNode] = set()
        stack = [] if top is None else [top]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            dropped.add(node)
            del self._nodes[node.page]
            self._pool.forget(node.page)
            if self.on_forget is not None:
                self.on_forget(node)
        return dropped

    def _forget(self, page: int) -> None:
        node = self._nodes.pop(page)
        if node.children or node.parent is None:
            raise CacheIntegrityError(f"page {page} is evicted before the pages that follow it")
        del node.parent.children[node.key]
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
                reached += 1
                stack.append(child)
                if child.key != key or child.parent is not node or self._nodes.get(child.page) is not child:
                    raise CacheIntegrityError(f"page {child.page} hangs at a wrong place of the tree")
                if evicted_at.get(child.page, owned) > evicted_at.get(node.page, owned):
                    raise CacheIntegrityError(f"page {node.page} would be evicted before {child.page}")
        if reached != len(self._nodes):
            raise CacheIntegrityError(f"{len(self._nodes)} pages are in the tree, {reached} can be reached")
