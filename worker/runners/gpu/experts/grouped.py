"""Products of experts with the rows that are sent to them, by `grouped.cu`."""

from collections.abc import Collection
from dataclasses import dataclass

from nightmill.worker.model.spec import Activation, Experts, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import ABSENT, FP8, PANEL_ROWS, Buffer, Format, Matrix
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.experts.room import ExpertRoom, most_tiles
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.weights.layout import OF_EXPERTS, formats_in

__all__ = ["ACTIVATIONS", "GroupedProducts", "Given", "tile_rows"]

ACTIVATIONS = {
    Activation.SILU: 0, Activation.GELU: 1, Activation.RELU_SQUARED: 2, Activation.CLAMPED_SWIGLU: 3,
}  # fmt: skip
_WARPS, _PANELS = 4, 2  # of a block, and of a warp
_TILES = (1, 2, 4)  # of 16 rows
_WIDE_STEP = 256


@dataclass(frozen=True, slots=True)
class Given:
    """What a product is given beside rows and a matrix; ABSENT what there is not.

    bias    as long as the matrix has rows
    first   factors of experts, float (E,); `second` of the other half of gate and up
    """

    bias: Buffer = ABSENT
    first: Buffer = ABSENT
    second: Buffer = ABSENT


class GroupedProducts:
    """Launches `grouped.cu` for matrices of these formats."""

    def __init__(self, device: Device, formats: Collection[Format]) -> None:
        self._kernels: dict[tuple[Format, str, int], Function] = {}
        for format_ in formats:
            module = Module.of(device, _source(format_))
            for name in ("floats", "one", "two"):
                for tiles in _TILES:
                    self._kernels[format_, name, tiles] = module.function(
                        f"experts_{name}_{tiles}", "PPPPPPPPPPPPiiiii", shared=_shared(format_, tiles),
                        dependent=True,
                    )  # fmt: skip

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision) -> list[Source]:
        """List the kernel files: one for each format of experts."""
        if not spec.experts:
            return []
        return [_source(one) for one in sorted(formats_in(spec, precision, *OF_EXPERTS), key=str)]

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
        self, experts: Experts, x: Buffer, weight: Matrix, given: Given, at: ExpertRoom, tokens: int
    ) -> None:
        """Queue gate, up and activation of x (T, R) at all positions -> at.activated (N, F)."""
        count, width = experts.count, experts.width
        if not experts.gated:
            self._queue("one", experts, x, weight, given, at, tokens, stride=width)
        elif weight.parts:  # in two formats: gates, and ups
            gates, ups = weight.parts
            bias = given.bias
            of_ups = bias if bias is ABSENT else bias.from_row(count)
            self._queue(
                "floats", experts, x, ups, Given(of_ups, given.second), at, tokens, y=at.ups, stride=width
            )
            self._queue("one", experts, x, gates, given, at, tokens, other=at.ups, stride=width)
        elif experts.fused:
            self._queue("two", experts, x, weight, given, at, tokens, stride=2 * width, side=width)
        else:
            self._queue("two", experts, x, weight, given, at, tokens, stride=width, side=count * width)

    def down(
        self, experts: Experts, x: Buffer, weight: Matrix, given: Given, at: ExpertRoom, tokens: int
    ) -> None:
        """Queue the product of x (N, F), rows by position -> at.outputs (N, R)."""
        stride = weight.rows // experts.count
        self._queue(
            "floats", experts, x, weight, given, at, tokens, y=at.outputs, stride=stride, gathers=False
        )

    def _queue(
        self, name: str, experts: Experts, x: Buffer, weight: Matrix, given: Given, at: ExpertRoom,
        tokens: int, *, y: Buffer | None = None, other: Buffer = ABSENT, stride: int, side: int = 0,
        gathers: bool = True,
    ) -> None:  # fmt: skip
        y = y or at.activated
        outputs, rows = y.shape[1], tile_rows(experts, tokens)
        tiles = rows // 16
        block = _WARPS * PANEL_ROWS * (1 if name == "two" else _PANELS)
        self._kernels[weight.format, name, tiles](
            (-(-outputs // block), most_tiles(experts, tokens, rows)), (32 * _WARPS, 1, 1), x.address,
            x.scales if x.dtype == FP8 else 0, at.sources.address if gathers else 0, at.tiles.address,
            at.total.address, weight.address, weight.scales, given.bias.address, given.first.address,
            given.second.address, other.address, y.address, outputs, weight.columns, stride, side,
            ACTIVATIONS[experts.activation], shared=_shared(weight.format, tiles),
        )  # fmt: skip


def tile_rows(experts: Experts, tokens: int) -> int:
    """Rows of a tile: 16, 32 or 64, by how many an expert is sent on average."""
    mean = tokens * experts.used / experts.count
    return 16 * (1 if mean <= 16 else 2 if mean <= 32 else 4)


def _shared(format_: Format, tiles: int) -> int:
    """Bytes of shared memory of a block, as grouped.cu says."""
    depth = _WIDE_STEP if format_.step == _WIDE_STEP else 128
    size = 1 if format_.scaled else 2
    pitch = depth * size + 16
    panel = depth // format_.step * format_.packet if format_.packed else PANEL_ROWS * pitch
    stages = 3 if tiles < 4 else 2
    return stages * (16 * tiles * pitch + _PANELS * _WARPS * panel)


def _source(format_: Format) -> Source:
    if format_.packed:
        return source_of("grouped", f"-DFORMAT={format_.name}")
    return source_of("grouped", *(["-DFP8"] if format_.scaled else []))
