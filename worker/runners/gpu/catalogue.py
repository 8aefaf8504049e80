"""All launchers: what a runner compiles for a model, and which models it takes."""

from typing import Protocol

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, Activations
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.attention.widening import Widening
from nightmill.worker.runners.gpu.computed import refusal
from nightmill.worker.runners.gpu.device.sources import Source, for_element
from nightmill.worker.runners.gpu.numbers import HALF, Numbers, WeightNumbers
from nightmill.worker.runners.gpu.products.few_rows import FewRows
from nightmill.worker.runners.gpu.products.hopper_fp8 import HopperFp8
from nightmill.worker.runners.gpu.products.hopper_qkv import HopperQkv
from nightmill.worker.runners.gpu.products.hopper_tiles import HopperTiles
from nightmill.worker.runners.gpu.products.library import LibraryProducts
from nightmill.worker.runners.gpu.products.packed_few import PackedFew
from nightmill.worker.runners.gpu.products.packed_qkv import PackedQkv
from nightmill.worker.runners.gpu.products.packed_rows import PackedRows
from nightmill.worker.runners.gpu.products.packed_tiles import PackedTiles
from nightmill.worker.runners.gpu.products.split import SplitTiles
from nightmill.worker.runners.gpu.products.unpacked import Unpacked
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.logits import LogitScale
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.quantise import Quantise
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.sampling.sampler import Sampler
from nightmill.worker.runners.gpu.weights.dequantizer import Dequantizer
from nightmill.worker.runners.gpu.weights.repacker import Repacker
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["Launcher", "check_spec", "sources_for", "workspace_bytes"]


class Launcher(Protocol):
    """Some kernels: its instances queue them on the device's stream.

    Operands are those of `device.operands`. No method but the constructor and those that reserve or tune
    allocates, waits, or looks at the device's data, and launch shapes hang on the arguments alone: all can be
    captured in a CUDA graph, which then serves whatever the arrays hold. Shapes and layouts of the arrays are
    told at the top of each `.cu` file. A launcher that has a rival says what it `suits`; one that keeps
    device memory says how much by `workspace`; one that stands last says by `refusal` what nothing computes.
    """

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """What it compiles for a model, whatever the element; nothing where others compute it."""
        ...


class PackedLauncher(Protocol):
    """The same of kernels for packed matrices, which only models have whose weights stay as in the file."""

    @classmethod
    def sources(cls, spec: ModelSpec, numbers: Numbers, *, hopper: bool) -> list[Source]:
        """What it compiles for the formats of a model."""
        ...


# Those that compile longest first.
_OF_ELEMENTS: tuple[type[Launcher], ...] = (HopperTiles, HopperQkv, SplitTiles, FewRows)
_OF_FP8: tuple[type[Launcher], ...] = (HopperFp8, Quantise)
_LAUNCHERS: tuple[type[Launcher], ...] = (
    Embedding, Norms, Activate, Rotation, LogitScale, DecodeAttention, HopperPrefill, PortablePrefill,
    GeneralDecode, Sampler, Dequantizer,
)  # fmt: skip
_PACKED_LAUNCHERS: tuple[type[PackedLauncher], ...] = (
    PackedTiles, PackedFew, PackedQkv, PackedRows, Unpacked, Repacker,
)  # fmt: skip
_LAST = (Norms, Activate, Rotation, PortablePrefill)


def sources_for(spec: ModelSpec, numbers: Numbers, *, hopper: bool) -> list[Source]:
    """Files and options for nvcc; those that take longest first."""
    products = _OF_FP8 if numbers.weights is WeightNumbers.FP8 else _OF_ELEMENTS
    widening = (Widening,) if numbers.kv is KvFormat.FP8 else ()
    launchers: tuple[type[Launcher], ...] = (*products, *_LAUNCHERS, *widening)
    found = (source for launcher in launchers for source in launcher.sources(spec, hopper=hopper))
    packed = (
        source for launcher in _PACKED_LAUNCHERS for source in launcher.sources(spec, numbers, hopper=hopper)
    )
    return list(
        dict.fromkeys(for_element(source, numbers.element, numbers.kv) for source in (*found, *packed))
    )


def workspace_bytes(
    spec: ModelSpec,
    numbers: Numbers,
    multiprocessors: int,
    *,
    slots: int,
    max_context: int,
    max_tokens: int,
    max_draws: int,
    hopper: bool = True,
) -> int:
    """Device memory for activations, and that launchers keep; of an unknown GPU, as if it were a Hopper."""
    attention = spec.layers[0].attention
    needed = [
        Activations.workspace(spec, numbers, max_tokens=max_tokens, max_draws=max_draws),
        LibraryProducts.workspace(),
        Unpacked.workspace(spec, numbers),
        Sampler.workspace(max_rows=LOGIT_ROWS, multiprocessors=multiprocessors),
        *(Rotation.workspace(one, max_context=max_context) for one in spec.attentions),
    ]
    if DecodeAttention.suits(attention):
        needed.append(
            DecodeAttention.workspace(attention, max_context=max_context, multiprocessors=multiprocessors)
        )
    if HopperPrefill.suits(attention, hopper=hopper):
        sizes = {"slots": slots, "max_context": max_context, "max_tokens": max_tokens}
        needed.append(HopperPrefill.reserved(spec, numbers.kv, **sizes))
    return sum(needed)


def check_spec(spec: ModelSpec, numbers: Numbers = HALF) -> None:
    """Raise RunnerError, which names the part or the size, if kernels do not take a model."""
    problems = [refusal(spec), *(launcher.refusal(spec) for launcher in _LAST)]
    # A step has one set of tiles and pieces, which all layers share.
    if len({(one.heads, one.kv_heads, one.head_dim) for one in spec.attentions}) > 1:
        problems.append("layers with different heads")
    for problem in filter(None, problems):
        raise RunnerError(f"the CUDA kernels do not take {problem}; `--reference` generates without a GPU")
    if numbers.weights is WeightNumbers.FP8 and (odd := HopperFp8.refusal(spec)):
        raise RunnerError(f"the kernels for FP8 weights do not take {odd}: give another --weights")
