"""The messages between a worker and its engine's process.

Pickled by `multiprocessing.connection` over a socket between a process and its own child: nothing of it comes
from a network or a file.
"""

from dataclasses import dataclass

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.jobs.base.settings import Settings
from nightmill.worker.engine.request import Completion, Delta, DrawnTokens, Request
from nightmill.worker.engine.stats import EngineStats
from nightmill.worker.runners.starting import StartStep


@dataclass(frozen=True, slots=True)
class Begin:
    """First command: what to serve, and how much to log.

    plain_products  the second way to multiply packed weights, after the first has failed
    ledger          the inherited descriptor of the accounts of engines that share a GPU
    waits           do all that takes nothing of a GPU, and wait for `Go`
    """

    settings: Settings
    log_level: int
    plain_products: bool = False
    ledger: int | None = None
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Go:
    """Go on with the GPU."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Take requests in."""

    requests: list[Request]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request at the next step."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Tell the tokens of those of these jobs that have grown by `at_least`; answered by `Answered`."""

    number: int
    job_ids: list[str]
    at_least: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Tell the texts of these jobs as they grow, by `Deltas`, and no longer those of others."""

    job_ids: list[str]


@dataclass(frozen=True, slots=True)
class Abandon:
    """Drop all work, without completions; answered by `Answered`, with the tokens that each request had."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process; unfinished work is dropped."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of building the engine: the step that begins or goes on, and news of it for people, or ""."""

    step: StartStep
    news: str = ""

    @property
    def words(self) -> str:
        """Both, for people."""
        return f"{self.step.words}: {self.news}" if self.news else self.step.words

    @property
    def shown(self) -> str:
        """The progress that a worker shows of itself: of weights, the share alone."""
        return self.news if self.step is StartStep.LOADING and self.news else self.words


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built. `arithmetic`: as of `Runner`."""

    stats: EngineStats
    arithmetic: Arithmetic


@dataclass(frozen=True, slots=True)
class Completed:
    """Completions since the last such message, and the state of the engine."""

    completions: list[Completion]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Deltas:
    """The growth of the texts that are followed since the last such message."""

    deltas: list[Delta]


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the question of that number."""

    number: int
    progress: list[DrawnTokens]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be built, or broke; nothing follows.

    by_products  a kernel gave wrong results, trapped or hung: plain products may help
    """

    reason: str
    by_products: bool = False


Command = Begin | Go | Submit | Cancel | Ask | Follow | Abandon | Stop
Answer = Loading | Ready | Completed | Deltas | Answered | Failed
