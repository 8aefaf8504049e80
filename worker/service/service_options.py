"""Options of a worker's service: how much it takes at once, and how long it goes on at its end."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Sizes and times of a service.

    capacity       answers in hand at once: those that the engine computes, and enough to refill it
    reserved_slots           places beyond that for interactive jobs alone
    drain_seconds  how long jobs in hand may go on once the worker is to stop
    """

    capacity: int
    reserved_slots: int = 0
    drain_seconds: float
