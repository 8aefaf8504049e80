"""A worker's turns with suspects: jobs that were in flight at a death, run with nothing else beside them.

See `jobs.sql.suspects` for how groups come to be. An idle worker, and one that has just started, takes a
group before anything else. Busy workers leave it to those for a while; then one of them
(`Claims.is_to_drain`) claims nothing more for batches, waits until what it has of these has ended, and runs
the group, unless somebody else has taken it meanwhile. The other workers go on as before.

Interactive jobs must not wait for all that, and no job may run beside suspects: at a death it would be one of
them, and who is guilty alone could not be found. So the two alternate, each with nothing beside it:

- While a worker drains, and between two turns, interactive jobs are admitted.
- A turn that has lasted `turn_seconds` ends as soon as an interactive job waits for this worker. The
  suspects go back into the queue with the tokens they have, still a group; the next turn goes on from these.
- A recess lasts until no interactive job waits or runs, `recess_seconds` at most. Those that still run then
  are set aside in the same way, are announced again, and wait for the next recess.

Therefore an interactive job waits for one turn at a time, however long the texts of suspects are, and however
many groups there are. Suspects go on however many interactive jobs come: a turn that gained nothing (no job
ended, and no token was drawn that a later attempt goes on from) is followed by one twice as long. That is the
one case in which an interactive job waits longer: where even the first prompt of a group takes longer than a
turn, or all of them ask for log-probabilities, which a later attempt draws anew.

Whatever is in flight at a death is therefore either suspects of one group, or no suspect at all, and the
charge is the same as if nobody had been set aside. Setting aside is what a worker does at its end: fenced by
the attempt, and no attempt is lost.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from nightmill.jobs.errors import BrokerError
from nightmill.jobs.sql.claims import Claim, Claims
from nightmill.worker.service.in_flight import InFlight, JobKey

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
TURN_SECONDS = 4.0
RECESS_SECONDS = 4.0
_POLL_SECONDS = 0.2  # how often a turn looks whether an interactive job waits


class Computing(Protocol):
    """The part of the service that a turn uses."""

    in_flight: InFlight

    def begin(self, claims: Sequence[Claim]) -> list[JobKey]:
        """Tokenise and submit claimed jobs; returns their keys."""
        ...

    def set_aside(self) -> Mapping[JobKey, int]:
        """Queue all jobs again that are being computed; returns how many tokens each had."""
        ...


class SuspectsTurn:
    """Looks for groups of suspects and runs them. `look` is called every LOOK_SECONDS, on one thread.

    patience  seconds for which a busy worker leaves a group to others: longer than it takes to start a worker
              in place of one that has died
    announce  sends messages for jobs that have none; may raise DatabaseError and BrokerError
    """

    def __init__(
        self,
        claims: Claims,
        service: Computing,
        models: Sequence[str | None],
        patience: float,
        announce: Callable[[], None],
        *,
        turn_seconds: float = TURN_SECONDS,
        recess_seconds: float = RECESS_SECONDS,
    ) -> None:
        self._claims = claims
        self._service = service
        self._in_flight = service.in_flight
        self._models = models
        self._patience = patience
        self._announce = announce
        self._turn_seconds = self._turn = turn_seconds
        self._recess_seconds = recess_seconds
        self._seen_at: float | None = None  # when groups were first seen waiting

    def look(self) -> None:
        """Run the groups that wait, if it is this worker's turn. Raises DatabaseError."""
        try:
            if not self._wait():
                self._seen_at = None
                return
            if self._seen_at is None:
                self._seen_at = time.monotonic()
            if self._in_flight.pause_if_idle() or self._drains():
                while self._run_one():
                    pass
        finally:
            self._in_flight.resume()

    def _wait(self) -> bool:
        return self._claims.suspects_wait(self._models)

    def _drains(self) -> bool:
        """Return True if this worker, busy as it is, has waited long enough and is to interrupt its work."""
        assert self._seen_at is not None
        waited = time.monotonic() - self._seen_at
        return waited >= self._patience and self._claims.is_to_drain(self._models)

    def _run_one(self) -> bool:
        """Give one group a turn, or what there is room for; False if there is none (any more)."""
        places = self._all_places()
        if not places:
            return False
        claims: list[Claim] = []
        try:
            claims = self._claims.claim_suspects(self._models, places)
        finally:
            ours = self._in_flight.fill(places, claims)
        if not claims or not ours:
            return False
        log.warning("%d jobs that were in flight when a worker died run apart from others", len(claims))
        self._run(claims)
        return True

    def _all_places(self) -> int:
        """Wait until nothing is in flight, and take every place; 0 if there is no group any more."""
        while not self._in_flight.closed and self._wait():
            self._in_flight.pause(interactive=True)
            if not self._in_flight.wait_until_quiet(self._recess_seconds):
                if not self._in_flight.interactive_alone:
                    continue  # jobs of batches end by themselves
                self._in_flight.pause()
                self._set_aside()
            if places := self._in_flight.reserve_all(LOOK_SECONDS):
                return places
        return 0

    def _run(self, claims: Sequence[Claim]) -> None:
        """Run suspects to their end, or until their turn is over and an interactive job waits."""
        over_at = time.monotonic() + self._turn
        ended = self._in_flight.ending(self._service.begin(claims))
        while not ended.wait(_POLL_SECONDS):
            if time.monotonic() >= over_at and self._in_flight.urgent:
                log.info("%d suspects are interrupted for interactive jobs, and go on later", len(claims))
                gained = _gained(claims, self._set_aside())
                self._turn = self._turn_seconds if gained else 2 * self._turn
                return
        self._turn = self._turn_seconds

    def _set_aside(self) -> Mapping[JobKey, int]:
        kept = self._service.set_aside()
        if kept:
            try:
                self._announce()
            except BrokerError as error:  # the sweep sends them once the broker is back
                log.debug("jobs that were set aside are not announced: %s", error)
        return kept


def _gained(claims: Sequence[Claim], kept: Mapping[JobKey, int]) -> bool:
    """Return True if a turn has brought these suspects on.

    That is: a job has ended, or will go on from more tokens than before.
    """
    for claim in claims:
        tokens = kept.get((claim.job_id, claim.attempt))
        before = 0 if claim.saved is None else len(claim.saved.token_ids)
        params = claim.params
        resumes = params.logprobs is None and params.prompt_logprobs is None and not params.score
        if tokens is None or (resumes and tokens > before):
            return True
    return False
