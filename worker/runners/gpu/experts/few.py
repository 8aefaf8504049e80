"""Experts of up to 8 tokens, with packed weights on Hopper, in three launches.

These are router and choice, gate and up, and down with the sums over ranks and the norm of what comes next.
They have the bits of the launches that compute any number of tokens (`route.py`, `grouped.py`, `combine.py`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nightmill.worker.model.spec import Experts, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.functions import Function, Module
from nightmill.worker.runners.gpu.device.operands import (
    ABSENT,
    ELEMENT,
    FLOAT,
    INT,
    PANEL_ROWS,
    Buffer,
    Format,
    Matrix,
)
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.experts.grouped import ACTIVATIONS, Given
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.experts.route import Routing
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.gpu.rows.norms import Ending, row_shape
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, OF_EXPERTS, formats_in

__all__ = ["MOST_TOKENS", "FewExperts", "FewMemory", "few_sources"]

FEW_BY_DEFAULT = False
"""True if these kernels compute what they can: they wait for a first run on a GPU (benchmarks/TRIED.md).

Tests and `benchmarks.engine --few-experts` turn it on.
"""
MOST_TOKENS = 8
_MOST_PLACES = 128  # choices of all tokens
_MOST_WARPS, _MOST_STAGES, _LEAST_STAGES = 16, 8, 2
_CHUNK = 256  # inputs of a stage of packets
_GROUP = 32  # inputs with one scale
_BARRIER = 8  # bytes
_STEP = 32  # inputs of a router, of which there is a multiple
_THREADS = 256  # of the router's blocks


@dataclass(frozen=True, slots=True)
class FewMemory:
    """A block of `few_experts.cu`: how its warps are fed, as `Memory` there says.

    left    bytes that warps leave for each other
    rows    of x, of so many inputs
    stages  of a warp's packets, each a chunk of _CHUNK inputs
    """

    format: Format
    element: Element
    warps: int
    left: int
    rows: int
    inputs: int
    stages: int

    @classmethod
    def of(
        cls, device: Device, format_: Format, *, warps: int, left: int, rows: int, inputs: int, tasks: int
    ) -> "FewMemory | None":  # fmt: skip
        """With as many stages as fit, and as warps with so many tasks each use; None: too few."""
        used = min(tasks * -(-inputs // _CHUNK), _MOST_STAGES)
        for stages in range(used, min(_LEAST_STAGES, used) - 1, -1):
            memory = cls(format_, device.element, warps, left, rows, inputs, stages)
            if memory.bytes + _DECLARED <= device.features.block_shared:
                return memory
        return None

    @property
    def bytes(self) -> int:
        """All of it."""
        stage = _CHUNK // self.format.step * self.format.packet
        scales = PANEL_ROWS * (_CHUNK // _GROUP) * self.format.computed
        if self.element is Element.F16:
            scales //= 2
        pitch = -(-self.inputs // self.format.step) * self.format.step * ELEMENT.itemsize + 16
        barriers = -(-_BARRIER * (1 + self.warps * self.stages) // 16) * 16
        return barriers + self.left + self.rows * pitch + self.warps * (self.stages * stage + scales)


_DECLARED = 6 << 10  # bytes that the kernels declare beside it, and more


class FewExperts:
    """Launches `few_router.cu` and `few_experts.cu` for experts in these formats."""

    def __init__(self, device: Device, formats: Collection[Format]) -> None:
        """Load them; it takes no other than packed formats, and none on other cards."""
        self._device = device
        self._formats = {one for one in formats if one.packed} if device.hopper else set[Format]()
        self._gate_up: dict[Format, Function] = {}
        self._down: dict[Format, Function] = {}
        if not self._formats:
            return
        self._arrived = device.allocate(2 * INT.itemsize, "arrivals of blocks")
        device.fill(self._arrived, 0, 2 * INT.itemsize)
        most: Any = {
            "shared": device.features.block_shared - _DECLARED,
            "dependent": True,
            "all_shared": True,
        }
        letters = "PPiPPPPPPPiiiifiiiiiiifiPPPP"
        self._router = Module.of(device, source_of("few_router")).function("few_router", letters, **most)
        for format_ in self._formats:
            module = Module.of(device, _source(format_))
            self._gate_up[format_] = module.function("few_gate_up", "PPPPPPPPPiiiiiiii", **most)
            self._down[format_] = module.function("few_down", "PPPPPPPPfPPPfPPiiiiiiii", **most)

    @staticmethod
    def sources(spec: ModelSpec, precision: Precision, *, hopper: bool) -> list[Source]:
        """List the kernel files."""
        formats = formats_in(spec, precision, *OF_EXPERTS) if spec.experts else set()
        return few_sources(formats) if hopper and FEW_BY_DEFAULT else []

    def takes(
        self, experts: Experts, router: Matrix, matrices: tuple[Matrix, Matrix], ending: Ending, tokens: int
    ) -> bool:
        """Return whether it computes so many tokens with these matrices and this ending.

        matrices  of gate and up, and of down
        """
        if not self._formats.issuperset(one.format for one in matrices):
            return False
        then = ending.before or NO_NORM
        plain = ending.after.weight is ABSENT and not (ending.behind or ending.beside or then.centred)
        alone = experts.latent is None and experts.shared is None and experts.beside is None
        few = 0 < tokens <= MOST_TOKENS and tokens * experts.used <= _MOST_PLACES
        if not (few and plain and alone and experts.gated and then.bias is ABSENT) or router.columns % _STEP:
            return False
        gate_up, down = matrices
        return (
            self._router_bytes(experts, router, tokens) + _DECLARED <= self._device.features.block_shared
            and self._of_gate_up(experts, gate_up, tokens) is not None
            and self._of_down(experts, down, tokens) is not None
        )

    def route(
        self, routing: Routing, x: Buffer, router: Matrix, biases: tuple[Buffer, Buffer], at: ExpertRoom,
        tokens: int, slots: tuple[int, int],
    ) -> None:  # fmt: skip
        """Queue logits of x (tokens, width), the choice and the places.

        biases  of logits, and of what is chosen by
        slots   address of the slots of tokens, or 0, and the slot of those of padding
        """
        self._router(
            (router.rows // PANEL_ROWS, 1), (_THREADS, 1, 1), x.address, router.address, router.columns,
            self._arrived, *routing.arguments(*biases, at, tokens, *slots), at.places.address,
            at.sources.address, at.tiles.address, at.total.address,
            shared=self._router_bytes(routing.experts, router, tokens),
        )  # fmt: skip

    @staticmethod
    def _router_bytes(experts: Experts, router: Matrix, tokens: int) -> int:
        """Bytes of rows of W and of x, or then of what is chosen by."""
        row = router.columns * ELEMENT.itemsize + 16
        return max((PANEL_ROWS + tokens) * row, 3 * tokens * experts.count * FLOAT.itemsize)

    def gate_up(
        self, experts: Experts, x: Buffer, weight: Matrix, given: Given, at: ExpertRoom, tokens: int
    ) -> None:
        """Queue gate, up and activation of x (tokens, R) at all positions -> at.activated."""
        memory = self._of_gate_up(experts, weight, tokens)
        assert memory is not None
        count, width = experts.count, experts.width
        stride, side = (2 * width, width) if experts.fused else (width, count * width)
        pairs = tokens * experts.used * width // PANEL_ROWS
        self._gate_up[weight.format](
            (min(self._device.multiprocessors, pairs), 1), (32 * memory.warps, 1, 1), x.address,
            at.sources.address, at.tiles.address, at.total.address, weight.address, given.bias.address,
            given.first.address, given.second.address, at.activated.address, width, weight.columns, stride,
            side, ACTIVATIONS[experts.activation], tokens, tokens * experts.used, memory.stages,
            shared=memory.bytes,
        )  # fmt: skip

    def _of_gate_up(self, experts: Experts, weight: Matrix, tokens: int) -> FewMemory | None:
        """Two warps for each pair of panels that a block has at most, in one turn or several."""
        pairs = tokens * experts.used * experts.width // PANEL_ROWS
        own = -(-pairs // self._device.multiprocessors)
        tasks = -(-own // (_MOST_WARPS // 2))
        at_once = -(-own // tasks)
        left = at_once * 2 * 32 * 2 * FLOAT.itemsize
        return FewMemory.of(
            self._device, weight.format, warps=2 * at_once, left=left, rows=tokens, inputs=weight.columns,
            tasks=tasks,
        )  # fmt: skip

    def add(
        self, experts: Experts, weight: Matrix, given: Given, at: ExpertRoom, ending: Ending, x: Buffer,
        out: Buffer, tokens: int,
    ) -> None:  # fmt: skip
        """Queue the product of at.activated with down, and what `ending` says for its sums over ranks."""
        memory = self._of_down(experts, weight, tokens)
        assert memory is not None
        width, norm = x.shape[1], ending.before or NO_NORM
        columns = self._columns(experts, weight)
        pieces, (threads, *_) = row_shape(width)
        self._down[weight.format](
            (-(-width // (PANEL_ROWS * columns)), 1), (32 * memory.warps, 1, 1), at.activated.address,
            at.places.address, at.shares.address, at.tiles.address, at.total.address, weight.address,
            given.bias.address, given.first.address, ending.scale, ending.factor.address, x.address,
            norm.weight.address, norm.eps, out.address, self._arrived + INT.itemsize, width, weight.columns,
            tokens, experts.used, columns, pieces, threads // 32, memory.stages, shared=memory.bytes,
        )  # fmt: skip

    def _columns(self, experts: Experts, weight: Matrix) -> int:
        """Panels of outputs of a block."""
        return -(-weight.rows // (experts.count * PANEL_ROWS * self._device.multiprocessors))

    def _of_down(self, experts: Experts, weight: Matrix, tokens: int) -> FewMemory | None:
        """A warp for each panel of each expert that a block has at most, in one turn or several."""
        columns, choices = self._columns(experts, weight), tokens * experts.used
        own = columns * min(choices, experts.count)
        tasks = -(-own // _MOST_WARPS)
        warps = max(-(-own // tasks), -(-tokens * columns * PANEL_ROWS // 32))
        if warps > _MOST_WARPS:
            return None
        left = choices * columns * PANEL_ROWS * FLOAT.itemsize
        return FewMemory.of(
            self._device, weight.format, warps=warps, left=left, rows=choices, inputs=weight.columns,
            tasks=tasks,
        )  # fmt: skip


def few_sources(formats: Collection[Format]) -> list[Source]:
    """The files of the kernels for matrices of these formats."""
    packed = sorted((one for one in formats if one.packed), key=str)
    return [source_of("few_router"), *map(_source, packed)] if packed else []


def _source(format_: Format) -> Source:
    return source_of("few_experts", f"-DFORMAT={format_.name}")
