"""Logits on their way from the LM head to sampling."""

import numpy as np

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["LogitScale"]


class LogitScale:
    """Launches `logits.cu`, for models that scale, cap or suppress logits; for others it does nothing."""

    def __init__(self, device: Device, spec: ModelSpec) -> None:
        self._scale, self._cap = spec.logit_scale, spec.logit_softcap or 0.0
        self._kernel = self._suppress = None
        self._suppressed, self._count = 0, len(spec.suppressed)
        if _needs(spec):
            kernels = KernelPairs(device, source_of("logits"))
            if _scales(spec):
                self._kernel = kernels.function("scale_logits", "Piiff")
            if spec.suppressed:
                self._suppress = kernels.function("suppress_logits", "PPiii")
                tokens = np.array(spec.suppressed, dtype=np.int32)
                self._suppressed = device.upload(tokens, "suppressed tokens")

    @staticmethod
    def sources(spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model."""
        return [source_of("logits")] if _needs(spec) else []

    def __call__(self, logits: Buffer, rows: int) -> None:
        """Queue it for logits (rows, padded vocab) float, in place."""
        if self._kernel is not None and rows:
            vocab = logits.shape[1]
            self._kernel.of(rows)(
                blocks_for(rows * vocab // 8),
                (256, 1, 1),
                logits.address,
                rows,
                vocab,
                self._scale,
                self._cap,
            )
        if self._suppress is not None and rows:
            self._suppress.of(rows)(
                blocks_for(rows * self._count), (256, 1, 1), logits.address, self._suppressed, rows,
                logits.shape[1], self._count,
            )  # fmt: skip


def _needs(spec: ModelSpec) -> bool:
    return _scales(spec) or bool(spec.suppressed)


def _scales(spec: ModelSpec) -> bool:
    return spec.logit_scale != 1.0 or spec.logit_softcap is not None
