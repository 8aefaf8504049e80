"""The CUDA runner itself on the host: kernels as `host_kernels` compiles them, products and draws by NumPy.

Graphs are replayed by queueing what was captured once more, with the addresses that it was captured with.
Nothing runs ahead: a step is done once it is launched. Slow, so models are tiny and answers short.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.base.arithmetic import Arithmetic
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.base import (
    DRAW,
    FOUND,
    NO_LOGPROBS,
    NOT_GIVEN,
    UNMASKED,
    mask_words,
)
from nightmill.worker.runners.gpu import decode_graphs
from nightmill.worker.runners.gpu import runner as runners
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.products.elements import few_rows
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.products.formats import ModelFormats
from nightmill.worker.runners.gpu.products.fp8 import quantise
from nightmill.worker.runners.gpu.rows import pooling, predictor
from nightmill.worker.runners.gpu.runner import CudaRunner
from nightmill.worker.runners.gpu.sampling import sampler
from nightmill.worker.runners.gpu.sampling.sampler import SLOT, Sampler
from nightmill.worker.runners.gpu.states import chunks, convolution, delta_net, mamba2, memory, recurrent
from nightmill.worker.runners.sampling import (
    PARAMETERS,
    SamplingRows,
    apply_masks,
    log_probabilities,
    sample,
)
from tests.support.cuda_runners import cuda_runner
from tests.unit.runners.host_kernels import HostDevice, HostModule
from tests.unit.runners.whole_models import HostProducts, launch_models_on_host

__all__ = ["host_runner", "run_on_host"]

_MEMORY = 1 << 30
_ARITHMETIC = Arithmetic("cuda", "host", "f16", "f16", "host", "model")


class _Device(HostDevice):
    """In place of `Device`; memory that is taken holds NaN."""

    lost = False
    compute_capability = (8, 9)
    pretended = None
    architecture = "host"

    def __init__(self, index: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments)
        self.sizes: dict[int, int] = {}

    def allocate(self, size: int, purpose: str = "") -> int:
        address = super().allocate(size)
        self.fill(address, 0xFF, size)
        if purpose:  # but for tensors on their way
            self.sizes[address] = size
        return address

    def free(self, address: int) -> None:
        super().free(address)
        self.sizes.pop(address, None)

    def free_memory(self) -> int:
        return _MEMORY

    def event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda stream: None)

    def wait(self, event: object, what: str) -> None:
        """All is done when it is launched."""

    stream = None

    @property
    def block_shared(self) -> int:
        return self.features.block_shared

    @property
    def fp8(self) -> bool:
        return self.features.fp8

    def close(self) -> None:
        self._held.clear()


class _Sampler(Sampler):
    """Draws as the definition says, since kernels that do are PTX; not rows whose logits are adjusted."""

    def _rows(self, logits: Buffer, count: int) -> npt.NDArray[np.float32]:
        padded = -(-self._vocab // 8) * 8
        rows = self._device.download(logits.address, (count, padded), np.float32)
        return np.ascontiguousarray(rows[:, : self._vocab])

    def _draws(self, draws: int, count: int) -> npt.NDArray[np.void]:
        return self._device.download(draws, (count * DRAW.itemsize,), np.uint8).view(DRAW)

    def sample(self, logits: Buffer, count: int, draws: int, slots: int, out_tokens: Buffer) -> None:
        rows, asked = self._rows(logits, count), self._draws(draws, count)
        for index in np.flatnonzero(asked["slot"] >= 0).tolist():
            address = slots + int(asked["slot"][index]) * SLOT.itemsize
            slot = self._device.download(address, (SLOT.itemsize,), np.uint8).view(SLOT)
            parameters = np.zeros(1, dtype=PARAMETERS)
            for name in PARAMETERS.names or ():
                parameters[name] = slot[name]
            seen, words = None, -(-self._vocab // 32)
            if slot["seen"][0] and not slot["adjusted"][0]:
                bits = self._device.download(int(slot["seen"][0]), (4 * words,), np.uint8)
                seen = np.unpackbits(bits, bitorder="little")[: self._vocab].astype(np.bool_)
            positions = asked["position"][index : index + 1].astype(np.int64)
            tokens = sample(rows[index : index + 1], SamplingRows(parameters, positions, [seen], {}))
            slot["last_token"] = max(int(tokens[0]), 0)
            self._device.copy_in(address, slot)
            self._device.copy_in(out_tokens.address + 4 * index, tokens.astype(np.int32))
            if seen is not None and tokens[0] >= 0:
                seen[tokens[0]] = True
                kept = np.zeros(32 * words, dtype=np.bool_)
                kept[: self._vocab] = seen
                self._device.copy_in(int(slot["seen"][0]), np.packbits(kept, bitorder="little"))

    def apply_masks(self, logits: Buffer, count: int, draws: int, masks: int, first: int) -> None:
        asked = self._draws(draws, count)
        masked = np.flatnonzero(asked["mask"] != UNMASKED)
        asked["mask"][masked] -= first
        words = self._device.download(masks, (len(masked), mask_words(self._vocab)), np.int32)
        rows = np.full((count, -(-self._vocab // 8) * 8), -np.inf, dtype=np.float32)
        rows[:, : self._vocab] = apply_masks(self._rows(logits, count), asked, words)
        self._device.copy_in(logits.address, rows)

    def log_probabilities(
        self, logits: Buffer, count: int, draws: int, out_tokens: Buffer, found: Buffer
    ) -> None:
        rows, asked = self._rows(logits, count), self._draws(draws, count)
        tokens = self._device.download(out_tokens.address, (count,), np.int32)
        tokens = np.where(asked["given"] == NOT_GIVEN, tokens, asked["given"]).astype(np.int32)
        asking = np.flatnonzero(asked["likely"] != NO_LOGPROBS)
        plain = SamplingRows(np.zeros(count, dtype=PARAMETERS), asked["position"].astype(np.int64),
                             [None] * count, {})  # fmt: skip
        told = log_probabilities(rows[asking], plain.of(asking), tokens[asking], asked["likely"][asking])
        for index, one in zip(asking.tolist(), told, strict=True):
            self._device.copy_in(found.address + index * FOUND.itemsize, np.array([one], dtype=FOUND))
        self._device.copy_in(out_tokens.address, tokens)


@dataclass
class _Graph:
    """In place of `Graph`."""

    device: object
    launch: Callable[[], None]

    def __post_init__(self) -> None:
        self.launch()

    def close(self) -> None:
        """Nothing is held."""


def run_on_host(patch: pytest.MonkeyPatch, folder: Path, *, few: bool = False) -> set[str]:
    """CUDA runners run on the host from now on; which kernels they launched.

    few  steps of few rows by the fused kernels, whose sums have other bits than products by NumPy
    """
    if not few:
        patch.setattr(FewRows, "suits_products", lambda *_, **__: False)
    launched = launch_models_on_host(patch, folder)
    for module in (quantise, pooling, predictor, sampler, chunks, convolution, delta_net, mamba2, recurrent):
        patch.setattr(module, "KernelPairs", HostModule)
    for module in (memory, few_rows):
        patch.setattr(module, "Module", HostModule)
    patch.setattr(runners, "Device", _Device)
    patch.setattr(decode_graphs, "Graph", _Graph)
    patch.setattr(runners, "Sampler", _Sampler)
    patch.setattr(runners, "arithmetic_of", lambda *_: _ARITHMETIC)
    patch.setattr(runners, "compile_all", lambda sources, *_, **__: [b""] * len(sources))
    patch.setattr(runners, "check_products", lambda *_: None)
    patch.setattr(runners, "checked_products", lambda *_: ())
    patch.setattr(ModelFormats, "products", lambda formats, device, *_: HostProducts(device))
    return launched


def host_runner(file: GgufFile, spec: ModelSpec, **options: Any) -> CudaRunner:
    """A runner of few slots and pages; the options are those of `cuda_runner`."""
    sizes = {"slots": 4, "kv_pages": 64, "context": 128, "max_tokens": 128, "tune": False, "graphs": False}
    return cuda_runner(file, spec, **(sizes | options))
