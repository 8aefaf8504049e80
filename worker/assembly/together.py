"""Several models on one GPU at once: what each needs of its memory, whether they fit, and what each gets.

Every model has an engine of its own, in a process of its own. One needs its weights, what its steps compute
in, and a cache that has room for one sequence of the whole context. What is left is shared so that all caches
get room for the same number of tokens more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import RunnerError
from nightmill.worker.assembly.forecast import GIB, Card, Forecast, forecast
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.kv_cache import PAGE, kinds_layout, pool_page_bytes
from nightmill.worker.runners.gpu.memory import allowed
from nightmill.worker.runners.gpu.precision import Precision

__all__ = ["ENGINE_BYTES", "Fit", "Planned", "Share", "share_out"]

ENGINE_BYTES = 1 << 30
"""Bytes that a process takes on a GPU beside what is planned: its context, kernels, graphs, libraries. One
engine's are in the tenth that --gpu-memory leaves; each further one's are set aside."""
_STEP = 64 << 20  # to which a need is found
_EXPECTED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Planned:
    """A model to load with others: what it is, and the formats that it is kept in."""

    spec: ModelSpec
    precision: Precision


@dataclass(frozen=True, slots=True)
class Share:
    """A model's share of the memory, and what a worker with that has room for."""

    bytes: int
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer whether models fit a GPU together.

    budget     bytes that all of them may have
    needs      the least bytes that each needs; None: more than there are
    would_fit  models that do fit together, as many as come first in the list
    shares     of each, if all fit
    """

    card: Card
    gpu_memory: float
    budget: int
    needs: dict[str, int | None]
    would_fit: tuple[str, ...]
    shares: dict[str, Share]

    @property
    def fits(self) -> bool:
        """True if all models fit."""
        return bool(self.shares)

    @property
    def refusal(self) -> str:
        """Say why they do not fit, what would, and what to do."""
        needs = ", ".join(f"{name} needs {self._said(need)}" for name, need in self.needs.items())
        fitting = _listed(self.would_fit)
        taken = sum(self.needs[name] or 0 for name in self.would_fit)
        match len(self.would_fit):
            case 0:
                would = "None of them fits alone"
            case 1:
                would = f"{fitting} alone would fit ({taken / GIB:.1f} GiB)"
            case _:
                would = f"{fitting} would fit together ({taken / GIB:.1f} GiB)"
        return (
            f"--together: the models do not fit {self.card} at once: {needs}, and --gpu-memory "
            f"{self.gpu_memory:,} leaves {self.budget / GIB:.1f} GiB for {len(self.needs)} engines. {would}. "
            "Name fewer models; leave out --together, so that they are loaded in turn; or lower "
            "--context or --max-sequences"
        )

    def _said(self, need: int | None) -> str:
        return f"more than {self.budget / GIB:.1f} GiB" if need is None else f"{need / GIB:.1f} GiB"


def share_out(models: Mapping[str, Planned], card: Card, settings: Settings) -> Fit:
    """Find whether these models fit that GPU together, and what each gets.

    Raises RunnerError if the kernels do not take a model, SettingsError for a context that it cannot have.
    """
    budget = max(0, allowed(card.free, settings.gpu_memory) - (len(models) - 1) * ENGINE_BYTES)
    needs = {name: _need(name, model, card, settings, budget) for name, model in models.items()}
    would_fit: list[str] = []
    left = budget
    for name, need in needs.items():
        if need is not None and need <= left:
            would_fit.append(name)
            left -= need
    shares: dict[str, Share] = {}
    if len(would_fit) == len(models):
        weights = {name: _sequence_bytes(model) for name, model in models.items()}
        for name, model in models.items():
            size = (needs[name] or 0) + left * weights[name] // max(1, sum(weights.values()))
            shares[name] = Share(size, _forecast(model, card, settings, size))
    return Fit(card, settings.gpu_memory, budget, needs, tuple(would_fit), shares)


def _need(name: str, model: Planned, card: Card, settings: Settings, budget: int) -> int | None:
    """Return the least bytes with which a model has room for one whole context; None: more than `budget`."""

    def has_room(size: int) -> bool:
        try:
            return min(_forecast(model, card, settings, size).sequences.values()) >= 1
        except RunnerError:
            return False

    fewest, most = 1, budget // _STEP
    if most < 1 or not has_room(most * _STEP):
        _check(name, model, card, settings)
        return None
    while fewest < most:
        tried = (fewest + most) // 2
        fewest, most = (fewest, tried) if has_room(tried * _STEP) else (tried + 1, most)
    return fewest * _STEP


def _check(name: str, model: Planned, card: Card, settings: Settings) -> None:
    """Raise what keeps a model from any card of that kind, however large."""
    try:
        _forecast(model, card, settings, 1 << 50)
    except RunnerError as error:
        raise RunnerError(f"{name}: {error}") from error


def _forecast(model: Planned, card: Card, settings: Settings, size: int) -> Forecast:
    given = settings.model_copy(update={"gpu_memory": size})
    room = Card(
        card.name, max(size, 1), card.multiprocessors, card.peaks,
        hopper=card.hopper, fp8=card.fp8, block_shared=card.block_shared,
    )  # fmt: skip
    return forecast(model.spec, room, given, model.precision)


def _sequence_bytes(model: Planned) -> int:
    """Return what a sequence of some tokens takes of the cache, with its state."""
    spec, kv = model.spec, model.precision.kv
    layout = kinds_layout(spec, kv)
    pages = -(-_EXPECTED_TOKENS // PAGE) if layout is None else layout.pages_at(_EXPECTED_TOKENS)
    return pages * pool_page_bytes(spec, kv) + spec.state_bytes


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
