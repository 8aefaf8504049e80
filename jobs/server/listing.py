"""Lists that are read by pages: what may be asked for, and how a page looks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import QueryParams

from nightmill.jobs.contract import JsonObject
from nightmill.jobs.fields import unknown_field
from nightmill.jobs.ids import is_job_id
from nightmill.jobs.server.errors import invalid

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is asked for."""

    limit: int
    after: str | None  # the id of the last item that was read
    oldest_first: bool = False

    @classmethod
    def read(
        cls,
        query: QueryParams,
        prefix: str = "",
        *,
        limit: int = 20,
        most: int = 100,
        more: str | None = None,
    ) -> Self:
        """What a query says; raises HttpError.

        more    what may be asked for besides
        prefix  what comes before the id proper in the ids of these items
        limit   if the query says none; `most` it may say
        """
        known = {"limit", "after", "order"} | ({more} if more else set())
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
        """The page of which one item more was looked for than is shown."""
        page = found[: self.limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        nothing = {"first_id": None, "last_id": None}
        return {"object": "list", "data": page} | (ends or nothing) | {"has_more": len(found) > len(page)}


def bare_id(text: str, prefix: str) -> str | None:
    """The id proper of `prefix` and an id; None if it is not one."""
    bare = text.removeprefix(prefix)
    return bare if text.startswith(prefix) and is_job_id(bare) else None
