"""Every link from page to page leads to a file that is there, and to a heading that it has."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in (
        ROOT,
        *(
            ROOT / name
            for name in ("docs", "docs/recipes", "benchmarks", "benchmarks/history", "cuda", "models")
        ),
    )
    for path in folder.glob("*.md")
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page, and those that it gives itself."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    named = set(re.findall(r'<a id="([^"]+)"></a>', text))
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def local_links(page: Path) -> Iterator[str]:
    """Links of a page that stay within the repository."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    return (link for link in _LINK.findall(text) if not urlsplit(link).scheme)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in local_links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
