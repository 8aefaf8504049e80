"""What launchers of chunked recurrences share: how a head's columns are shared out among blocks."""

from dataclasses import dataclass

from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.states.operands import Pieces

__all__ = ["Chunked", "DeltaChunks", "controls_of"]

_TOKENS = 64  # of a chunk (`STATE_CHUNK`)
_TIMES = 4 * 4 * _TOKENS  # bytes of what a chunk's tokens keep, ...
_TRIANGLE = 2 * 2 * 10 * 16 * 16  # ... of a triangle of 64 x 64, ...
_DIAGONAL = 4 * 4 * 16 * 17  # ... and of blocks that are inverted: see chunk.cuh, delta_chunked.cu
_RECORD = 2 * _TRIANGLE + _TIMES
_NARROW = 32  # columns
_MOST_PIECES = 64  # whose chunks have records at the same time
_HOPPER_SHARED = 227 << 10


@dataclass(frozen=True, slots=True)
class _Width:
    """A kernel whose blocks have so many columns of a head."""

    name: str
    columns: int
    threads: int


class _Widths:
    """A file's kernels by the columns that a block has: all of a head, or few, where blocks would be few.

    Columns know nothing of each other, so that bits do not depend on it.
    """

    def __init__(
        self, device: Device, kernels: KernelPairs, arguments: str, widths: list[_Width], shared: int
    ) -> None:
        self._multiprocessors = device.multiprocessors
        self._shared = shared
        self._kernels = [
            (width, kernels.function(width.name, arguments, shared=shared).many) for width in widths
        ]

    def __call__(self, columns: int, pieces: int, *arguments: int) -> None:
        """Queue it for so many columns of all heads together, and so many pieces."""
        width, kernel = self._chosen(columns, pieces)
        grid = columns // width.columns, pieces
        kernel(grid, (width.threads, 1, 1), *arguments, shared=self._shared)

    def _chosen(self, columns: int, pieces: int) -> tuple[_Width, Function]:
        """The widest with which there is a block for each multiprocessor."""
        for width, kernel in self._kernels:
            if columns // width.columns * pieces >= self._multiprocessors:
                return width, kernel
        return self._kernels[-1]


def _widths(name: str, columns: int, narrow_threads: int) -> list[_Width]:
    """Those of heads of so many columns, the widest first."""
    widths = [_Width(f"{name}_wide", columns, 32 * max(columns // 16, 4))]
    if columns % _NARROW == 0 and columns > _NARROW:
        widths.append(_Width(f"{name}_narrow", _NARROW, narrow_threads))
    return widths


class Chunked:
    """Launches kernels that take prompts through a recurrence whose chunks need no more than one pass."""

    def __init__(
        self, device: Device, source: Source, name: str, arguments: str, *, keys: int, values: int, heads: int
    ) -> None:
        shared = _operands(keys) + _TRIANGLE + _TIMES
        widths = _widths(name, values, 256)
        self._columns = heads * values
        self._kernels = _Widths(device, KernelPairs(device, source), arguments, widths, shared)

    def __call__(self, pieces: int, *arguments: int) -> None:
        """Queue it for so many pieces."""
        self._kernels(self._columns, pieces, *arguments)


class DeltaChunks:
    """Launches `delta_chunked.cu`: what hangs on no state for all chunks at once, then chunk by chunk.

    records  the address of `bytes`
    """

    def __init__(
        self, device: Device, source: Source, *, keys: int, values: int, key_heads: int, heads: int,
        records: int,
    ) -> None:  # fmt: skip
        kernels = KernelPairs(device, source)
        self._prepared = _operands(keys) + _RECORD + _DIAGONAL
        self._prepare = kernels.function("delta_prepare", "PPiPiPPPPPPPiii", shared=self._prepared).many
        stage = _operands(keys) + _RECORD
        self._stages = 2 if device.hopper and 2 * stage <= _HOPPER_SHARED else 1
        self._scan = _Widths(
            device, kernels, "PPPPPPPiii", _widths("delta_scan", values, 128), self._stages * stage
        )
        self._heads, self._key_heads, self._columns = heads, key_heads, heads * values
        self._records = records

    @staticmethod
    def bytes(rows: int, heads: int) -> int:
        """Memory for records of so many rows."""
        return (rows // _TOKENS + _MOST_PIECES) * heads * _RECORD

    def __call__(
        self, work: int, steering: tuple[int, ...], weights: tuple[int, int], matrix: int, prompts: Pieces
    ) -> None:
        """Queue it for what the convolution left in `work`, where results take the place of values.

        steering  addresses of elements and floats of controls, with their strides
        weights   addresses of biases of time steps, and of decays
        """
        heads, key_heads = self._heads, self._key_heads
        for first in range(0, prompts.count, _MOST_PIECES):
            some = prompts.part(first, min(_MOST_PIECES, prompts.count - first))
            self._prepare(
                (prompts.rows // _TOKENS + some.count, key_heads), (256, 1, 1), work, *steering, *weights,
                self._records, *some.addresses, some.count, heads, key_heads, shared=self._prepared,
            )  # fmt: skip
            self._scan(
                self._columns, some.count, work, self._records, matrix, *some.addresses, heads, key_heads,
                self._stages,
            )  # fmt: skip


def _operands(keys: int) -> int:
    """Bytes of keys and queries of a chunk, each in two parts of two bytes."""
    return 2 * 2 * 2 * _TOKENS * (keys + 8)


def controls_of(controls: Buffer) -> tuple[int, int]:
    """Address and stride of a row's floats that steer heads; 0 where there are none."""
    return controls.address, controls.shape[1] if controls.address else 0
