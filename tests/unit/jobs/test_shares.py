"""Shares of a queue: a simulation of a thousand owners, and what a flow is given."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.base.shares import (
    QUEUE_MESSAGES,
    Grant,
    Standing,
    grants,
    parse_shares,
    room,
    weights,
    windows,
)
from nightmill.jobs.errors import SettingsError

SHARD = 64


@dataclass
class SimulatedFlow:
    owner: str
    unsent: int
    begun: int  # rows of all that had been served when it came
    announced: int = 0
    served: int = 0


class Queue:
    """Flows, their messages, first in, first out, and workers that take some of them at each look."""

    def __init__(self, shares: dict[str, int], rows_a_look: int) -> None:
        self.shares, self.rows_a_look = shares, rows_a_look
        self.flows: list[SimulatedFlow] = []
        self.messages: deque[Grant] = deque()
        self.served = 0
        self.first_waits: list[
            tuple[int, int]
        ] = []  # rows before a flow's first, and those in the queue then

    def come(self, owner: str, rows: int) -> SimulatedFlow:
        flow = SimulatedFlow(owner, rows, self.served)
        self.flows.append(flow)
        return flow

    def look(self) -> None:
        standings = [Standing(flow.owner, flow.announced, flow.unsent > 0) for flow in self.flows]
        for grant in grants(standings, self.shares, SHARD):
            flow = self.flows[grant.flow]
            rows = min(grant.rows, flow.unsent)
            flow.unsent -= rows
            flow.announced += rows
            self.messages.append(Grant(grant.flow, rows))
        left = self.rows_a_look
        while left > 0 and self.messages:
            grant = self.messages.popleft()
            flow = self.flows[grant.flow]
            flow.announced -= grant.rows
            flow.served += grant.rows
            self.served += grant.rows
            left -= grant.rows


@pytest.mark.parametrize("owners", [2, 60, 1000])
def test_no_flow_waits_longer_than_its_share_says(owners: int) -> None:
    """Of all rows that were served since it came, a flow has its share at any time, or it has no rows left;
    less what the queue holds of it, and a message."""
    draw = random.Random(owners)
    shares = {f"o{number}": draw.randint(1, 4) for number in range(owners)}
    queue = Queue(shares, rows_a_look=1000)
    for number in range(owners):
        queue.come(f"o{number}", draw.choice((300_000, 100_000, 500, 50)))
    shares["late"] = 1
    total, whole = sum(shares.values()), max(QUEUE_MESSAGES * SHARD, 16 * owners)
    late, in_queue = None, 0
    for look in range(120):
        if look == 30:  # one that comes late waits for what is in the queue, and no more
            late = queue.come("late", 50)
            in_queue = sum(flow.announced for flow in queue.flows)
        queue.look()
        for flow in queue.flows:
            if flow.unsent:
                share = shares[flow.owner] / total
                held = max(4, share * whole)
                due = share * (queue.served - flow.begun) - (share * in_queue if flow is late else 0)
                assert flow.served >= due - 3 * held, flow
        if late is not None and queue.served > late.begun + in_queue + 1000 + SHARD:
            assert late.served
    assert late is not None and late.served >= min(50, 90_000 / total - 12)


def test_idle_shares_flow_to_others_and_owners_share_among_their_batches() -> None:
    shares = {"alice": 2}
    alice, bob, nobody = "alice", "bob", None
    flows = [
        *(Standing(alice, 0, True), Standing(alice, 0, True), Standing(alice, 0, False)),
        *(Standing(bob, 0, True), Standing(nobody, 0, True), Standing(nobody, 0, True)),
    ]
    assert weights(flows, shares) == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert windows(flows, shares, 1000)[:3] == [200.0, 200.0, 0.0]
    assert windows([Standing(bob, 0, True), Standing(alice, 0, False)], shares, 1000) == [1000.0, 0.0]
    lone = grants([Standing(nobody, 100, True)], {}, SHARD)
    assert lone == [Grant(0, SHARD)] * 62  # what is not a full message waits for room
    assert grants([Standing(nobody, 0, False)], {}, SHARD) == []
    assert grants([], {}, SHARD) == []


def test_messages_are_sent_in_turn_by_weight() -> None:
    flows = [Standing("alice", 0, True), Standing("bob", 0, True), Standing("carol", 900, True)]
    sent = [grant.flow for grant in grants(flows, {"alice": 2}, SHARD)]
    assert sent[:9] == [0, 1, 0, 0, 1, 0, 0, 1, 0]  # carol has had its turn
    assert {flow: sent.count(flow) for flow in range(3)} == {0: 32, 1: 16, 2: 1}


def test_bulk_enqueueing_leaves_room_for_others() -> None:
    assert room(0, 0, SHARD) == 1024
    assert room(1000, 1000, SHARD) == 24
    assert room(0, 4000, SHARD) == 96
    assert room(0, 4096, SHARD) == 16 and room(16, 4096, SHARD) == 0  # a crowd does not lock anybody out


@pytest.mark.parametrize("text", ["alice", "alice=0", "alice=two", "=1", "a=1,a=2", "a=101", "a=1,,"])
def test_shares_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"NIGHTMILL_SHARES: .*is not OWNER=WEIGHT"):
        Settings.from_env({"NIGHTMILL_SHARES": text})
    with pytest.raises(ValueError, match="OWNER=WEIGHT"):
        parse_shares(text)
    assert Settings.from_env({"NIGHTMILL_SHARES": "a=2, b=1"}).weights_of_owners == {"a": 2, "b": 1}
