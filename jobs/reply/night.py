"""Reports of a night: loads, rows, tokens, idle time and its reasons, and what would have made it shorter.

Everything is made of counts, so that it can be said a month later. No SQL here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, datetime, time, timedelta
from typing import Any

from nightmill.jobs.reply.batch_status import ErrorGroup

_NOON = time(12)
_SENTENCES = 3
_WORTH = 0.01  # of the night: less is not worth a sentence
_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class Spell:
    """Some minutes of a worker, in seconds by what it spent them on.

    computing  texts, with all the memory that they wanted
    memory     texts, while others waited for KV pages
    tokenizer  nothing, while claimed jobs were rendered, tokenised or written
    messages   nothing, for want of jobs
    loading    the model
    """

    worker: str
    host: str | None
    gpu: str | None
    model: str
    began_at: datetime
    ended_at: datetime
    computing: float = 0.0
    memory: float = 0.0
    tokenizer: float = 0.0
    messages: float = 0.0
    loading: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelNight:
    """The rows of a model that ended."""

    model: str | None
    rows: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    failed_tokens: int  # of answers of rows that failed
    energy_joules: float | None = None  # None: not recorded
    gpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class BatchNight:
    """The rows of a batch that ended."""

    name: str
    rows: int
    completion_tokens: int
    began_at: datetime
    ended_at: datetime

    @property
    def seconds(self) -> float:
        """From its first start to its last end."""
        return (self.ended_at - self.began_at).total_seconds()


@dataclass(frozen=True, slots=True)
class Load:
    """A model that a worker loaded."""

    model: str
    host: str | None
    gpu: str | None
    at: datetime
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NightReport:
    """The report of a night. Times are None and lists empty where nothing happened."""

    date: date
    since: datetime
    until: datetime
    began_at: datetime | None  # the first start of a row that ended,
    ended_at: datetime | None  # and the last end
    models: list[ModelNight]
    loads: list[Load]
    workers: int
    spent: dict[str, float]  # seconds of all workers, by what they spent them on
    slowest: BatchNight | None
    failures: list[ErrorGroup]
    sentences: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that ended."""
        return sum(model.rows for model in self.models)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        if self.began_at is None or self.ended_at is None:
            return 0.0
        return (self.ended_at - self.began_at).total_seconds()

    def values(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        slowest = None if self.slowest is None else asdict(self.slowest) | {"seconds": self.slowest.seconds}
        return asdict(self) | {"rows": self.rows, "seconds": self.seconds, "slowest": slowest}


def night_of(day: date | None, now: datetime) -> tuple[date, datetime, datetime]:
    """Return a night and its begin and end: from noon to noon, in this machine's zone.

    day  on which it begins; None: the night of now, or in the afternoon the last one
    now  the time in this machine's zone
    """
    if day is None:
        day = now.date() if now.time() >= _NOON else now.date() - timedelta(days=1)
        if _NOON <= now.time() < time(18):
            day -= timedelta(days=1)
    since, until = (datetime.combine(day + timedelta(days=days), _NOON).astimezone() for days in (0, 1))
    return day, since, until


def loads_of(spells: Sequence[Spell]) -> list[Load]:
    """Return the loads of models, in their order."""
    return [
        Load(spell.model, spell.host, spell.gpu, spell.began_at, spell.loading)
        for spell in spells
        if spell.loading
    ]


def spent_in(spells: Sequence[Spell]) -> dict[str, float]:
    """Return the seconds of all workers by what they spent them on."""
    names = ("computing", "memory", "tokenizer", "messages", "loading")
    return {name: sum(getattr(spell, name) for spell in spells) for name in names}


def shorter(spent: Mapping[str, float], models: Sequence[ModelNight], loads: int, gaps: float) -> list[str]:
    """Return the sentences that say what would have made a night shorter, the greatest gain first.

    spent  seconds of workers by what they spent them on
    gaps   seconds for which workers had nothing to do between the night's first row and its last
    """
    whole = sum(spent.values()) or 1.0
    tokens = sum(model.completion_tokens for model in models)
    failed = sum(model.failed_tokens for model in models)
    failing = spent.get("computing", 0.0) * failed / tokens if tokens else 0.0
    said = [
        (
            gaps,
            f"Workers waited {_span(gaps)} for jobs while the night went on: hand batches in earlier, or all "
            "at the beginning.",
        ),
        (
            spent.get("tokenizer", 0.0),
            f"Workers waited {_span(spent.get('tokenizer', 0.0))} for prompts to be rendered and tokenised: "
            "more processor cores would have kept the GPU busy.",
        ),
        (
            spent.get("memory", 0.0),
            f"For {_span(spent.get('memory', 0.0))} texts waited for KV pages: more memory for them (--kv "
            "fp8, --weights file, --gpu-memory), or a smaller max_tokens, lets more run at once.",
        ),
        (
            spent.get("loading", 0.0),
            f"Models were loaded {'once' if loads == 1 else f'{loads:,} times'}, which took "
            f"{_span(spent.get('loading', 0.0))}: fewer starts, or a longer --idle-seconds, save that.",
        ),
        (
            failing,
            f"About {_span(failing)} went into {failed:,} tokens of rows that failed: --max-failures stops a "
            "batch of such rows early.",
        ),
    ]
    found = [sentence for seconds, sentence in sorted(said, reverse=True) if seconds >= _WORTH * whole]
    busy = (spent.get("computing", 0.0) + spent.get("memory", 0.0)) / whole
    if busy >= _BUSY and len(found) < _SENTENCES:
        found.append(
            f"GPUs computed for {100 * busy:.0f}% of the time: only another GPU, a smaller model or a faster "
            "format of its weights would have made it much shorter."
        )
    read = sum(model.prompt_tokens for model in models)
    cached = sum(model.cached_tokens for model in models)
    if read > 4 * tokens and cached < read / 2 and len(found) < _SENTENCES:
        found.append(
            f"Prompts had {read:,} tokens and answers {tokens:,}: prompts that begin alike, with what "
            "differs at the end, are read once."
        )
    return found[:_SENTENCES]


def _span(seconds: float) -> str:
    """Format seconds as 45 s, 12 min, or 3 h 05 min."""
    minutes = round(seconds / 60)
    if seconds < 99:
        return f"{max(0, round(seconds))} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
