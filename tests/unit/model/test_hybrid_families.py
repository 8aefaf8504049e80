"""Families with states: what their files may hold, and the texts of whole files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import GatedDeltaNet
from nightmill.worker.model.tokenizer import Tokenizer
from tests.support.engines import greedy
from tests.support.ggufs import spec_tensors, write_file
from tests.support.hybrid_cases import HYBRID_FILES, KEYS
from tests.tiny import FILES, expected, unpacked


def file_of(path: Path, name: str, keys: dict[str, Any], tensors: dict[str, Any]) -> GgufFile:
    """The file of that name with other keys and tensors; None leaves one out."""
    own, spec = HYBRID_FILES[name]
    merged = {"block_count": len(spec.layers)} | KEYS | own | keys
    held = {key: value for key, value in (spec_tensors(spec) | tensors).items() if value is not None}
    return GgufFile.open(write_file(path / "model.gguf", spec.family, merged, held))


Fault = tuple[str, dict[str, Any], dict[str, Any], str]
FAULTS: dict[str, Fault] = {
    "a key that lacks": ("qwen35", {"ssm.state_size": None}, {}, "qwen35.ssm.state_size: the key is missing"),
    "a key that lacks, for Mamba-2": (
        "granitehybrid", {"ssm.conv_kernel": None}, {}, "granitehybrid.ssm.conv_kernel: the key is missing",
    ),
    "a key that lacks, for convolutions": (
        "lfm2", {"shortconv.l_cache": None}, {}, "lfm2.shortconv.l_cache: the key is missing",
    ),
    "a convolution over half a page": (
        "lfm2", {"shortconv.l_cache": 70}, {}, "lfm2.shortconv.l_cache: is 70, expected 1 to 64",
    ),
    "value heads that key heads do not divide": (
        "qwen35", {"ssm.group_count": 4}, {},
        "qwen35.ssm.group_count: 4 does not divide qwen35.ssm.time_step_rank, 6",
    ),
    "a width that heads do not divide": (
        "qwen35", {"ssm.inner_size": 145}, {},
        "qwen35.ssm.time_step_rank: 6 does not divide qwen35.ssm.inner_size, 145",
    ),
    "heads that groups do not divide": (
        "nemotron_h", {"ssm.group_count": 5}, {},
        "nemotron_h.ssm.group_count: 5 does not divide nemotron_h.ssm.time_step_rank, 6",
    ),
    "an interval that the tensors contradict": (
        "qwen35", {"full_attention_interval": 2}, {},
        "qwen35.full_attention_interval: makes layer 1 one of attention, but the file lacks "
        "blk.1.attn_output.weight",
    ),
    "no attention at all": (
        "qwen35", {"full_attention_interval": 9, "block_count": 2}, {},
        "qwen35.full_attention_interval: leaves no layer with attention, which is not supported",
    ),
    "another number of layers": (
        "qwen35", {"attention.recurrent_layers": [True, False]}, {},
        "qwen35.attention.recurrent_layers: has 2 entries for 5 layers",
    ),
    "layers that the tensors contradict": (
        "lfm2", {"attention.head_count_kv": [2, 2, 0]}, {},
        "lfm2.attention.head_count_kv: makes layer 0 one of attention, but the file lacks "
        "blk.0.attn_output.weight",
    ),
    "a layer of two kinds": (
        "nemotron_h", {}, {"blk.1.ssm_out.weight": np.ones((64, 120), np.float32)},
        "nemotron_h.attention.head_count_kv: makes layer 1 one of a feed-forward network, but the file has "
        "blk.1.ssm_out.weight",
    ),
    "KV heads of two numbers": (
        "granitehybrid", {"attention.head_count_kv": [0, 2, 0, 0]}, {},
        "granitehybrid.attention.head_count_kv: has 4 entries for 3 layers",
    ),
    "experts": (
        "lfm2", {"expert_count": 62}, {},
        "lfm2.expert_count: 62 experts; this family has none, those with experts have other names",
    ),
    "a convolution of another length": (
        "qwen35", {"ssm.conv_kernel": 3}, {},
        "tensor blk.0.ssm_conv1d.weight: has shape (208, 4), expected (208, 3) from the metadata",
    ),
    "more blocks to skip than there are": (
        "qwen35", {"nextn_predict_layers": 5}, {},
        "qwen35.nextn_predict_layers: is 5, expected 0 to 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_contradicts_itself_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, keys, tensors, message = FAULTS[name]
    with (
        file_of(tmp_path, family, keys, tensors) as file,
        pytest.raises(ModelFileError) as caught,
    ):
        read_spec(file)
    assert message in str(caught.value)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    extra = {"blk.5.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    name, keys = "qwen35", {"block_count": 6, "nextn_predict_layers": 1}
    layers = {"attention.recurrent_layers": [True, True, False, True, True, False]}
    for more in ({}, layers):
        with file_of(tmp_path, name, keys | more, extra) as file:
            assert read_spec(file) == HYBRID_FILES[name][1]
    with file_of(tmp_path, name, {}, extra) as file, pytest.raises(ModelFileError, match=r"blk\.5\.nextn"):
        read_spec(file)


@pytest.mark.parametrize("name", FILES)
def test_all_prompts_have_the_tokens_and_logits_of_transformers_and_llama_cpp(
    name: str, tmp_path: Path
) -> None:
    answers = expected(name)
    with GgufFile.open(unpacked(name, tmp_path)) as file:
        spec = read_spec(file)
        for prompt in answers["prompts"]:
            drawn, logits = greedy(file, spec, prompt["prompt"], len(prompt["greedy"]))
            assert list(drawn) == prompt["greedy"] == prompt["llama_cpp_greedy"]
            assert np.abs(logits - prompt["logits_all"]).max() < 2e-4
            assert np.abs(logits[:32] - prompt["llama_cpp_logits32"]).max() < 2e-4
    assert len(answers["prompts"]) == 6


@pytest.mark.parametrize("name", ["qwen35-bf16", "lfm2-bf16"])
def test_texts_have_the_tokens_of_llama_cpp(name: str, tmp_path: Path) -> None:
    with GgufFile.open(unpacked(name, tmp_path)) as file:
        tokenizer = Tokenizer.from_gguf(file)
        for text in expected(name)["tokenization"]:
            assert tokenizer.encode(text["text"], special=True) == text["llama_cpp_ids"], text["text"]


def test_a_state_is_data_of_known_size() -> None:
    spec = HYBRID_FILES["qwen35"][1]
    net = spec.layers[0].mixer
    assert isinstance(net, GatedDeltaNet)
    assert {array.name: array.shape for array in net.state} == {"inputs": (3, 208), "matrix": (6, 16, 24)}
    assert spec.layers[2].state == ()
    assert spec.state_bytes == 4 * (3 * 208 + 6 * 16 * 24) * 4
    assert spec.keys == 2 * 32
