"""Adds up what experts give, to the residual stream, and computes the norm of what comes next."""

from dataclasses import dataclass

from nightmill.worker.model.spec import Experts, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.rows.norms import Ending, row_shape
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, NormWeight
from nightmill.worker.runners.gpu.weights.router import PART_SCALE, PARTS, part_rows

__all__ = ["Branches", "Combine"]

_MOST_OF_TWO = 4096  # elements of a row, of which registers hold two: where branches have norms of their own


class Combine:
    """Launches `combine.cu`."""

    def __init__(self, device: Device) -> None:
        kernels = KernelPairs(device, source_of("combine"))
        self._kernels = {
            pieces: kernels.function(f"combine_{pieces}", "PPPiPPPiiifPPfiPPfiPPfifPPPPfiPi")
            for pieces in (1, 2, 4)
        }

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("combine")] if spec.experts else []

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the width of a model whose rows two at a time are too many for registers, or None."""
        width = spec.width
        if width <= _MOST_OF_TWO or all(one.beside is None for one in spec.experts):
            return None
        return f"experts beside a dense network at a width of {width:,} (up to {_MOST_OF_TWO:,})"

    def mix(self, experts: Experts, at: ExpertRoom, tokens: int) -> None:
        """Queue the sum of experts' outputs -> at.mixed (T, R) elements."""
        self._queue(at, tokens, experts.used, _Others(), Ending(), ABSENT, at.mixed)

    def add(
        self, experts: Experts, at: ExpertRoom, gates: Buffer, ending: Ending, x: Buffer, out: Buffer,
        tokens: int, branches: "Branches | None" = None,
    ) -> None:  # fmt: skip
        """Queue what `ending` says for the sum of what experts and the shared one give.

        With a latent, of what experts give the product at.raised is added.
        """
        raised = experts.latent is not None
        others = _Others(
            at.raised if raised else ABSENT, at.shared if experts.shared else ABSENT, gates,
            part_rows(experts.count + experts.shared_gated), branches or Branches(),
        )  # fmt: skip
        self._queue(at, tokens, 0 if raised else experts.used, others, ending, x, out)

    def _queue(
        self, at: ExpertRoom, tokens: int, used: int, others: "_Others", ending: Ending, x: Buffer,
        out: Buffer,
    ) -> None:  # fmt: skip
        after, before = ending.after, ending.before or NO_NORM
        norms = others.branches.routed, others.branches.shared, after
        width = (out if x is ABSENT else x).shape[1]
        pieces, block = row_shape(width)
        self._kernels[pieces].of(tokens)(
            (tokens, 1), block, at.outputs.address, at.places.address, at.shares.address, used,
            others.base.address, others.shared.address, others.gates.address, at.logits.shape[1], others.part,
            PARTS, PART_SCALE, *(argument for norm in norms for argument in _arguments(norm)), ending.scale,
            ending.factor.address, x.address, *_arguments(before), out.address, width,
        )  # fmt: skip


def _arguments(norm: NormWeight) -> tuple[int | float, ...]:
    return norm.weight.address, norm.bias.address, norm.eps, norm.centred


@dataclass(frozen=True, slots=True)
class Branches:
    """Norms after what experts add up to, and after the shared one, where they stand beside each other."""

    routed: NormWeight = NO_NORM
    shared: NormWeight = NO_NORM


@dataclass(frozen=True, slots=True)
class _Others:
    """Terms that are added beside experts' outputs; ABSENT those that there are not.

    base    (T, width) elements; shared (T, width), times the sigmoid of a gate each, if there are gates
    part    rows of a part of the router's product
    branches  the norms of either
    """

    base: Buffer = ABSENT
    shared: Buffer = ABSENT
    gates: Buffer = ABSENT
    part: int = 0
    branches: Branches = Branches()
