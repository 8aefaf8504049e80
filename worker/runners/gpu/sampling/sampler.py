"""Draws a token for each row of logits: launches `sample.cu`, and `sample_filtered.cu` after it."""

from typing import Protocol

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["Sampler", "Slots"]

_BLOCKS = 4  # of `sample` that a multiprocessor holds
_BEST_BYTES = 12


class Slots(Protocol):
    """Addresses of the per-slot arrays that sampling reads and writes, and the words of a row of `seen`."""

    temperature: int
    top_k: int
    top_p: int
    min_p: int
    penalty: int
    seeds: int
    last_token: int
    seen: int
    words: int


class Sampler:
    """Draws as `worker.runners.sampling` defines it.

    max_rows  most rows of one call
    """

    def __init__(self, device: Device, vocab: int, *, max_rows: int) -> None:
        self._device = device
        self._vocab = vocab
        self._max_rows = max_rows
        self._blocks = _BLOCKS * device.multiprocessors
        slots = "PPPPPPPPi"
        sample, filtered = (KernelPairs(device, source) for source in _sources())
        self._sample = sample.function("sample", "PiPPP" + slots + "PPP")
        self._sample_filtered = filtered.function("sample_filtered", "PiPPP" + slots + "Pi")
        best, counters = _scratch(max_rows, device.multiprocessors)
        self._partial_best = device.allocate(best, "sampling")
        self._counters = device.allocate(counters, "sampling")
        device.fill(self._counters, 0, counters)

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it is compiled from."""
        return _sources()

    @staticmethod
    def workspace(*, max_rows: int, multiprocessors: int) -> int:
        """Bytes of device memory that it takes."""
        return sum(_scratch(max_rows, multiprocessors))

    def __call__(
        self, logits: Buffer, count: int, sample_slots: int, sample_rows: int, positions: int, slots: Slots,
        out_tokens: Buffer,
    ) -> None:  # fmt: skip
        """Queue it for logits (R, V) float, whose rows have room for a multiple of 8.

        sample_slots  (R,) int32, negative: the row is skipped
        sample_rows   (R,) indices into `positions` of the rows' last tokens; the token drawn is the one after
        out_tokens    (R,) int32; the slots' last_token is set too, and with a penalty the bit in `seen`;
                      NOT_A_NUMBER where the logits are none, and 0 in last_token
        """
        if count > self._max_rows:
            raise RunnerError(f"{count} rows to sample at once, but room for {self._max_rows}")
        if not count:
            return
        vocab = self._vocab
        inputs = (
            logits.address, vocab, sample_slots, sample_rows, positions, slots.temperature, slots.top_k,
            slots.top_p, slots.min_p, slots.penalty, slots.seeds, slots.last_token, slots.seen, slots.words,
        )  # fmt: skip
        # A block has 512 threads of 4 tokens: more blocks than that have nothing to do.
        blocks = min(-(-self._blocks // count), -(-vocab // 2048))
        self._sample.of(count)(
            (blocks, count, 1), (512, 1, 1), *inputs, self._partial_best, self._counters, out_tokens.address,
        )  # fmt: skip
        grid = (min(count, self._device.multiprocessors), 1, 1)  # each at most 1,024 rows
        self._sample_filtered.of(count)(grid, (1024, 1, 1), *inputs, out_tokens.address, count)


def _sources() -> list[Source]:
    return [source_of("sample"), source_of("sample_filtered")]


def _scratch(max_rows: int, multiprocessors: int) -> tuple[int, int]:
    """Bytes of the best tokens of blocks, at most `all at once + R` for R rows, and of counters."""
    return _BEST_BYTES * (max_rows + _BLOCKS * multiprocessors), 4 * max_rows
