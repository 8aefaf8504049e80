"""What experts give, added up and to the residual stream, and the norm of what comes next."""

from nightmill.worker.model.spec import Experts, ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.rows.norms import row_shape
from nightmill.worker.runners.gpu.weights.layout import NO_NORM, NormWeight
from nightmill.worker.runners.gpu.weights.router import PART_SCALE, PARTS, part_rows

__all__ = ["Combine"]


class Combine:
    """Launches `combine.cu`."""

    def __init__(self, device: Device) -> None:
        kernels = KernelPairs(device, source_of("combine"))
        self._kernels = {
            pieces: kernels.function(f"combine_{pieces}", "PPPiPPPiiifPPfifPPPfiPi") for pieces in (1, 2, 4)
        }

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("combine")] if spec.experts else []

    def mix(self, experts: Experts, at: ExpertRoom, tokens: int) -> None:
        """Queue the sum of experts' outputs -> at.mixed (T, R) elements."""
        self._queue(at, at.mixed.shape[1], tokens, used=experts.used, out=at.mixed)

    def add(
        self, experts: Experts, at: ExpertRoom, gates: Buffer, after: NormWeight, scale: float, x: Buffer,
        before: NormWeight, out: Buffer, tokens: int,
    ) -> None:  # fmt: skip
        """Queue x += scale * after(what experts and the shared one give), then out = before(x).

        With a latent, of what experts give the product at.raised is added.
        """
        raised = experts.latent is not None
        self._queue(
            at, x.shape[1], tokens, used=0 if raised else experts.used,
            base=at.raised if raised else ABSENT, shared=at.shared if experts.shared else ABSENT,
            gates=gates, part=part_rows(experts.count + experts.shared_gated), after=after, scale=scale, x=x,
            before=before, out=out,
        )  # fmt: skip

    def _queue(
        self, at: ExpertRoom, width: int, tokens: int, *, used: int, base: Buffer = ABSENT,
        shared: Buffer = ABSENT, gates: Buffer = ABSENT, part: int = 0, after: NormWeight = NO_NORM,
        scale: float = 1.0, x: Buffer = ABSENT, before: NormWeight = NO_NORM, out: Buffer,
    ) -> None:  # fmt: skip
        pieces, block = row_shape(width)
        self._kernels[pieces].of(tokens)(
            (tokens, 1), block, at.outputs.address, at.places.address, at.shares.address, used, base.address,
            shared.address, gates.address, at.logits.shape[1], part, PARTS, PART_SCALE, after.weight.address,
            after.bias.address, after.eps, after.centred, scale, x.address, before.weight.address,
            before.bias.address, before.eps, before.centred, out.address, width,
        )  # fmt: skip
