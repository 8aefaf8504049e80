"""Queries, keys and values on Hopper in one launch: product, bias, rotation and cache write."""

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import Buffer, Format
from nightmill.worker.runners.gpu.device.sources import (
    Source,
    instances,
    rotated,
    source_of,
)
from nightmill.worker.runners.gpu.device.tensor_maps import NO_MAP, TensorMaps
from nightmill.worker.runners.gpu.kinds import only_rotates
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.products.elements.hopper_gemm import Tile, load_tiles
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.weights.layout import LayerWeights

__all__ = ["QKV_TILES", "HopperQkv"]

_HEADS = (64, 128)  # sizes of theirs

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


class HopperQkv:
    """Launches `hopper_qkv.cu`, for weights that are elements, of layers of one kind of attention.

    angles  the rotation table of such layers
    """

    def __init__(self, device: Device, attention: Attention, angles: Buffer) -> None:
        self._attention = attention
        self._angles = angles
        self._maps = TensorMaps(device)
        module = Module.of(device, _source(attention))
        self._kernels = load_tiles(module, device, "qkv_", "128s128s128sPPPPiPPPiiii", _tiles(attention))

    @staticmethod
    def suits(attention: Attention, format_: Format, *, hopper: bool) -> bool:
        """Return whether the kernels take a layer: heads of 64 or 128, only rotated, weights of elements."""
        heads = attention.head_dim in _HEADS
        return hopper and heads and only_rotates(attention) and format_.plain

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        suited = (a for a in spec.attentions if cls.suits(a, Format.F16, hopper=hopper))
        return [_source(attention) for attention in suited]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles that have whole heads."""
        return tuple(self._kernels)

    def run(
        self, tile: Tile, x: Buffer, layer: LayerWeights, positions: int, cache_rows: int, qkv: Buffer,
        cache: LayerCache, rows: int,
    ) -> None:  # fmt: skip
        """Queue it for x (rows, width): queries to qkv, keys and values to the pages.

        Rows of x are read up to `padded_rows(rows)`.
        """
        function, at_once = self._kernels[tile]
        attention, weight, angles, maps = self._attention, layer.qkv, self._angles, self._maps
        outputs, width = weight.rows, weight.columns
        function(
            tile.grid(rows, -(-outputs // tile.columns), at_once), (tile.threads, 1, 1),
            maps(x.address, padded_rows(rows), width, tile.rows),
            maps(weight.address, outputs, width, tile.columns // 2),
            maps.of_results(qkv.address, rows, outputs) if tile.buffers else NO_MAP, layer.qkv_bias.address,
            positions, cache_rows, angles.address, angles.shape[0], qkv.address, cache.keys.address,
            cache.values.address, rows, attention.heads, attention.kv_heads, width, shared=tile.shared,
        )  # fmt: skip


def _tiles(attention: Attention) -> tuple[Tile, ...]:
    """Return the tiles of QKV_TILES that have whole heads."""
    return tuple(tile for tile in QKV_TILES if tile.columns % attention.head_dim == 0)


def _source(attention: Attention) -> Source:
    kernels = instances("QKV_KERNEL", (tile.arguments for tile in _tiles(attention)))
    return source_of("hopper_qkv", *rotated(attention), kernels)
