"""Sizes of real models, and the types that llama.cpp's quantiser gives their tensors."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from tests.support.llama_quantiser import FILE_TYPES, FileType, Release, types_of
from tests.support.real_model import real_model
from tests.support.real_models import REAL_MODELS, RealModel

MODELS = {model.name: model for model in REAL_MODELS}


@pytest.mark.parametrize("model", REAL_MODELS, ids=lambda model: model.name)
def test_sizes_add_up_to_the_published_number_of_parameters(model: RealModel) -> None:
    parameters = sum(math.prod(weight.shape) for _, weight in model.spec.all_weights())
    assert parameters / 1e6 == pytest.approx(model.millions, rel=0.004)


def test_the_table_covers_the_widths_and_shapes_that_people_have() -> None:
    sizes = [model.size for model in REAL_MODELS]
    assert len(REAL_MODELS) >= 25 and len(MODELS) == len(REAL_MODELS)
    assert {min(size.width for size in sizes), max(size.width for size in sizes)} == {576, 8192}
    assert {size.heads.size for size in sizes} == {64, 96, 128, 256}
    assert any(size.width % 256 and size.ffn % 256 == 0 for size in sizes)
    assert any(size.width % 256 == 0 and size.ffn % 256 for size in sizes)


# What llama.cpp prints of real files when it loads them ("type q4_K: 193 tensors").
PUBLISHED = [
    ("Llama 2 7B", "Q4_K_M", Release.BEFORE, {"F32": 65, "Q4_K": 193, "Q6_K": 33}),
    ("Mistral 7B v0.3", "Q4_K_M", Release.BEFORE, {"F32": 65, "Q4_K": 193, "Q6_K": 33}),
    ("Llama 3.1 8B", "Q3_K_L", Release.BEFORE, {"F32": 65, "Q3_K": 129, "Q5_K": 96, "Q6_K": 1}),
    ("Phi-3 mini 3.8B", "Q4_K_M", Release.BEFORE, {"F32": 65, "Q4_K": 81, "Q5_K": 32, "Q6_K": 17}),
    ("Phi-4 mini 3.8B", "Q4_K_M", Release.BEFORE, {"F32": 65, "Q4_K": 80, "Q5_K": 32, "Q6_K": 17}),
]
"""A file of Llama 3 and of Phi-4 has one or two tensors of F32 more, the divisors of the rotation."""
OWN_HEADS = [
    (
        "Qwen2.5 0.5B", "Q4_K_M", Release.BEFORE,
        {"F32": 121, "Q5_0": 133, "Q8_0": 13, "Q4_K": 12, "Q6_K": 12},
    ),
    ("Qwen2.5 1.5B", "Q3_K_M", Release.BEFORE, {"F32": 141, "Q3_K": 113, "Q4_K": 81, "Q5_K": 3, "Q6_K": 1}),
]  # fmt: skip
"""The publisher's own files repeat the embedding as a head, although the model ties them."""


def counted(
    model: str, name: str, release: Release, *, own_head: bool = False, imatrix: bool = False
) -> Counter[str]:
    base = next(one.base for one in FILE_TYPES if one.name == name)
    spec = MODELS[model].spec
    spec = replace(spec, tied_head=spec.tied_head and not own_head)
    return Counter(types_of(spec, FileType(name, base, imatrix, release)).values())


@pytest.mark.parametrize(("model", "name", "release", "types"), PUBLISHED)
def test_types_are_those_of_published_files(
    model: str, name: str, release: Release, types: dict[str, int]
) -> None:
    assert counted(model, name, release) == types


@pytest.mark.parametrize(("model", "name", "release", "types"), OWN_HEADS)
def test_types_are_those_of_published_files_with_heads_of_their_own(
    model: str, name: str, release: Release, types: dict[str, int]
) -> None:
    assert counted(model, name, release, own_head=True) == types


def test_an_importance_matrix_changes_the_first_layers() -> None:
    assert counted("Gemma 3 27B", "IQ4_XS", Release.BEFORE, imatrix=True) == {
        "F32": 373, "IQ4_XS": 434, "Q6_K": 1,
    }  # fmt: skip
    assert counted("Gemma 3 27B", "IQ4_XS", Release.BEFORE)["Q5_K"] == 62 // 8


def test_types_are_those_of_a_real_file() -> None:
    with GgufFile.open(real_model()) as file:
        spec = read_spec(file)
    (q4_1,) = [one for one in FILE_TYPES if one.name == "Q4_1"]
    assert types_of(spec, q4_1) == dict(spec.tensor_types)
    assert replace(spec, name="", context_length=0, tensor_types={}).layers[0].feed_forward.width == 1536
    assert (spec.width, spec.vocab, len(spec.layers)) == (576, 49_152, 30)


def test_rows_that_are_no_whole_blocks_fall_back_as_the_release_says() -> None:
    small = MODELS["SmolLM2 135M"].spec
    for release, other in ((Release.SINCE, "Q4_0"), (Release.BEFORE, "IQ4_NL")):
        (q2_k,) = [one for one in FILE_TYPES if one.name == "Q2_K" and one.release is release]
        types = types_of(small, q2_k)
        assert types["blk.0.attn_q.weight"] == other
        assert types["blk.0.ffn_down.weight"] == "Q3_K"  # rows of 1,536
        assert types["token_embd.weight"] == "Q8_0"  # the head, too
