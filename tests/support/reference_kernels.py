"""The readable kernels of `cuda/` (`*_reference.cu`), launched: what fast kernels are held against."""

from dataclasses import dataclass

from nightmill.worker.model.spec import Attention
from nightmill.worker.runners.base import DRAW
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.functions import Module
from nightmill.worker.runners.gpu.device.operands import FLOAT, Buffer, Matrix
from nightmill.worker.runners.gpu.device.sources import members, rotated, source_of
from nightmill.worker.runners.gpu.sampling.sampler import SLOT
from nightmill.worker.runners.gpu.shapes import Kind

__all__ = ["QkvOperands", "ReferenceProducts", "ReferenceSampler", "reference_rms_norm", "reference_rope"]

_NAMES = {Kind.FLOAT: "product", Kind.SWIGLU: "swiglu", Kind.RESIDUAL: "residual"}


class ReferenceProducts:
    """Products of elements, of packed weights (`Kind.FLOAT`) and of FP8 (the same)."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(self, x: Buffer, weight: Matrix, y: Buffer, rows: int, kind: Kind = Kind.FLOAT) -> None:
        """Queue it for x (rows, inputs) and weight (outputs, inputs); y is float, of SWIGLU elements."""
        outputs = weight.rows // 2 if kind is Kind.SWIGLU else weight.rows
        grid = (-(-outputs // 128), rows, 1)
        arguments = [x.address, weight.address, y.address, outputs, weight.columns]
        if weight.format.packed:
            name, source = "packed", source_of("packed_reference", f"-DFORMAT={weight.format.name}")
        elif weight.scales:
            name, source = "fp8", source_of("fp8_reference")
            arguments[1:2] = [x.scales, weight.address, weight.scales]
        else:
            name, source = _NAMES[kind], source_of("product_reference")
        letters = "P" * (len(arguments) - 2) + "ii"
        kernel = Module.of(self._device, source).function(f"{name}_reference", letters)
        kernel(grid, (128, 1, 1), *arguments)


def reference_rms_norm(device: Device, x: Buffer, weight: Buffer, out: Buffer, rows: int, eps: float) -> None:
    """Queue the RMS norms of x (rows, width) float -> elements."""
    assert x.dtype == weight.dtype == FLOAT
    kernel = Module.of(device, source_of("rms_norm_reference")).function("rms_norm_reference", "PPPiif")
    kernel((-(-rows // 32), 1, 1), (32, 1, 1), x.address, weight.address, out.address, rows, x.shape[1], eps)


@dataclass(frozen=True)
class QkvOperands:
    """Queries, keys and values of a product, with what is done to them, on the device.

    qkv        (rows, heads, D) elements, of queries, keys and values
    positions  (rows,) int32
    table      (positions, D / 2, 2) float, cosines and sines
    """

    qkv: Buffer
    bias: Buffer
    q_norm: Buffer
    k_norm: Buffer
    positions: Buffer
    table: Buffer


def reference_rope(device: Device, attention: Attention, given: QkvOperands, out: Buffer) -> None:
    """Queue bias, norms and rotation: out (rows, heads, D) float."""
    eps = 0.0 if attention.qk_norm is None else attention.qk_norm.eps
    module = Module.of(device, source_of("rope_reference", *rotated(attention)))
    rows, all_heads, _ = given.qkv.shape
    weights = (given.bias.address, given.q_norm.address, given.k_norm.address)
    module.function("rope_reference", "PPPPfPPPii")(
        (-(-all_heads // 32), rows, 1), (32, 1, 1), given.qkv.address, *weights, eps, given.positions.address,
        given.table.address, out.address, attention.heads, attention.kv_heads,
    )  # fmt: skip


class ReferenceSampler:
    """Draws, with the arguments of `Sampler.sample`."""

    def __init__(self, device: Device, vocab: int) -> None:
        self._vocab = vocab
        records = (members("SLOT_MEMBERS", SLOT), members("DRAW_MEMBERS", DRAW))
        module = Module.of(device, source_of("sample_reference", *records))
        self._sample = module.function("sample_reference", "PiPPPi")

    def sample(self, logits: Buffer, count: int, draws: int, slots: int, out_tokens: Buffer) -> None:
        """Queue a draw for each row of logits."""
        operands = (logits.address, self._vocab, draws, slots, out_tokens.address, count)
        self._sample((-(-count // 32), 1, 1), (32, 1, 1), *operands)
