"""A spec comes from the file alone, and a file that contradicts itself is refused by name."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.errors import ModelFileError
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.rope import Rope, RopeScaling, RopeStyle
from nightmill.worker.model.spec import Attention, FeedForward, LayerSpec, ModelSpec, Norm, Role, Weight
from tests.support.ggufs import byte_vocabulary, sentencepiece_vocabulary, write_model

TOKENS = len(byte_vocabulary().tokens)


def spec_of(path: Path, *args: Any, **options: Any) -> ModelSpec:
    with GgufFile.open(write_model(path / "model.gguf", *args, **options)) as file:
        return read_spec(file)


def rope_of(path: Path, *args: Any, **options: Any) -> Rope:
    return spec_of(path, *args, **options).layers[0].attention.rope


def test_qwen2_has_bias_halves_and_a_tied_head(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen2", ffn=224, rope_base=1e6, padding_rows=3)
    norm = Norm(pytest.approx(1e-6))
    layer = LayerSpec(
        attention_norm=norm,
        mixer=Attention(
            heads=4,
            kv_heads=2,
            head_dim=16,
            rope=Rope(style=RopeStyle.HALVES, dim=16, base=1e6, scaling=RopeScaling(original_context=512)),
            bias=True,
        ),
        feed_forward_norm=norm,
        feed_forward=FeedForward(width=224),
    )
    assert spec == ModelSpec(
        family="qwen2",
        name="tiny qwen2",
        width=64,
        vocab=TOKENS + 3,
        context_length=512,
        layers=(layer, layer),
        output_norm=norm,
        tied_head=True,
    )


def test_llama_rotates_pairs_and_may_have_its_own_head(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    spec = spec_of(tmp_path, "llama", tied=False, kv_heads=1, vocabulary=vocabulary, layers=1)
    (layer,) = spec.layers
    attention = layer.attention
    assert attention.rope.style is RopeStyle.PAIRS
    assert (spec.tied_head, attention.bias, attention.qk_norm) == (False, False, None)
    assert (attention.kv_heads, spec.vocab) == (1, len(vocabulary.tokens))


def test_qwen3_heads_need_not_divide_the_width(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen3", head_dim=40, heads=6, kv_heads=3)
    attention = spec.layers[1].attention
    assert (attention.head_dim, spec.width, attention.bias) == (40, 64, False)
    assert attention.qk_norm == spec.output_norm
    assert spec.layer_weights(1)[Role.ATTN_OUTPUT] == Weight((("blk.1.attn_output.weight", (64, 240)),))


def test_llama_with_bias_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    assert spec_of(tmp_path, "llama", qkv_bias=True).layers[0].attention.bias


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_of_a_file_is_part_of_one_weight(tmp_path: Path, family: str, tied: bool) -> None:
    with GgufFile.open(write_model(tmp_path / "model.gguf", family, tied=tied, kv_heads=1)) as file:
        weights = list(read_spec(file).all_weights())
        names = [name for _, weight in weights for name in weight.names]
        assert sorted(names) == sorted(file.tensors)
        for _, weight in weights:
            stacked = np.concatenate([file.array(name) for name in weight.names])
            assert weight.shape == stacked.shape
            assert weight.is_matrix == (stacked.ndim == 2)


def test_sizes_that_lack_are_read_off_the_tensors(tmp_path: Path) -> None:
    lacking = ("feed_forward_length", "attention.head_count_kv", "rope.freq_base")
    spec = spec_of(
        tmp_path,
        kv_heads=4,
        ffn=96,
        metadata={f"qwen2.{name}": None for name in lacking} | {"general.name": None},
    )
    layer = spec.layers[0]
    assert (layer.feed_forward.width, layer.attention.kv_heads) == (96, 4)
    assert layer.attention.rope.base == 10_000.0
    assert spec.name == "model"  # the file's own name


def test_sizes_given_per_layer_are_accepted_where_they_agree(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, metadata={"qwen2.attention.head_count_kv": [2, 2]})
    assert spec.layers[0].attention.kv_heads == 2
    with pytest.raises(ModelFileError, match="head_count_kv: layers of different sizes"):
        spec_of(tmp_path, metadata={"qwen2.attention.head_count_kv": [2, 4]})
    with pytest.raises(ModelFileError, match="head_count_kv: has 1 entries for 2 layers"):
        spec_of(tmp_path, metadata={"qwen2.attention.head_count_kv": [2]})


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype=np.float32)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"metadata": {"general.architecture": "mamba"}},
        "general.architecture: 'mamba' is not supported; supported are llama, qwen2, qwen3, ",
    ),
    "no block count": ({"metadata": {"qwen2.block_count": None}}, "qwen2.block_count: the key is missing"),
    "no context": ({"metadata": {"qwen2.context_length": None}}, "qwen2.context_length: the key is missing"),
    "context 0": ({"metadata": {"qwen2.context_length": 0}}, "qwen2.context_length: is 0, expected 1"),
    "no width": (
        {"metadata": {"qwen2.embedding_length": None}},
        "qwen2.embedding_length: the key is missing",
    ),
    "no heads": (
        {"metadata": {"qwen2.attention.head_count": None}},
        "attention.head_count: the key is missing",
    ),
    "no epsilon": (
        {"metadata": {"qwen2.attention.layer_norm_rms_epsilon": None}},
        "qwen2.attention.layer_norm_rms_epsilon: the key is missing",
    ),
    "epsilon type": (
        {"metadata": {"qwen2.attention.layer_norm_rms_epsilon": "small"}},
        "layer_norm_rms_epsilon: is STRING, expected a number",
    ),
    "heads": (
        {"metadata": {"qwen2.attention.head_count": 2}},
        r"tensor blk.0.attn_k.weight: has shape \(32, 64\), expected \(64, 64\) from the metadata",
    ),
    "kv heads": (
        {"metadata": {"qwen2.attention.head_count_kv": 3}},
        "head_count_kv: 3 does not divide 4 heads",
    ),
    "head size": (
        {"metadata": {"qwen2.attention.head_count": 5, "qwen2.attention.head_count_kv": 5}},
        "key_length: is missing, and a width of 64 is not a multiple of 5 heads",
    ),
    "key length": (
        {"metadata": {"qwen2.attention.key_length": 32, "qwen2.attention.value_length": 32}},
        r"tensor blk.0.attn_q.weight: has shape \(64, 64\), expected \(128, 64\)",
    ),
    "value length": (
        {"metadata": {"qwen2.attention.value_length": 8}},
        "value_length: 8 differs from the keys' 16",
    ),
    "ffn": (
        {"metadata": {"qwen2.feed_forward_length": 256}},
        "qwen2.feed_forward_length: is 256, but blk.0.ffn_up.weight has 160 rows",
    ),
    "ffn wrong way round": (
        {"tensors": {"blk.1.ffn_down.weight": zeros(160, 64)}},
        r"tensor blk.1.ffn_down.weight: has shape \(160, 64\), expected \(64, 160\)",
    ),
    "embedding wrong way round": (
        {"tensors": {"token_embd.weight": zeros(64, TOKENS)}},
        f"tokenizer.ggml.tokens: {TOKENS} tokens, but token_embd.weight has only 64 rows",
    ),
    "embedding not a matrix": (
        {"tensors": {"token_embd.weight": zeros(64)}},
        r"tensor token_embd.weight: has shape \(64,\), expected two dimensions",
    ),
    "too few rows": (
        {"tensors": {"token_embd.weight": zeros(TOKENS - 1, 64)}},
        f"tokenizer.ggml.tokens: {TOKENS} tokens, but token_embd.weight has only {TOKENS - 1} rows",
    ),
    "vocab size": (
        {"metadata": {"qwen2.vocab_size": 9999}},
        "qwen2.vocab_size: is 9999, but token_embd.weight",
    ),
    "no embedding": ({"tensors": {"token_embd.weight": None}}, "tensor token_embd.weight: is missing"),
    "no norm": ({"tensors": {"output_norm.weight": None}}, "tensor output_norm.weight: is missing"),
    "no ffn": ({"tensors": {"blk.0.ffn_up.weight": None}}, "tensor blk.0.ffn_up.weight: is missing"),
    "last layer lacks": (
        {"tensors": {"blk.1.attn_v.weight": None}},
        "tensor blk.1.attn_v.weight: is missing",
    ),
    "more layers claimed": (
        {"metadata": {"qwen2.block_count": 3}},
        "tensor blk.2.attn_norm.weight: is missing",
    ),
    "fewer layers claimed": (
        {"metadata": {"qwen2.block_count": 1}},
        "tensor blk.1.* is not part of the supported",
    ),
    "no bias": ({"tensors": {"blk.0.attn_q.bias": None}}, "tensor blk.0.attn_q.bias: is missing"),
    "experts": (
        {"tensors": {"blk.0.ffn_gate_inp.weight": zeros(4, 64)}},
        "tensor blk.0.ffn_gate_inp.weight: is not part of the supported qwen2 model",
    ),
    "expert count": ({"metadata": {"qwen2.expert_count": 8}}, "qwen2.expert_count: 8 asks for arithmetic"),
    "logit scale": ({"metadata": {"qwen2.logit_scale": 0.25}}, "qwen2.logit_scale: 0.25 asks for arithmetic"),
    "window": (
        {"metadata": {"qwen2.attention.sliding_window": 64}},
        "sliding_window: sliding-window attention",
    ),
    "encoder": (
        {"metadata": {"qwen2.attention.causal": False}},
        "attention.causal: encoders of this family are not supported",
    ),
    "rotation past the head": (
        {"metadata": {"qwen2.rope.dimension_count": 18}},
        "qwen2.rope.dimension_count: is 18, expected 1 to 16",
    ),
    "rotation of no pairs": (
        {"metadata": {"qwen2.rope.dimension_count": 7}},
        "qwen2.rope.dimension_count: 7 elements are not pairs",
    ),
    "base": ({"rope_base": 0.0}, "qwen2.rope.freq_base: is 0, expected more than 0"),
    "scaling type": ({"rope_scaling": {"type": "longrope"}}, "scaling.type: 'longrope' is not supported"),
    "scaling factor": (
        {"rope_scaling": {"factor": -2.0}},
        "qwen2.rope.scaling.factor: is -2, expected more than 0",
    ),
    "divisors": ({"rope_freqs": [1.0] * 7}, r"tensor rope_freqs.weight: has shape \(7,\), expected \(8,\)"),
    "zero divisor": ({"rope_freqs": [0.0] * 8}, "tensor rope_freqs.weight: holds a divisor that is not"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_contradiction_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    options, message = REFUSED[fault]
    with pytest.raises(ModelFileError, match=message) as caught:
        spec_of(tmp_path, **options)
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_tensor_type_that_cannot_be_dequantised_is_refused_before_loading(tmp_path: Path) -> None:
    doubles = np.zeros((64, 224), dtype=np.float64)
    with pytest.raises(
        ModelFileError, match=r"tensor blk\.1\.ffn_down\.weight: the type F64 is not supported"
    ):
        spec_of(tmp_path, ffn=224, tensors={"blk.1.ffn_down.weight": doubles})


def test_a_vocabulary_without_tensors_is_no_model(vocab_dir: Path) -> None:
    with (
        GgufFile.open(vocab_dir / "ggml-vocab-qwen2.gguf") as file,
        pytest.raises(ModelFileError, match="holds no tensors, only a vocabulary"),
    ):
        read_spec(file)


def test_plain_frequencies_are_powers_of_the_base(tmp_path: Path) -> None:
    rope = rope_of(tmp_path)
    frequencies = rope.frequencies()
    assert frequencies.dtype == np.float64
    np.testing.assert_allclose(frequencies, [10_000 ** (-i / 8) for i in range(8)], rtol=1e-12)
    assert rope.magnitude == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"factor": 4.0}},
        {"metadata": {"qwen2.rope.scale_linear": 4.0}},
    ],
)
def test_linear_scaling_divides_every_frequency(options: dict[str, Any], tmp_path: Path) -> None:
    rope = rope_of(tmp_path, **options)
    plain = replace(rope, scaling=RopeScaling()).frequencies()
    np.testing.assert_allclose(rope.frequencies(), plain / 4, rtol=1e-12)
    assert rope.magnitude == 1.0


def test_scaling_of_type_none_ignores_the_factor(tmp_path: Path) -> None:
    scaling = rope_of(tmp_path, rope_scaling={"type": "none", "factor": 4.0}).scaling
    assert (scaling.kind, scaling.factor) == ("none", 1.0)


def test_divisors_divide_the_frequencies(tmp_path: Path) -> None:
    divisors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    rope = rope_of(tmp_path, "llama", rope_freqs=divisors)
    plain = rope_of(tmp_path, "llama").frequencies()
    np.testing.assert_allclose(rope.frequencies(), plain / divisors, rtol=1e-12)


def test_yarn_agrees_with_the_published_formula(tmp_path: Path) -> None:
    rope = rope_of(
        tmp_path,
        "qwen3",
        head_dim=128,
        rope_base=1e6,
        context_length=131_072,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_context_length": 32_768},
    )
    frequencies = rope.frequencies()
    # Hugging Face's _compute_yarn_parameters for Qwen3 with factor 4 over 32,768, written out.
    expected = []
    for i in range(64):
        plain = 1e6 ** (-2 * i / 128)
        low, high = (
            edge(128 * math.log(32_768 / (beta * 2 * math.pi)) / (2 * math.log(1e6)))
            for edge, beta in ((math.floor, 32), (math.ceil, 1))
        )
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        expected.append(plain / 4 * ramp + plain * (1 - ramp))
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)
    assert frequencies[0] == 1.0
    np.testing.assert_allclose(frequencies[-1], 1e6 ** (-126 / 128) / 4)
    assert rope.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_attention_factor_multiplies_the_magnitude(tmp_path: Path) -> None:
    rope = rope_of(tmp_path, rope_scaling={"type": "yarn", "factor": 2.0, "attn_factor": 0.5})
    assert rope.magnitude == pytest.approx(0.5 * (0.1 * math.log(2) + 1))
