"""Every distinct product that the GPU runner launches for the models and file types that people have.

From a model's spec and the types of its tensors follow the matrices, as the loader stacks them, and from the
spec the kind of each product, by the same functions that the runner asks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from nightmill.worker.model.spec import Attention, LayerSpec, ModelSpec, Role, Weight
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.kinds import layer_kinds
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.gpu.shapes import Kind
from nightmill.worker.runners.gpu.weights.layout import runs_of
from tests.support.llama_quantiser import FILE_TYPES, FileType, type_in_layer, types_of
from tests.support.real_models import REAL_MODELS

__all__ = [
    "HEAD_ROWS", "IN_FILE", "ROWS", "Part", "RealProduct", "RealQkv", "products_in", "real_products",
    "real_qkvs", "rows_of", "typed_specs",
]  # fmt: skip

ROWS = (1, 3, 8, 17, 64, 200, 2048)
HEAD_ROWS = (1, 3, 8, 17, 64, 200, 512)
"""The head has no more than `LOGIT_ROWS` at once."""
IN_FILE, IN_ELEMENTS, IN_FP8 = (
    Precision(weights=weights) for weights in (WeightsFormat.FILE, WeightsFormat.ELEMENT, WeightsFormat.FP8)
)


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Rows of a weight in one format."""

    format: str
    rows: int


@dataclass(frozen=True, slots=True, order=True)
class RealProduct:
    """A product: its kind, sizes, and the formats of the weight, one after the other."""

    kind: str
    inputs: int
    outputs: int
    parts: tuple[Part, ...]

    @property
    def format(self) -> Format:
        """As the chooser is told it."""
        return Format[self.parts[0].format] if len(self.parts) == 1 else Format.MIXED

    @property
    def formats(self) -> str:
        """Of its parts, for names of tests."""
        return "+".join(part.format for part in self.parts)

    def __str__(self) -> str:
        return f"{self.kind} {self.outputs:,} x {self.inputs:,}, {self.formats}"


@dataclass(frozen=True, slots=True)
class RealQkv:
    """Queries, keys and values in one launch: attention's sizes, the width, and the formats of the weight."""

    attention: Attention
    width: int
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        heads = f"{self.attention.heads}+2x{self.attention.kv_heads} heads of {self.attention.head_dim}"
        return f"qkv {heads} x {self.width:,}, {'+'.join(part.format for part in self.parts)}"


def rows_of(product: RealProduct) -> tuple[int, ...]:
    """Numbers of rows to try it with."""
    return HEAD_ROWS if product.kind == Kind.FLOAT.value else ROWS


# Files that other tools write, which choose a type for each tensor; llama.cpp's chooses one for gate and up.
_BY_HAND = {
    "gate and up": {"ffn_gate": "Q4_K", "ffn_up": "Q6_K"},
    "gate and up, other order": {"ffn_gate": "Q6_K", "ffn_up": "Q5_K"},
    "gate and up, small blocks": {"ffn_gate": "Q4_0", "ffn_up": "Q8_0"},
    "three in one": {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K"},
    "three, small blocks": {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q5_1"},
}
_BY_HAND_MODELS = ("SmolLM2 135M", "Qwen2.5 1.5B", "Llama 3.1 8B", "Gemma 2 2B", "Gemma 3 1B")


@cache
def typed_specs() -> tuple[ModelSpec, ...]:
    """All models with the tensor types of every file that they may come in, each of layers that differ."""
    found: list[ModelSpec] = []
    for model in REAL_MODELS:
        spec = model.spec
        found += [_thinned(spec, file_type) for file_type in FILE_TYPES]
        if model.name in _BY_HAND_MODELS:
            found += [_by_hand(spec, chosen) for chosen in _BY_HAND.values()]
    return tuple(found)


def _thinned(spec: ModelSpec, file_type: FileType) -> ModelSpec:
    """The spec with types, and of its layers the first of each kind."""
    matrices = {layer: _matrices(layer, spec.width) for layer in set(spec.layers)}
    kept: dict[tuple[LayerSpec, tuple[str, ...]], None] = {}
    for index, layer in enumerate(spec.layers):
        types = (type_in_layer(spec, file_type, index, name, columns) for name, columns in matrices[layer])
        kept[layer, tuple(types)] = None
    thin = replace(spec, layers=tuple(layer for layer, _ in kept))
    named = types_of(thin, file_type)
    for index, (layer, chosen) in enumerate(kept):
        names = (f"blk.{index}.{name}" for name, _ in matrices[layer])
        named |= dict(zip(names, chosen, strict=True))
    return replace(thin, tensor_types=named)


def _by_hand(spec: ModelSpec, chosen: dict[str, str]) -> ModelSpec:
    """The first layer with those types for tensors of these names where rows are whole blocks; else Q8_0."""
    thin, types = replace(spec, layers=spec.layers[:1]), {}
    for _, weight in thin.all_weights():
        for name, shape in weight.parts:
            kind = chosen.get(name.split(".")[-2], "Q8_0") if weight.is_matrix else "F32"
            types[name] = "Q8_0" if kind.endswith("_K") and shape[1] % 256 else kind
    return replace(thin, tensor_types=types)


def _matrices(layer: LayerSpec, width: int) -> list[tuple[str, int]]:
    """Names of a layer's matrices in the file, and their columns."""
    weights = layer.weights(width).values()
    return [(name, shape[1]) for weight in weights if weight.is_matrix for name, shape in weight.parts]


def products_in(spec: ModelSpec, precision: Precision = IN_FILE) -> Iterator[RealProduct]:
    """The products of a model with these tensor types; some of them several times."""
    product = partial(_product, spec, precision)
    for index, layer in enumerate(spec.layers):
        own, kinds, attention = spec.layer_weights(index), layer_kinds(layer), layer.attention
        gate_up = own[Role.GATE_UP]
        outputs = gate_up.shape[0] if kinds.gate_up is Kind.PLAIN else layer.feed_forward.width
        yield product(Kind.PLAIN, attention.qkv, Role.QKV, own[Role.QKV])
        yield product(kinds.output, spec.width, Role.ATTN_OUTPUT, own[Role.ATTN_OUTPUT])
        yield product(kinds.gate_up, outputs, Role.GATE_UP, gate_up)
        yield product(kinds.down, spec.width, Role.FFN_DOWN, own[Role.FFN_DOWN])
    role = Role.EMBEDDING if spec.tied_head else Role.HEAD
    head = product(Kind.FLOAT, 0, role, spec.weights()[role])
    yield replace(head, outputs=head.parts[0].rows)


def _product(
    spec: ModelSpec, precision: Precision, kind: Kind, outputs: int, role: Role, weight: Weight
) -> RealProduct:
    runs = runs_of(spec, role, weight, precision)
    parts = tuple(Part(run.format.name, run.rows) for run in runs)
    return RealProduct(kind.value, weight.shape[1], outputs, parts)


@cache
def real_products() -> tuple[RealProduct, ...]:
    """All that differ, of each kind those with few inputs first; as in the file, in 16 bits, and in FP8."""
    found = {product for spec in typed_specs() for product in products_in(spec)}
    for model in REAL_MODELS:
        for precision in (IN_ELEMENTS, IN_FP8):
            found.update(products_in(model.spec, precision))
    return tuple(sorted(found))


@cache
def real_qkvs() -> tuple[RealQkv, ...]:
    """All products of queries, keys and values that differ, with what rotates them."""
    found: dict[RealQkv, None] = {}
    for spec in typed_specs():
        for index, layer in enumerate(spec.layers):
            weight = spec.layer_weights(index)[Role.QKV]
            runs = runs_of(spec, Role.QKV, weight, IN_FILE)
            parts = tuple(Part(run.format.name, run.rows) for run in runs)
            found[RealQkv(replace(layer.attention, window=None, softcap=None), spec.width, parts)] = None
    return tuple(found)
