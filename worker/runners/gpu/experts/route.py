"""Which experts tokens go through, and the order in which experts take them."""

from nightmill.worker.model.spec import Experts, ModelSpec, RouterScores
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPair, KernelPairs
from nightmill.worker.runners.gpu.device.operands import ABSENT, FLOAT, Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of
from nightmill.worker.runners.gpu.experts.room import ExpertRoom
from nightmill.worker.runners.gpu.experts.tiles import ExpertTile
from nightmill.worker.runners.gpu.weights.router import PART_SCALE, PARTS, part_rows

__all__ = ["Routing"]

_WARPS, _MOST_EXPERTS, _MOST_USED = 4, 1024, 32
_SCORES = {RouterScores.SOFTMAX: 0, RouterScores.SIGMOID: 1, RouterScores.SOFTMAX_OF_CHOSEN: 2}
_NO_PADDING = -1
_FEW = 8  # tokens that one launch routes
_MOST_SHARED = 48 << 10


class Routing:
    """Launches `route.cu` for experts of one kind."""

    def __init__(self, device: Device, experts: Experts) -> None:
        self.experts = experts
        self._shared = 3 * experts.count * FLOAT.itemsize * _WARPS
        kernels = KernelPairs(device, source_of("route"))
        self._choose = kernels.function("choose", "PPPPPPiiiifiiiiiiifi", shared=self._shared)
        self._place = kernels.function("place_tokens", "PPPPPiiii")
        self._few_shared = self._shared // _WARPS * _FEW
        self._few: KernelPair | None = None
        if self._few_shared <= _MOST_SHARED:
            letters = "PPPPPPiiiifiiiiiiifiPPPP"
            self._few = kernels.function("route_few", letters, shared=self._few_shared)

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("route")] if spec.experts else []

    @staticmethod
    def refusal(spec: ModelSpec) -> str | None:
        """Return the experts of a model that it does not take, or None."""
        for experts in spec.experts:
            if experts.count > _MOST_EXPERTS or experts.used > _MOST_USED:
                return (
                    f"{experts.used} of {experts.count:,} experts (up to {_MOST_USED} of {_MOST_EXPERTS:,})"
                )
        return None

    def __call__(
        self, bias: Buffer, selection_bias: Buffer, at: ExpertRoom, tokens: int, tile: ExpertTile,
        *, slots: int = 0, padding: int = _NO_PADDING,
    ) -> None:  # fmt: skip
        """Queue the choice for tokens whose logits are there, and their places.

        slots, padding  address of the slots of tokens, and the slot of those of padding; 0: there are none
        """
        if self._few is not None and tokens <= min(_FEW, tile.rows):
            self._few.of(tokens)(
                (1, 1), (32 * _FEW, 1, 1), *self._arguments(bias, selection_bias, at, tokens, slots, padding),
                at.places.address, at.sources.address, at.tiles.address, at.total.address,
                shared=self._few_shared,
            )  # fmt: skip
            return
        self._choose.of(tokens)(
            (-(-tokens // _WARPS), 1), (32 * _WARPS, 1, 1),
            *self._arguments(bias, selection_bias, at, tokens, slots, padding), shared=self._shared,
        )  # fmt: skip
        self.place(at, tokens, tile)

    def place(self, at: ExpertRoom, tokens: int, tile: ExpertTile) -> None:
        """Queue the places of choices that are there, for such tiles."""
        experts = self.experts
        self._place.of(tokens)(
            (experts.count, 1), (256, 1, 1), at.chosen.address, at.places.address, at.sources.address,
            at.tiles.address, at.total.address, tokens * experts.used, experts.used, experts.count, tile.rows,
        )  # fmt: skip

    def _arguments(
        self, bias: Buffer, selection_bias: Buffer, at: ExpertRoom, tokens: int, slots: int, padding: int
    ) -> tuple[int | float, ...]:
        """Arguments of kernels that choose, beside where their choices have places."""
        experts = self.experts
        return (
            at.logits.address, bias.address, selection_bias.address, slots, at.chosen.address,
            at.shares.address, tokens, at.logits.shape[1], part_rows(experts.count + experts.shared_gated),
            PARTS, PART_SCALE, experts.count, experts.used, _SCORES[experts.scores], experts.groups,
            experts.groups_used, experts.group_best, experts.normalise, experts.scale, padding,
        )  # fmt: skip

    def gates(self, at: ExpertRoom) -> Buffer:
        """The logits of the shared expert's gate, of which a row's parts are `part_rows` apart."""
        if not self.experts.shared_gated:
            return ABSENT
        place = at.logits.address + self.experts.count * FLOAT.itemsize
        return Buffer(place, at.logits.shape, FLOAT)
