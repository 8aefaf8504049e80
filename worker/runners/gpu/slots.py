"""What the GPU knows about each running sequence: sampling parameters, last token, tokens seen.

One slot more than sequences can have belongs to the rows that pad a captured graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nightmill.worker.runners.base import Admission
from nightmill.worker.runners.gpu.device.device import Device, aligned

__all__ = ["SlotState"]

_BITMAPS_AT_ONCE = 64
_FIELDS = (
    ("seeds", np.uint64, 0),
    ("temperature", np.float32, 0),
    ("top_k", np.int32, 0),
    ("top_p", np.float32, 1),
    ("min_p", np.float32, 0),
    ("penalty", np.float32, 1),
)


@dataclass(slots=True)
class _Staging:
    parameters: np.ndarray
    bitmaps: np.ndarray


class SlotState:
    """Per-slot arrays of length slots + 1 on the device; the attributes are their addresses.

    seeds (uint64), temperature, top_p, min_p, penalty (float32), top_k, last_token (int32), and `seen`
    (slots + 1, words) uint32: bit t of row s is set where sequence s has token t; only kept for sequences
    with a repetition penalty.
    """

    def __init__(self, device: Device, *, slots: int, vocab: int, depth: int) -> None:
        self._device = device
        self.words = -(-vocab // 32)
        self._row_bytes = 4 * self.words
        count = slots + 1
        sizes = [aligned(count * np.dtype(kind).itemsize) for _, kind, _ in _FIELDS]
        offsets = np.cumsum([0, *sizes])
        self._host = np.zeros(int(offsets[-1]), dtype=np.uint8)
        self._views = {}
        addresses = {}
        self._parameters = device.allocate(self._host.nbytes, "sampling parameters")
        for (name, kind, default), offset in zip(_FIELDS, offsets, strict=False):
            view = self._host[offset : offset + count * np.dtype(kind).itemsize].view(kind)
            view[:] = default
            self._views[name] = view
            addresses[name] = self._parameters + int(offset)
        self.seeds, self.temperature = addresses["seeds"], addresses["temperature"]
        self.top_k, self.top_p = addresses["top_k"], addresses["top_p"]
        self.min_p, self.penalty = addresses["min_p"], addresses["penalty"]
        self.last_token = device.upload(np.zeros(count, dtype=np.int32), "last tokens")
        self.seen = device.allocate(count * self._row_bytes, "tokens seen")
        device.fill(self.seen, 0, count * self._row_bytes)
        self._staging = [
            _Staging(
                device.pinned(self._host.nbytes, np.uint8),
                device.pinned((_BITMAPS_AT_ONCE, self.words), np.uint32),
            )
            for _ in range(depth)
        ]
        self._upload(0)

    @staticmethod
    def bytes(slots: int, vocab: int) -> int:
        """Device memory that the state takes."""
        return (slots + 1) * (4 * -(-vocab // 32) + 32) + 4096

    def admit(self, admissions: Sequence[Admission], turn: int) -> None:
        """Queue the arrival of sequences. `turn`: a staging buffer whose earlier copies are done."""
        views = self._views
        bitmaps = 0
        for admission in admissions:
            slot, params = admission.slot, admission.params
            views["seeds"][slot] = admission.seed
            views["temperature"][slot] = params.temperature
            views["top_k"][slot] = params.top_k
            views["top_p"][slot] = params.top_p
            views["min_p"][slot] = params.min_p
            views["penalty"][slot] = params.repetition_penalty
            if params.repetition_penalty != 1.0:
                if bitmaps == _BITMAPS_AT_ONCE:
                    self._device.synchronize()
                    bitmaps = 0
                row = self._staging[turn].bitmaps[bitmaps]
                bitmaps += 1
                mark(row, admission.token_ids)
                self._device.copy_in(self.seen + slot * self._row_bytes, row)
        if admissions:
            self._upload(turn)

    def _upload(self, turn: int) -> None:
        staged = self._staging[turn].parameters
        staged[:] = self._host
        self._device.copy_in(self._parameters, staged)


def mark(row: np.ndarray, token_ids: Sequence[int]) -> None:
    """Set the bits of these tokens in a bitmap (words,) of uint32, and clear all others."""
    row[:] = 0
    tokens = np.unique(np.asarray(token_ids, dtype=np.uint32))
    np.bitwise_or.at(row, tokens >> 5, np.uint32(1) << (tokens & 31))
