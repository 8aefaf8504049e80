"""Products of experts with the rows that are sent to them.

By `grouped.cu`, or on Hopper by `packed_experts.cu`, `hopper_grouped.cu`, or many by `expert_gemm.cu`
(`tiles.py`): all have the same bits, so that a row's hang on that row alone.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from nightmill.worker.model.spec import Activation, Experts, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import (
    ABSENT,
    ELEMENT,
    FP8,
    INT,
    PANEL_ROWS,
    Buffer,
    Format,
    Matrix,
)
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.device.tensor_maps import TensorMaps
from nightmill.worker.runners.gpu.experts.room import SLICE, ExpertRoom, most_tiles
from nightmill.worker.runners.gpu.experts.tiles import (
    GEMM_BY_DEFAULT,
    GEMM_TILE,
    ExpertTile,
    Multiplier,
    grouped_source,
    grouped_sources,
    made_elements,
    tile_for,
    tiles_for,
)
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, formats_in

__all__ = ["ACTIVATIONS", "Given", "GroupedProducts", "elements_of"]

ACTIVATIONS = {
    Activation.SILU: 0, Activation.GELU: 1, Activation.RELU_SQUARED: 2, Activation.CLAMPED_SWIGLU: 3,
}  # fmt: skip


_GEMM_LETTERS = "128sPPPPPPPPPPPPiiiiiPP"


def elements_of(experts: Experts, width: int) -> int:
    """Bytes of the larger of a layer's matrices as elements."""
    sides = 2 if experts.gated else 1
    return sides * experts.count * experts.width * (experts.latent or width) * ELEMENT.itemsize


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
        self, device: Device, formats: Collection[Format], tiles: tuple[ExpertTile, ...] = (),
        elements: int = 0,
    ) -> None:  # fmt: skip
        """Load them.

        tiles     to choose from, the smallest first; without any, those that suit the device and formats
        elements  bytes of room for matrices that become such, as `workspace` says
        """
        self._packed = any(format_.packed for format_ in formats)
        tiles = tiles or tiles_for(formats, hopper=device.hopper)
        if self._packed and not elements:
            tiles = tuple(tile for tile in tiles if tile != GEMM_TILE)
        self.tiles = tiles
        self._multiprocessors = device.multiprocessors
        self._maps = TensorMaps(device)
        self._elements = device.allocate(elements, "experts as elements") if elements else 0
        self._kernels: dict[tuple[Format, str, ExpertTile], Function] = {}
        for format_ in formats:
            modules = {
                by: Module.of(device, grouped_source(format_, by)) for by in {tile.by for tile in self.tiles}
            }
            for name in ("floats", "one", "two"):
                for tile in self.tiles:
                    letters = _GEMM_LETTERS if tile.by is Multiplier.GEMM else "PPPPPPPPPPPPiiiii"
                    self._kernels[format_, name, tile] = modules[tile.by].function(
                        tile.kernel(name), letters, shared=tile.shared(format_), dependent=True,
                        all_shared=True,
                    )  # fmt: skip

    @staticmethod
    def sources(
        spec: ModelSpec, precision: Precision, *, hopper: bool, gemm: bool = GEMM_BY_DEFAULT
    ) -> list[Source]:
        """List the kernel files: those of each format of experts."""
        formats = formats_in(spec, precision, *OF_EXPERTS) if spec.experts else set()
        return grouped_sources(formats, hopper=hopper, gemm=gemm)

    @staticmethod
    def workspace(
        spec: ModelSpec, precision: Precision, tokens: int, *, hopper: bool, gemm: bool = GEMM_BY_DEFAULT
    ) -> int:
        """Bytes for the largest matrix as elements, if packed ones become such; tokens: of a step."""
        formats = formats_in(spec, precision, *OF_EXPERTS) if spec.experts else set()
        most = min(tokens, SLICE)
        return max(
            (
                elements_of(experts, spec.width)
                for experts in spec.experts
                if made_elements(formats, most * experts.used / experts.count, hopper=hopper, gemm=gemm)
            ),
            default=0,
        )

    def tile(self, experts: Experts, tokens: int) -> ExpertTile:
        """The tile for so many tokens, by how many an expert is sent on average."""
        mean = tokens * experts.used / experts.count
        return tile_for(self.tiles, mean, packed=self._packed)

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
            queue("one", gates, given, _Target(y, width, other=at.ups, turn=1))
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
        target = _Target(at.outputs, weight.rows // experts.count, turn=2)
        self._queue(experts, rows, "floats", weight, given, target)

    def _queue(
        self, experts: Experts, rows: "_Rows", name: str, weight: Matrix, given: Given, target: "_Target"
    ) -> None:
        x, tile, at, y, format_ = rows.x, rows.tile, rows.at, target.y, weight.format
        outputs = y.shape[1]
        columns = -(-outputs // tile.outputs(format_, 2 if name == "two" else 1))
        grid = columns, most_tiles(experts, rows.tokens, tile.rows)
        if tile.stays:
            grid = min(math.prod(grid), tile.blocks * self._multiprocessors), 1
        gathered = at.sources.address if rows.gathers else 0
        if tile.by is Multiplier.GEMM:
            elements = self._elements if format_.packed else weight.address
            map_of = self._maps.of_fp8 if format_.scaled else self._maps
            counts = at.counts.address + target.turn * at.counts.shape[1] * INT.itemsize
            self._kernels[format_, name, tile](
                grid, (tile.threads(format_), 1, 1),
                map_of(elements, weight.rows, weight.columns, tile.columns(format_) // 2), x.address,
                x.scales if x.dtype == FP8 else 0, gathered, at.tiles.address, at.total.address,
                weight.address, weight.scales, given.bias.address, given.first.address, given.second.address,
                target.other.address, y.address, outputs, weight.columns, target.stride,
                target.side, ACTIVATIONS[experts.activation], elements, counts, shared=tile.shared(format_),
            )  # fmt: skip
            return
        self._kernels[format_, name, tile](
            grid, (tile.threads(format_), 1, 1),
            x.address, x.scales if x.dtype == FP8 else 0, gathered, at.tiles.address, at.total.address,
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
    turn    of the product among those of a layer
    """

    y: Buffer
    stride: int
    side: int = 0
    other: Buffer = ABSENT
    turn: int = 0
