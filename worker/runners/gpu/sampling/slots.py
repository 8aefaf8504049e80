"""Slots: the table of records of running sequences, which the kernels of sampling read.

One slot more than sequences can have belongs to the rows that pad a captured graph.

Tokens seen are a bitmap for each slot, V / 8 bytes: 39 MB for 2,048 slots of 152,000 tokens. Counts, which
presence and frequency penalties ask for, would be two bytes a token, 622 MB: they are made anew for each
draw, of the tokens that the KV cache says it is of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nightmill.worker.runners.adjusting import adjusts
from nightmill.worker.runners.base import Admission, DrawArray, mask_words
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.sampling.logit_adjustments import ADJUSTMENT_WORDS, write_adjustments
from nightmill.worker.runners.gpu.sampling.sampler import SLOT, Sampler
from nightmill.worker.runners.sampling import parameters_of

__all__ = ["SlotTable"]

_AT_ONCE = 64  # sequences with a bitmap, and with adjustments, that arrive without a wait between them


@dataclass(slots=True)
class _Staging:
    rows: npt.NDArray[np.uint8]
    bitmaps: npt.NDArray[np.uint32]
    adjustments: npt.NDArray[np.int32]


class SlotTable:
    """The records of all slots on the device, at `address`: (slots + 1,) SLOT."""

    def __init__(self, device: Device, sampler: Sampler, *, slots: int, vocab: int, depth: int) -> None:
        self._device = device
        self._sampler = sampler
        self._words = mask_words(vocab)
        self._bitmap_bytes = 4 * self._words
        self.address = device.upload(np.zeros(slots + 1, dtype=SLOT), "the table of slots")
        self._arriving = device.allocate(slots * _ARRIVAL_BYTES, "sequences that take a slot")
        self._seen = device.allocate(slots * self._bitmap_bytes, "tokens seen")
        self._adjustments = device.allocate(slots * _ADJUSTMENT_BYTES, "biases and banned words")
        self._adjusted = np.zeros(slots, dtype=np.bool_)
        self._staging = [
            _Staging(
                device.pinned(slots * _ARRIVAL_BYTES, np.uint8),
                device.pinned((_AT_ONCE, self._words), np.uint32),
                device.pinned((_AT_ONCE, ADJUSTMENT_WORDS), np.int32),
            )
            for _ in range(depth)
        ]

    @staticmethod
    def bytes(slots: int, vocab: int) -> int:
        """Device memory that the table takes, with all that belongs to it."""
        return (slots + 1) * (
            SLOT.itemsize + _ARRIVAL_BYTES + 4 * mask_words(vocab) + _ADJUSTMENT_BYTES
        ) + 4096

    def adjusts(self, draws: DrawArray) -> bool:
        """Return whether the logits of any of these draws are adjusted."""
        slots = draws["slot"]
        return bool(self._adjusted[slots[slots >= 0]].any())

    def admit(self, admissions: Sequence[Admission], turn: int) -> None:
        """Queue the arrival of sequences. `turn`: a staging buffer whose earlier copies are done."""
        count = len(admissions)
        if not count:
            return
        staged = self._staging[turn].rows[: count * _ARRIVAL_BYTES]
        rows = staged[: count * SLOT.itemsize].view(SLOT)
        places = staged[count * SLOT.itemsize :].view(np.int32)
        staging = self._staging[turn]
        used = 0  # places of the staging
        for index, admission in enumerate(admissions):
            slot, seen, adjustments = admission.slot, 0, 0
            repeats = admission.params.repetition_penalty != 1.0
            # What tells log-probabilities reads logits with their penalties applied.
            adjusted = adjusts(admission) or (repeats and admission.params.logprobs is not None)
            if repeats or adjusted:
                if used == _AT_ONCE:
                    self._device.synchronize()
                    used = 0
                if repeats:
                    mark(staging.bitmaps[used], admission.token_ids)
                    seen = self._seen + slot * self._bitmap_bytes
                    self._device.copy_in(seen, staging.bitmaps[used])
                if adjusted:
                    words = write_adjustments(staging.adjustments[used], admission)
                    adjustments = self._adjustments + slot * _ADJUSTMENT_BYTES
                    self._device.copy_in(adjustments, staging.adjustments[used, :words])
                used += 1
            self._adjusted[slot] = adjusted
            rows[index] = (
                *parameters_of(admission),
                admission.token_ids[-1],
                adjusted,
                len(admission.token_ids) - admission.answered,
                len(admission.params.logit_bias),
                len(admission.banned),
                adjustments,
                seen,
            )
            places[index] = slot
        self._device.copy_in(self._arriving, staged)
        self._sampler.admit(self._arriving, self._arriving + rows.nbytes, self.address, count)


_ARRIVAL_BYTES = SLOT.itemsize + 4  # a record and the number of its slot
_ADJUSTMENT_BYTES = 4 * ADJUSTMENT_WORDS


def mark(row: npt.NDArray[np.uint32], token_ids: Sequence[int]) -> None:
    """Set the bits of these tokens in a bitmap (words,) of uint32, and clear all others."""
    row[:] = 0
    tokens = np.unique(np.asarray(token_ids, dtype=np.uint32))
    np.bitwise_or.at(row, tokens >> 5, np.uint32(1) << (tokens & 31))
