"""The files, options and architectures that runners compile, so chosen that each risk is met once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeStyle
from nightmill.worker.model.spec import (
    Activation,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    ModelSpec,
    Norm,
    ShortConv,
)
from nightmill.worker.runners.base import DRAW
from nightmill.worker.runners.gpu.attention.latent import latent_kernels
from nightmill.worker.runners.gpu.attention.scores import scoring
from nightmill.worker.runners.gpu.catalogue import sources_for
from nightmill.worker.runners.gpu.device.compiler import included_files
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.device.sources import for_element, members, source_of
from nightmill.worker.runners.gpu.device.waits import BOUNDED_WAITS
from nightmill.worker.runners.gpu.experts.tiles import grouped_source, multipliers
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.rows.predictor import predictor_sources
from nightmill.worker.runners.gpu.sampling.sampler import SLOT
from nightmill.worker.runners.gpu.states.convolution import ShortConvolution
from nightmill.worker.runners.gpu.states.delta_net import DeltaNet
from nightmill.worker.runners.gpu.states.mamba2 import Mamba
from nightmill.worker.runners.kv_format import KvFormat
from tools.kernel_record import ROOT

HOPPER = "sm_90a"
ARCHITECTURES = ("sm_80", HOPPER, "sm_100")
Job = tuple[Path, tuple[str, ...], str]
"""File, options beside those of all, and architecture."""
BOUNDED = ("few_rows", "hopper_attention", "hopper_split", "split_attention")
"""Files that are compiled with bounded waits, too: together they have every kind of wait."""


def every_source() -> Iterator[Job]:
    """File, options and architecture of what runners compile, so chosen that each risk is met once.

    Each kind of product, of attention and of layer, each size of heads and each element is met on each
    architecture that has it, but with one of the rest, not with all: heads of 64 with half, of 128 with BF16.
    They are compiled from the same templates, and what a combination computes is held by `tests/gpu`, and
    without a GPU by the tests that compile kernels for the host. FP8 weights are for Hopper and Ada, with any
    element.
    """
    bundled = read_spec(GgufFile.open(ROOT / "models" / "nightmill-demo.gguf"))
    other = with_other_parts(bundled)
    large = with_heads(bundled, 128, RopeStyle.PAIRS)
    small = with_heads(bundled, 32, RopeStyle.HALVES)
    sixes = replace(bundled, tensor_types=dict.fromkeys(bundled.tensor_types, "Q6_K"))
    f16, bf16 = Precision(Element.F16), Precision(Element.BF16)
    in_file = WeightsFormat.FILE  # packed weights, in the bundled model Q8_0
    chosen = (
        (other, replace(f16, weights=in_file), (HOPPER, "sm_80")),
        (sixes, replace(bf16, weights=in_file), ("sm_80",)),
        (large, bf16, (HOPPER, "sm_80", "sm_100")),
        (small, f16, ("sm_80",)),
        (small, bf16, (HOPPER, "sm_100")),
        (with_scores(bundled, window=512, sinks=True), f16, (HOPPER, "sm_80")),
        (with_scores(large, window=512, softcap=50.0), bf16, (HOPPER,)),
        (with_scores(bundled, window=512, causal=False), f16, (HOPPER, "sm_80")),
        (with_scores(small, softcap=50.0), f16, (HOPPER,)),
        (with_heads(bundled, 96, RopeStyle.HALVES), f16, (HOPPER,)),
        (with_heads(bundled, 256, RopeStyle.HALVES), bf16, (HOPPER,)),
        (with_heads(bundled, 512, RopeStyle.HALVES), f16, (HOPPER,)),
        (other, replace(f16, weights=WeightsFormat.FP8), (HOPPER,)),
        (bundled, replace(f16, kv=KvFormat.FP8), (HOPPER,)),
        (large, replace(bf16, kv=KvFormat.FP8), ("sm_80",)),
    )
    for spec, precision, architectures in chosen:
        for architecture in architectures:
            sources = sources_for(spec, precision, hopper=architecture == HOPPER)
            yield from ((path, options, architecture) for path, options in sources)
    yield from latent_sources()
    heads = scoring("prefill_attention", with_heads(bundled, 256, RopeStyle.HALVES).attentions[0])
    yield (*heads, "sm_80")
    yield (*scoring("wide_attention", with_heads(bundled, 512, RopeStyle.HALVES).attentions[0]), "sm_80")
    for path, options in sources_for(large, replace(bf16, kv=KvFormat.FP8), hopper=False):
        if any(included.name == "e4m3.cuh" for included in included_files(path)):
            yield path, options, "sm_89"
    for path, options in sources_for(other, replace(f16, weights=WeightsFormat.FP8), hopper=False):
        if path.stem == "mma_fp8":
            yield path, options, "sm_89"
    for path, options in sources_for(bundled, f16, hopper=False):
        if path.stem == "decode_attention":  # whose blocks are as many as these have shared memory for
            yield from ((path, options, architecture) for architecture in ("sm_86", "sm_120"))
    yield from state_sources()
    yield from expert_sources()
    for element, architecture in ((Element.F16, HOPPER), (Element.BF16, "sm_80")):
        for source in (source_of("layer_inputs"), *predictor_sources()):
            yield (*for_element(source, element), architecture)
    yield from reference_sources()
    for path, options in sources_for(bundled, f16, hopper=True):
        if path.stem in BOUNDED:
            yield path, (*options, BOUNDED_WAITS), HOPPER


def latent_sources() -> Iterator[Job]:
    """The same of latent attention."""
    attention = LatentAttention(
        heads=20, key_dim=192, value_dim=256, latent=512, norm=Norm(1e-5), scale=1.0,
        rope=Rope(style=RopeStyle.PAIRS, dim=64, base=1e6),
    )  # fmt: skip
    small = replace(attention, latent=40, rope=replace(attention.rope, dim=8))
    for one, element, architecture in (
        (attention, Element.F16, HOPPER),
        (attention, Element.BF16, "sm_80"),
        (attention, Element.BF16, "sm_100"),
        (small, Element.F16, HOPPER),
    ):
        for source in latent_kernels(one, hopper=architecture == HOPPER):
            yield (*for_element(source, element), architecture)


def state_sources() -> Iterator[Job]:
    """The same of layers with states, of the sizes that models have and some others."""
    plain = Norm(1e-6)
    delta = GatedDeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, norm=plain)
    mamba = Mamba2(heads=64, head_dim=64, groups=8, state_size=128, kernel=4, norm=plain)
    of_short = [*ShortConvolution.sources(ShortConv(width=2048, kernel=3)), source_of("copy_states")]
    of_delta = DeltaNet.sources(delta)
    on_hopper = [*DeltaNet.sources(delta, hopper=True), *Mamba.sources(mamba, hopper=True)]
    other_delta = DeltaNet.sources(replace(delta, key_dim=96, value_dim=64, kernel=2))
    other_mamba = Mamba.sources(replace(mamba, head_dim=80, state_size=256, kernel=3))
    for sources, element, architecture in (
        ([*of_short, *on_hopper], Element.F16, HOPPER),
        ([*of_short, *of_delta], Element.BF16, "sm_80"),
        (of_delta, Element.F16, "sm_100"),
        ([*other_delta, *other_mamba], Element.BF16, HOPPER),
    ):
        yield from ((*for_element(source, element), architecture) for source in sources)


def expert_sources() -> Iterator[Job]:
    """The same of mixtures of experts, with weights of each kind."""
    around = [source_of("route"), source_of("combine")]
    for format_, element, architecture in (
        (Format.F16, Element.F16, HOPPER),
        (Format.BF16, Element.BF16, "sm_80"),
        (Format.FP8, Element.BF16, HOPPER),
        (Format.FP8, Element.F16, "sm_89"),
        (Format.Q4_K, Element.BF16, HOPPER),
        (Format.Q6_K, Element.F16, HOPPER),
        (Format.MXFP4, Element.F16, "sm_100"),
    ):
        by = multipliers(format_, hopper=architecture == HOPPER)
        sources = [*([] if architecture == "sm_89" else around), *(grouped_source(format_, on) for on in by)]
        yield from ((*for_element(source, element), architecture) for source in sources)


def reference_sources() -> Iterator[Job]:
    """The readable kernels, which tests alone launch."""
    records = (members("SLOT_MEMBERS", SLOT), members("DRAW_MEMBERS", DRAW))
    yield (*source_of("sample_reference", *records), HOPPER)
    of_elements = [source_of(f"{name}_reference") for name in ("product", "fp8", "rms_norm")]
    packed = [source_of("packed_reference", f"-DFORMAT={name}") for name in ("Q4_K", "Q8_0")]
    rope = [source_of("rope_reference", "-DHEAD_DIM=128", f"-DINTERLEAVED={pairs}") for pairs in (0, 1)]
    for source in (*of_elements, *packed, *rope):
        for element, architecture in ((Element.F16, HOPPER), (Element.BF16, "sm_80")):
            yield (*for_element(source, element), architecture)


def with_heads(spec: ModelSpec, size: int, style: RopeStyle) -> ModelSpec:
    """The model with heads of another size, rotated in that style."""
    layer = spec.layers[0]
    rope = replace(layer.attention.rope, dim=size, style=style)
    attention = replace(layer.attention, head_dim=size, rope=rope)
    return replace(spec, layers=(replace(layer, mixer=attention),) * len(spec.layers))


def with_scores(spec: ModelSpec, **scores: Any) -> ModelSpec:
    """The model with other attention in its last layer."""
    *layers, last = spec.layers
    return replace(spec, layers=(*layers, replace(last, mixer=replace(last.attention, **scores))))


def with_other_parts(spec: ModelSpec) -> ModelSpec:
    """The model with GeGLU, norms after and another type of values in its last layer, and scaled logits."""
    *layers, last = spec.layers
    other = replace(
        last,
        feed_forward=replace(last.feed_forward, activation=Activation.GELU),
        attention_post_norm=spec.output_norm,
        feed_forward_post_norm=spec.output_norm,
    )
    types = {**spec.tensor_types, f"blk.{len(layers)}.attn_v.weight": "Q6_K"}
    return replace(spec, layers=(*layers, other), logit_scale=0.5, tensor_types=types)
