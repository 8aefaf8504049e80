"""Turns of a worker's models: what SQL says goes to the policy, what that says becomes a load or a swap.

A process serves one model. Its turn ends as any rest does: it drains. Then it becomes the worker for the next
model (`swapping.py`), or else the process that sleeps (`service/sleeping.py`), which chooses one in its time.
"""

import logging
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from nightmill.jobs.base.settings import Settings, parse_models
from nightmill.jobs.base.times import parse_span
from nightmill.jobs.errors import BrokerError, DatabaseError, ModelFetchError, ModelFileError, NightmillError
from nightmill.jobs.sql.claims import Claims
from nightmill.jobs.sql.loads import FailureKind, Failures, Loads, Queue
from nightmill.worker.model.gguf.parts import whole_name
from nightmill.worker.service.in_flight import InFlight
from nightmill.worker.service.turns.policy import Loadable, Loaded, NextModel, Rules, View, choose, give_way
from nightmill.worker.service.turns.warming import Warmer

log = logging.getLogger(__name__)

_START_SECONDS, _BYTES_PER_SECOND = 10.0, 1e9  # a guess of what a load takes, until one was seen
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 5.0, 600.0  # after a first failed load; twice as long after each more
_LOOK_SECONDS = 5.0  # between two looks at all queues while the model is at work
LOOK_SHARE = 20
"""Looking at all queues, of millions of rows perhaps, takes one in so many seconds at most."""


def rules_of(settings: Settings) -> Rules:
    """Return the rules that the settings say."""
    return Rules(parse_span("stay", settings.stay), settings.swap_for_interactive)


def named_models(settings: Settings) -> dict[str, str]:
    """Return the settings' models by name, once all have one (`assembly.fetching.with_models`)."""
    listed = () if settings.models is None else parse_models(settings.models)
    return {name: model for name, model in listed if name is not None}


class Turning:
    """The models that one worker loads in turn."""

    def __init__(self, loads: Loads, models: Mapping[str, str], rules: Rules) -> None:
        self._loads = loads
        self._models = dict(models)
        self._rules = rules
        self._sizes = {
            name: sum(file.stat().st_size for file in files_of(model)) for name, model in models.items()
        }
        self.trouble: str | None = None
        """Which model could not be loaded, and is tried again, as of the last choice."""

    def choose(self) -> str | None:
        """Take the next model, if there is one to load; fail the rows of those that cannot be loaded.

        Raises DatabaseError.
        """
        self._fail_rows_of_broken()
        view = self._view()
        if choose(view({}), self._rules) is None:  # without a lock, as it is mostly
            return None

        def take(held: Mapping[str, int]) -> tuple[str, str] | None:
            chosen = choose(view(held), self._rules)
            return None if chosen is None else (chosen.model, chosen.reason)

        return self._loads.begin(take)

    def give_way(self, loaded: Loaded) -> NextModel | None:
        """Return the model to swap to; None: the loaded one goes on. Raises DatabaseError."""
        return give_way(self._view()(self._loads.held_by_others()), loaded, self._rules)

    def next_after(self, loaded: Loaded) -> NextModel | None:
        """Return the model that would follow if this one had no rows now. Raises DatabaseError."""
        view = self._view()(self._loads.held_by_others())
        queues: Mapping[str | None, Queue] = {
            name: queue for name, queue in view.queues.items() if name not in (loaded.model, None)
        }
        return choose(View(view.now, view.candidates, queues, view.held), self._rules)

    def _view(self) -> "partial[View]":
        """Return a view of what is now, which lacks only what other workers hold."""
        names = list(self._models)
        queues = self._loads.queues((None, *names))
        seconds, failures = self._loads.seconds(names), self._loads.failures(names)
        candidates = [
            Loadable(name, seconds.get(name) or self._guess(name), _retry_at(failures.get(name)))
            for name in names
        ]
        self.trouble = next((_described(name, failures[name]) for name in names if name in failures), None)
        return partial(View, self._loads.database.now(), candidates, queues)

    def _guess(self, name: str) -> float:
        return _START_SECONDS + self._sizes[name] / _BYTES_PER_SECOND

    def _fail_rows_of_broken(self) -> None:
        """Fail the rows of models that were tried as often as rows are.

        If no model of this worker was ever loaded, and no file was found broken, it is more likely the GPU,
        which is no row's fault; nor is a network that is away.
        """
        for model, failures in self._loads.failures(list(self._models)).items():
            least = self._loads.least_attempts(model)
            if least is None or failures.count < least:
                continue
            proved = failures.kind is FailureKind.FILE or self._loads.has_loaded_any()
            if failures.kind is FailureKind.FETCH or not proved:
                continue
            if self._loads.others_hope(model, least):
                continue
            failed = self._loads.fail_rows(model, failures)
            log.error("%d rows failed: %s could not be loaded: %s", failed, model, failures.error)


class Turn:
    """The turn of one model, in the process that serves it."""

    def __init__(
        self, claims: Claims, settings: Settings, model: str, *, has_others_beside: bool = False
    ) -> None:
        self.model = model
        self._has_others_beside = has_others_beside
        self._claims = claims
        self._loads = Loads(claims.database, claims.worker_id)
        self._models = named_models(settings)
        self._turning = Turning(self._loads, self._models, rules_of(settings))
        self._warmer = Warmer(log.warning)
        self.gives_way_to: str | None = None
        """The model that is to be loaded in place of this one, as of the last look."""
        self._since: datetime | None = None
        self._look_at = 0.0  # while there is work
        self._rested_at = 0.0  # when the last look has been paid for

    def begin(self) -> None:
        """Take the model at the start of a worker that has others beside it. Raises DatabaseError.

        Nothing has waited for it yet, so nobody has chosen it.
        """
        if not self._loads.is_open():
            self._loads.begin(lambda _: (self.model, "is loaded together with others"))

    def failed(self, error: BaseException) -> str | None:
        """Record why the model could not be loaded; returns that for people.

        None: it is not about this model, and the worker ends. Raises DatabaseError.
        """
        if not isinstance(error, NightmillError) or isinstance(error, DatabaseError | BrokerError):
            self._loads.end()
            return None
        kinds = {ModelFileError: FailureKind.FILE, ModelFetchError: FailureKind.FETCH}
        self._loads.end(str(error), kinds.get(type(error), FailureKind.RUNNER))
        return f"{self.model} could not be loaded: {error}"

    def ready(self) -> None:
        """Record that the model is loaded. Raises DatabaseError."""
        self._since = self._claims.database.now()
        self._loads.ready()

    def choose_next(self) -> str | None:
        """Take the model of the next turn, if there is one to load. Raises DatabaseError."""
        return self._turning.choose()

    def end(self) -> None:
        """Record that the turn is over. Raises DatabaseError."""
        self._warmer.close()
        self._loads.end()

    def look(self, in_flight: InFlight) -> str | None:
        """Return why another model is to be loaded in place of this one; None: it goes on.

        While the last rows of this one are computed, the weights of the next are read. Raises DatabaseError.
        """
        idle, drained = in_flight.idle, not self._claims.jobs_wait((None, self.model))
        began = time.monotonic()
        look_at = self._rested_at if idle and drained else max(self._look_at, self._rested_at)
        if self._since is None or began < look_at:
            return None
        loaded = Loaded(self.model, self._since, idle)
        choice = self._turning.give_way(loaded)
        if choice is None and drained and (then := self._turning.next_after(loaded)) is not None:
            self._warmer.warm(then.model, files_of(self._models[then.model]))
        now = time.monotonic()
        self._look_at, self._rested_at = now + _LOOK_SECONDS, now + LOOK_SHARE * (now - began)
        self.gives_way_to = None if choice is None else choice.model
        return None if choice is None else f"{choice.model} is next: {choice.reason}"

    def yields(self) -> bool:
        """Return True while this model takes no rows of batches, as more urgent ones wait for one beside it.

        Raises DatabaseError.
        """
        if not self._has_others_beside:
            return False
        theirs = self._loads.most_urgent(self._loads.beside())
        ours = None if theirs is None else self._loads.most_urgent((None, self.model))
        return theirs is not None and ours is not None and theirs > ours


def register_turn(claims: Claims, settings: Settings, turn: str | None, together: str | None) -> Turn | None:
    """Write the models of a registered worker into its row; returns the turn of the one that it loads now.

    together  what it and the workers that share its GPU are called. Raises DatabaseError
    """
    swaps = settings.swap_for_interactive
    claims.register_models([*named_models(settings)], swap_for_interactive=swaps, together=together)
    if turn is None:
        return None
    made = Turn(claims, settings, turn, has_others_beside=together is not None)
    if together is not None:
        made.begin()
    return made


def files_of(model: str) -> list[Path]:
    """Return the files of a model that are there, all parts of a split one."""
    path = Path(model)
    if (stem := whole_name(path.stem)) == path.stem:
        return [path] if path.is_file() else []
    return sorted(one for one in path.parent.glob(f"*{path.suffix}") if whole_name(one.stem) == stem)


def _retry_at(failures: Failures | None) -> datetime | None:
    if failures is None:
        return None
    seconds = min(_RETRY_SECONDS * 2 ** min(failures.count - 1, 16), _MOST_RETRY_SECONDS)
    return failures.last + timedelta(seconds=seconds)


def _described(name: str, failures: Failures) -> str:
    return f"{name} could not be loaded, and is tried again: {failures.error}"
