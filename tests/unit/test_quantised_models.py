"""Random models of quantised types: which tensor has which type, and that their numbers are sane."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Role
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.reference.experts import choose
from tests.support.expert_shapes import EXPERT_SHAPES
from tests.support.family_models import Heads, Size
from tests.support.gemma4_shapes import GEMMA4_SHAPES
from tests.support.hybrid_shapes import HYBRID_SHAPES
from tests.support.quantised_models import SHAPES, TYPES, Shape, kinds_of, write

Kind = GGMLQuantizationType
SMALL = Shape(Size(layers=16, vocab=512, context=128, heads=Heads(4, 2, 64), width=256, ffn=512))


@pytest.mark.parametrize("name", TYPES)
def test_every_matrix_has_the_deviation_of_its_width_and_no_mean(name: str, tmp_path: Path) -> None:
    shape = replace(SMALL, size=replace(SMALL.size, layers=2))
    with GgufFile.open(write(tmp_path / "m.gguf", shape, name, pool_bytes=1 << 19)) as file:
        spec = read_spec(file)
        for role, weight in spec.all_weights():
            for tensor, sizes in weight.parts:
                values = file.array(tensor)
                assert values.shape == sizes and np.isfinite(values).all()
                if weight.is_matrix:
                    gain = 2.5 if role in (Role.EMBEDDING, Role.HEAD) else 1.5
                    assert values.std() * sizes[1] ** 0.5 == pytest.approx(gain, rel=0.1), tensor
                    assert abs(values.mean()) < 0.05 * values.std(), tensor


def test_a_mixture_has_more_bits_where_llama_cpp_has_them(tmp_path: Path) -> None:
    """Layers of 16: the first and last two, and of the others each third."""
    with GgufFile.open(write(tmp_path / "m.gguf", SMALL, "Q4_K_M", pool_bytes=1 << 19)) as file:
        better = {name for name, info in file.tensors.items() if info.kind is Kind.Q6_K}
        others = {info.kind for name, info in file.tensors.items() if name not in better}
    layers = (0, 1, 4, 7, 10, 13, 14, 15)
    assert better == {"output.weight"} | {
        f"blk.{layer}.{name}.weight" for layer in layers for name in ("attn_v", "ffn_down")
    }
    assert others == {Kind.Q4_K, Kind.F32}


def test_rows_that_are_no_multiple_of_256_fall_back(tmp_path: Path) -> None:
    odd = Shape(Size(layers=1, vocab=512, context=128, heads=Heads(4, 2, 64), width=160, ffn=256), tied=True)
    with GgufFile.open(write(tmp_path / "m.gguf", odd, "Q4_K_M", pool_bytes=1 << 19)) as file:
        found = {name: info.kind for name, info in file.tensors.items()}
        assert found == kinds_of(read_spec(file), "Q4_K_M")
    assert found["token_embd.weight"] is Kind.Q8_0  # the head, too
    assert found["blk.0.attn_q.weight"] is Kind.Q5_0
    assert found["blk.0.attn_v.weight"] is Kind.Q8_0
    assert found["blk.0.ffn_down.weight"] is Kind.Q6_K


@pytest.mark.parametrize("name", HYBRID_SHAPES)
@pytest.mark.parametrize("type_name", ["F16", "Q4_K_M"])
def test_files_of_layers_with_states_say_what_they_were_made_of(
    name: str, type_name: str, tmp_path: Path
) -> None:
    """In small, with the heads and states of the real one, which kernels compute."""
    whole = HYBRID_SHAPES[name]
    check_spec(whole.file()[2])
    state = (4, 2, *whole.state[2:]) if whole.state[0] else whole.state
    shape = replace(
        whole, layers=8, width=256, ffn=512, vocab=512, heads=(4, 2, whole.heads[2]), state=state,
        attends=(3, 7), context=512,
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", shape, type_name, pool_bytes=1 << 19)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        assert replace(spec, name="model") == shape.file()[2]
        check_spec(spec)
        decays = [name for role, weight in spec.all_weights() if role is Role.DECAY for name in weight.names]
        assert all((file.array(name) < 0).all() for name in decays)
        assert bool(decays) == (whole.family != "lfm2")


@pytest.mark.parametrize(("name", "type_name"), [("qwen3-30b-a3b", "Q4_K_M"), ("gpt-oss-20b", "MXFP4")])
def test_files_of_experts_say_what_they_were_made_of(name: str, type_name: str, tmp_path: Path) -> None:
    """In small; the types of tensors are those of llama.cpp's files, and values have one deviation."""
    shape = replace(
        EXPERT_SHAPES[name], layers=8, width=256, vocab=512, heads=(4, 2, 64), experts=(8, 2, 256),
        context=512,
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", shape, type_name, pool_bytes=1 << 19)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        assert replace(spec, name="model") == shape.file()[2]
        kinds = {name: info.kind for name, info in file.tensors.items()}
        assert kinds["blk.2.ffn_gate_inp.weight"] is Kind.F32
        more = Kind.Q6_K if type_name == "Q4_K_M" else Kind.MXFP4
        assert kinds["blk.0.ffn_down_exps.weight"] is more
        assert kinds["blk.1.ffn_down_exps.weight"] is (Kind.Q4_K if type_name == "Q4_K_M" else Kind.MXFP4)
        assert kinds["blk.1.attn_q.weight"] is (Kind.Q4_K if type_name == "Q4_K_M" else Kind.Q8_0)
        for part in ("gate", "up", "down"):
            deviation = file.array(f"blk.3.ffn_{part}_exps.weight").std() * 16
            assert deviation == pytest.approx(1.5, rel=0.5)


def test_a_file_of_latent_attention_and_experts_says_what_it_was_made_of(tmp_path: Path) -> None:
    shape = replace(
        EXPERT_SHAPES["glm-4.7-flash"], layers=2, width=256, vocab=512, heads=(4, 1, 256),
        experts=(8, 2, 256), context=512,
    )  # fmt: skip
    with GgufFile.open(write(tmp_path / "m.gguf", shape, "Q4_K_M", pool_bytes=1 << 19)) as file:
        assert replace(read_spec(file), name="model") == shape.file()[2]
        check_spec(read_spec(file))


PUBLISHED = {
    "gemma4-e2b": 5.12e9, "gemma4-e4b": 8.0e9, "gemma4-12b": 11.96e9, "gemma4-31b": 30.7e9,
    "gemma4-26b-a4b": 26e9,
}  # fmt: skip
"""Parameters, up to a tenth of them for images and sounds."""


@pytest.mark.parametrize("name", GEMMA4_SHAPES)
def test_files_of_gemma_4_say_what_they_were_made_of(name: str, tmp_path: Path) -> None:
    """In small, with heads as large as the real one's; the real one is as large as it is said to be."""
    real = GEMMA4_SHAPES[name]
    assert 0.9 < real.spec.parameters / PUBLISHED[name] < 1.001
    check_spec(real.spec)
    shape = replace(
        real, layers=2 * real.period, shared=min(real.shared, real.period), width=256, ffn=512, vocab=512,
        heads=max(real.kv_heads), window=100, context=512, experts=real.experts and (8, 2, 256),
    )  # fmt: skip
    path = write(tmp_path / "m.gguf", shape, "Q4_K_M", pool_bytes=1 << 19)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        assert replace(spec, name="model") == replace(shape.spec, tensor_types=spec.tensor_types)
        kinds = {name: info.kind for name, info in file.tensors.items()}
        assert kinds | {"rope_freqs.weight": Kind.F32} == kinds_of(spec, "Q4_K_M") | kinds
        if real.inputs is not None:
            assert kinds["per_layer_token_embd.weight"] is Kind.Q5_K
            assert kinds["per_layer_model_proj.weight"] is Kind.BF16
        assert file.array("blk.1.layer_output_scale.weight")[0] == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize(("skew", "often"), [(False, 1.0), (True, 5.0)])
def test_a_skewed_router_chooses_one_expert_in_eight_more_often(
    skew: bool, often: float, tmp_path: Path
) -> None:
    shape = replace(
        EXPERT_SHAPES["qwen3-30b-a3b"],
        layers=1,
        width=256,
        vocab=512,
        heads=(4, 2, 64),
        experts=(128, 8, 256),
    )
    path = write(tmp_path / "m.gguf", shape, "Q4_K_M", pool_bytes=1 << 19, skew=skew)
    with GgufFile.open(path) as file:
        (experts,) = read_spec(file).experts
        x = np.random.default_rng(2).standard_normal((2000, 256), dtype=np.float32)
        chosen, _ = choose(experts, x @ file.array("blk.0.ffn_gate_inp.weight").T)
    assert (chosen < 16).sum() / 16 == pytest.approx(often * chosen.size / 128, rel=0.15)


def test_shapes_are_those_of_the_models_they_are_called_after() -> None:
    sizes = {name: shape.size for name, shape in SHAPES.items()}
    assert {name: (one.layers, one.width, one.ffn, one.vocab) for name, one in sizes.items()} == {
        "qwen2.5-0.5b": (24, 896, 4864, 151_936),
        "qwen2.5-1.5b": (28, 1536, 8960, 151_936),
        "qwen2.5-7b": (28, 3584, 18_944, 152_064),
        "qwen2.5-32b": (64, 5120, 27_648, 152_064),
    }
