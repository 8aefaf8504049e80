"""Products by `hopper_gemm.cu`: its tile shapes, its tensor maps, its launches."""

import ctypes
from dataclasses import dataclass
from enum import Enum

from worker.runners.gpu.compiler import compile_kernels, kernel_directory
from worker.runners.gpu.device import CudaError, Device
from worker.runners.gpu.functions import Function, Module, bindings, error_text

__all__ = ["HopperProducts", "Kind", "Tile", "is_hopper"]

_DEPTH = 64  # elements of K in a stage
_SHARED_ALIGNMENT = 1024


class Kind(Enum):
    """What becomes of a product."""

    HALF = "product"
    FLOAT = "float"  # not among these kernels
    SWIGLU = "swiglu"  # the weight is gate rows, then up rows; the result their SwiGLU, half


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of 64 `groups` rows by `columns` rows of the weight, `stages` copies ahead, `cluster` blocks."""

    groups: int
    columns: int
    stages: int
    cluster: int = 1

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.stages * (64 * self.groups + self.columns) * _DEPTH * 2 + _SHARED_ALIGNMENT

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32


# The best for many rows first.
TILES = {
    Kind.HALF: (Tile(1, 64, 6), Tile(1, 32, 8)),
    Kind.FLOAT: (),
    Kind.SWIGLU: (
        Tile(2, 256, 4, 2),
        Tile(2, 256, 4),
        Tile(2, 160, 5),
        Tile(1, 160, 4),
        Tile(1, 128, 4),
        Tile(1, 64, 6),
    ),
}


def is_hopper(device: Device) -> bool:
    """Whether these kernels run on the device; others have no wgmma."""
    return device.compute_capability == (9, 0)


class HopperProducts:
    """y = x weight^T with one accumulator a result, so that all tiles give the same bits; on Hopper only."""

    def __init__(self, device: Device) -> None:
        source = kernel_directory() / "hopper_gemm.cu"
        module = Module(device, compile_kernels(source, (), device.architecture), source.name)
        self._device = device
        self._functions: dict[tuple[Kind, Tile], Function] = {}
        self._blocks: dict[tuple[Kind, Tile], int] = {}
        self._maps: dict[tuple[int, int, int, int], bytes] = {}
        for kind, tiles in TILES.items():
            for tile in tiles:
                name = f"{kind.value}_{tile.groups}_{tile.columns}_{tile.stages}_{tile.cluster}"
                function = module.function(name, "128s128sPiii", shared=tile.shared, dependent=True)
                self._functions[kind, tile] = function
                held = function.blocks_at_once(tile.threads, tile.shared)
                self._blocks[kind, tile] = held * device.multiprocessors

    def run(
        self, kind: Kind, tile: Tile, x: int, weight: int, y: int, rows: int, outputs: int, inputs: int
    ) -> None:
        """Queue a product; for SWIGLU, `outputs` is the FFN width: half the rows of the weight."""
        fused = kind is Kind.SWIGLU
        results = tile.columns // 2 if fused else tile.columns
        x_map = self._map(x, rows, inputs, 64 * tile.groups)
        weight_map = self._map(weight, 2 * outputs if fused else outputs, inputs, tile.columns // 2)
        tiles = -(-rows // (64 * tile.groups * tile.cluster)) * -(-outputs // results)
        grid = (min(tiles * tile.cluster, self._blocks[kind, tile] // tile.cluster * tile.cluster), 1, 1)
        self._functions[kind, tile](
            grid, (tile.threads, 1, 1), x_map, weight_map, y, rows, outputs, inputs, shared=tile.shared
        )

    def _map(self, address: int, rows: int, columns: int, box: int) -> bytes:
        """The tensor map of a row-major half matrix, with boxes of 64 columns and `box` rows."""
        key = (address, rows, columns, box)
        if (known := self._maps.get(key)) is not None:
            return known
        driver = bindings()
        status, made = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, address,
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)], [driver.cuuint64_t(columns * 2)],
            [driver.cuuint32_t(_DEPTH), driver.cuuint32_t(box)], [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        if status != 0:
            raise self._device.named(
                CudaError(error_text(status)), f"describing a matrix of {rows} x {columns} at {address:#x}"
            )
        self._maps[key] = encoded = ctypes.string_at(int(made.getPtr()), 128)
        return encoded
