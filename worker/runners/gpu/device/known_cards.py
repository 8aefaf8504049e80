"""Cards that people own, as data: what they have, and a GPU taken for one of them.

On a GPU that stands for another, the worker compiles what that one would run, chooses as it would, and takes
no more of memory, multiprocessors and shared memory than it has. So paths that no card at hand would take
are computed and tested. Speeds there say nothing of the other card's.

Figures: NVIDIA's data sheets and white papers ("NVIDIA A100 Tensor Core GPU Architecture", "NVIDIA Ampere
GA102 GPU Architecture", "NVIDIA Ada GPU Architecture", "NVIDIA RTX Blackwell GPU Architecture", data sheets
of L4, L40S, H100 and H200). FLOPs are of dense 16-bit products with sums in float.
"""

from dataclasses import dataclass

from nightmill.jobs.errors import SettingsError
from nightmill.worker.runners.gpu.device.features import Capability, Features, features_of
from nightmill.worker.runners.gpu.device.peaks import Peaks

__all__ = ["KNOWN_CARDS", "KnownCard", "known_card"]

_FREE_SHARE = 0.95  # of a card's memory, before Nightmill comes: the driver and its context have the rest


@dataclass(frozen=True, slots=True)
class KnownCard:
    """A card.

    key     what a person calls it in NIGHTMILL_PRETEND_DEVICE
    name    as the driver calls it
    memory  GiB
    l2      MiB
    """

    key: str
    name: str
    capability: Capability
    multiprocessors: int
    memory: int
    l2: int
    peaks: Peaks

    @property
    def free(self) -> int:
        """Bytes that nothing else uses, about."""
        return int((self.memory << 30) * _FREE_SHARE)

    @property
    def features(self) -> Features:
        return features_of(self.capability)


KNOWN_CARDS = {
    card.key: card
    for card in (
        KnownCard("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 24, 6, Peaks(0.936e12, 71e12)),
        KnownCard("rtx4060", "NVIDIA GeForce RTX 4060", (8, 9), 24, 8, 24, Peaks(0.272e12, 30e12)),
        KnownCard("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 24, 72, Peaks(1.008e12, 165e12)),
        KnownCard("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 32, 96, Peaks(1.792e12, 209e12)),
        KnownCard("a100", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80, 40, Peaks(2.039e12, 312e12)),
        KnownCard("l4", "NVIDIA L4", (8, 9), 58, 24, 48, Peaks(0.3e12, 121e12)),
        KnownCard("l40s", "NVIDIA L40S", (8, 9), 142, 48, 96, Peaks(0.864e12, 362e12)),
        KnownCard("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 80, 50, Peaks(3.35e12, 989e12)),
        KnownCard("h200", "NVIDIA H200", (9, 0), 132, 141, 50, Peaks(4.8e12, 989e12)),
    )
}  # fmt: skip
"""By key."""


def known_card(key: str | None) -> KnownCard | None:
    """The card of that key; None for none. Raises SettingsError for one that is not known."""
    if key is None:
        return None
    if key.lower() not in KNOWN_CARDS:
        raise SettingsError(
            f"no card is known as {key!r} that a GPU could be taken for: {', '.join(KNOWN_CARDS)}"
        )
    return KNOWN_CARDS[key.lower()]
