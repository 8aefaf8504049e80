"""Timing of kernels that compute the same, as they run in a step, and the choice of one by number of rows."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.products.remembered import RememberedChoices
from nightmill.worker.runners.gpu.shapes import MANY_ROWS, padded_rows

__all__ = ["Choices", "KernelClock", "Naming", "nearest"]

log = logging.getLogger(__name__)

Tried = TypeVar("Tried")

_TIMED_RUNS = 8
_FINALISTS, _RETRIALS = 4, 2
_CLOSE = 1.15  # times the least time: clocks do not change by more within milliseconds
_STEADY = 1.05  # the same, of two measurements of one way, where nobody else uses the GPU
_NEARBY = 1.25  # times the rows, or a part of them: up to MANY_ROWS, what is best further away is not so here
_SHORTLIST = 6  # ways that are tried at sizes near one where all were
_OCCUPYING_FILLS = 12  # of 32 MiB, 10 us each on an H200

# Steps of many rows hold the GPU at its power cap. In the tenth of a second before it is there, products are
# up to 15% faster, and a way that is as fast as another may then be 10% slower.
_LOADED_RUNS = 2
_WARM_SECONDS = 0.2  # of work before the first is timed
_LOAD_SECONDS, _LOAD_TIMED_SECONDS = 0.05, 0.025  # of each of the best few alone, then of it, timed


class KernelClock:
    """Times launches.

    scratch, size  address and bytes of memory that may be overwritten at any time, 32 MiB or so
    remembered     what was found at earlier starts
    """

    def __init__(
        self, device: Device, scratch: int, size: int, remembered: RememberedChoices | None = None
    ) -> None:
        self.remembered = remembered or RememberedChoices()
        self.steady = False
        """The best of the last ranking took as long when it was measured once more."""
        self._rankings = 0
        self._device = device
        self._scratch, self._size = scratch, size
        self._started, self._ended = device.event(timing=True), device.event(timing=True)

    def ranked(
        self, kernels: Sequence[Callable[[int], None]], beside: Callable[[], None], *, loaded: bool = False
    ) -> list[int]:
        """Rank launches by the time they take, called with the numbers 0, 1, 2 ..., best first; waits.

        They are timed as they run in a step: in a graph, so that no pause of the host counts, and with
        `beside` between the calls, since kernels of ours overlap with what is before and after them, the
        library's do not. The best few, where they are close, are measured again, and each one's least time
        counts: clocks change.

        loaded  on a GPU that has been at work for so long that its clocks are those of a long run; the best
                few are measured again after each has run alone for a while, and that counts
        """
        self._rankings += 1
        runs = _LOADED_RUNS if loaded else _TIMED_RUNS
        graphs: list[Graph] = []
        try:
            graphs.extend(self._repeated(kernel, beside, runs) for kernel in kernels)
            return self._under_load(graphs) if loaded and len(graphs) > 1 else self._by_least(graphs)
        finally:
            for graph in graphs:
                graph.close()

    def keep(self) -> None:
        """Keep what was found for later starts, and say in the log how much of it could be."""
        log.info(
            "of products, %d sizes were timed; what was fastest is kept of %d, whose times were steady",
            self._rankings, self.remembered.noted,
        )  # fmt: skip
        self.remembered.save()

    def _by_least(self, graphs: Sequence[Graph]) -> list[int]:
        times = [self._seconds(graph) for graph in graphs]
        for _ in range(_RETRIALS):
            close = _best_of(times)
            for index in close if len(close) > 1 else ():
                times[index] = min(times[index], self._seconds(graphs[index]))
        order = [int(index) for index in np.argsort(times)]
        self._look_again(times[order[0]], self._seconds(graphs[order[0]]))
        return order

    def _under_load(self, graphs: Sequence[Graph]) -> list[int]:
        self._replayed(graphs[0], _WARM_SECONDS, self._seconds(graphs[0]))
        times = [self._seconds(graph) for graph in graphs]
        alone = {}
        for index in _best_of(times):
            self._replayed(graphs[index], _LOAD_SECONDS, times[index])
            alone[index] = self._replayed(graphs[index], _LOAD_TIMED_SECONDS, times[index])
        others = [int(index) for index in np.argsort(times) if index not in alone]
        best, *rest = sorted(alone, key=lambda index: alone[index])
        self._look_again(alone[best], self._replayed(graphs[best], _LOAD_TIMED_SECONDS, times[best]))
        return [best, *rest, *others]

    def _look_again(self, first: float, second: float) -> None:
        self.steady = max(first, second) <= _STEADY * min(first, second)

    def _repeated(self, run: Callable[[int], None], beside: Callable[[], None], runs: int) -> Graph:
        """A graph of so many calls."""
        run(0)  # what is made or loaded at a first call is no part of it

        def record() -> None:
            for turn in range(runs):
                beside()
                run(turn)
            beside()

        return Graph(self._device, record)

    def _seconds(self, graph: Graph) -> float:
        """Time a replay."""
        for _ in range(_OCCUPYING_FILLS):  # something to do while the host queues the graph and the events
            self._device.fill(self._scratch, 0, self._size)
        return self._replayed(graph)

    def _replayed(self, graph: Graph, seconds: float = 0.0, each: float = 1.0) -> float:
        """Replay it for so long, if a replay takes `each`, once at least; what a replay took."""
        replays = max(1, math.ceil(seconds / each))
        self._started.record(self._device.stream)
        for _ in range(replays):
            graph.launch()
        self._ended.record(self._device.stream)
        self._device.wait(self._ended, "a product being timed")
        return float(self._started.time_till(self._ended)) * 1e-3 / replays


def _best_of(times: Sequence[float]) -> list[int]:
    """The best few, of those that are close to the best."""
    best = np.argsort(times)[:_FINALISTS]
    return [int(index) for index in best if times[index] <= _CLOSE * times[best[0]]]


def nearest(tried: Iterable[int], rows: int) -> int | None:
    """Return the number of rows, of those that were tried, to choose by for others; None if all are too far.

    More than MANY_ROWS have only each other.
    """
    many = rows > MANY_ROWS
    ratios = [(max(other, rows) / min(other, rows), other) for other in tried if (other > MANY_ROWS) == many]
    ratio, found = min(ratios, default=(0.0, None))
    return found if many or ratio <= _NEARBY else None


@dataclass(frozen=True, slots=True)
class Naming(Generic[Tried]):
    """Names by which the fastest of some ways is remembered.

    what    they compute
    name    of a way, which no other has
    kernel  of a way, for a person; algorithms of the library share one
    """

    what: str
    name: Callable[[Tried], str]
    kernel: Callable[[Tried], str]


class Choices(Generic[Tried]):
    """The kernel that is chosen for each number of rows, padded.

    every   all ways that there are for so many rows, the best guess first
    suits   whether what was found for other rows can compute so many
    trusts  whether it may be taken although nothing was timed near so many rows
    naming  what the fastest is remembered by. None: it is not

    Of all ways at the first size between two powers of two, the best few are tried at the other sizes there.
    """

    def __init__(
        self, clock: KernelClock, every: Callable[[int], Sequence[Tried]],
        suits: Callable[[Tried, int], bool] = lambda kernel, rows: True,
        trusts: Callable[[Tried, int], bool] = lambda kernel, rows: True,
        naming: Naming[Tried] | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._naming = naming
        self._every = every
        self._suits = suits
        self._trusts = trusts
        self._tuned: dict[int, Tried] = {}
        self._octave = -1
        self._shortlist: list[Tried] = []
        self._of_octave: dict[str, Tried] = {}
        """All ways of the octave's sizes so far, by name."""

    @property
    def tuned(self) -> Mapping[int, Tried]:
        """The fastest candidates, by the numbers of rows that were tried."""
        return self._tuned

    def best(self, rows: int) -> Tried:
        """Return the fastest for so many rows, or for the nearest number that was tried; else the best guess.

        With what was tried nothing has to be asked for, or loaded, now.
        """
        if rows in self._tuned:
            return self._tuned[rows]
        other = nearest(self._tuned, rows)
        if other is not None and self._suits(self._tuned[other], rows):
            return self._tuned[other]
        every = self._every(rows)
        return next((one for one in every if self._trusts(one, rows)), every[0])

    def tune(
        self, rows: int, runs: Callable[[Tried], Callable[[int], None]], beside: Callable[[], None],
        worthy: Callable[[Sequence[Tried]], Sequence[Tried]] = lambda kernels: kernels,
    ) -> bool:  # fmt: skip
        """Time the kernels for so many rows, by `runs(kernel)(turn)`; returns False if that is done.

        worthy  those that may be chosen, one at least

        One that was the fastest at an earlier start is not timed, but run once.
        """
        rows = padded_rows(rows)
        if rows in self._tuned:
            return False
        octave = (rows - 1).bit_length()
        if is_first := octave != self._octave:
            self._octave, self._shortlist, self._of_octave = octave, [], {}
        every: Sequence[Tried] = () if self._naming is None else self._every(rows)
        if (known := self._remembered(rows, every)) is not None:
            # At the first size all are looked at, as where they are timed: whom `trusts` trusts, and so how
            # sizes that nothing is timed for are computed, may not hang on what is kept.
            looked_at = every if is_first else [known]
            if any(one is known for one in worthy(looked_at)):
                runs(known)(0)  # what is made or loaded at a first call is now
                self._tuned[rows] = known
                return True
        few = [kernel for kernel in self._shortlist if self._suits(kernel, rows)]
        kernels = worthy(few or every or self._every(rows))
        order = self._clock.ranked([runs(kernel) for kernel in kernels], beside, loaded=rows > MANY_ROWS)
        ranked = [kernels[index] for index in order]
        if not few:
            self._shortlist = ranked[:_SHORTLIST]
        self._tuned[rows] = ranked[0]
        if (naming := self._naming) is not None and self._clock.steady:
            name = naming.name(ranked[0])
            self._clock.remembered.note(naming.what, rows, map(naming.kernel, every), name)
        return True

    def _remembered(self, rows: int, every: Sequence[Tried]) -> Tried | None:
        """The way that was the fastest for so many rows, if it is known and still there.

        It may be one of those of another size of the octave, from whose shortlist it came.
        """
        if (naming := self._naming) is None:
            return None
        own = {naming.name(one): one for one in every}
        self._of_octave |= own
        name = self._clock.remembered.find(naming.what, rows, map(naming.kernel, every))
        if name is None or name in own:
            return None if name is None else own[name]
        other = self._of_octave.get(name)
        return other if other is not None and self._suits(other, rows) else None
