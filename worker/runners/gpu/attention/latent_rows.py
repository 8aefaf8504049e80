"""Rows of latent attention before and after it: norms, rotation, pages, and products of heads."""

from dataclasses import dataclass

import numpy as np

from nightmill.worker.model.rope import RopeStyle
from nightmill.worker.model.spec import LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.device.arena import aligned
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, ELEMENT, FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.step_inputs import StepInputs
from nightmill.worker.runners.gpu.weights.layout import HeadMatrices, LatentWeights

__all__ = ["Angles", "HeadProducts", "LatentRoom", "LatentRows", "row_sources"]

_BLOCK = (128, 1, 1)
_TILES = {8: 64, 64: 64, 128: 128}  # outputs of a block, by its tokens ...
_MOST = ((8, 8), (256, 64))  # ... which are so many up to that many rows, and above 128
_PITCH = 144  # bytes of 64 elements in shared memory


@dataclass(frozen=True, slots=True)
class LatentRoom:
    """Buffers of elements of latent attention, one layer after the other.

    queries   (T, H (key + rotated)) as their product gives them
    kept      (T, latent + rotated) the same of keys and values; done with when they are in the pages
    down      (T, query latent) what queries are made of, or ABSENT; done with when they are
    absorbed  (T, H (latent + rotated)) queries as attention reads them
    mixed     (T, H latent) what it gives
    """

    queries: Buffer
    kept: Buffer
    down: Buffer
    absorbed: Buffer
    mixed: Buffer

    @classmethod
    def of(cls, attention: LatentAttention, queries: int, work: int, rows: int) -> "LatentRoom":
        """Lay out buffers for steps of up to so many rows: queries at one address, others in `workspace`."""

        def buffer(address: int, width: int) -> Buffer:
            return Buffer(address, (rows, width), ELEMENT)

        first, heads, down = _first_bytes(attention, rows), attention.heads, attention.query_latent
        behind = work + first + aligned(rows * attention.kept * ELEMENT.itemsize)
        return cls(
            queries=buffer(queries, heads * attention.head_dim),
            kept=buffer(work + first, attention.kept),
            down=ABSENT if down is None else buffer(behind, down),
            absorbed=buffer(work, heads * attention.kept),
            mixed=buffer(work + first, heads * attention.latent),
        )

    @staticmethod
    def workspace(spec: ModelSpec, rows: int) -> int:
        """Bytes of device memory for all but the queries."""
        return max((_first_bytes(one, rows) + _second_bytes(one, rows) for one in spec.latents), default=0)


class LatentRows:
    """Launches `latent_rows.cu`; owns the table of angles.

    max_context  tokens that a sequence may have: rows of the table
    """

    def __init__(self, device: Device, attention: LatentAttention, *, max_context: int) -> None:
        self._attention = attention
        self._sizes = attention.latent, attention.rope.dim
        self._neighbours = int(attention.rope.style is RopeStyle.PAIRS)
        kernels = KernelPairs(device, source_of("latent_rows"))
        self._keep = kernels.function("latent_keep", "PPPPfPPPiPiiii")
        angles = np.arange(max_context)[:, None] * attention.rope.frequencies().astype(np.float64)
        table = np.stack([np.cos(angles), np.sin(angles)], axis=-1) * attention.rope.magnitude
        self._table = device.upload(table.astype(np.float32), "the rotation table")
        self._table_rows = max_context

    @staticmethod
    def workspace(attention: LatentAttention, *, max_context: int) -> int:
        """Bytes of the table."""
        return max_context * attention.rope.dim * FLOAT.itemsize

    def keep(
        self, room: LatentRoom, weights: LatentWeights, inputs: StepInputs, cache: LayerCache, rows: int
    ) -> None:
        """Queue norm and rotation of what is kept, to its pages, and the norm of what queries are made of."""
        down, (latent, rotated) = room.down, self._sizes
        width = down.shape[1] if down is not ABSENT else 0
        self._keep.of(rows)(
            (rows, 2 if width else 1), _BLOCK, room.kept.address, weights.kv_norm.address, down.address,
            weights.q_norm.address, self._attention.norm.eps, inputs.positions, inputs.cache_rows,
            self._table, self._table_rows, cache.keys.address, latent, rotated, width, self._neighbours,
        )  # fmt: skip

    def angles(self, positions: int) -> "Angles":
        """Return the angles by which the rotated parts of queries at these positions are turned."""
        return Angles(positions, self._table, self._table_rows, self._sizes[1], self._neighbours)


@dataclass(frozen=True, slots=True)
class Angles:
    """Arguments of `latent_product.cu` for the rotated parts of rows."""

    positions: int
    table: int
    table_rows: int
    rotated: int
    neighbours: int


_NOTHING_ROTATED = Angles(0, 0, 0, 0, 0)


class HeadProducts:
    """Launches `latent_product.cu`: a product of each head with a matrix of its own.

    rows  that know how the rest of queries is rotated
    """

    def __init__(self, device: Device, heads: int, rows: LatentRows | None = None) -> None:
        self._heads, self._rows = heads, rows
        kernels = KernelPairs(device, source_of("latent_product"))
        self._kernels = {
            (turned, tokens): kernels.function(
                f"latent_product_{'turned_' if turned else ''}{tokens}",
                "PqPiPiiiiiPPiii",
                shared=_shared(tokens),
            )
            for turned in (False, True)
            for tokens in _TILES
        }

    def of_queries(self, x: Buffer, weights: HeadMatrices, y: Buffer, inputs: StepInputs, rows: int) -> None:
        """Queue it for queries, with the rotation of their rest."""
        assert self._rows is not None
        self(x, weights, y, rows, self._rows.angles(inputs.positions))

    def __call__(
        self, x: Buffer, weights: HeadMatrices, y: Buffer, rows: int, angles: Angles = _NOTHING_ROTATED
    ) -> None:
        """Queue it for the first elements of each head of x (rows, H n), to those of y (rows, H m).

        angles  by which what lies behind them is rotated, and put behind those of y
        """
        heads = self._heads
        tokens = next((tokens for most, tokens in _MOST if rows <= most), 128)
        outputs = _TILES[tokens]
        self._kernels[weights.turned, tokens].of(rows)(
            (heads * -(-weights.outputs // outputs), -(-rows // tokens)), (2 * outputs, 1, 1),
            weights.address, weights.stride, x.address, x.shape[1] // heads, y.address, y.shape[1] // heads,
            rows, heads, weights.outputs, weights.inputs, angles.positions, angles.table, angles.table_rows,
            angles.rotated, angles.neighbours, shared=_shared(tokens),
        )  # fmt: skip


def row_sources() -> list[Source]:
    """List the kernel files."""
    return [source_of("latent_rows"), source_of("latent_product")]


def _first_bytes(attention: LatentAttention, rows: int) -> int:
    return aligned(rows * attention.heads * attention.kept * ELEMENT.itemsize)


def _second_bytes(attention: LatentAttention, rows: int) -> int:
    """Return the bytes of kept rows and of what queries are made of; mixed rows take their place later."""
    before = sum(
        aligned(rows * width * ELEMENT.itemsize) for width in (attention.kept, attention.query_latent or 0)
    )
    return max(before, aligned(rows * attention.heads * attention.latent * ELEMENT.itemsize))


def _shared(tokens: int) -> int:
    """Bytes of shared memory of a block with so many tokens."""
    return 2 * (_TILES[tokens] + tokens) * _PITCH
