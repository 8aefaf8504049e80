"""Each family from the keys that llama.cpp's converter writes for it, in small: is its spec the right one?"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.families import FAMILIES
from tests.parity.cases import ARCHITECTURES, CASES
from tests.parity.mixtures import MIXTURES
from tests.support.encoder_models import ENCODERS
from tests.support.family_cases import FILES, HALVES, KEYS, spec_of


@pytest.mark.parametrize("name", FILES)
def test_the_keys_of_a_family_give_its_spec(name: str, tmp_path: Path) -> None:
    keys, expected = FILES[name]
    assert spec_of(tmp_path, keys, expected) == expected


@pytest.mark.parametrize("name", FILES)
def test_keys_and_tensors_are_those_that_the_converter_knows(name: str) -> None:
    keys, spec = FILES[name]
    known = {
        value.removeprefix("{arch}.")
        for group in (
            gguf.Keys.LLM,
            gguf.Keys.Attention,
            gguf.Keys.Rope,
            gguf.Keys.SSM,
            gguf.Keys.ShortConv,
        )
        for value in vars(group).values()
        if isinstance(value, str)
    }
    assert set(KEYS | keys) <= known
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[spec.family]
    blocks = range(len(spec.layers))
    tensors = {
        gguf.TENSOR_NAMES[tensor].format(bid=block)
        for tensor in gguf.MODEL_TENSORS[number]
        for block in blocks
    }
    names = (name for _, weight in spec.all_weights() for name in weight.names)
    used = {name.removesuffix(".weight").removesuffix(".bias").removesuffix(".scale") for name in names}
    assert used <= tensors


def test_every_family_beside_the_first_three_has_a_file_here() -> None:
    here = {spec.family for _, spec in FILES.values()} | {"llama", "qwen2", "qwen3"}
    assert here == set(FAMILIES) - ENCODERS


def test_every_family_is_held_to_transformers() -> None:
    """Encoders by `tests/parity/test_encoders.py`."""
    held = {ARCHITECTURES.get(case.family, case.family) for case in (CASES | MIXTURES).values()}
    assert held == set(FAMILIES) - ENCODERS


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_scores_by_width_over_heads(
    family: str, layers: int, tmp_path: Path
) -> None:
    keys, spec = FILES[family]
    heads_of_32 = replace(spec.layers[0].attention, head_dim=32, rope=replace(HALVES, dim=32))
    like = replace(spec, layers=(replace(spec.layers[0], mixer=heads_of_32),) * layers)
    keys = keys | {"attention.key_length": 32, "attention.value_length": 32}
    assert {one.scale for one in spec_of(tmp_path, keys, like).attentions} == {0.25}
    smaller = replace(like, layers=like.layers[1:])
    assert {one.scale for one in spec_of(tmp_path, keys, smaller).attentions} == {None}


@pytest.mark.parametrize(("original", "factors"), [(512, "short"), (128, "long")])
def test_long_factors_serve_contexts_past_the_original_one(
    original: int, factors: str, tmp_path: Path
) -> None:
    given = {"short": np.arange(1, 9, dtype=np.float32), "long": np.arange(2, 10, dtype=np.float32)}
    _, like = FILES["phi3"]
    keys = {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": 1.25}
    tensors = {f"rope_factors_{name}.weight": values for name, values in given.items()}
    rope = spec_of(tmp_path, keys, like, **tensors).layers[0].attention.rope
    assert rope.divisors == tuple(given[factors])
    assert rope.magnitude == 1.25


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma2", "attention.scale", 0.5),
        ("phi3", "logit_scale", 0.5),
        ("olmo2", "attn_logit_softcapping", 30.0),
        ("granite", "attention.temperature_scale", 0.5),
        ("smollm3", "final_logit_softcapping", 30.0),
    ],
)
def test_a_key_that_its_family_does_not_have_is_refused_by_name(
    name: str, key: str, value: float, tmp_path: Path
) -> None:
    keys, spec = FILES[name]
    with pytest.raises(
        ModelFileError, match=rf"{spec.family}\.{key}: {value:g} asks for arithmetic that is not supported"
    ):
        spec_of(tmp_path, keys | {key: value}, spec)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma3", "attention.sliding_window_pattern", [True], "has 1 entries for 7 layers"),
        ("gemma3", "attention.sliding_window", -1, "sliding_window: is -1, expected 0"),
        ("granite", "embedding_scale", -2.0, "embedding_scale: is -2, expected more than 0"),
        ("glm4", "rope.dimension_sections", [4, 2, 2, 0], "dimension_sections: the rotation of images"),
        ("mistral3", "rope.scaling.type", "longrope", "'longrope' is not supported"),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    name: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    keys, spec = FILES[name]
    with pytest.raises(ModelFileError, match=message):
        spec_of(tmp_path, keys | {key: value}, spec)
