"""The list of all launchers: kernel files to compile for a model, memory, and models that are refused."""

from typing import Protocol

from nightmill.jobs.errors import RunnerError
from nightmill.worker.model.spec import LatentAttention, ModelSpec
from nightmill.worker.runners.gpu.activations import LOGIT_ROWS, Activations
from nightmill.worker.runners.gpu.attention.choice import attention_workspace
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.general import GeneralDecode
from nightmill.worker.runners.gpu.attention.hopper_wide import HopperWide
from nightmill.worker.runners.gpu.attention.latent import LatentKernels
from nightmill.worker.runners.gpu.attention.latent_rows import LatentRows
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill, PortablePrefill
from nightmill.worker.runners.gpu.attention.wide import WideDecode
from nightmill.worker.runners.gpu.attention.widening import Widening
from nightmill.worker.runners.gpu.computed import refusal
from nightmill.worker.runners.gpu.device.chosen import NamedGpu
from nightmill.worker.runners.gpu.device.sources import Source, for_element
from nightmill.worker.runners.gpu.experts.combine import Combine
from nightmill.worker.runners.gpu.experts.grouped import GroupedProducts
from nightmill.worker.runners.gpu.experts.route import Routing
from nightmill.worker.runners.gpu.precision import HALF, Precision
from nightmill.worker.runners.gpu.products.formats import ModelFormats
from nightmill.worker.runners.gpu.rows.activate import Activate
from nightmill.worker.runners.gpu.rows.embedding import Embedding
from nightmill.worker.runners.gpu.rows.layer_inputs import LayerInputRows
from nightmill.worker.runners.gpu.rows.logits import LogitScale
from nightmill.worker.runners.gpu.rows.norms import Norms
from nightmill.worker.runners.gpu.rows.pooling import PooledSums
from nightmill.worker.runners.gpu.rows.predictor import predictor_sources
from nightmill.worker.runners.gpu.rows.rotation import Rotation
from nightmill.worker.runners.gpu.sampling.sampler import Sampler
from nightmill.worker.runners.gpu.states.choice import StateMixers
from nightmill.worker.runners.gpu.states.memory import States
from nightmill.worker.runners.gpu.weights.dequantizer import Dequantizer
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["Launcher", "check_spec", "sources_for", "workspace_bytes"]


class Launcher(Protocol):
    """A class that launches some kernels: its instances queue them on the device's stream.

    Operands are those of `device.operands`. No method but the constructor and those that reserve or tune
    allocates, waits, or looks at the device's data, and launch shapes hang on the arguments alone: all can be
    captured in a CUDA graph, which then serves whatever the arrays hold. Shapes and layouts of the arrays are
    told at the top of each `.cu` file. A launcher that has a rival says what it `suits`; one that keeps
    device memory says how much by `workspace`; one that stands last says by `refusal` what nothing computes.
    """

    @classmethod
    def sources(cls, spec: ModelSpec, *, hopper: bool) -> list[Source]:
        """List the kernel files for a model, whatever the element; none if others compute it."""
        ...


_LAUNCHERS: tuple[type[Launcher], ...] = (
    Embedding, LayerInputRows, Norms, Activate, Rotation, LogitScale, PooledSums, DecodeAttention,
    HopperPrefill, PortablePrefill, HopperWide, WideDecode, GeneralDecode, LatentKernels, StateMixers, States,
    Routing, Combine, Sampler, Dequantizer,
)  # fmt: skip
_LAST = (
    LayerInputRows,
    Norms,
    Activate,
    Rotation,
    PortablePrefill,
    LatentKernels,
    StateMixers,
    Routing,
    Combine,
    GroupedProducts,
)


def sources_for(
    spec: ModelSpec, precision: Precision, *, hopper: bool, predicts: bool = False
) -> list[Source]:
    """Files and options for nvcc; those that take longest first.

    predicts  by the block that predicts further tokens, too
    """
    widening = (Widening,) if precision.kv is KvFormat.FP8 else ()
    others = (s for launcher in (*_LAUNCHERS, *widening) for s in launcher.sources(spec, hopper=hopper))
    products = [
        *ModelFormats(spec, precision).sources(hopper=hopper),
        *GroupedProducts.sources(spec, precision, hopper=hopper),
    ]
    sources = (*products, *others, *(predictor_sources() if predicts else ()))
    return list(dict.fromkeys(for_element(source, precision.element, precision.kv) for source in sources))


def workspace_bytes(
    spec: ModelSpec,
    precision: Precision,
    multiprocessors: int,
    *,
    slots: int,
    max_context: int,
    max_tokens: int,
    max_draws: int,
    hopper: bool = True,
) -> int:
    """Device memory for activations, and that launchers keep; of an unknown GPU, as if it were a Hopper."""
    needed = [
        Activations.workspace(spec, precision, max_tokens=max_tokens, max_draws=max_draws),
        ModelFormats(spec, precision).workspace(),
        Sampler.workspace(max_rows=LOGIT_ROWS, multiprocessors=multiprocessors),
        Rotation.workspace(spec, max_context=max_context),
        *(LatentRows.workspace(one, max_context=max_context) for one in spec.latents),
    ]
    if spec.latents:
        return sum(needed) + LatentKernels.workspace(spec.latents[0])
    of_attention = attention_workspace(
        spec, precision.kv, hopper=hopper, multiprocessors=multiprocessors, slots=slots,
        max_context=max_context, max_tokens=max_tokens,
    )  # fmt: skip
    return sum(needed) + of_attention


def check_spec(spec: ModelSpec, precision: Precision = HALF, gpu: NamedGpu | None = None) -> None:
    """Raise RunnerError, which names the part or the size, if kernels do not take a model.

    gpu  that may lack what the precision or the model needs
    """
    problems = [refusal(spec)]
    if problems == [None]:  # launchers know nothing of what is refused
        problems += [launcher.refusal(spec) for launcher in _LAST]
    # Of latents a step has one set of tiles and pieces, which all layers share.
    if len({(one.heads, one.latent, one.kept) for one in spec.latents}) > 1:
        problems.append("latents of different heads")
    for problem in filter(None, problems):
        raise RunnerError(f"the CUDA kernels do not take {problem}; `--reference` generates without a GPU")
    if spec.latents and precision.kv is KvFormat.FP8:
        raise RunnerError(f"{LatentAttention.title} keeps its latents in elements: leave out `--kv fp8`")
    if gpu is not None and (reason := StateMixers.refusal_on(spec, gpu)) is not None:
        raise RunnerError(reason)
    if (rounded := ModelFormats(spec, precision).rounded) is not None:
        reason = rounded.refusal(spec) or (None if gpu is None else rounded.refusal_on(gpu))
        if reason is not None:
            raise RunnerError(reason)
