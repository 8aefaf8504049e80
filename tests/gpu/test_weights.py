"""Every tensor type, dequantised on the GPU, against the `gguf` package: bit for bit."""

import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.gpu.device.device import Device
from nightmill.worker.runners.gpu.device.operands import ABSENT, Buffer, Matrix
from nightmill.worker.runners.gpu.loading import load_weights
from nightmill.worker.runners.gpu.precision import HALF, Precision
from nightmill.worker.runners.gpu.weights.dequantizer import SUPPORTED, Dequantizer
from nightmill.worker.runners.gpu.weights.layout import weight_bytes
from nightmill.worker.runners.gpu.weights.staging import Staging
from tests.support.blocks import random_blocks
from tests.support.elements import BOTH_ELEMENTS, as_words
from tests.support.ggufs import write_model

Kind = GGMLQuantizationType
NAN_WORD = np.uint16(0x7FFF)


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_dequantising_gives_the_same_bits_as_gguf(device: Device, kind: GGMLQuantizationType) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    count = 3001 * max(1, 64 // block)
    blocks = random_blocks(kind, count)
    expected = dequantize(blocks, kind).reshape(-1)
    dequantizer = Dequantizer(device, Staging(device, size * 256 * 3))  # so small that it takes several turns
    out_float = device.upload(np.full(expected.size + 8, np.nan, dtype=np.float32))
    out_words = device.upload(np.full(expected.size + 8, NAN_WORD))
    dequantizer.load(blocks.reshape(-1), kind, out_float, floats=True)
    dequantizer.load(blocks.reshape(-1), kind, out_words, floats=False)
    assert dequantizer.fits()
    floats = device.download(out_float, expected.size + 8, np.float32)
    words = device.download(out_words, expected.size + 8, np.uint16)
    np.testing.assert_array_equal(floats[:-8].view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(words[:-8], as_words(expected, device.element))
    assert np.isnan(floats[-8:]).all()
    assert (words[-8:] == NAN_WORD).all()
    dequantizer.close()


@BOTH_ELEMENTS
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q5_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_a_file_arrives_whole_and_stacked(
    device: Device, tmp_path: Path, architecture: str, kind: GGMLQuantizationType
) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", architecture, kind=kind, tied=False))
    spec = read_spec(file)
    weights = load_weights(device, file, spec, Precision(device.element))

    def check(held: Matrix | Buffer, *names: str) -> None:
        expected = np.concatenate([file.array(name) for name in names])
        if isinstance(held, Matrix):
            expected = as_words(expected, device.element)
        actual = device.download(held.address, expected.shape, expected.dtype)
        np.testing.assert_array_equal(actual, expected)

    check(weights.embedding, "token_embd.weight")
    check(weights.head, "output.weight")
    check(weights.output_norm.weight, "output_norm.weight")
    for index, layer in enumerate(weights.layers):
        block = f"blk.{index}."
        check(layer.attn_norm.weight, block + "attn_norm.weight")
        check(layer.qkv, *(f"{block}attn_{part}.weight" for part in "qkv"))
        check(layer.attn_output, block + "attn_output.weight")
        check(layer.ffn_norm.weight, block + "ffn_norm.weight")
        check(layer.gate_up, block + "ffn_gate.weight", block + "ffn_up.weight")
        check(layer.ffn_down, block + "ffn_down.weight")
        attention = spec.layers[index].attention
        if attention.bias:
            check(layer.qkv_bias, *(f"{block}attn_{part}.bias" for part in "qkv"))
        if attention.qk_norm is not None:
            check(layer.q_norm, block + "attn_q_norm.weight")
            check(layer.k_norm, block + "attn_k_norm.weight")
        assert (layer.qkv_bias is not ABSENT) == attention.bias
        assert (layer.q_norm is not ABSENT) == (attention.qk_norm is not None)


def test_the_plan_covers_the_weights_and_wastes_little(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf"))
    spec = read_spec(file)
    least = sum(math.prod(i.shape) * (2 if len(i.shape) == 2 else 4) for i in file.tensors.values())
    assert least <= weight_bytes(spec, HALF) <= least + 256 * len(file.tensors)
