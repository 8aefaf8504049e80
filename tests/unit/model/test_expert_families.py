"""Families with mixtures of experts: what their files may hold, and the texts of whole files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.gpu.computed import refusal
from tests.support.engines import greedy
from tests.support.expert_cases import EXPERT_FILES, file_of
from tests.tiny import EXPERTS, expected, unpacked

Fault = tuple[str, dict[str, Any], dict[str, Any], str]
FAULTS: dict[str, Fault] = {
    "no router": (
        "qwen3moe", {}, {"blk.0.ffn_gate_inp.weight": None}, "tensor blk.0.ffn_gate_inp.weight: is missing",
    ),
    "no experts": (
        "qwen3moe", {}, {"blk.1.ffn_down_exps.weight": None}, "tensor blk.1.ffn_down_exps.weight: is missing",
    ),
    "no gates": (
        "qwen3moe", {}, {"blk.1.ffn_gate_exps.weight": None}, "tensor blk.1.ffn_gate_exps.weight: is missing",
    ),
    "experts of two dimensions": (
        "qwen3moe", {}, {"blk.0.ffn_down_exps.weight": np.ones((64, 48), np.float32)},
        "tensor blk.0.ffn_down_exps.weight: has shape (64, 48), expected three dimensions",
    ),
    "another number of experts": (
        "qwen3moe", {"expert_count": 8}, {},
        "tensor blk.0.ffn_gate_inp.weight: has shape (6, 64), expected (8, 64) from the metadata",
    ),
    "more used than there are": (
        "qwen3moe", {"expert_used_count": 7}, {},
        "qwen3moe.expert_used_count: is 7, but qwen3moe.expert_count is 6: a token cannot go through more "
        "than all",
    ),
    "no word of how many are used": (
        "qwen3moe", {"expert_used_count": None}, {}, "qwen3moe.expert_used_count: the key is missing",
    ),
    "other numbers in other layers": (
        "qwen3moe", {"expert_used_count": [2, 3]}, {},
        "qwen3moe.expert_used_count: layers that use different numbers of experts are not supported",
    ),
    "another width": (
        "qwen3moe", {"expert_feed_forward_length": 40}, {},
        "qwen3moe.expert_feed_forward_length: is 40, but blk.0.ffn_down_exps.weight has 48 columns",
    ),
    "scores of another kind": (
        "qwen3moe", {"expert_gating_func": 4}, {},
        "qwen3moe.expert_gating_func: 4 is not supported; supported are 1 (softmax), 2 (sigmoid) and 3",
    ),
    "groups that do not divide": (
        "glm4moe", {"expert_group_count": 4, "expert_group_used_count": 2}, {},
        "glm4moe.expert_group_count: 4 does not divide glm4moe.expert_count, 6",
    ),
    "groups too few": (
        "glm4moe", {"expert_group_count": 6, "expert_group_used_count": 1}, {},
        "glm4moe.expert_group_used_count: 1 groups have fewer experts than glm4moe.expert_used_count, 2",
    ),
    "a dense layer with experts": (
        "glm4moe", {"leading_dense_block_count": 2}, {},
        "tensor blk.1.ffn_gate_inp.weight: layer 1 is one without experts, as the metadata has it",
    ),
    "no sinks": (
        "gpt-oss", {}, {"blk.1.attn_sinks.weight": None}, "tensor blk.1.attn_sinks.weight: is missing",
    ),
    "no latent": (
        "deepseek2", {"attention.kv_lora_rank": None}, {},
        "deepseek2.attention.kv_lora_rank: the key is missing",
    ),
    "all of a key rotated": (
        "deepseek2", {"attention.key_length_mla": 8}, {},
        "deepseek2.rope.dimension_count: 8 of the 8 elements of a key",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_contradicts_itself_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case, keys, tensors, message = FAULTS[name]
    with (
        file_of(tmp_path, case, keys, tensors) as file,
        pytest.raises(ModelFileError) as caught,
    ):
        read_spec(file)
    assert message in str(caught.value)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    layers = len(EXPERT_FILES["glm4moe"][1].layers)
    extra = {f"blk.{layers}.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    keys = {"block_count": layers + 1, "nextn_predict_layers": 1}
    with file_of(tmp_path, "glm4moe", keys, extra) as file:
        assert read_spec(file) == EXPERT_FILES["glm4moe"][1]


def test_active_parameters_are_those_that_a_token_goes_through() -> None:
    spec = EXPERT_FILES["qwen3moe"][1]
    expert = 3 * 64 * 48
    assert spec.parameters - spec.active_parameters == len(spec.layers) * (6 - 2) * expert
    dense = replace(spec, layers=(EXPERT_FILES["glm4moe"][1].layers[0],))
    assert dense.parameters == dense.active_parameters


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("qwen3moe", None),
        ("gpt-oss", None),
        ("deepseek2", None),
    ],
)
def test_what_no_kernel_computes_is_named(name: str, titles: str | None) -> None:
    assert refusal(EXPERT_FILES[name][1]) == titles


@pytest.mark.parametrize("name", EXPERTS)
def test_all_prompts_have_the_tokens_and_logits_of_transformers(name: str, tmp_path: Path) -> None:
    answers = expected(name)
    with GgufFile.open(unpacked(name, tmp_path)) as file:
        spec = read_spec(file)
        for prompt in answers["prompts"]:
            drawn, logits = greedy(file, spec, prompt["prompt"], len(prompt["greedy"]))
            assert list(drawn) == prompt["greedy"]
            assert np.abs(logits - prompt["logits_all"]).max() < 2e-3
            if name != "gptoss-q8_0":
                assert prompt["greedy"] == prompt["llama_cpp_greedy"]
    assert len(answers["prompts"]) == 6


def test_gpt_oss_differs_from_llama_cpp_by_the_ends_of_a_ramp_alone(tmp_path: Path) -> None:
    name = "gptoss-q8_0"
    with GgufFile.open(unpacked(name, tmp_path)) as file:
        spec = read_spec(file)
        rounded = with_rounded_ramps(spec)
        assert rounded != spec
        for prompt in expected(name)["prompts"][:3]:
            drawn, logits = greedy(file, rounded, prompt["prompt"], len(prompt["greedy"]))
            assert list(drawn) == prompt["llama_cpp_greedy"]
            assert np.abs(logits[:32] - prompt["llama_cpp_logits32"]).max() < 2e-3


def with_rounded_ramps(spec: ModelSpec) -> ModelSpec:
    """The model with the angles that llama.cpp rotates by."""
    layers = []
    for layer in spec.layers:
        rope = layer.attention.rope
        rope = replace(rope, scaling=replace(rope.scaling, rounded=True))
        layers.append(replace(layer, mixer=replace(layer.attention, rope=rope)))
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("name", EXPERTS)
def test_texts_have_the_tokens_of_llama_cpp(name: str, tmp_path: Path) -> None:
    with GgufFile.open(unpacked(name, tmp_path)) as file:
        tokenizer = Tokenizer.from_gguf(file)
        for text in expected(name)["tokenization"]:
            assert tokenizer.encode(text["text"], special=True) == text["llama_cpp_ids"], text["text"]


def test_experts_that_share_a_tensor_compute_what_separate_ones_do(tmp_path: Path) -> None:
    """Gate and up of an expert as one tensor, with scales of 1, have the bits of two."""
    name = "qwen3moe"
    _, spec = EXPERT_FILES[name]
    prompt = list(range(40))
    with file_of(tmp_path, name) as file:
        _, separate = greedy(file, spec, prompt, 1)
        tensors: dict[str, Any] = {}
        for index in range(len(spec.layers)):
            gate, up = (f"blk.{index}.ffn_{part}_exps.weight" for part in ("gate", "up"))
            tensors |= {gate: None, up: None}
            joined = np.concatenate([file.array(gate), file.array(up)], axis=1)
            tensors[f"blk.{index}.ffn_gate_up_exps.weight"] = joined
            tensors[f"blk.{index}.ffn_down_exps.scale"] = np.full(6, 2.0, np.float32)
            down = f"blk.{index}.ffn_down_exps.weight"
            tensors[down] = file.array(down) / 2
    (tmp_path / "fused").mkdir()
    with file_of(tmp_path / "fused", name, {}, tensors) as file:
        fused = read_spec(file)
        assert all(experts.fused for experts in fused.experts)
        assert Role.EXPERTS_DOWN_SCALE in fused.layer_weights(0)
        _, joined_logits = greedy(file, fused, prompt, 1)
    np.testing.assert_allclose(joined_logits, separate, rtol=1e-5, atol=1e-5)
