"""Which type llama.cpp's `llama-quantize` gives each tensor of a model: the rules of `src/llama-quant.cpp`.

A file type is a base type and exceptions from it, by what a tensor does and how deep its layer is. Matrices
whose rows are no whole number of blocks of their type get another one. Rules for experts, and the file types
that only keep matrices in formats that become elements here (IQ1 to IQ3), are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from nightmill.worker.model.spec import ModelSpec, Role

__all__ = ["FILE_TYPES", "FileType", "Release", "type_in_layer", "types_of"]

Kind = GGMLQuantizationType


class Release(Enum):
    """Rules changed in 2026: files of both kinds are in use."""

    BEFORE = 2024
    SINCE = 2026


@dataclass(frozen=True, slots=True)
class FileType:
    """What is asked of the quantiser.

    imatrix  an importance matrix is given, which changes the choice for the first layers
    """

    name: str
    base: Kind
    imatrix: bool = False
    release: Release = Release.SINCE

    def __str__(self) -> str:
        notes = [note for note, said in (("imatrix", self.imatrix), ("2024", not self._new)) if said]
        return "-".join([self.name, *notes])

    @property
    def _new(self) -> bool:
        return self.release is Release.SINCE


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stands: its layer, of how many, and how many query heads share a key head."""

    layer: int
    layers: int
    sharing: int

    @property
    def more_bits(self) -> bool:
        """The first and the last eighth of the layers, and every third between."""
        eighth = self.layers // 8
        outside = self.layer < eighth or self.layer >= 7 * self.layers // 8
        return outside or (self.layer - eighth) % 3 == 2

    @property
    def first_eighth(self) -> bool:
        return self.layer < self.layers // 8


_Rule = Callable[[_Place], bool]
_Rules = Mapping[str, tuple[tuple[_Rule, Kind], ...]]
"""By file type: the first condition that holds gives the type; none: the base."""


def _always(place: _Place) -> bool:
    return True


def _more_bits(place: _Place) -> bool:
    return place.more_bits


def _first_eighth(place: _Place) -> bool:
    return place.first_eighth


def _much_shared(place: _Place) -> bool:
    return place.sharing >= 4


_VALUES: Final[_Rules] = {
    "Q2_K": ((_much_shared, Kind.Q4_K), (_always, Kind.Q3_K)),
    "Q3_K_M": ((lambda place: place.layer < 2, Kind.Q5_K), (_always, Kind.Q4_K)),
    "Q3_K_L": ((_always, Kind.Q5_K),),
    "Q4_K_S": ((lambda place: place.layer < 4, Kind.Q5_K),),
    "Q4_K_M": ((_more_bits, Kind.Q6_K),),
    "Q5_K_M": ((_more_bits, Kind.Q6_K),),
    "IQ4_NL": ((_much_shared, Kind.Q5_K),),
    "IQ4_XS": ((_much_shared, Kind.Q5_K),),
}
_FUSED_BEFORE: Final[_Rules] = {  # queries, keys and values in one tensor; since 2026 as values
    "Q3_K_M": ((_always, Kind.Q4_K),),
    "Q3_K_L": ((_always, Kind.Q4_K),),
    "Q4_K_M": ((_always, Kind.Q5_K),),
    "Q5_K_M": ((_always, Kind.Q6_K),),
}
_DOWN: Final[_Rules] = {
    "Q2_K": ((_always, Kind.Q3_K),),
    "Q3_K_M": ((lambda place: place.layer < place.layers // 16, Kind.Q5_K), (_always, Kind.Q4_K)),
    "Q3_K_L": ((_always, Kind.Q5_K),),
    "Q4_K_S": ((_first_eighth, Kind.Q5_K),),
    "Q4_K_M": ((_more_bits, Kind.Q6_K),),
    "Q5_K_M": ((_more_bits, Kind.Q6_K),),
    "IQ4_NL": ((_first_eighth, Kind.Q5_K),),
    "IQ4_XS": ((_first_eighth, Kind.Q5_K),),
}
_DOWN_WITH_IMATRIX: Final[_Rules] = {
    **{name: rules for name, rules in _DOWN.items() if not name.startswith("IQ4")},
    "Q4_0": ((_first_eighth, Kind.Q4_1),),
    "Q5_0": ((_first_eighth, Kind.Q5_1),),
}
_OUTPUT: Final[_Rules] = {
    "Q2_K": ((_always, Kind.Q3_K),),
    "Q3_K_M": ((_always, Kind.Q4_K),),
    "Q3_K_L": ((_always, Kind.Q5_K),),
}
_FALLBACKS: Final = {
    Kind.Q2_K: Kind.Q4_0, Kind.Q3_K: Kind.Q4_0, Kind.IQ4_XS: Kind.IQ4_NL, Kind.Q4_K: Kind.Q5_0,
    Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0,
}  # fmt: skip
_FALLBACKS_BEFORE: Final = _FALLBACKS | {Kind.Q2_K: Kind.IQ4_NL, Kind.Q3_K: Kind.IQ4_NL}
_VECTOR: Final = Kind.F32.name
_DEEP = 80  # layers of the models that have 70 billion weights

_BASES: Final = {
    "Q2_K": Kind.Q2_K, "Q3_K_S": Kind.Q3_K, "Q3_K_M": Kind.Q3_K, "Q3_K_L": Kind.Q3_K, "Q4_0": Kind.Q4_0,
    "Q4_1": Kind.Q4_1, "Q4_K_S": Kind.Q4_K, "Q4_K_M": Kind.Q4_K, "Q5_0": Kind.Q5_0, "Q5_1": Kind.Q5_1,
    "Q5_K_S": Kind.Q5_K, "Q5_K_M": Kind.Q5_K, "Q6_K": Kind.Q6_K, "Q8_0": Kind.Q8_0, "IQ4_NL": Kind.IQ4_NL,
    "IQ4_XS": Kind.IQ4_XS,
}  # fmt: skip
_BY_IMATRIX: Final = ("Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS")
_BY_RELEASE: Final = (
    "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_M", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
FILE_TYPES: Final = (
    *(FileType(name, base) for name, base in _BASES.items()),
    *(FileType(name, _BASES[name], imatrix=True) for name in _BY_IMATRIX),
    *(FileType(name, _BASES[name], release=Release.BEFORE) for name in _BY_RELEASE),
)
"""All that differ."""


def types_of(spec: ModelSpec, file_type: FileType) -> dict[str, str]:
    """GGUF's names of the types of a model's tensors, by name, as `ModelSpec.tensor_types` has them."""
    head = Role.EMBEDDING if spec.tied_head else Role.HEAD
    found = {}
    for role, weight in spec.weights().items():
        for name, shape in weight.parts:
            kind = _of_head(file_type.base, shape[1]) if role is head else file_type.base
            found[name] = _fitting(kind, shape[1], file_type).name if weight.is_matrix else _VECTOR
    for index, layer in enumerate(spec.layers):
        for weight in layer.weights(spec.width).values():
            for name, shape in weight.parts:
                full = f"blk.{index}.{name}"
                found[full] = (
                    type_in_layer(spec, file_type, index, name, shape[1]) if weight.is_matrix else _VECTOR
                )
    return found


def type_in_layer(spec: ModelSpec, file_type: FileType, index: int, name: str, columns: int) -> str:
    """GGUF's name of the type of a layer's matrix, by the tensor's name in the layer."""
    attention = spec.layers[index].attention
    place = _Place(index, len(spec.layers), attention.heads // attention.kv_heads)
    return _fitting(_in_layer(file_type, name.removesuffix(".weight"), place), columns, file_type).name


def _of_head(base: Kind, columns: int) -> Kind:
    whole = columns % GGML_QUANT_SIZES[base][0] == 0
    return Kind.Q6_K if whole and base is not Kind.Q8_0 else Kind.Q8_0


def _in_layer(file_type: FileType, part: str, place: _Place) -> Kind:
    before = file_type.release is Release.BEFORE
    by_part = {
        "attn_v": _VALUES,
        "attn_qkv": _FUSED_BEFORE if before else _VALUES,
        "ffn_down": _DOWN_WITH_IMATRIX if file_type.imatrix else _DOWN,
        "attn_output": _OUTPUT,
    }
    rules = by_part.get(part, {}).get(file_type.name, ())
    kind = next((kind for holds, kind in rules if holds(place)), file_type.base)
    of_values = part == "attn_v" or (part == "attn_qkv" and not before)
    if of_values and place.layers == _DEEP and kind in (Kind.Q3_K, Kind.Q4_K):
        return Kind.Q5_K  # values of such models are an eighth of queries
    return kind


def _fitting(kind: Kind, columns: int, file_type: FileType) -> Kind:
    if columns % GGML_QUANT_SIZES[kind][0] == 0:
        return kind
    fallbacks = _FALLBACKS_BEFORE if file_type.release is Release.BEFORE else _FALLBACKS
    other = fallbacks.get(kind, Kind.F16)
    return other if columns % GGML_QUANT_SIZES[other][0] == 0 else Kind.F16
