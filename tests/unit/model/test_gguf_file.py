"""Files that are broken or hostile are refused by name; sound ones are read without waste."""

import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from nightmill.jobs.errors import ChatTemplateError, ModelFileError
from nightmill.worker.model.chat import ChatTemplate, template
from nightmill.worker.model.chat.renderer import Limits, Renderer
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED
from tests.support.blocks import random_blocks
from tests.support.ggufs import write_model

U32, U64, F32, STRING, ARRAY, BOOL, I32 = 4, 10, 6, 8, 9, 7, 5


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + u32(kind) + payload


def tensor(name: str, shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(map(u64, reversed(shape)))
    return text(name) + u32(len(shape)) + dims + u32(kind) + u64(offset)


def gguf(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(256),
    *,
    head: bytes = b"GGUF" + u32(3),
    counts: tuple[int, int] | None = None,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    tensor_count, key_count = counts or (len(tensors), len(keys))
    body = head + u64(tensor_count) + u64(key_count) + b"".join(keys + tensors)
    return body + bytes(-len(body) % 32) + data


def opened(path: Path, content: bytes) -> GgufFile:
    path.write_bytes(content)
    return GgufFile.open(path)


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "no gguf": (b"abcdefgh" * 8, r"is not a GGUF file: it starts with b'abcd'"),
    "safetensors": (u64(500) + b'{"a.weight":{"dtype":"F16"', "it looks like safetensors; convert"),
    "zip": (b"PK\x03\x04" + bytes(60), "it is a ZIP archive"),
    "html": (b"\n<!DOCTYPE html><html>", "it is a web page"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git lfs pull"),
    "ggml": (b"tjgg" + bytes(60), "old llama.cpp format"),
    "big-endian": (gguf(head=b"GGUF" + struct.pack(">I", 3)), "big-endian GGUF file; turn it around"),
    "version 1": (gguf(head=b"GGUF" + u32(1)), "is GGUF version 1"),
    "version 9": (gguf(head=b"GGUF" + u32(9)), "is GGUF version 9; versions 2 and 3"),
    "key count": (gguf(counts=(0, 2**63)), "claims 9223372036854775808 metadata keys"),
    "tensor count": (gguf(counts=(2**40, 0)), "claims 1099511627776 tensors"),
    "key length": (gguf([u64(2**60) + b"name"]), "metadata key 0: its name has an impossible length"),
    "key text": (gguf([text(b"\xff\xfe") + u32(U32) + u32(1)]), "metadata key 0: its name is not UTF-8"),
    "duplicate key": (gguf([key("a.b", U32, u32(1))] * 2), "a.b: the key occurs twice"),
    "value type": (gguf([key("a.b", 99, u32(1))]), "a.b: unknown value type 99"),
    "string length": (gguf([key("a.b", STRING, u64(2**50))]), "a.b: a string's length passes the end"),
    "array length": (
        gguf([key("a.b", ARRAY, u32(U32) + u64(2**61))]),
        "a.b: claims 2305843009213693952 items, which do not fit",
    ),
    "array item type": (gguf([key("a.b", ARRAY, u32(77) + u64(1))]), "a.b: unknown value type 77"),
    "string in array": (
        gguf([key("a.b", ARRAY, u32(STRING) + u64(2) + u64(2**63) + u64(2**63))]),
        "a.b: string 1 of 2 lies past the end",
    ),
    "nested arrays": (
        gguf([key("a.b", ARRAY, u32(ARRAY) + u64(1 << 20) + (u32(U32) + u64(0)) * (1 << 20))]),
        "a.b: is an array of arrays, which no supported model has",
    ),
    "alignment": (gguf([key("general.alignment", U32, u32(24))]), "general.alignment: 24 is not a power of"),
    "alignment type": (gguf([key("general.alignment", STRING, text("8"))]), "general.alignment: is STRING"),
    "alignment zero": (gguf([key("general.alignment", U32, u32(0))]), "general.alignment: 0 is not a power"),
    "no dimensions": (gguf(tensors=[tensor("t", ())]), "tensor t: has 0 dimensions"),
    "dimensions": (gguf(tensors=[tensor("t", (1,) * 5)]), "tensor t: has 5 dimensions"),
    "zero dimension": (gguf(tensors=[tensor("t", (0, 32))]), "tensor t: has a dimension of 0"),
    "overflow": (gguf(tensors=[tensor("t", (2**33, 2**33))]), "tensor t: its shape .* is impossibly large"),
    "tensor type": (gguf(tensors=[tensor("t", kind=200)]), "tensor t: unknown tensor type 200"),
    "newer type": (
        gguf(tensors=[tensor("t", kind=42)]),
        "tensor t: the type Q2_0 is not supported; requantise",
    ),
    "removed type": (gguf(tensors=[tensor("t", kind=4)]), "tensor t: unknown tensor type 4"),
    "block size": (gguf(tensors=[tensor("t", (2, 33), kind=8)]), "rows of 33 are not a multiple of Q8_0's"),
    "duplicate tensor": (gguf(tensors=[tensor("t")] * 2), "tensor t: the name occurs twice"),
    "overlap": (gguf(tensors=[tensor("t"), tensor("u", offset=96)]), "tensor u: its data overlaps .* t$"),
    "unaligned": (gguf(tensors=[tensor("t", offset=5)]), "tensor t: offset 5 is not aligned to 32"),
    "past the end": (
        gguf(tensors=[tensor("t", offset=192)]),
        "tensor t: its data ends 64 bytes past the end of the file; the download may be incomplete",
    ),
    "far away": (gguf(tensors=[tensor("t", offset=2**64 - 32)]), "tensor t: its data ends .* past the end"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused_by_file_and_name(fault: str, tmp_path: Path) -> None:
    content, message = FAULTS[fault]
    with pytest.raises(ModelFileError, match=message) as caught:
        opened(tmp_path / "model.gguf", content)
    assert str(caught.value).startswith(str(tmp_path / "model.gguf"))


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"there is no such file; give the path .* such as hf:"):
        GgufFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match=r"is a directory; give the path of a \.gguf"):
        GgufFile.open(tmp_path)
    with pytest.raises(ModelFileError, match="there is no such file"):
        GgufFile.open("bad\0name")


def test_absurd_counts_allocate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content, _ in FAULTS.values():
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(ModelFileError):
            GgufFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000


def read_everything(path: Path) -> None:
    with GgufFile.open(path) as file:
        read_spec(file)
        for name in file.tensors:
            file.array(name)
        tokenizer = Tokenizer.from_gguf(file)
        ids = tokenizer.encode("hello", special=True)
        tokenizer.decode(ids)
        try:
            ChatTemplate.from_gguf(file, tokenizer).encode([{"role": "user", "content": "hi"}])
        except ChatTemplateError:
            return  # damage within the template's text


def test_truncation_anywhere_is_a_model_file_error(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    header_end = whole.index(b"token_embd.weight")
    cuts = {int(header_end * part / 40) for part in range(40)} | {header_end + 9, len(whole) // 2}
    for cut in [*sorted(cuts), len(whole) - 40]:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelFileError):
            GgufFile.open(path)


@pytest.fixture
def shared_renderers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process for all templates of the same text: they are many, and few are damaged."""
    made: dict[str, Renderer] = {}

    def renderer(source: str, variables: Mapping[str, Any], limits: Limits, label: str) -> Renderer:
        key = f"{source} {variables}"
        if key not in made:
            made[key] = Renderer(source, variables, limits, label)
        return made[key]

    monkeypatch.setattr(template, "Renderer", renderer)
    yield
    for one in made.values():
        one.close()


@pytest.mark.usefixtures("shared_renderers")
@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_give_a_model_or_a_model_file_error(seed: int, tiny: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    whole = tiny.read_bytes()
    header_end = whole.index(b"blk.1.ffn_down.weight") + 60
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 3))):
            at = rng.randrange(header_end)
            damaged[at] = rng.choice((damaged[at] ^ 1 << rng.randrange(8), 0, 0xFF))
        path.write_bytes(damaged)
        try:
            read_everything(path)
        except ModelFileError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 10


def with_values(tmp_path: Path) -> GgufFile:
    keys = [
        key("s", STRING, text("größe")),
        key("bad_text", STRING, text(b"\xff")),
        key("i", I32, struct.pack("<i", -5)),
        key("u", U64, u64(2**40)),
        key("f", F32, struct.pack("<f", 0.5)),
        key("nan", F32, struct.pack("<f", float("nan"))),
        key("b", BOOL, b"\1"),
        key("ss", ARRAY, u32(STRING) + u64(2) + text("a") + text("ü")),
        key("is", ARRAY, u32(I32) + u64(2) + struct.pack("<ii", -1, 7)),
        key("fs", ARRAY, u32(F32) + u64(2) + struct.pack("<ff", 1.5, float("inf"))),
        key("none", ARRAY, u32(F32) + u64(0)),
        key("no_texts", ARRAY, u32(STRING) + u64(0)),
    ]
    return opened(tmp_path / "values.gguf", gguf(keys))


def test_getters_return_typed_values(tmp_path: Path) -> None:
    file = with_values(tmp_path)
    assert file.string("s") == "größe"
    assert file.integer("i", minimum=-10) == -5
    assert file.integer("u") == 2**40
    assert file.number("f") == 0.5
    assert file.number("i") == -5.0
    assert file.boolean("b") is True
    assert file.strings("ss") == ["a", "ü"]
    assert file.integers("is") == [-1, 7]
    assert file.numbers("is") == [-1.0, 7.0]
    assert file.numbers("none") == []
    assert file.strings("no_texts") == []
    assert file.count("ss") == 2
    assert file.integer("absent", default=None) is None
    assert file.strings("absent", default=[]) == []
    assert "s" in file
    assert "absent" not in file


@pytest.mark.parametrize(
    ("get", "message"),
    [
        (lambda file: file.string("absent"), "absent: the key is missing"),
        (lambda file: file.string("i"), "i: is INT32, expected a string"),
        (lambda file: file.string("i", default="x"), "i: is INT32, expected a string"),
        (lambda file: file.string("bad_text"), "bad_text is not valid UTF-8"),
        (lambda file: file.integer("b"), "b: is BOOL, expected an integer"),
        (lambda file: file.integer("i"), "i: is -5, expected 0 to"),
        (lambda file: file.integer("u", maximum=9), "u: is 1099511627776, expected 0 to 9"),
        (lambda file: file.number("nan"), "nan: is nan, expected a finite number"),
        (lambda file: file.boolean("u"), "u: is UINT64, expected a boolean"),
        (lambda file: file.strings("is"), "is: is an array of INT32, expected an array of strings"),
        (lambda file: file.integers("s"), "s: is STRING, expected an array of integers"),
        (lambda file: file.numbers("fs"), "fs: item 1 is not a finite number"),
        (lambda file: file.integers("no_texts"), "no_texts: is an array of STRING, expected an array of int"),
        (lambda file: file.numbers("no_texts"), "no_texts: is an array of STRING, expected an array of numb"),
        (lambda file: file.strings("none"), "none: is an array of FLOAT32, expected an array of strings"),
        (lambda file: file.array("t"), "tensor t: is missing"),
    ],
)
def test_wrong_values_are_named(get: Callable[[GgufFile], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        get(with_values(tmp_path))


READ_AS_ARRAYS = {
    "llama.attention.head_count": (STRING, F32, BOOL),
    "llama.attention.head_count_kv": (STRING, F32, BOOL),
    "llama.feed_forward_length": (STRING, F32, BOOL),
    "tokenizer.ggml.tokens": (U32, F32, BOOL),
    "tokenizer.ggml.token_type": (STRING, F32, BOOL),
    "tokenizer.ggml.merges": (U32, F32, BOOL),
    "tokenizer.ggml.scores": (STRING, BOOL),
}


@pytest.mark.parametrize(
    ("name", "item"), [(name, item) for name in READ_AS_ARRAYS for item in READ_AS_ARRAYS[name]]
)
def test_empty_array_of_another_type_is_refused_by_key(name: str, item: int, tmp_path: Path) -> None:
    tokens = ["A", "<0x41>"] if "scores" not in name else [f"<0x{byte:02X}>" for byte in range(256)]
    values = {
        "general.architecture": key("general.architecture", STRING, text("llama")),
        "llama.block_count": key("llama.block_count", U32, u32(1)),
        "llama.embedding_length": key("llama.embedding_length", U32, u32(32)),
        "llama.context_length": key("llama.context_length", U32, u32(32)),
        "llama.attention.layer_norm_rms_epsilon": key("llama.attention.layer_norm_rms_epsilon", U32, u32(1)),
        "llama.attention.head_count": key("llama.attention.head_count", U32, u32(1)),
        "tokenizer.ggml.model": key(
            "tokenizer.ggml.model", STRING, text("llama" if "scores" in name else "gpt2")
        ),
        "tokenizer.ggml.pre": key("tokenizer.ggml.pre", STRING, text("smollm")),
        "tokenizer.ggml.tokens": key(
            "tokenizer.ggml.tokens", ARRAY, u32(STRING) + u64(len(tokens)) + b"".join(map(text, tokens))
        ),
        name: key(name, ARRAY, u32(item) + u64(0)),
    }
    names = ["blk.0.ffn_up.weight", "token_embd.weight"]
    tensors = [tensor(name, (1, 32), offset=128 * index) for index, name in enumerate(names)]
    file = opened(tmp_path / "m.gguf", gguf(list(values.values()), tensors))
    with pytest.raises(ModelFileError, match=rf"m\.gguf: {name}: is an array of \w+, expected an array of"):
        read_spec(file) if name.startswith("llama.") else Tokenizer.from_gguf(file)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_tensors_match_the_gguf_package(kind: str, tmp_path: Path) -> None:
    quantisation = GGMLQuantizationType[kind]
    path = write_model(tmp_path / "model.gguf", kind=quantisation)
    file = GgufFile.open(path)
    for theirs in GGUFReader(path).tensors:
        info = file.tensors[theirs.name]
        assert info.shape == tuple(reversed(theirs.shape.tolist()))
        assert (info.kind, info.nbytes, info.offset) == (
            theirs.tensor_type,
            theirs.n_bytes,
            theirs.data_offset,
        )
        ours = file.array(theirs.name)
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, dequantize(theirs.data, theirs.tensor_type).reshape(info.shape))
    assert file.tensors["blk.0.ffn_up.weight"].kind is quantisation


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_what_the_gpu_reads_numpy_reads_too(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    rows, columns = 3, 512
    blocks = random_blocks(kind, rows * columns // GGML_QUANT_SIZES[kind][0])
    declared = tensor("t", (rows, columns), kind=int(kind))
    file = opened(tmp_path / "m.gguf", gguf(tensors=[declared], data=blocks.tobytes()))
    np.testing.assert_array_equal(file.raw("t"), blocks.reshape(-1))
    np.testing.assert_array_equal(file.array("t"), dequantize(blocks, kind).reshape(rows, columns))


def test_tensor_type_without_dequantisation_is_named(tmp_path: Path) -> None:
    file = opened(tmp_path / "i.gguf", gguf(tensors=[tensor("t", (32,), kind=26)]))
    with pytest.raises(ModelFileError, match="tensor t: the type I32 is not supported"):
        file.array("t")


def test_views_are_read_only_and_outlive_close(tmp_path: Path) -> None:
    values = np.arange(32, dtype=np.float32)
    content = gguf(tensors=[tensor("t")], data=values.tobytes())
    with opened(tmp_path / "m.gguf", content) as file:
        raw, array = file.raw("t"), file.array("t")
    file.close()
    np.testing.assert_array_equal(array, values)
    for view in (raw, array):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    with pytest.raises(ValueError, match="was closed"):
        file.raw("t")


def test_quantised_values_stay_close(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    raw = quantize(weights, GGMLQuantizationType.Q8_0)
    file = opened(tmp_path / "q.gguf", gguf(tensors=[tensor("t", (4, 64), kind=8)], data=raw.tobytes()))
    np.testing.assert_allclose(file.array("t"), weights, atol=0.02)


def test_a_real_vocabulary_is_read_without_waste(vocab_dir: Path) -> None:
    script = (
        "import sys, psutil\n"
        "from nightmill.worker.model.gguf.file import GgufFile\n"
        "before = psutil.Process().memory_full_info().uss\n"
        "file = GgufFile.open(sys.argv[1])\n"
        "kept = file.strings('tokenizer.ggml.tokens'), file.strings('tokenizer.ggml.merges')\n"
        "assert [len(k) for k in kept] == [151936, 151387]\n"
        "print(psutil.Process().memory_full_info().uss - before)\n"
    )
    command = [sys.executable, "-c", script, str(vocab_dir / "ggml-vocab-qwen2.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert int(done.stdout) < 80_000_000
