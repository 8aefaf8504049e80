"""Paged lists: parsing of queries, and the form of a page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import QueryParams

from nightmill.jobs.base.contract import JsonObject
from nightmill.jobs.base.ids import is_job_id
from nightmill.jobs.request.fields import unknown_field
from nightmill.jobs.server.errors import invalid

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Page:
    """The requested part of a list."""

    limit: int
    after: str | None  # id of the last item read
    oldest_first: bool = False

    @classmethod
    def read(
        cls,
        query: QueryParams,
        prefix: str = "",
        *,
        limit: int = 20,
        most: int = 100,
        more: Sequence[str] = (),
    ) -> Self:
        """Parse a query; raises HttpError.

        more    further allowed parameters
        prefix  prefix of ids of these items
        limit   default limit; `most` is the highest
        """
        known = {"limit", "after", "order", *more}
        if unknown := [name for name in query if name not in known]:
            raise unknown_field(unknown[0], known)
        asked, after, order = query.get("limit", str(limit)), query.get("after"), query.get("order", "desc")
        if not _NUMBER.fullmatch(asked) or not 1 <= int(asked) <= most:
            raise invalid("limit", f"must be a number from 1 to {most:,}")
        if order not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc")
        if after is not None and (after := bare_id(after, prefix)) is None:
            raise invalid("after", "must be the id of an item of this list")
        return cls(int(asked), after, order == "asc")

    def answer(self, found: Sequence[JsonObject]) -> JsonObject:
        """Build a list page from limit + 1 items; the extra one shows whether there is more."""
        page = found[: self.limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        nothing = {"first_id": None, "last_id": None}
        return {"object": "list", "data": page} | (ends or nothing) | {"has_more": len(found) > len(page)}


def items_page(query: QueryParams, items: Sequence[JsonObject], *, more: Sequence[str] = ()) -> JsonObject:
    """Build the requested page from all items, oldest first; raises HttpError.

    more  further allowed parameters
    """
    known = {"limit", "after", "order", *more}
    if unknown := [name for name in query if name not in known]:
        raise unknown_field(unknown[0], known)
    after = query.get("after")
    page = Page.read(QueryParams([(name, query[name]) for name in ("limit", "order") if name in query]))
    ordered = list(items) if page.oldest_first else list(reversed(items))
    if after is not None:
        places = {item["id"]: place for place, item in enumerate(ordered)}
        if after not in places:
            raise invalid("after", "must be the id of an item of this list")
        ordered = ordered[places[after] + 1 :]
    return page.answer(ordered)


def bare_id(text: str, prefix: str) -> str | None:
    """Remove `prefix` from an id; None if it is invalid."""
    bare = text.removeprefix(prefix)
    return bare if text.startswith(prefix) and is_job_id(bare) else None
