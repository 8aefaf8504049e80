"""In which formats matrices are kept, and how much memory they take."""

from dataclasses import replace

from nightmill.worker.model.spec import ModelSpec, Role
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.device.operands import Format
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.gpu.products.packed.unpack import Unpacked
from nightmill.worker.runners.gpu.weights.layout import Run, formats_in, runs_of, weight_bytes
from tests.support.specs import dense_spec

FILE = Precision(weights=WeightsFormat.FILE)


def model(**types: str) -> ModelSpec:
    """Two layers, all matrices Q4_K but those that are named by their last part."""
    spec = dense_spec(layers=2, width=512, heads=8, kv_heads=2, ffn_width=768, vocab=1003)
    names = [name for _, weight in spec.all_weights() if weight.is_matrix for name in weight.names]
    return replace(spec, tensor_types={name: types.get(name.split(".")[-2], "Q4_K") for name in names})


def stack(spec: ModelSpec, role: Role, precision: Precision = FILE) -> list[Run]:
    return runs_of(spec, role, spec.layer_weights(1)[role], precision)


def test_tensors_of_one_type_are_one_matrix_and_others_a_stack() -> None:
    (qkv,) = stack(model(), Role.QKV)
    assert (qkv.format, qkv.rows, qkv.columns) == (Format.Q4_K, 768, 512)
    first, last = stack(model(attn_v="Q6_K"), Role.QKV)
    assert (first.format, first.rows, last.format, last.rows) == (Format.Q4_K, 640, Format.Q6_K, 128)
    assert [name for name, _ in first.parts] == ["blk.1.attn_q.weight", "blk.1.attn_k.weight"]


def test_types_that_cannot_be_packed_become_elements_with_all_their_stack() -> None:
    spec = model(attn_v="IQ4_XS", ffn_down="F16")
    precision = replace(FILE, element=Element.BF16)
    (qkv,), (down,), (gate_up,) = (
        stack(spec, role, precision) for role in (Role.QKV, Role.FFN_DOWN, Role.GATE_UP)
    )
    assert (qkv.format, down.format, gate_up.format) == (Format.BF16, Format.BF16, Format.Q4_K)
    assert formats_in(spec, precision) == {Format.BF16, Format.Q4_K}
    assert formats_in(spec, precision, Role.FFN_DOWN) == {Format.BF16}


def test_weights_take_the_files_bytes_and_sixteen_bits_where_these_are_asked_for() -> None:
    spec = model(attn_v="Q6_K")
    matrices = 1003 * 512 + 2 * (768 * 512 + 512 * 512 + 3 * 512 * 768)
    in_file = matrices * 144 // 256 + 2 * 128 * 512 * (210 - 144) // 256
    assert in_file < weight_bytes(spec, FILE) < 1.03 * in_file
    assert 2 * matrices < weight_bytes(spec, HALF) < 2.01 * matrices
    assert Unpacked.workspace(spec, HALF) == 0
    assert Unpacked.workspace(spec, FILE) == 16 << 20, "pieces of the head"
    assert Unpacked.workspace(replace(spec, width=8192), FILE) == 2 * 768 * 8192 * 2, "gate and up"
