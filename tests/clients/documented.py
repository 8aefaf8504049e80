"""Cases that fail, as docs/http.md lists them: a table with client, case and the reason."""

import re
from collections.abc import Sequence

from tests.clients.running import ClientResult
from tests.support.pages import ROOT

_PAGE = ROOT / "docs" / "http.md"
_HEAD = "| client | case | why it fails |\n| --- | --- | --- |\n"
_MIN_REASON = 20  # characters: enough for a sentence


def documented_failures() -> dict[tuple[str, str], str]:
    """The reason by client and case; empty if the page has no such table. ValueError without one."""
    _, found, rest = _PAGE.read_text(encoding="utf-8").partition(_HEAD)
    failures: dict[tuple[str, str], str] = {}
    for line in rest.splitlines() if found else ():
        cells = re.fullmatch(r"\| (.+?) \| `(\w+)` \| (.+?) \|", line)
        if cells is None:
            break
        client, case, why = cells.groups()
        if len(why) < _MIN_REASON:
            raise ValueError(f"docs/http.md: {client}, {case}: say why it fails")
        failures[client, case] = why
    return failures


def unexpected(results: Sequence[ClientResult]) -> list[str]:
    """What the page does not say: cases that fail and are not listed, and listed ones that do not fail."""
    listed = documented_failures()
    tried = {one.client.name for one in results}
    failed = {(one.client.name, case.case) for one in results for case in one.failed}
    lines = [
        f"docs/http.md does not list that {client} fails at {case}"
        for client, case in sorted(failed - set(listed))
    ]
    lines += [
        f"docs/http.md says that {client} fails at {case}, and it does not"
        for client, case in sorted(set(listed) - failed)
        if client in tried
    ]
    return lines
