"""The keywords of a batch's limits, and their change later on."""

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from nightmill.jobs.errors import InvalidParameterError
from nightmill.jobs.messages.announcing import Announcer
from nightmill.jobs.reply.batch_status import BatchRecord
from nightmill.jobs.request.fields import deadline_moment
from nightmill.jobs.request.limits import Limits
from nightmill.jobs.sql.batches import BatchStore
from nightmill.jobs.sql.raising import Raising
from nightmill.jobs.tables.options import TableSettings


class SubmitSettings(TableSettings, total=False):
    """Keywords of submit_batch."""

    budget: str | None
    max_failures: str | None


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """The effect of changed limits: how many rows are queued again, and why the batch stays stopped."""

    queued: int
    stopped_because: str | None = None

    def values(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def columns_of(limits: Limits) -> dict[str, Any]:
    """Return the columns of a new batch with these limits."""
    share = limits.max_failures
    return {
        "budget": dict(limits.budget) if limits.budget else None,
        "max_failures": None if share is None or share >= 1 else share,
    }


def differ(limits: Limits, record: BatchRecord) -> bool:
    """Return True if what was given is not what a batch has."""
    columns = columns_of(limits)
    return (limits.budget is not None and columns["budget"] != record.budget) or (
        limits.max_failures is not None and columns["max_failures"] != record.max_failures
    )


def change_limits(
    store: BatchStore,
    announcer: Announcer,
    name: str,
    limits: Limits,
    deadline: datetime | timedelta | None = None,
) -> LimitsChanged:
    """Change the limits of a batch, and queue the rows again that a limit ended, if they may run now.

    Raises InvalidParameterError if nothing is given, and what `Raising.change` raises.
    """
    if not limits.given:
        raise InvalidParameterError("budget: is missing; give it, or max_failures", field="budget")
    queued, room = 0, None
    for groups in Raising(store).change(name, limits, deadline_moment(deadline, store.database.now())):
        queued += sum(map(len, groups.values()))
        room = announcer.announce_first(groups, room)
    return LimitsChanged(queued, store.get(name).stopped_because)
