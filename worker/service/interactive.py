"""Interactive jobs: their ids come through Redis lists of their own, whatever else a worker does.

A message for batches waits in Redis until a worker has room. Here somebody waits for each job, so a thread
always listens, as long as there are places that only such jobs may take.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import count

from nightmill.jobs.errors import BrokerError
from nightmill.jobs.messages.broker import Broker, lane_name, read_lane
from nightmill.jobs.streams.redis import RedisConnection
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.watched import watched_thread

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64  # jobs of one claim
_LISTEN_SECONDS = 1.0  # before it looks whether it is to end
_LOOK_SECONDS = 0.1  # from one look at what waits to the next, while all places are taken
_END_SECONDS = 10.0  # for an answer of Redis, and a claim, that are under way when the worker ends
_PAUSE_SECONDS = 1.0  # after a failure of Redis


class InteractiveConsumer:
    """Takes interactive jobs for these models, and has `take` begin them.

    What is read is gone from Redis. If the worker dies before it has claimed it, a sweep sends it again, as
    whatever else gets lost on the way.
    """

    def __init__(
        self,
        broker: Broker,
        models: Sequence[str | None],
        in_flight: InFlight,
        take: Callable[[Sequence[str]], object],
        on_failure: Callable[[str], None],
    ) -> None:
        self._redis = RedisConnection(broker)
        self._keys = [lane_name(model) for model in models]
        self._turn = count()
        self._in_flight = in_flight
        self._take = take
        self._full = False
        self._closing = threading.Event()
        self._thread = watched_thread("interactive jobs", self._run, on_failure)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Take no more, and end the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():  # else it is still using the connection
            self._redis.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                room = self._in_flight.wait_for_room(_LOOK_SECONDS, urgent=self._full and self._awaited())
                self._full = not room
                job_ids = self._listen(min(room, MOST_AT_ONCE)) if room else []
            except BrokerError as error:
                log.debug("interactive jobs do not arrive: %s", error)
                self._closing.wait(_PAUSE_SECONDS)
                continue
            if job_ids:
                self._take(job_ids)
            elif self._in_flight.closed:
                self._closing.wait()

    def _awaited(self) -> bool:
        """Return True if interactive jobs wait for a place: the next that is free is theirs."""
        with self._redis.open() as redis:
            return any(redis.llen(key) for key in self._keys)

    def _listen(self, most: int) -> list[str]:
        """Take the ids of interactive jobs that have come, up to `most`; wait for the first.

        Returns none if none came within `_LISTEN_SECONDS`.
        """
        turn = next(self._turn) % len(self._keys)
        keys = self._keys[turn:] + self._keys[:turn]
        with self._redis.open() as redis:
            found = redis.brpop(keys, timeout=_LISTEN_SECONDS)
            if found is None:
                return []
            key, first = found
            entries = [first]
            if most > 1:
                entries += redis.rpop(key, most - 1) or ()
        job_ids = [read_lane(entry) for entry in entries]
        if (foreign := job_ids.count(None)) > 0:
            log.error("%d entries of %s that are not job ids were removed", foreign, key.decode())
        return list(dict.fromkeys(job_id for job_id in job_ids if job_id is not None))
