"""Logits on their way from the LM head to sampling."""

from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import KernelPairs, blocks_for
from nightmill.worker.runners.gpu.device.operands import Buffer
from nightmill.worker.runners.gpu.device.sources import Source, source_of

__all__ = ["LogitScale"]


class LogitScale:
    """Launches `logits.cu`, for models that scale their logits or cap them; for others it does nothing."""

    def __init__(self, device: Device, spec: ModelSpec) -> None:
        self._scale, self._cap = spec.logit_scale, spec.logit_softcap or 0.0
        self._kernel = None
        if _needs(spec):
            self._kernel = KernelPairs(device, source_of("logits")).function("scale_logits", "Piiff")

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


def _needs(spec: ModelSpec) -> bool:
    return spec.logit_scale != 1.0 or spec.logit_softcap is not None
