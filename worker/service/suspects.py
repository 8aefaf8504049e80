"""A worker's turns with suspects: jobs that were in flight at a death, run with nothing else beside them.

See `jobs.sql.suspects` for how groups come to be. An idle worker, and one that has just started, takes a
group before anything else. A busy one leaves it to those for a while; then it claims nothing more, waits
until what it has in flight has ended, and runs the group, unless somebody else has taken it meanwhile.
"""

import logging
import time
from collections.abc import Callable, Sequence

from nightmill.jobs.sql.claims import Claim, Claims
from nightmill.worker.service.in_flight import InFlight, JobKey

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class SuspectsTurn:
    """Looks for groups of suspects and runs them. `look` is called every LOOK_SECONDS, on one thread.

    `begin` tokenises and submits claimed jobs, and returns their keys. A busy worker leaves a group to others
    for `patience` seconds: longer than it takes to start a worker in place of one that has died.
    """

    def __init__(
        self,
        claims: Claims,
        in_flight: InFlight,
        begin: Callable[[Sequence[Claim]], list[JobKey]],
        models: Sequence[str | None],
        patience: float,
    ) -> None:
        self._claims = claims
        self._in_flight = in_flight
        self._begin = begin
        self._models = models
        self._patience = patience
        self._seen_at: float | None = None  # when groups were first seen waiting

    def look(self) -> None:
        """Run the groups that wait, if it is this worker's turn. Raises DatabaseError."""
        try:
            if not self._wait():
                self._seen_at = None
                return
            if self._seen_at is None:
                self._seen_at = time.monotonic()
            if self._in_flight.pause(even_if_busy=time.monotonic() - self._seen_at >= self._patience):
                while self._run_one():
                    pass
        finally:
            self._in_flight.resume()

    def _wait(self) -> bool:
        return self._claims.suspects_wait(self._models)

    def _run_one(self) -> bool:
        """Run one group to its end, or what there is room for; False if there is none (any more)."""
        while (places := self._in_flight.reserve_all(LOOK_SECONDS)) == 0:
            if self._in_flight.closed or not self._wait():
                return False
        claims: list[Claim] = []
        try:
            claims = self._claims.claim_suspects(self._models, places)
        finally:
            ours = self._in_flight.fill(places, claims)
        if not claims or not ours:
            return False
        log.warning("%d jobs that were in flight when a worker died run apart from others", len(claims))
        self._in_flight.wait_for_end(self._begin(claims))
        return True
