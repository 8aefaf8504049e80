"""Shares of a queue: how many rows of each flow have a message, so that none waits for all of another.

A flow is a batch, or the jobs without a batch of one owner. Messages of a queue are served first in, first
out, so the share of a flow is the part of the queue that it may fill: its *window*, by its weight. What a
flow leaves empty is filled by the others. No I/O here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

QUEUE_MESSAGES = 64
"""Messages of a queue, if they are full: enough for seconds of work between two looks."""
LEAST_ROWS = 16
"""Rows of a flow in the queue, on average, however many flows there are: smaller messages cost more."""
_FEWEST = 4  # rows of a flow of little weight
_MOST_WEIGHT = 100
_SHOWN = 80  # characters of what cannot be read


@dataclass(frozen=True, slots=True)
class Standing:
    """A flow that has queued rows.

    owner      whose weight it has a part of; None: it has the weight 1
    announced  its rows in messages
    waiting    whether it has rows without a message
    """

    owner: str | None
    announced: int
    waiting: bool


@dataclass(frozen=True, slots=True)
class Grant:
    """A message that a flow is to send next: its place in the list of flows, and its number of rows."""

    flow: int
    rows: int


def parse_shares(text: str) -> dict[str, int]:
    """Parse alice=2,bob=1; raises ValueError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        weight = int(number) if number.isascii() and number.isdigit() and len(number) <= 3 else 0
        if not (name and equals and 1 <= weight <= _MOST_WEIGHT) or name in found:
            raise ValueError(
                f"{part.strip()[:_SHOWN]!r} is not OWNER=WEIGHT; write alice=2,bob=1, each owner once, with "
                f"whole numbers from 1 to {_MOST_WEIGHT}"
            )
        found[name] = weight
    return found


def weights(flows: Sequence[Standing], shares: Mapping[str, int]) -> list[float]:
    """Return the weight of each flow: owners share by `shares` (1 if not named), and what an owner has is
    divided among those of its flows that wait."""
    active = Counter(flow.owner for flow in flows if flow.waiting and flow.owner is not None)
    return [
        1.0 if flow.owner is None else shares.get(flow.owner, 1) / max(1, active[flow.owner])
        for flow in flows
    ]


def windows(flows: Sequence[Standing], shares: Mapping[str, int], queue_rows: int) -> list[float]:
    """Return how many rows of each flow are to be in the queue; 0 for flows that have none to add."""
    weighed = weights(flows, shares)
    active = [weight for flow, weight in zip(flows, weighed, strict=True) if flow.waiting]
    if not active:
        return [0.0] * len(flows)
    taken = sum(flow.announced for flow in flows if not flow.waiting)
    unit = max(queue_rows - taken, LEAST_ROWS * len(active)) / sum(active)
    return [
        max(_FEWEST, weight * unit) if flow.waiting else 0.0
        for flow, weight in zip(flows, weighed, strict=True)
    ]


def grants(flows: Sequence[Standing], shares: Mapping[str, int], shard_size: int) -> list[Grant]:
    """Return the messages that fill the windows, in the order in which they are to be sent: in turn, by
    weight. A flow sends no message that would be less than full for want of room, unless its window is."""
    sized = windows(flows, shares, QUEUE_MESSAGES * shard_size)
    turns: list[tuple[float, int, int]] = []
    for place, (flow, window) in enumerate(zip(flows, sized, strict=True)):
        size = min(shard_size, int(window))
        if size:
            messages = range(int(window - flow.announced) // size)
            turns += [((flow.announced + message * size) / window, place, size) for message in messages]
    return [Grant(place, size) for _, place, size in sorted(turns)]


def room(announced: int, in_queue: int, shard_size: int) -> int:
    """Return how many rows of a flow may get messages as they are enqueued, without a look at other flows.

    announced  its rows in messages
    in_queue   rows of all flows of its queue in messages
    """
    free = QUEUE_MESSAGES * shard_size - in_queue
    return max(0, LEAST_ROWS - announced, min(free, QUEUE_MESSAGES * shard_size // 4 - announced))
