"""Kernels that give other bits than they should are left out before any is chosen by its time.

Which algorithm of a library is fastest is decided at each start by noise. All that may be chosen have to give
the same bits, or a text would depend on the start and on the number of rows. So each candidate is run on the
same numbers as a reference, a tile whose order of sums is known, and digests of the results are compared.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import ELEMENT, FLOAT, FP8, Buffer, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.shapes import Candidate, Kind, Shape

__all__ = ["Agreement"]

log = logging.getLogger(__name__)

_THREADS = 256
_BLOCKS = 8  # a multiprocessor
_BEFORE = 0x3F  # each byte of what is there before a product: floats of 0.747, which some kinds add to


class Agreement:
    """Holds candidates against a reference.

    reference  the kernel whose bits a shape should have; None where there is none, and all are taken
    """

    def __init__(self, device: Device, reference: Callable[[Shape], Candidate | None]) -> None:
        self._device = device
        self._reference = reference
        self._sum = device.allocate(8, "a digest")
        module = Module.of(device, source_of("digest"))
        self._fill = module.function("random_rows", "Pq")
        self._digest = module.function("digest", "PqiP")
        self._blocks = _BLOCKS * device.multiprocessors
        self._agree: set[tuple[object, ...]] = set()
        self.left_out: dict[str, set[str]] = {}
        """Names of candidates that gave other bits, by product; for a person."""

    @staticmethod
    def sources() -> list[Source]:
        """List the kernel files."""
        return [source_of("digest")]

    def trusts(self, candidate: Candidate, shape: Shape) -> bool:
        """Return whether it is a kernel of ours, or one that has agreed for some number of rows."""
        return not candidate.algorithm or _key(candidate, shape) in self._agree

    def agreeing(
        self, candidates: Sequence[Candidate], shape: Shape, x: Buffer, weight: Matrix, y: Buffer
    ) -> list[Candidate]:
        """Return those candidates that give the reference's bits; the reference, if none does.

        Waits for the device. What is at `x` and `y` is overwritten.
        """
        reference = self._reference(shape)
        if reference is None or x.dtype == FP8:
            return list(candidates)
        self._fill((self._blocks, 1), (_THREADS, 1, 1), x.address, shape.rows * shape.inputs)
        expected = self._run(reference, shape, x, weight, y)
        found = []
        for one in candidates:
            if self._run(one, shape, x, weight, y) == expected:
                found.append(one)
                self._agree.add(_key(one, shape))
                continue
            self.left_out.setdefault(shape.title, set()).add(one.name)
            log.info(
                "%s with %d rows: %s gives other bits and is left out", shape.title, shape.rows, one.name
            )
        return found or [reference]

    def _run(self, one: Candidate, shape: Shape, x: Buffer, weight: Matrix, y: Buffer) -> int:
        """A digest of what a candidate makes of x; waits."""
        floats = y.dtype == FLOAT
        size = shape.rows * shape.outputs * (FLOAT if floats else ELEMENT).itemsize
        self._device.fill(y.address, _BEFORE, size)
        self._device.fill(self._sum, 0, 8)
        one.kernel(shape)(x, weight, y)
        self._digest((self._blocks, 1), (_THREADS, 1, 1), y.address, size // 4, int(not floats), self._sum)
        return int(self._device.download(self._sum, (1,), np.uint64)[0])


def _key(candidate: Candidate, shape: Shape) -> tuple[object, ...]:
    """All that the order of a library's sums hangs on, but for the number of rows."""
    kind: Kind = shape.kind
    return kind, shape.outputs, shape.inputs, shape.format, candidate.algorithm
