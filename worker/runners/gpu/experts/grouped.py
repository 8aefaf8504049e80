"""Products of experts with the rows that are sent to them.

By `grouped.cu`, or on Hopper by `packed_experts.cu`, `hopper_grouped.cu` or, of FP8, `expert_gemm.cu`
(`tiles.py`). All that multiply a format on a GPU have the same bits, so that a row's hang on that row alone.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import Activation, Experts, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import ABSENT, FP8, PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.experts.room import ExpertRoom, most_tiles
from nightmill.worker.runners.gpu.experts.tiles import (
    ExpertTile,
    Multiplier,
    grouped_source,
    grouped_sources,
    tile_for,
    tiles_for,
)
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, formats_in

__all__ = ["ACTIVATIONS", "Given", "GroupedProducts"]

ACTIVATIONS = {
    Activation.SILU: 0, Activation.GELU: 1, Activation.RELU_SQUARED: 2, Activation.CLAMPED_SWIGLU: 3,
}  # fmt: skip
_LETTERS = "PPPPPPPPPPPPiiiii"


@dataclass(frozen=True, slots=True)
class Given:
    """Operands of a product beside rows and a matrix; ABSENT those that there are not.

    bias    as long as the matrix has rows
    first   factors of experts, float (E,); `second` of the other half of gate and up
    """

    bias: Buffer = ABSENT
    first: Buffer = ABSENT
    second: Buffer = ABSENT


class GroupedProducts:
    """Launches these kernels for matrices of these formats."""

    def __init__(
        self, device: Device, formats: Collection[Format], tiles: tuple[ExpertTile, ...] = ()
    ) -> None:
        """Load them.

        tiles  to choose from, the smallest first; without any, those that suit the device and formats
        """
        self.tiles = tiles or tiles_for(formats, hopper=device.hopper)
        self._multiprocessors = device.multiprocessors
        self._maps = TensorMaps(device)
        self._kernels: dict[tuple[Format, str, ExpertTile], Function] = {}
        for format_ in formats:
            modules = {
                by: Module.of(device, grouped_source(format_, by)) for by in {tile.by for tile in self.tiles}
            }
            for name in ("floats", "one", "two"):
                for tile in self.tiles:
                    letters = f"128s{_LETTERS}" if tile.by is Multiplier.GEMM else _LETTERS
                    self._kernels[format_, name, tile] = modules[tile.by].function(
                        tile.kernel(name), letters, shared=tile.shared(format_), dependent=True,
                        all_shared=True,
                    )  # fmt: skip

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files: those of each format of experts."""
        formats = formats_in(spec, precision, *OF_EXPERTS) if spec.experts else set()
        return grouped_sources(formats, hopper=hopper)

    def tile(self, experts: Experts, tokens: int) -> ExpertTile:
        """The tile for so many tokens, by how many an expert is sent on average."""
        return tile_for(self.tiles, tokens * experts.used / experts.count)

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the size or the activation of a model that it does not take, or None."""
        for experts in spec.experts:
            read = experts.latent or spec.width
            if odd := next((size for size in (experts.width, read) if size % PANEL_ROWS), None):
                return f"experts with rows of {odd} (multiples of {PANEL_ROWS})"
            if experts.activation not in ACTIVATIONS:
                return f"the activation {experts.activation} of experts"
            if experts.activation is Activation.CLAMPED_SWIGLU and not experts.gated:
                return f"the activation {experts.activation} without a gate"
        return None

    def gate_up(
        self, experts: Experts, x: Buffer, weight: Matrix, given: Given, at: ExpertRoom, tokens: int,
        tile: ExpertTile,
    ) -> None:  # fmt: skip
        """Queue gate, up and activation of x (T, R) at all positions -> at.activated (N, F).

        tile  that positions were placed for
        """
        queue = partial(self._queue, experts, _Rows(x, tokens, tile, at))
        count, width, y = experts.count, experts.width, at.activated
        if not experts.gated:
            queue("one", weight, given, _Target(y, width))
        elif weight.parts:  # in two formats: gates, and ups
            gates, ups = weight.parts
            bias = given.bias
            of_ups = bias if bias is ABSENT else bias.from_row(count)
            queue("floats", ups, Given(of_ups, given.second), _Target(at.ups, width))
            queue("one", gates, given, _Target(y, width, other=at.ups))
        elif experts.fused:
            queue("two", weight, given, _Target(y, 2 * width, side=width))
        else:
            queue("two", weight, given, _Target(y, width, side=count * width))

    def down(
        self, experts: Experts, x: Buffer, weight: Matrix, given: Given, at: ExpertRoom, tokens: int,
        tile: ExpertTile,
    ) -> None:  # fmt: skip
        """Queue the product of x (N, F), rows by position -> at.outputs (N, R)."""
        rows = _Rows(x, tokens, tile, at, gathers=False)
        self._queue(experts, rows, "floats", weight, given, _Target(at.outputs, weight.rows // experts.count))

    def _queue(
        self, experts: Experts, rows: "_Rows", name: str, weight: Matrix, given: Given, target: "_Target"
    ) -> None:
        x, tile, at, y, format_ = rows.x, rows.tile, rows.at, target.y, weight.format
        outputs = y.shape[1]
        columns = -(-outputs // tile.outputs(format_, 2 if name == "two" else 1))
        grid = columns, most_tiles(experts, rows.tokens, tile.rows)
        if tile.stays:
            grid = min(math.prod(grid), tile.blocks * self._multiprocessors), 1
        gathered, maps = at.sources.address if rows.gathers else 0, list[bytes]()
        if tile.by is Multiplier.GEMM:
            map_of = self._maps.of_fp8 if format_.scaled else self._maps
            maps.append(map_of(weight.address, weight.rows, weight.columns, tile.columns(format_) // 2))
        self._kernels[format_, name, tile](
            grid, (tile.threads(format_), 1, 1),
            *maps, x.address, x.scales if x.dtype == FP8 else 0, gathered, at.tiles.address, at.total.address,
            weight.address, weight.scales, given.bias.address, given.first.address, given.second.address,
            target.other.address, y.address, outputs, weight.columns, target.stride, target.side,
            ACTIVATIONS[experts.activation], shared=tile.shared(format_),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a product: of tokens, which are gathered by position, or by position already."""

    x: Buffer
    tokens: int
    tile: ExpertTile
    at: ExpertRoom
    gathers: bool = True


@dataclass(frozen=True, slots=True)
class _Target:
    """The place that a product is written to.

    stride  rows of the matrix from one expert to the next; side: from a gate to its up
    other   ups that were multiplied before
    """

    y: Buffer
    stride: int
    side: int = 0
    other: Buffer = ABSENT
