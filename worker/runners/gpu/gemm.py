"""Products with weights: which of cuBLASLt's algorithms and our kernels computes each shape.

y (rows, outputs) = x (rows, inputs) times weight (outputs, inputs) transposed; x and the weight are half, y
half or float, sums float, all row-major. Also with SwiGLU, and added to the residual stream.

The number of rows is rounded up to one of few sizes, so that a way is chosen a bounded number of times: x and
y must have room for `padded_rows(rows)` rows. What the rows in between hold does not matter, and what is
written to them means nothing.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from nightmill.worker.runners.gpu.device import CudaError, Device
from nightmill.worker.runners.gpu.functions import Function, Module
from nightmill.worker.runners.gpu.graphs import Graph
from nightmill.worker.runners.gpu.hopper import TILES, HopperProducts, Kind, Tile, first_sum, is_hopper
from nightmill.worker.runners.gpu.library import Algorithm, Library, Product, Way
from nightmill.worker.runners.gpu.sources import source_of
from nightmill.worker.runners.gpu.split import HopperSplit, SplitTile, split_tiles

__all__ = ["MANY_ROWS", "Gemm", "Shortlist", "nearest", "nothing", "padded_rows"]

log = logging.getLogger(__name__)

Tried = TypeVar("Tried")

MAX_GEMV_ROWS = 8
MANY_ROWS = 1024  # above, shapes are too many to try each: they take what was best at the nearest size tried
_TIMED_RUNS = 8
_FINALISTS, _RETRIALS = 4, 2
_CLOSE = 1.15  # times the least time: clocks do not change by more within milliseconds
_NEARBY = 1.25  # times the rows, or a part of them: up to MANY_ROWS, what is best further away is not so here
_SHORTLIST = 6  # ways that are tried at sizes near one where all were
# Rows of the weight a warp _ warps a row; the last needs too many registers beyond 4 rows of x.
_GEMV_VARIANTS = ("1_4", "1_1", "2_1", "4_1")
_FEW_ROWS = 4

Candidate = Algorithm | Tile | SplitTile | str
"""An algorithm of the library, a tile of one of the Hopper kernels, or a variant of `gemv.cu`.

For SWIGLU, an algorithm is followed by the kernel that does nothing else; for two sums, it is called twice.
"""


def padded_rows(rows: int) -> int:
    """The number of rows that is computed for `rows`: steps of 8, then 32, then 128."""
    step = 1 if rows <= 16 else 8 if rows <= 256 else 32 if rows <= MANY_ROWS else 128
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    outputs: int
    inputs: int
    kind: Kind

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.rows, self.outputs, self.inputs

    @property
    def product(self) -> Product:
        """What the library is asked for."""
        outputs = 2 * self.outputs if self.kind is Kind.SWIGLU else self.outputs
        return Product(
            self.rows, outputs, self.inputs, self.kind is Kind.FLOAT, added=self.kind is Kind.RESIDUAL
        )

    @property
    def sums(self) -> tuple[Product, ...]:
        """The same, where what is added to something may be two sums (`first_sum`)."""
        whole, first = self.product, first_sum(self.outputs, self.inputs)
        if not whole.added or first == self.inputs:
            return (whole,)
        parts = first, self.inputs - first
        return tuple(replace(whole, inputs=part, stride=self.inputs) for part in parts)


def nearest(tried: Iterable[int], rows: int) -> int | None:
    """Of the numbers of rows that were tried, the one to choose by for others; None if all are too far.

    More than MANY_ROWS have only each other.
    """
    many = rows > MANY_ROWS
    ratios = [(max(other, rows) / min(other, rows), other) for other in tried if (other > MANY_ROWS) == many]
    ratio, found = min(ratios, default=(0.0, None))
    return found if many or ratio <= _NEARBY else None


def nothing() -> None:
    """Stands beside a product that is timed alone."""


class Shortlist(Generic[Tried]):
    """What is worth trying: of all ways at the first of the sizes between two powers of two, the best few."""

    def __init__(self) -> None:
        self._octave = -1
        self._best: list[Tried] = []

    def of(self, rows: int) -> list[Tried]:
        """The best few ways, best first; none where all have to be tried."""
        return self._best if (rows - 1).bit_length() == self._octave else []

    def learn(self, rows: int, ranked: Sequence[Tried]) -> None:
        """Keep what came first when all were tried."""
        self._octave, self._best = (rows - 1).bit_length(), list(ranked[:_SHORTLIST])


@dataclass(slots=True)
class _Plan:
    """How one shape is computed."""

    candidate: Candidate
    way: Way
    tuned: bool = False


class Gemm:
    """Multiplies on the device's stream; can be captured in a graph.

    own_kernels   use our kernels where `tune` found them faster, or where nothing was tuned
    reproducible  a row's result must not depend on how many rows there are: only algorithms that sum in one
                  piece, without workspace, and our Hopper kernels, which gave the same bits for 1 to 4,096
                  rows of ten shapes (H200, CUDA 13.0). `gemv.cu` sums in another order. On Hopper, products
                  with many inputs and few outputs that are added to something have two sums (`first_sum`)

    Call `separate_swiglu` before `swiglu`.
    """

    def __init__(self, device: Device, *, own_kernels: bool = True, reproducible: bool = False) -> None:
        self._device = device
        self._plans: dict[_Shape, _Plan] = {}
        self._library = Library(device, reproducible=reproducible)
        self._sums = is_hopper(device)  # of our kernels there, which others must give the bits of
        hopper = own_kernels and is_hopper(device)
        self._hopper = HopperProducts(device) if hopper else None
        self._split = HopperSplit(device) if hopper else None
        self._module: Module | None = None
        self._functions: dict[str, Function] = {}
        self._shortlists: dict[tuple[int, int, Kind], Shortlist[Candidate]] = {}
        self._activate: Callable[[int, int, int, int], None] | None = None
        self._gate_up = 0
        if own_kernels and not reproducible:
            self._module = Module.of(device, source_of("gemv"))
        self._started, self._ended = device.event(timing=True), device.event(timing=True)

    def __call__(
        self, x: int, weight: int, y: int, rows: int, outputs: int, inputs: int, *, floats: bool = False
    ) -> None:
        """Queue y = x weight^T; the three are device addresses, aligned to 16 bytes."""
        if rows:
            shape = _Shape(padded_rows(rows), outputs, inputs, Kind.FLOAT if floats else Kind.HALF)
            (self._plans.get(shape) or self._plan(shape)).way(x, weight, y)

    def residual(self, x: int, weight: int, y: int, rows: int, outputs: int, inputs: int) -> None:
        """Queue y (rows, outputs) float += x weight^T."""
        if rows:
            shape = _Shape(padded_rows(rows), outputs, inputs, Kind.RESIDUAL)
            (self._plans.get(shape) or self._plan(shape)).way(x, weight, y)

    def swiglu(self, x: int, weight: int, y: int, rows: int, ffn_width: int, inputs: int) -> None:
        """Queue y (rows, ffn_width) half = silu(gate) * up; the weight's rows are gate's, then up's."""
        if rows:
            shape = _Shape(padded_rows(rows), ffn_width, inputs, Kind.SWIGLU)
            (self._plans.get(shape) or self._plan(shape)).way(x, weight, y)

    def separate_swiglu(self, activate: Callable[[int, int, int, int], None], gate_up: int) -> None:
        """Tell how SwiGLU is computed apart: `Kernels.swiglu`, and room for gate and up, half (rows, 2 F)."""
        self._activate, self._gate_up = activate, gate_up

    def tune(
        self, x: int, weights: Sequence[int], y: int, shape: tuple[int, int, int, Kind],
        beside: Callable[[], None] = nothing,
    ) -> None:  # fmt: skip
        """Time the candidates for (rows, outputs, inputs, kind) on these operands and keep the fastest.

        weights  several of that size, so that they come from memory as in a step, not from the cache
        beside   queues a kernel as it stands before and after the product in a step (`ranked`)

        Waits for the device. What is at `y` is overwritten. A shape is tuned once.
        """
        key = _Shape(padded_rows(shape[0]), *shape[1:])
        if (known := self._plans.get(key)) is not None and known.tuned:
            return

        def runs(candidate: Candidate) -> Callable[[int], None]:
            way = self._bind(candidate, key)
            return lambda turn: way(x, weights[turn % len(weights)], y)

        shortlist = self._shortlists.setdefault(shape[1:], Shortlist())
        candidates = [candidate for candidate in shortlist.of(key.rows) if self._suits(candidate, key)]
        every = not candidates
        if every:
            candidates = self._candidates(key)
        ranked = self.ranked([runs(candidate) for candidate in candidates], beside)
        best = candidates[ranked[0]]
        if every:
            shortlist.learn(key.rows, [candidates[index] for index in ranked])
        self._plans[key] = _Plan(best, self._bind(best, key), tuned=True)

    def ranked(
        self, ways: Sequence[Callable[[int], None]], beside: Callable[[], None] = nothing
    ) -> list[int]:
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
        self._library.occupy()
        self._started.record(self._device.stream)
        graph.launch()
        self._ended.record(self._device.stream)
        self._device.wait(self._ended, "a product being timed")
        return float(self._started.time_till(self._ended)) * 1e-3 / _TIMED_RUNS

    def close(self) -> None:
        """Let go of cuBLASLt; the memory goes with the device."""
        self._library.close()

    def _plan(self, shape: _Shape) -> _Plan:
        candidate = self._tried_nearby(shape)
        if candidate is None:
            candidate = self._candidates(shape)[0]
        plan = self._plans[shape] = _Plan(candidate, self._bind(candidate, shape))
        return plan

    def _tried_nearby(self, shape: _Shape) -> Candidate | None:
        """What was fastest at the nearest number of rows: nothing has to be asked for, or loaded, now."""
        tried = {
            other.rows: plan.candidate
            for other, plan in self._plans.items()
            if plan.tuned and other.sizes[1:] == shape.sizes[1:] and other.kind is shape.kind
        }
        rows = nearest(tried, shape.rows)
        return tried[rows] if rows and self._suits(tried[rows], shape) else None

    def _suits(self, candidate: Candidate, shape: _Shape) -> bool:
        """Whether what was found for more rows or fewer can compute this shape."""
        return isinstance(candidate, Tile | SplitTile | str) or all(
            self._library.suits(candidate, product) for product in self._products(shape)
        )

    def _products(self, shape: _Shape) -> tuple[Product, ...]:
        """What the library is asked for, one after the other."""
        return shape.sums if self._sums else (shape.product,)

    def _candidates(self, shape: _Shape) -> list[Candidate]:
        """Everything that can compute this shape, the best guess first."""
        found: list[Candidate] = []
        aligned = shape.inputs % 8 == 0 and shape.outputs % 8 == 0
        if self._hopper is not None and aligned:
            found += TILES.get(shape.kind, ())
            if shape.kind is Kind.RESIDUAL:
                found += split_tiles(*shape.sizes)
        if shape.kind is not Kind.SWIGLU or self._activate is not None:
            products = self._products(shape)
            library = [
                algorithm
                for algorithm in self._library.algorithms(products[0])
                if all(self._library.suits(algorithm, product) for product in products[1:])
            ]
            found = [*found, *library] if shape.kind is Kind.SWIGLU else [*library, *found]
        gemv = shape.kind in (Kind.HALF, Kind.FLOAT) and shape.rows <= MAX_GEMV_ROWS
        if self._module is not None and gemv and shape.inputs % 8 == 0:
            variants = _GEMV_VARIANTS[: None if shape.rows <= _FEW_ROWS else -1]
            found = [*(variants if shape.outputs < 8192 else variants[::-1]), *found]
        if not found:
            raise CudaError(f"no kernel computes the product {shape}: sizes are multiples of 8")
        return found

    def _bind(self, candidate: Candidate, shape: _Shape) -> Way:
        """How the candidate computes this shape."""
        kind, sizes = shape.kind, shape.sizes
        if isinstance(candidate, Tile):
            assert self._hopper is not None
            run = self._hopper.run
            return lambda x, weight, y: run(kind, candidate, x, weight, y, *sizes)
        if isinstance(candidate, SplitTile):
            assert self._split is not None
            split = self._split.run
            return lambda x, weight, y: split(candidate, x, weight, y, *sizes)
        if isinstance(candidate, str):
            return self._gemv(candidate, shape)
        products = self._products(shape)
        way = self._library.way(candidate, products[0])
        if len(products) > 1:
            second, skipped = self._library.way(candidate, products[1]), 2 * products[0].inputs

            def two_sums(x: int, weight: int, y: int) -> None:
                way(x, weight, y)
                second(x + skipped, weight + skipped, y)

            return two_sums
        if kind is not Kind.SWIGLU:
            return way
        activate, gate_up = self._activate, self._gate_up
        assert activate is not None

        def two_kernels(x: int, weight: int, y: int) -> None:
            way(x, weight, gate_up)
            activate(gate_up, y, shape.rows, shape.outputs)

        return two_kernels

    def _gemv(self, variant: str, shape: _Shape) -> Way:
        assert self._module is not None
        per_warp, warps = map(int, variant.split("_"))
        name = f"gemv_{shape.rows}_{variant}_{'f32' if shape.kind is Kind.FLOAT else 'f16'}"
        if name not in self._functions:
            self._functions[name] = self._module.function(name, "PPPii")
        function, grid = self._functions[name], (-(-shape.outputs // (per_warp * 8 // warps)), 1)
        return lambda x, weight, y: function(grid, (256, 1, 1), x, weight, y, shape.outputs, shape.inputs)
