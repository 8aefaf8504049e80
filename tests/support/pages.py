"""The pages that people read, and the blocks of code on them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TYPED_IN = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            *("installing", "first-night", "tables", "python", "http"),
            *("verifying", "running-for-months", "operations", "reading-results-with-sql"),
        )
    ),
)
"""Pages whose commands people type in, in the order in which a newcomer meets them."""
PAGES = (
    *TYPED_IN,
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "file-formats",
            "settings",
            "models",
            "embeddings",
            "cards",
            "page",
            "architecture",
            "glossary",
        )
    ),
)
"""Every page of docs/ is one of these."""
RECIPES = tuple(sorted((ROOT / "docs" / "recipes").glob("*.md")))
"""Their blocks are run by tests/clients/test_recipes.py, in environments that have what they import."""
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+) -->\n)?```(?P<kind>.*)\n(?P<text>(?:.*\n)*?)```$", re.M
)


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason` says, on the page, why it is not run."""

    page: str
    line: int
    kind: str  # what stands behind the three backticks
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text.splitlines()[0]}"


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    page = path.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(page):
        line = page.count("\n", 0, found.start("kind")) + 1
        yield Block(path.name, line, found["kind"], found["text"], found["reason"])


ALL = tuple(block for path in PAGES for block in blocks(path))
