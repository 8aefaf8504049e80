"""Queries, keys and values on Hopper in one launch, with packed weights."""

from functools import cache

from nightmill.worker.model.spec import Attention, ModelSpec, Role
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import PANEL_ROWS, Buffer, Format
from nightmill.worker.runners.gpu.device.sources import Source, instances, rotated, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kinds import only_rotates
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.products.packed.packed_gemm import PackedTile
from nightmill.worker.runners.gpu.shapes import padded_rows
from nightmill.worker.runners.gpu.weights.layout import LayerWeights, layer_weights, runs_of
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["PACKED_QKV_TILES", "PackedQkv", "shares"]

_HEADS = (64, 128)  # sizes of theirs
_SIDES = 2  # halves of a head in a tile
_MOST_FORMATS = 2  # of a layer's matrix
_ARGUMENTS = "128s128s128sPPPPiPPPiiiiii"

PACKED_QKV_TILES = (
    PackedTile(4, 8, 4, relay=2),
    PackedTile(1, 16, 2, 1, 2),
    PackedTile(3, 32, 4, relay=2),
    PackedTile(1, 32, 2, 1, 2),
    PackedTile(3, 64, 4, relay=2),
    PackedTile(1, 64, 1, 1, 2),
    PackedTile(1, 128, 1, 2),
    PackedTile(1, 256, 1, 2),
)

_Formats = tuple[Format, ...]
"""The format of the first heads, and that of the last ones where it is another."""


class PackedQkv:
    """Launches `packed_qkv.cu` for layers of one kind of attention, with weights in one packed format or two.

    formats  of a matrix (`Matrix.formats`)
    angles   the rotation table of such layers
    """

    def __init__(self, device: Device, attention: Attention, formats: _Formats, angles: Buffer) -> None:
        self._attention = attention
        self._formats = formats
        self._angles = angles
        self._maps = TensorMaps(device)
        module = Module.of(device, _source(attention, formats))
        self._kernels = {
            tile: tile.loaded(module, device, _name(tile, formats), _ARGUMENTS, self._shared(tile))
            for tile in _tiles(attention, formats)
        }

    @staticmethod
    def suits(attention: Attention, formats: _Formats, kv: KvFormat, *, hopper: bool) -> bool:
        """Return whether the kernels take a layer: heads of 64 or 128, only rotated, stored as elements."""
        plain = attention.head_dim in _HEADS and kv is KvFormat.ELEMENT
        known = len(formats) <= _MOST_FORMATS and all(format_.packed for format_ in formats)
        return hopper and known and only_rotates(attention) and plain

    @classmethod
    def sources(cls, spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        if precision.plain_products:
            return []
        layers: dict[tuple[Attention, _Formats], None] = {}
        for index, layer in enumerate(spec.layers):
            if isinstance(layer.mixer, Attention):
                runs = runs_of(spec, Role.QKV, layer_weights(spec, index)[Role.QKV], precision)
                layers[layer.mixer, tuple(run.format for run in runs)] = None
        return [
            _source(attention, formats)
            for attention, formats in layers
            if cls.suits(attention, formats, precision.kv, hopper=hopper)
        ]

    @property
    def tiles(self) -> tuple[PackedTile, ...]:
        """Tiles that are loaded."""
        return tuple(self._kernels)

    def run(
        self, tile: PackedTile, x: Buffer, layer: LayerWeights, positions: int, cache_rows: int, qkv: Buffer,
        cache: LayerCache, rows: int,
    ) -> None:  # fmt: skip
        """Queue it for x (rows, width): queries to qkv, keys and values to the pages.

        Rows of x are read up to `padded_rows(rows)`.
        """
        function, at_once, shared = self._kernels[tile]
        attention, weight, angles, maps = self._attention, layer.qkv, self._angles, self._maps
        padded, width, panels = padded_rows(rows), weight.columns, tile.outputs(_SIDES) // PANEL_ROWS
        parts = weight.parts or (weight,)
        needed = [tile.needed(rows, part.rows // _SIDES, _SIDES) for part in parts]
        blocks = shares(tuple(needed), at_once, tile.cluster)
        last_heads = parts[-1].rows // attention.head_dim if len(parts) > 1 else 0
        packed = [maps.of_packed(part.address, part.rows, width, part.format, panels) for part in parts]
        function(
            (sum(blocks), 1), (tile.threads, 1, 1), maps(x.address, padded, width, tile.box), packed[0],
            packed[-1], layer.qkv_bias.address, positions, cache_rows, angles.address, angles.shape[0],
            qkv.address, cache.keys.address, cache.values.address, rows, attention.heads, attention.kv_heads,
            width, last_heads, blocks[-1] if last_heads else 0, shared=shared,
        )  # fmt: skip

    def _shared(self, tile: PackedTile) -> int:
        return max(tile.shared(format_, _SIDES) for format_ in self._formats)


@cache
def shares(needed: tuple[int, ...], at_once: int, cluster: int) -> tuple[int, ...]:
    """Divide blocks among the parts of a launch: as many as each needs, or so many that both end together."""
    if sum(needed) <= at_once:
        return needed
    if len(needed) == 1:
        return (at_once,)
    rest = range(cluster, at_once, cluster)
    last = min(rest, key=lambda last: max(-(-needed[0] // (at_once - last)), -(-needed[1] // last)))
    return at_once - last, last


def _tiles(attention: Attention, formats: _Formats) -> list[PackedTile]:
    """Return the tiles of PACKED_QKV_TILES that have parts of one head."""
    whole = (tile for tile in PACKED_QKV_TILES if attention.head_dim // 2 % tile.outputs(_SIDES) == 0)
    return [tile for tile in whole if all(tile.fits(format_, _SIDES) for format_ in formats)]


def _name(tile: PackedTile, formats: _Formats) -> str:
    return "_".join(map(str, ("qkv", *_arguments(tile, formats))))


def _arguments(tile: PackedTile, formats: _Formats) -> tuple[int, ...]:
    """Return the kernel template's arguments: the tile's in the first format, then stages in the last."""
    return *tile.arguments(formats[0], _SIDES), *tile.stages(formats[-1], _SIDES)


def _source(attention: Attention, formats: _Formats) -> Source:
    kernels = (_arguments(tile, formats) for tile in _tiles(attention, formats))
    names = ("FORMAT", "LAST_FORMAT")
    formats_ = (f"-D{name}={one.name}" for name, one in zip(names, formats, strict=False))
    return source_of("packed_qkv", *rotated(attention), *formats_, instances("PACKED_QKV_KERNEL", kernels))
