"""Products of a step of a few sequences with FP8 weights, fused with what is around: launches `few_fp8.cu`.

They give the bits of the kernels that serve larger steps.
"""

from collections.abc import Iterable

from nightmill.worker.model.spec import LayerSpec, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, rotated, source_of
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.kv_cache import LayerCache
from nightmill.worker.runners.gpu.products.few_rows import HEADS, is_plain
from nightmill.worker.runners.gpu.rows.rotation import KvWrite
from nightmill.worker.runners.gpu.steps import StepInputs
from nightmill.worker.runners.gpu.weights.layout import LayerWeights
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["FewFp8"]

_TILES = (32, 16)  # rows of a weight
_LINE, _BOXES, _STAGES, _ROWS = 128, 4, 4, 8  # as in few_fp8.cu, which has rows of inputs by eights
_ALIGNMENT = 1024
_MOST_INPUTS = 8192  # of a product
_MULTIPLE = 16
_BLOCK = (256, 1, 1)


class FewFp8:
    """The operations of steps of up to MAX_ROWS tokens, one a sequence, in layers of one kind.

    angles  the rotation table of such layers
    """

    def __init__(self, device: Device, layer: LayerSpec, width: int, angles: Buffer) -> None:
        self._attention = layer.attention
        self._width, self._ffn = width, layer.feed_forward.width
        self._angles = angles
        self._maps = TensorMaps(device)
        self._multiprocessors = device.multiprocessors
        self._write = KvWrite(device, layer.attention) if device.kv is KvFormat.FP8 else None
        module = Module.of(device, _source(layer))
        most = _shared(_MOST_INPUTS, max(_TILES))

        def functions(name: str, arguments: str) -> dict[int, Function]:
            return {
                tile: module.function(
                    f"few_fp8_{name}_{tile}", arguments, shared=most, dependent=True, all_shared=True
                )
                for tile in _TILES
            }

        self._qkv = functions("qkv", "PPf128sPPPPPiPPPiiii")
        self._swiglu = functions("swiglu", "PPf128sPPiii")
        self._residual = functions("residual", "P128sPPiii")

    @staticmethod
    def suits(layer: LayerSpec, width: int, formats: Iterable[Format], *, hopper: bool) -> bool:
        """Whether the kernels take a layer: as `FewRows`, but with weights in FP8."""
        queries, ffn = layer.attention.queries, layer.feed_forward.width
        return (
            hopper
            and all(kept is Format.FP8 for kept in formats)
            and layer.attention.head_dim in HEADS
            and is_plain(layer)
            and not any(size % _MULTIPLE for size in (width, queries, ffn))
            and max(width, queries) <= _MOST_INPUTS
        )

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What they are compiled from."""
        suited = (one for one in spec.layers if cls.suits(one, spec.width, [Format.FP8], hopper=hopper))
        return list(dict.fromkeys(_source(layer) for layer in suited))

    def takes_down(self, rows: int) -> bool:
        """Whether `residual` is for what leaves the feed-forward network, too, in steps of so many rows."""
        return self._ffn <= _MOST_INPUTS

    def qkv(
        self, x: Buffer, layer: LayerWeights, inputs: StepInputs, qkv: Buffer, cache: LayerCache, tokens: int
    ) -> None:
        """Norm, product, bias, rotation: queries to qkv, keys and values to the pages."""
        attention, width, angles, norm, weight = (
            self._attention, self._width, self._angles, layer.attn_norm, layer.qkv,
        )  # fmt: skip
        tile = self._tile(weight.rows)
        self._qkv[tile](
            self._grid(weight.rows // tile), _BLOCK, x.address, norm.weight.address, norm.eps,
            self._map(weight, tile), weight.scales, layer.qkv_bias.address, inputs.positions,
            inputs.cache_rows, angles.address, angles.shape[0], qkv.address, cache.keys.address,
            cache.values.address, tokens, width, attention.heads, attention.kv_heads,
            shared=_shared(width, tile),
        )  # fmt: skip
        if self._write is not None:
            self._write(qkv, inputs.cache_rows, cache, tokens)

    def residual(self, source: Buffer, weight: Matrix, x: Buffer, tokens: int) -> None:
        """x (T, width) += source (T, inputs) weight^T."""
        width, inputs = weight.rows, weight.columns
        tile = self._tile(width)
        self._residual[tile](
            self._grid(-(-width // tile)), _BLOCK, source.address, self._map(weight, tile), weight.scales,
            x.address, tokens, width, inputs, shared=_shared(inputs, tile),
        )  # fmt: skip

    def swiglu(self, x: Buffer, layer: LayerWeights, out: Buffer, tokens: int) -> None:
        """Norm, gate and up, SwiGLU -> out (T, F)."""
        width, ffn, norm, weight = self._width, self._ffn, layer.ffn_norm, layer.gate_up
        tile = self._tile(weight.rows)
        self._swiglu[tile](
            self._grid(-(-weight.rows // tile)), _BLOCK, x.address, norm.weight.address, norm.eps,
            self._map(weight, tile), weight.scales, out.address, tokens, width, ffn,
            shared=_shared(width, tile),
        )  # fmt: skip

    def _tile(self, outputs: int) -> int:
        """Smaller ones where there are not enough for all multiprocessors."""
        return next((tile for tile in _TILES if 3 * outputs >= 2 * tile * self._multiprocessors), _TILES[-1])

    def _grid(self, tiles: int) -> tuple[int, int]:
        """A block a tile, or, where these are many, a block a multiprocessor."""
        return (tiles if tiles <= 2 * self._multiprocessors else self._multiprocessors), 1

    def _map(self, weight: Matrix, tile: int) -> bytes:
        return self._maps.of_fp8(weight.address, weight.rows, weight.columns, tile // 2)


def _source(layer: LayerSpec) -> Source:
    return source_of("few_fp8", *rotated(layer.attention))


def _shared(inputs: int, tile: int) -> int:
    """Bytes of shared memory: rows of all inputs, and the weights of all stages."""
    steps = -(-inputs // (_BOXES * _LINE))
    return steps * _BOXES * _ROWS * _LINE + _STAGES * _BOXES * tile * _LINE + _ALIGNMENT
