"""Times several ways to compute the same, as they run in a step; keeps which is best for how many rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.graphs import Graph
from nightmill.worker.runners.gpu.products.shapes import MANY_ROWS, padded_rows

__all__ = ["Choices", "Clock", "nearest"]

Tried = TypeVar("Tried")

_TIMED_RUNS = 8
_FINALISTS, _RETRIALS = 4, 2
_CLOSE = 1.15  # times the least time: clocks do not change by more within milliseconds
_NEARBY = 1.25  # times the rows, or a part of them: up to MANY_ROWS, what is best further away is not so here
_SHORTLIST = 6  # ways that are tried at sizes near one where all were
_OCCUPYING_FILLS = 12  # of 32 MiB, 10 us each on an H200


class Clock:
    """Times launches.

    scratch, size  address and bytes of memory that may be overwritten at any time, 32 MiB or so
    """

    def __init__(self, device: Device, scratch: int, size: int) -> None:
        self._device = device
        self._scratch, self._size = scratch, size
        self._started, self._ended = device.event(timing=True), device.event(timing=True)

    def ranked(self, ways: Sequence[Callable[[int], None]], beside: Callable[[], None]) -> list[int]:
        """Which of these take the least time, called with the numbers 0, 1, 2 ..., best first; waits.

        They are timed as they run in a step: in a graph, so that no pause of the host counts, and with
        `beside` between the calls, since kernels of ours overlap with what is before and after them, the
        library's do not. The best few, where they are close, are measured again, and each one's least time
        counts: clocks change.
        """
        graphs: list[Graph] = []
        try:
            graphs.extend(self._repeated(way, beside) for way in ways)
            times = [self._seconds(graph) for graph in graphs]
            for _ in range(_RETRIALS):
                best = np.argsort(times)[:_FINALISTS]
                close = [index for index in best if times[index] <= _CLOSE * times[best[0]]]
                for index in close if len(close) > 1 else ():
                    times[index] = min(times[index], self._seconds(graphs[index]))
        finally:
            for graph in graphs:
                graph.close()
        return [int(index) for index in np.argsort(times)]

    def _repeated(self, run: Callable[[int], None], beside: Callable[[], None]) -> Graph:
        """A graph of _TIMED_RUNS calls."""
        run(0)  # what is made or loaded at a first call is no part of it

        def record() -> None:
            for turn in range(_TIMED_RUNS):
                beside()
                run(turn)
            beside()

        return Graph(self._device, record)

    def _seconds(self, graph: Graph) -> float:
        """What one call in the graph takes."""
        for _ in range(_OCCUPYING_FILLS):  # something to do while the host queues the graph and the events
            self._device.fill(self._scratch, 0, self._size)
        self._started.record(self._device.stream)
        graph.launch()
        self._ended.record(self._device.stream)
        self._device.wait(self._ended, "a product being timed")
        return float(self._started.time_till(self._ended)) * 1e-3 / _TIMED_RUNS


def nearest(tried: Iterable[int], rows: int) -> int | None:
    """Of the numbers of rows that were tried, the one to choose by for others; None if all are too far.

    More than MANY_ROWS have only each other.
    """
    many = rows > MANY_ROWS
    ratios = [(max(other, rows) / min(other, rows), other) for other in tried if (other > MANY_ROWS) == many]
    ratio, found = min(ratios, default=(0.0, None))
    return found if many or ratio <= _NEARBY else None


class Choices(Generic[Tried]):
    """Which way is taken for each number of rows, padded.

    every  all ways that there are for so many rows, the best guess first
    suits  whether what was found for other rows can compute so many

    Of all ways at the first size between two powers of two, the best few are tried at the other sizes there.
    """

    def __init__(
        self, clock: Clock, every: Callable[[int], Sequence[Tried]],
        suits: Callable[[Tried, int], bool] = lambda way, rows: True,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._every = every
        self._suits = suits
        self._tuned: dict[int, Tried] = {}
        self._octave = -1
        self._shortlist: list[Tried] = []

    @property
    def tuned(self) -> Mapping[int, Tried]:
        """What was fastest, by the numbers of rows that were tried."""
        return self._tuned

    def best(self, rows: int) -> Tried:
        """What was fastest, for so many rows or for the nearest number that was tried; else the best guess.

        With what was tried nothing has to be asked for, or loaded, now.
        """
        if rows in self._tuned:
            return self._tuned[rows]
        other = nearest(self._tuned, rows)
        if other is not None and self._suits(self._tuned[other], rows):
            return self._tuned[other]
        return self._every(rows)[0]

    def tune(
        self, rows: int, runs: Callable[[Tried], Callable[[int], None]], beside: Callable[[], None]
    ) -> bool:
        """Time the ways for so many rows, run by `runs(way)(turn)`, and keep the fastest; False: known."""
        rows = padded_rows(rows)
        if rows in self._tuned:
            return False
        octave = (rows - 1).bit_length()
        few = [way for way in self._shortlist if octave == self._octave and self._suits(way, rows)]
        ways = few or self._every(rows)
        ranked = [ways[index] for index in self._clock.ranked([runs(way) for way in ways], beside)]
        if not few:
            self._octave, self._shortlist = octave, ranked[:_SHORTLIST]
        self._tuned[rows] = ranked[0]
        return True
