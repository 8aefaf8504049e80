"""Products by `hopper_gemm.cu` and `hopper_qkv.cu`: tile shapes and launches; tensor maps, also of others."""

import ctypes
import math
from dataclasses import dataclass
from enum import Enum

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device import CudaError, Device
from nightmill.worker.runners.gpu.functions import Function, Module, bindings, error_text
from nightmill.worker.runners.gpu.sources import TENSOR_CORE_HEADS, Source, instances, source_of

__all__ = [
    "QKV_TILES", "TILES", "HopperProducts", "HopperQkv", "Kind", "TensorMaps", "Tile", "first_sum",
    "gemm_sources", "is_hopper", "qkv_source",
]  # fmt: skip

_DEPTH = 64  # elements of K in a stage
_SHARED_ALIGNMENT = 1024
_PIECE_ROWS, _PIECE_BYTES = 64, 128
_NO_MAP = bytes(128)
_LONG, _MANY_OUTPUTS = 4096, 2048  # inputs from which sums are taken in two halves, and outputs up to which


class Kind(Enum):
    """What becomes of a product."""

    HALF = "product"
    FLOAT = "float"  # not among these kernels
    SWIGLU = "swiglu"  # the weight is gate rows, then up rows; the result their SwiGLU, half
    RESIDUAL = "residual"  # added to what is there, float


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of 64 `groups` rows by `columns` rows of the weight, `stages` copies ahead.

    The blocks of a `cluster` share weights. `buffers`: pieces of 64 rows by 128 bytes that 64 rows have in
    shared memory for results, which bulk copies take to memory; 0: results go there from registers.
    """

    groups: int
    columns: int
    stages: int
    cluster: int = 1
    buffers: int = 0

    @property
    def arguments(self) -> tuple[int, ...]:
        """Of the kernel template, and in the names of kernels."""
        return self.groups, self.columns, self.stages, self.cluster, self.buffers

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        stage = (64 * self.groups + self.columns) * _DEPTH * 2
        pieces = self.groups * self.buffers
        return self.stages * stage + pieces * _PIECE_ROWS * _PIECE_BYTES + _SHARED_ALIGNMENT

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32


# The best for many rows first.
TILES = {
    Kind.HALF: (Tile(1, 64, 12), Tile(1, 32, 14), Tile(1, 32, 8)),
    Kind.SWIGLU: (
        Tile(2, 256, 4, 2, 2),
        Tile(2, 256, 4, 1, 2),
        Tile(2, 224, 5),
        Tile(2, 160, 5, 2),
        Tile(2, 160, 5),
        Tile(1, 160, 7, 2),
        Tile(1, 160, 7),
        Tile(1, 128, 8),
        Tile(1, 128, 4),
        Tile(1, 64, 13),
        Tile(1, 64, 6),
    ),
    Kind.RESIDUAL: (
        Tile(2, 256, 4, 2, 2),
        Tile(2, 128, 5, 1, 4),
        Tile(2, 64, 8),
        Tile(1, 64, 12),
        Tile(1, 64, 6),
        Tile(1, 32, 8),
    ),
}
QKV_TILES = (
    Tile(2, 192, 4, 2, 3),
    Tile(2, 192, 4, 1, 3),
    Tile(2, 256, 4, 2, 2),
    Tile(2, 128, 5, 2, 2),
    Tile(2, 128, 5, 1, 2),
    Tile(2, 128, 6),
    Tile(1, 128, 8),
    Tile(1, 64, 12),
    Tile(1, 64, 6),
)


def is_hopper(device: Device) -> bool:
    """Whether these kernels run on the device; others have no wgmma."""
    return device.compute_capability == (9, 0)


def gemm_sources() -> list[Source]:
    """`hopper_gemm.cu` for each kind of TILES, so that they can be compiled at once."""
    file, options = source_of("hopper_gemm")
    return [
        (
            file,
            (
                *options,
                instances("GEMM_KERNEL", ((kind.value, kind.name, *tile.arguments) for tile in tiles)),
            ),
        )
        for kind, tiles in TILES.items()
    ]


def _qkv_tiles(spec: ModelSpec) -> tuple[Tile, ...]:
    """Those of QKV_TILES that have whole heads."""
    return tuple(tile for tile in QKV_TILES if tile.columns % spec.layers[0].attention.head_dim == 0)


def qkv_source(spec: ModelSpec) -> Source:
    """`hopper_qkv.cu` for a model."""
    file, options = source_of("hopper_qkv", spec)
    return file, (*options, instances("QKV_KERNEL", (tile.arguments for tile in _qkv_tiles(spec))))


def first_sum(outputs: int, inputs: int) -> int:
    """How many of the inputs the first sum of a product that is added to something goes through.

    All, unless they are many and outputs few: then there is a second sum, which is added after the first. Few
    rows, whose time is that of one product after the other, take half of it, and twice as many blocks share
    the work. With more outputs there are blocks enough, and a second addition only costs.
    """
    if inputs < _LONG or outputs >= _MANY_OUTPUTS:
        return inputs
    return -(-inputs // (2 * _DEPTH)) * _DEPTH


class HopperProducts:
    """y = x weight^T with the same sums in all tiles, so that they give the same bits; on Hopper only."""

    def __init__(self, device: Device) -> None:
        self._maps = TensorMaps(device)
        self._functions: dict[tuple[Kind, Tile], Function] = {}
        self._blocks: dict[tuple[Kind, Tile], int] = {}
        for (kind, tiles), source in zip(TILES.items(), gemm_sources(), strict=True):
            module = Module.of(device, source)
            for tile in tiles:
                name = f"{kind.value}_{_name(tile)}"
                function = module.function(name, "128s128s128sPiiii", shared=tile.shared, dependent=True)
                self._functions[kind, tile] = function
                self._blocks[kind, tile] = _blocks_at_once(device, function, tile)

    def run(
        self, kind: Kind, tile: Tile, x: int, weight: int, y: int, rows: int, outputs: int, inputs: int
    ) -> None:
        """Queue a product; for SWIGLU, `outputs` is the FFN width: half the rows of the weight."""
        fused = kind is Kind.SWIGLU
        results = tile.columns // 2 if fused else tile.columns
        x_map = self._maps(x, rows, inputs, 64 * tile.groups)
        weight_map = self._maps(weight, 2 * outputs if fused else outputs, inputs, tile.columns // 2)
        y_map = (
            self._maps.of_results(y, rows, outputs, floats=kind is Kind.RESIDUAL) if tile.buffers else _NO_MAP
        )
        self._functions[kind, tile](
            _grid(tile, rows, -(-outputs // results), self._blocks[kind, tile]), (tile.threads, 1, 1),
            x_map, weight_map, y_map, y, rows, outputs, inputs, first_sum(outputs, inputs),
            shared=tile.shared,
        )  # fmt: skip


class HopperQkv:
    """Queries, keys and values in one launch: product, bias, rotation, cache write. Check `suits` first."""

    def __init__(self, device: Device, spec: ModelSpec, rope_table: int, max_context: int) -> None:
        module = Module.of(device, qkv_source(spec))
        self._width, self._attention = spec.width, spec.layers[0].attention
        self._rope = (rope_table, max_context)
        self._maps = TensorMaps(device)
        self._functions: dict[Tile, Function] = {}
        self._blocks: dict[Tile, int] = {}
        for tile in _qkv_tiles(spec):
            arguments = "128s128s128sPPPPiPPPiiii"
            function = module.function(f"qkv_{_name(tile)}", arguments, shared=tile.shared, dependent=True)
            self._functions[tile] = function
            self._blocks[tile] = _blocks_at_once(device, function, tile)

    @staticmethod
    def suits(spec: ModelSpec) -> bool:
        """Whether the kernels take a model: heads of 64 or 128, no QK norm."""
        attention = spec.layers[0].attention
        return attention.head_dim in TENSOR_CORE_HEADS and attention.qk_norm is None

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Those that have whole heads."""
        return tuple(self._functions)

    def run(
        self, tile: Tile, x: int, weight: int, bias: int, positions: int, cache_rows: int, qkv: int,
        keys: int, values: int, rows: int, room: int,
    ) -> None:  # fmt: skip
        """Queue it for x (rows, width) half: queries to qkv, keys and values to the pages.

        bias  0 where there is none
        room  rows of x that may be read, of few different numbers
        """
        attention, width, outputs = self._attention, self._width, self._attention.qkv
        x_map = self._maps(x, room, width, 64 * tile.groups)
        weight_map = self._maps(weight, outputs, width, tile.columns // 2)
        qkv_map = self._maps.of_results(qkv, rows, outputs) if tile.buffers else _NO_MAP
        self._functions[tile](
            _grid(tile, rows, -(-outputs // tile.columns), self._blocks[tile]), (tile.threads, 1, 1),
            x_map, weight_map, qkv_map, bias, positions, cache_rows, *self._rope, qkv, keys, values, rows,
            attention.heads, attention.kv_heads, width, shared=tile.shared,
        )  # fmt: skip


def _name(tile: Tile) -> str:
    return "_".join(map(str, tile.arguments))


def _blocks_at_once(device: Device, function: Function, tile: Tile) -> int:
    """Blocks that the device holds, in whole clusters."""
    held = function.blocks_at_once(tile.threads, tile.shared) * device.multiprocessors
    return held // tile.cluster * tile.cluster


def _grid(tile: Tile, rows: int, column_tiles: int, at_once: int) -> tuple[int, int, int]:
    """No more blocks than the device holds, which go on to the next tile."""
    tiles = -(-rows // (64 * tile.groups * tile.cluster)) * column_tiles
    return min(tiles * tile.cluster, at_once), 1, 1


class TensorMaps:
    """What bulk tensor copies must know of matrices and tensors of half, kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[tuple[int, ...], bytes] = {}

    def __call__(self, address: int, rows: int, columns: int, box: int) -> bytes:
        """The tensor map of a row-major half matrix, with boxes of 64 columns and `box` rows."""
        return self._map(address, (columns, rows), (_DEPTH, box))

    def of_three(self, address: int, sizes: tuple[int, int, int], box: tuple[int, int]) -> bytes:
        """The map of a half tensor (planes, rows, columns); boxes of `box` planes and rows, 64 columns."""
        return self._map(address, sizes[::-1], (_DEPTH, *box[::-1]))

    def of_results(self, address: int, rows: int, columns: int, *, floats: bool = False) -> bytes:
        """The tensor map of a row-major matrix, half or float, with boxes of 64 rows by 128 bytes."""
        size = 4 if floats else 2
        return self._map(address, (columns, rows), (_PIECE_BYTES // size, _PIECE_ROWS), size)

    def _map(self, address: int, sizes: tuple[int, ...], box: tuple[int, ...], itemsize: int = 2) -> bytes:
        """Sizes and box: fastest dimension first."""
        key = (address, itemsize, *sizes, *box)
        if (known := self._known.get(key)) is not None:
            return known
        driver = bindings()
        types = driver.CUtensorMapDataType
        strides = [itemsize * math.prod(sizes[:count]) for count in range(1, len(sizes))]
        status, made = driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if itemsize == 2 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            len(sizes), address,
            [driver.cuuint64_t(size) for size in sizes], [driver.cuuint64_t(stride) for stride in strides],
            [driver.cuuint32_t(size) for size in box], [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        if status != 0:
            shown = " x ".join(str(size) for size in reversed(sizes))
            raise self._device.named(CudaError(error_text(status)), f"describing {shown} at {address:#x}")
        self._known[key] = encoded = ctypes.string_at(int(made.getPtr()), 128)
        return encoded
