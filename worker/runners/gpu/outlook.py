"""The kernels that a GPU would compute a model by, told before anything is compiled; asks no device."""

from collections.abc import Iterator

from nightmill.worker.model.spec import Attention, ModelSpec
from nightmill.worker.runners.gpu.attention.choice import by_heads
from nightmill.worker.runners.gpu.attention.decode import DecodeAttention
from nightmill.worker.runners.gpu.attention.hopper_wide import HopperWide
from nightmill.worker.runners.gpu.attention.prefill import HopperPrefill
from nightmill.worker.runners.gpu.attention.scores import PREFILL_HEADS
from nightmill.worker.runners.gpu.attention.wide import WideDecode
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.device.sources import Source
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.elements.few_rows import FewRows
from nightmill.worker.runners.gpu.products.packed.packed_gemm import packed_products
from nightmill.worker.runners.gpu.states.choice import StateMixers
from nightmill.worker.runners.gpu.weights.layout import formats_in
from nightmill.worker.runners.kv_format import KvFormat

__all__ = ["kernel_outlook"]


def kernel_outlook(spec: ModelSpec, precision: Precision, *, hopper: bool) -> dict[str, str]:
    """Words for a person, by what is computed. `precision` is as chosen, never `auto`.

    `sources_for` lists the files of these kernels; of several that suit, a worker times which is fastest.
    """
    found = dict(_products(spec, precision, hopper=hopper))
    if spec.experts:
        found["experts"] = f"grouped products by {'wgmma' if hopper else 'mma.sync'}"
    if states := StateMixers.sources(spec, hopper=hopper):
        found["states"] = _states(states)
    if spec.latents:
        wide = "by wgmma" if hopper else "by mma.sync"
        return found | {"attention": f"latent attention, of prompts {wide}"}
    kinds = {alike[0].head_dim: _attention(alike, precision, hopper=hopper) for alike in by_heads(spec)}
    found["drawn tokens"], found["prompts"] = map("; ".join, zip(*kinds.values(), strict=True))
    if spec.encoder is not None:
        del found["drawn tokens"]
    return found


def _states(sources: list[Source]) -> str:
    """The kernels of layers with states, by the files."""
    names = {path.stem for path, _ in sources}
    if names == {"convolution"}:
        return "short convolutions"
    by = "wgmma" if names & {"delta_hopper", "mamba_hopper"} else "mma.sync"
    return f"of prompts in chunks of 64 tokens by {by}, of drawn tokens one by one"


def _attention(alike: list[Attention], precision: Precision, *, hopper: bool) -> tuple[str, str]:
    """The kernels of drawn tokens and of prompts for layers with equal heads."""
    first, heads = alike[0], f"heads of {alike[0].head_dim}"
    wide = all(map(WideDecode.suits, alike)) and precision.kv is KvFormat.ELEMENT
    if DecodeAttention.suits(first):
        clusters = hopper and DecodeAttention.splits(first)
        drawn = f"fast decode attention for {heads}{', in clusters' if clusters else ''}"
    elif wide:
        drawn = f"wide decode attention for {heads}"
    else:
        drawn = f"attention for {heads}, which the fast one does not take"
    by_wgmma = HopperPrefill.suits(first, hopper=hopper) or (wide and HopperWide.suits(first, hopper=hopper))
    if not (by_wgmma or wide) and first.head_dim not in PREFILL_HEADS:
        return drawn, f"attention for {heads} without tensor cores, which is slow"
    return drawn, f"attention by {'wgmma' if by_wgmma else 'mma.sync'} for {heads}"


def _products(spec: ModelSpec, precision: Precision, *, hopper: bool) -> Iterator[tuple[str, str]]:
    if precision.weights is WeightsFormat.FP8:
        yield "products", f"tiles of FP8 by {'wgmma' if hopper else 'mma.sync'}"
        return
    in_file = {format_ for _, format_ in packed_products(spec, precision)}
    if in_file:
        names = ", ".join(sorted(format_.value[0] for format_ in in_file))
        yield (
            "products",
            f"weights as they are ({names}): "
            + (
                "relays of warps and tiles by wgmma; with many rows through 16 bits"
                if hopper
                else "up to 64 rows by warps, then tiles by mma.sync; from 257 rows on also through 16 bits"
            ),
        )
    if formats_in(spec, precision) & {Format.F16, Format.BF16}:
        tiles = "tiles by wgmma" if hopper else "tiles by mma.sync"
        yield "products in 16 bits", f"{tiles}, or algorithms of cuBLASLt with the same bits"
    elements = (precision.element.format,) if not in_file else tuple(in_file)
    if all(FewRows.suits_products(layer, spec.width, elements, hopper=hopper) for layer in spec.layers):
        yield "few sequences", f"layers in four kernels{' that overlap' if hopper else ''}"
