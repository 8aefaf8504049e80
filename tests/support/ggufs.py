"""Tiny random models as GGUF files, made in milliseconds, so that tests need no download.

The weights are scaled so that the model is not degenerate: logits have a standard deviation of about 2.5,
the blocks outweigh the embedding in the residual stream (a tied head would echo its input otherwise), and
biases and norms are away from their neutral values, so that leaving one out changes the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.model.tokenizer.vocabulary import byte_alphabet

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", "and", "ing", "you", "user", "assistant", "hello", "world", "night", "mill", "count", "one")


@dataclass(frozen=True)
class TestVocabulary:
    """What `write_model` puts under tokenizer.ggml.*; `merges` for byte-level, `scores` for SentencePiece."""

    __test__ = False

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None

    def id(self, token: str) -> int:
        return self.tokens.index(token)


def byte_vocabulary(extra: Sequence[tuple[str, int]] = ()) -> TestVocabulary:
    """256 bytes, some words built by merges (also with a leading space), then `<tool_call>` and CONTROL."""
    alphabet = byte_alphabet()
    tokens = [alphabet[byte] for byte in range(256)]
    merges: list[str] = []
    for word in WORDS:
        for spelling in (word, "Ġ" + word):
            built = spelling[0]
            for char in spelling[1:]:
                if built + char not in tokens:
                    merges.append(f"{built} {char}")
                    tokens.append(built + char)
                built += char
    types = [int(TokenType.NORMAL)] * len(tokens)
    marked = [
        ("<tool_call>", TokenType.USER_DEFINED),
        *((text, TokenType.CONTROL) for text in CONTROL),
        *extra,
    ]
    return TestVocabulary(
        "gpt2", tokens + [text for text, _ in marked], types + [int(kind) for _, kind in marked], merges
    )


def sentencepiece_vocabulary(extra: Sequence[tuple[str, int]] = ()) -> TestVocabulary:
    """<unk>, <s>, </s>, 256 byte tokens, letters, the prefixes of WORDS with scores, then CONTROL."""
    marked = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    marked += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    pieces = ["▁", *map(chr, range(0x21, 0x7F)), "é", "ü"]
    for word in WORDS:
        for spelling in (word, "▁" + word):
            for end in range(2, len(spelling) + 1):
                if spelling[:end] not in pieces:
                    pieces.append(spelling[:end])
    marked += [(piece, TokenType.NORMAL) for piece in pieces]
    marked += [*((text, TokenType.CONTROL) for text in CONTROL), *extra]
    return TestVocabulary(
        "llama",
        [text for text, _ in marked],
        [int(kind) for _, kind in marked],
        scores=[-float(index) for index in range(len(marked))],
    )


def write_model(
    path: Path,
    architecture: str = "qwen2",
    *,
    layers: int = 2,
    width: int = 64,
    ffn: int = 160,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tied: bool = True,
    context_length: int = 512,
    vocabulary: TestVocabulary | None = None,
    padding_rows: int = 0,
    pre: str | None = None,
    chat_template: str | None = CHATML,
    rope_base: float = 10_000.0,
    rope_scaling: Mapping[str, str | float | int] | None = None,
    rope_freqs: npt.ArrayLike | None = None,
    qkv_bias: bool | None = None,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, npt.NDArray[Any] | None] | None = None,
    split: int = 0,
) -> Path:
    """Write a random model and return `path`, or the path of its first part.

    architecture: qwen2 (QKV bias), llama or qwen3 (QK norm). head_dim: None is width / heads, and then the
    file has no key_length. kind: of the matrices; quantised ones need width and ffn in multiples of 32.
    padding_rows: embedding rows past the vocabulary. rope_scaling: e.g. {"type": "yarn", "factor": 4.0}.
    metadata: further keys, or other values for the usual ones; None leaves a key out.
    tensors: further F32 tensors, or other values for the usual ones; None leaves a tensor out.
    split: the most tensors of a part; 0: one file.
    """
    rng = np.random.default_rng(seed)
    vocabulary = vocabulary or byte_vocabulary()
    head = head_dim or width // heads
    rows = len(vocabulary.tokens) + padding_rows
    bias = architecture == "qwen2" if qkv_bias is None else qkv_bias

    def normal(*shape: int, scale: float) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return normal(outputs, inputs, scale=gain / np.sqrt(inputs))

    def norm(size: int) -> npt.NDArray[np.float32]:
        return 1 + normal(size, scale=0.1)

    weights: dict[str, npt.NDArray[Any] | None] = {"token_embd.weight": matrix(rows, width, gain=2.5)}
    if not tied:
        weights["output.weight"] = matrix(rows, width, gain=2.5)
    weights["output_norm.weight"] = norm(width)
    if rope_freqs is not None:
        weights["rope_freqs.weight"] = np.asarray(rope_freqs, dtype=np.float32)
    for layer in range(layers):
        block = f"blk.{layer}."
        weights[block + "attn_norm.weight"] = norm(width)
        weights[block + "ffn_norm.weight"] = norm(width)
        for part, outputs in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
            weights[f"{block}attn_{part}.weight"] = matrix(outputs, width)
            if bias:
                weights[f"{block}attn_{part}.bias"] = normal(outputs, scale=0.5)
        if architecture == "qwen3":
            weights[block + "attn_q_norm.weight"] = norm(head)
            weights[block + "attn_k_norm.weight"] = norm(head)
        weights[block + "attn_output.weight"] = matrix(width, heads * head, gain=1.5)
        weights[block + "ffn_gate.weight"] = matrix(ffn, width, gain=1.5)
        weights[block + "ffn_up.weight"] = matrix(ffn, width, gain=1.5)
        weights[block + "ffn_down.weight"] = matrix(width, ffn, gain=1.5)
    weights |= tensors or {}

    keys: dict[str, Any] = {
        "general.name": f"tiny {architecture}",
        f"{architecture}.block_count": layers,
        f"{architecture}.context_length": context_length,
        f"{architecture}.embedding_length": width,
        f"{architecture}.feed_forward_length": ffn,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": float(rope_base),
    }
    if head_dim is not None:
        keys[f"{architecture}.attention.key_length"] = head_dim
        keys[f"{architecture}.attention.value_length"] = head_dim
    for name, value in (rope_scaling or {}).items():
        keys[f"{architecture}.rope.scaling.{name}"] = value
    keys |= _vocabulary_keys(vocabulary, pre or ("llama-bpe" if architecture == "llama" else "qwen2"))
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    keys |= metadata or {}

    writer = GGUFWriter(path, keys.pop("general.architecture", architecture), split_max_tensors=split)
    for key, value in keys.items():
        _add(writer, key, value)
    for name, tensor in weights.items():
        if tensor is None:
            continue
        if tensor.ndim == 2 and name not in (tensors or {}) and kind is not GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    path = _written(writer, path)
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if split else path


def write_file(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]],
    kind: GGMLQuantizationType = GGMLQuantizationType.BF16,
) -> Path:  # fmt: skip
    """Write a file of these keys, with the vocabulary's beside them, and tensors, and return `path`.

    Keys are the architecture's: `block_count` becomes `qwen2.block_count`. Tensors of bytes are of that kind.
    """
    writer = GGUFWriter(path, architecture)
    add_keys(writer, architecture, keys)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=kind if tensor.dtype == np.uint8 else None)
    return _written(writer, path)


def add_keys(writer: GGUFWriter, architecture: str, keys: Mapping[str, Any]) -> None:
    """Add the keys of an architecture, and those of a vocabulary of bytes; `tokenizer...` are whole names."""
    vocabulary = _vocabulary_keys(byte_vocabulary(), "qwen2")
    own = {key if key.startswith("tokenizer.") else f"{architecture}.{key}": keys[key] for key in keys}
    for key, value in (vocabulary | own).items():
        _add(writer, key, value)


def write_spec(path: Path, spec: ModelSpec, *, seed: int = 0) -> Path:
    """Write random weights for a spec and return `path`: tensors alone, no keys that say what for."""
    writer = GGUFWriter(path, "test")
    for name, tensor in spec_tensors(spec, seed=seed).items():
        writer.add_tensor(name, tensor)
    return _written(writer, path)


def spec_tensors(spec: ModelSpec, *, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights for a spec."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for role, weight in spec.all_weights():
        for name, shape in weight.parts:
            noise = rng.standard_normal(shape, dtype=np.float32)
            if weight.is_matrix or weight.is_matrices:
                gain = 2.5 if role in (Role.EMBEDDING, Role.HEAD) else 1.5
                noise *= np.float32(gain / np.sqrt(shape[-1]))
            elif role is Role.DECAY:
                noise = -np.exp(noise)
            elif role is Role.CONVOLUTION:
                noise *= np.float32(shape[1] ** -0.5)
            else:
                around_one = role.endswith("norm") or role is Role.LAYER_SCALE
                noise = 1 + 0.1 * noise if around_one else 0.2 * noise
                if role is Role.ROUTER_NORM:  # what the router reads is divided by that
                    noise *= np.float32(np.sqrt(shape[0]))
            tensors[name] = noise.astype(np.float32)
    if divisors := {rope.divisors for rope in spec.ropes if rope.divisors}:
        (tensors["rope_freqs.weight"],) = (np.array(one, dtype=np.float32) for one in divisors)
    return tensors


def half_tensors(spec: ModelSpec) -> dict[str, npt.NDArray[np.float32]]:
    """The same that a half holds exactly; divisors of angles, which stay float on a GPU, as they are."""
    return {
        name: array if name == "rope_freqs.weight" else array.astype(np.float16).astype(np.float32)
        for name, array in spec_tensors(spec).items()
    }


def _written(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary_keys(vocabulary: TestVocabulary, pre: str) -> dict[str, Any]:
    byte_level = vocabulary.model == "gpt2"
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": pre if byte_level else "default",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.bos_token_id": vocabulary.id("<|endoftext|>" if byte_level else "<s>"),
        "tokenizer.ggml.eos_token_id": vocabulary.id("<|im_end|>"),
    }
    if vocabulary.merges is not None:
        keys["tokenizer.ggml.merges"] = vocabulary.merges
    if vocabulary.scores is not None:
        keys["tokenizer.ggml.scores"] = vocabulary.scores
    return keys


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int() if value < 0:
            writer.add_int32(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
