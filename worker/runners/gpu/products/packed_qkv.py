"""Queries, keys and values on Hopper in one launch, with packed weights."""

from nightmill.worker.model.spec import Attention, ModelSpec, Role
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import PANEL_ROWS, Buffer, Format
from nightmill.worker.runners.gpu.device.sources import Source, instances, rotated, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.numbers import Numbers
from nightmill.worker.runners.gpu.products.packed_tiles import PackedTile
from nightmill.worker.runners.gpu.products.shapes import padded_rows
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, formats_in
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["PACKED_QKV_TILES", "PackedQkv"]

_HEADS = (64, 128)  # sizes of theirs
_SIDES = 2  # halves of a head in a tile

PACKED_QKV_TILES = (
    PackedTile(4, 8, 4, relay=True),
    PackedTile(1, 16, 2, 1, 2),
    PackedTile(1, 32, 2, 1, 2),
    PackedTile(1, 64, 1, 1, 2),
    PackedTile(1, 128, 1, 2),
    PackedTile(1, 256, 1, 2),
)


class PackedQkv:
    """Launches `packed_qkv.cu` for layers of one kind of attention, with weights in one packed format.

    angles  the rotation table of such layers
    """

    def __init__(self, device: Device, attention: Attention, kept: Format, angles: Buffer) -> None:
        self._attention = attention
        self._angles = angles
        self._maps = TensorMaps(device)
        module = Module.of(device, _source(attention, kept))
        self._kernels = {}
        for tile in _tiles(attention, kept):
            name, shared = _name(tile, kept), tile.shared(kept, _SIDES)
            function = module.function(name, "128s128sPPPPiPPPiiii", shared=shared, dependent=True)
            self._kernels[tile] = (
                function,
                function.blocks_at_once(tile.threads, shared) * device.multiprocessors,
            )

    @staticmethod
    def suits(attention: Attention, kept: Format, kv: KvFormat, *, hopper: bool) -> bool:
        """Whether the kernels take a layer: heads of 64 or 128 that are only rotated and kept as elements."""
        only_rotated = attention.qk_norm is None and attention.temperature is None
        plain = attention.head_dim in _HEADS and kv is KvFormat.ELEMENT
        return hopper and kept.packed and only_rotated and plain

    @classmethod
    def sources(cls, spec: ModelSpec, numbers: Numbers, *, hopper: bool) -> list[Source]:
        """What they are compiled from."""
        return [
            _source(attention, kept)
            for attention in spec.attentions
            for kept in sorted(formats_in(spec, numbers, Role.QKV), key=str)
            if cls.suits(attention, kept, numbers.kv, hopper=hopper)
        ]

    @property
    def tiles(self) -> tuple[PackedTile, ...]:
        """Those that there are."""
        return tuple(self._kernels)

    def run(
        self, tile: PackedTile, x: Buffer, layer: LayerWeights, positions: int, cache_rows: int, qkv: Buffer,
        cache: LayerCache, rows: int,
    ) -> None:  # fmt: skip
        """Queue it for x (rows, width): queries to qkv, keys and values to the pages.

        Rows of x are read up to `padded_rows(rows)`.
        """
        function, at_once = self._kernels[tile]
        attention, weight, angles, maps = self._attention, layer.qkv, self._angles, self._maps
        padded, kept, width = padded_rows(rows), weight.format, weight.columns
        panels = tile.outputs(_SIDES) // PANEL_ROWS
        function(
            (tile.grid(rows, weight.rows // _SIDES, _SIDES, at_once), 1), (tile.threads, 1, 1),
            maps(x.address, padded, width, tile.box),
            maps.of_packed(weight.address, weight.rows, width, kept, panels), layer.qkv_bias.address,
            positions, cache_rows, angles.address, angles.shape[0], qkv.address, cache.keys.address,
            cache.values.address, rows, attention.heads, attention.kv_heads, width,
            shared=tile.shared(kept, _SIDES),
        )  # fmt: skip


def _tiles(attention: Attention, kept: Format) -> list[PackedTile]:
    """Those of PACKED_QKV_TILES that have parts of one head."""
    whole = (tile for tile in PACKED_QKV_TILES if attention.head_dim // 2 % tile.outputs(_SIDES) == 0)
    return [tile for tile in whole if tile.fits(kept, _SIDES)]


def _name(tile: PackedTile, kept: Format) -> str:
    return "_".join(map(str, ("qkv", *tile.arguments(kept, _SIDES))))


def _source(attention: Attention, kept: Format) -> Source:
    arguments = (tile.arguments(kept, _SIDES) for tile in _tiles(attention, kept))
    kernels = instances("PACKED_QKV_KERNEL", arguments)
    return source_of("packed_qkv", *rotated(attention), f"-DFORMAT={kept.name}", kernels)
