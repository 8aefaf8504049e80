"""Carries masks to the GPU: pinned buffers that grow with what steps ask for, device room for some rows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.base import DrawArray, IntArray, mask_words, masked_draws
from nightmill.worker.runners.gpu.device.device import Device

__all__ = ["MaskBuffers", "StagedMasks"]


class MaskBuffers:
    """Staging for `depth` outstanding steps; `rows`: the most rows that are drawn at once."""

    def __init__(self, device: Device, *, vocab: int, rows: int, depth: int) -> None:
        self._device = device
        self._words = mask_words(vocab)
        self._target = device.allocate(self.bytes(vocab, rows), "masks")
        self._host = [np.zeros((0, self._words), dtype=np.int32)] * depth

    @staticmethod
    def bytes(vocab: int, rows: int) -> int:
        """Device memory that the masks take."""
        return 4 * rows * mask_words(vocab)

    def room(self, turn: int, count: int) -> IntArray:
        """Pinned memory for `count` masks (count, words). `turn`: a buffer whose earlier copies are done."""
        if count > len(self._host[turn]):
            self._host[turn] = self._device.pinned((1 << (count - 1).bit_length(), self._words), np.int32)
        return self._host[turn][:count]

    def stage(self, turn: int, draws: DrawArray, masks: IntArray) -> "StagedMasks":
        """Keep a step's masks (M, words) and draws (R,); masks that were written to `room` are there."""
        staged = self.room(turn, len(masks))
        if not np.shares_memory(staged, masks):
            staged[:] = masks
        return StagedMasks(self._device, self._target, staged, masked_draws(draws))


@dataclass(frozen=True, slots=True)
class StagedMasks:
    """A step's masks (M, words), pinned; `places` (M,): which draws have them."""

    device: Device
    target: int
    masks: IntArray
    places: npt.NDArray[np.intp]

    def send(self, first: int, rows: int) -> tuple[int, int, int]:
        """Queue the copy of the masks of some draws: address and number of the first one, and how many."""
        begin, end = np.searchsorted(self.places, (first, first + rows)).tolist()
        if end > begin:
            self.device.copy_in(self.target, self.masks[begin:end])
        return self.target, begin, end - begin
