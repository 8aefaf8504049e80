"""Gemma 4: what its files may hold, the texts of a whole file, and tokens that are never drawn."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import ModelFileError
from nightmill.worker.assembly.model import load_model
from nightmill.worker.commands.inspection import inspect
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Norm, Role
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.gpu.computed import refusal
from tests.support.engines import greedy
from tests.support.family_cases import file_of
from tests.support.gemma4_cases import GEMMA4_FILES
from tests.tiny import GEMMAS, expected, unpacked

Fault = tuple[str, dict[str, Any], dict[str, Any], str]
PATTERN = "attention.sliding_window_pattern"
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
FAULTS: dict[str, Fault] = {
    "no word of windows": (
        "gemma4", {PATTERN: None}, {},
        f"gemma4.{PATTERN}: the key is missing: which layers have a window is not known",
    ),
    "windows of other layers": (
        "gemma4", {PATTERN: [True, False]}, {}, f"gemma4.{PATTERN}: has 2 entries for 5 layers",
    ),
    "no size of a window": (
        "gemma4", {"attention.sliding_window": None}, {},
        "gemma4.attention.sliding_window: is missing, but layers have a window",
    ),
    "no angles": (
        "gemma4", {}, {"rope_freqs.weight": None},
        "tensor rope_freqs.weight: is missing: which part of a head is rotated is not known",
    ),
    "angles of smaller heads": (
        "gemma4", {}, {"rope_freqs.weight": np.ones(8, np.float32)},
        "tensor rope_freqs.weight: has shape (8,), expected (16,)",
    ),
    "all layers read others": (
        "gemma4", {"attention.shared_kv_layers": 5}, {},
        "gemma4.attention.shared_kv_layers: is 5, expected 0 to 4",
    ),
    "nobody to read": (
        "gemma4", {"attention.shared_kv_layers": 3}, {},
        "gemma4.attention.shared_kv_layers: layer 2 is to read the keys of an earlier one without a window, "
        "and there is none",
    ),
    "other KV heads than those that are read": (
        "gemma4", {"attention.head_count_kv": [2, 2, 2, 1, 2]}, {},
        "gemma4.attention.head_count_kv: layer 3 has 1, but reads the keys of layer 1, which has 2",
    ),
    "values of another size": (
        "gemma4", {"attention.value_length_swa": 32}, {},
        "gemma4.attention.value_length_swa: 32 differs from the keys' 16, which is not supported",
    ),
    "heads of an unknown size": (
        "gemma4", {"attention.key_length_swa": None}, {},
        "gemma4.attention.key_length_swa: the key is missing: layers with a window have heads of their own",
    ),
    "heads of another size": (
        "gemma4", {"attention.key_length_swa": 32, "attention.value_length_swa": 32}, {},
        "tensor blk.0.attn_q.weight: has shape",
    ),
    "no table": (
        "gemma4", {}, {"per_layer_token_embd.weight": None}, "tensor per_layer_token_embd.weight: is missing",
    ),
    "inputs that nobody announced": (
        "gemma4", {"embedding_length_per_layer_input": 0}, {}, "is not part of the supported gemma4 model",
    ),
    "no keys": (
        "gemma4", {}, {"blk.0.attn_k.weight": None}, "tensor blk.0.attn_k.weight: is missing",
    ),
    "experts that nobody announced": (
        "gemma4, with experts", {"expert_count": 0}, {}, "is not part of the supported gemma4 model",
    ),
    "no scale of what is routed": (
        "gemma4, with experts", {}, {"blk.1.ffn_gate_inp.scale": None},
        "tensor blk.1.ffn_gate_inp.scale: is missing",
    ),
    "a suppressed token beyond the vocabulary": (
        "gemma4", {SUPPRESSED: [3, 5000]}, {}, f"{SUPPRESSED}: token 5000 is not one of the vocabulary's",
    ),
}  # fmt: skip


def opened(path: Path, name: str, keys: dict[str, Any], tensors: dict[str, Any]) -> GgufFile:
    own, spec = GEMMA4_FILES[name]
    return file_of(path, own | keys, spec, **tensors)


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_contradicts_itself_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case, keys, tensors, message = FAULTS[name]
    with opened(tmp_path, case, keys, tensors) as file, pytest.raises(ModelFileError) as caught:
        read_spec(file)
    assert message in str(caught.value)


def test_keys_of_layers_that_read_others_are_left_out(tmp_path: Path) -> None:
    """Checkpoints hold them, and nothing reads them."""
    matrix = np.full((32, 64), np.nan, np.float32)
    unused = {f"blk.3.attn_{part}.weight": matrix for part in "kv"}
    unused["blk.3.attn_k_norm.weight"] = matrix[0, :16]
    with opened(tmp_path, "gemma4", {}, unused) as file:
        assert read_spec(file) == GEMMA4_FILES["gemma4"][1]


def test_the_embeddings_of_layers_are_no_active_parameters() -> None:
    spec = GEMMA4_FILES["gemma4"][1]
    assert spec.parameters - spec.active_parameters == spec.vocab * 24 * len(spec.layers)


def test_check_says_why_not_all_parameters_are_active(tmp_path: Path) -> None:
    said = inspect(load_model(Settings(model=unpacked("gemma4-bf16", tmp_path)))).lines()["model"]
    assert (
        "0.54 million parameters (0.441 million active: of the embeddings of layers a token has a row)"
        in said
    )


def test_only_rows_of_the_table_are_read(tmp_path: Path) -> None:
    name, prompt = "per_layer_token_embd.weight", [5, 9, 200]
    spec = GEMMA4_FILES["gemma4"][1]
    with opened(tmp_path, "gemma4", {}, {}) as file:
        drawn, logits = greedy(file, spec, prompt, 1)
        table = file.array(name).copy()
        assert (file.rows(name, np.array([7, 7, 3])) == table[[7, 7, 3]]).all()
    table[[row for row in range(len(table)) if row not in prompt]] = np.nan
    (tmp_path / "other").mkdir()
    with opened(tmp_path / "other", "gemma4", {}, {name: table}) as file:
        again, same = greedy(file, spec, prompt, 1)
    assert again == drawn
    assert (same == logits).all()


def test_suppressed_tokens_are_never_drawn(tmp_path: Path) -> None:
    prompt = list(range(40, 80))
    with opened(tmp_path, "gemma4", {}, {}) as file:
        free, before = greedy(file, read_spec(file), prompt, 6)
    kept_out = sorted(set(free))
    (tmp_path / "other").mkdir()
    with opened(tmp_path / "other", "gemma4", {SUPPRESSED: kept_out}, {}) as file:
        spec = read_spec(file)
        assert spec.suppressed == tuple(kept_out)
        drawn, after = greedy(file, spec, prompt, 6)
    assert not set(drawn) & set(free)
    others = np.setdiff1d(np.arange(spec.vocab), kept_out)
    assert (after[others] == before[others]).all()
    assert (after[kept_out] == -np.inf).all()


def test_kernels_compute_all_of_it() -> None:
    """But for what its files never have: values without a norm of queries and keys that is theirs, too."""
    for _, spec in GEMMA4_FILES.values():
        assert refusal(spec) is None
        assert refusal(replace(spec, suppressed=(3,))) is None
    spec = GEMMA4_FILES["gemma4"][1]
    first = spec.layers[0]
    other = replace(first.attention, value_norm=Norm(1e-3))
    unlike = replace(spec, layers=(replace(first, mixer=other), *spec.layers[1:]))
    assert refusal(unlike) == "a model with its own value_norm"


@pytest.mark.parametrize("name", GEMMAS)
def test_all_prompts_have_the_tokens_and_logits_of_transformers_and_llama_cpp(
    name: str, tmp_path: Path
) -> None:
    prompts = expected(name)["prompts"]
    with GgufFile.open(unpacked(name, tmp_path)) as file:
        spec = read_spec(file)
        assert [layer.attention.keys_of for layer in spec.layers] == [None] * 4 + [2, 2, 2, 3]
        assert Role.LAYER_EMBEDDING in spec.weights()
        for prompt in prompts:
            drawn, logits = greedy(file, spec, prompt["prompt"], len(prompt["greedy"]))
            assert list(drawn) == prompt["greedy"] == prompt["llama_cpp_greedy"]
            assert np.abs(logits - prompt["logits_all"]).max() < 2e-3
            assert np.abs(logits[:32] - prompt["llama_cpp_logits32"]).max() < 2e-3
    assert len(prompts) == 6


@pytest.mark.parametrize("name", GEMMAS)
def test_texts_have_the_tokens_of_llama_cpp(name: str, tmp_path: Path) -> None:
    with GgufFile.open(unpacked(name, tmp_path)) as file:
        tokenizer = Tokenizer.from_gguf(file)
        for text in expected(name)["tokenization"]:
            assert tokenizer.encode(text["text"], special=True) == text["llama_cpp_ids"], text["text"]
