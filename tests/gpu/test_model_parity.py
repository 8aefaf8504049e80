"""Whole models of real shapes, with random weights, against transformers in FP32."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from tests.support.comparing import compare_logits
from tests.support.driving import BLOCK, Chunk, Cuda, Pages, logits_of
from tests.support.ggufs import byte_vocabulary, write_model

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "qwen2",
        {"layers": 24, "width": 896, "ffn": 4864, "heads": 14, "kv_heads": 2, "vocab": 151936,
         "rope_base": 1e6},
    ),
    "qwen3-0.6b": (
        "qwen3",
        {"layers": 28, "width": 1024, "ffn": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128,
         "vocab": 151936, "rope_base": 1e6},
    ),
    "llama-3.2-1b": (
        "llama",
        {"layers": 16, "width": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocab": 128256,
         "rope_base": 5e5},
    ),
}  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOKENS = 256
DECODED = 16


def transformers_model(file: GgufFile, spec: ModelSpec) -> Any:
    """The file's weights in transformers' classes, in FP32 on the CPU."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name = {"qwen2": "Qwen2", "llama": "Llama", "qwen3": "Qwen3"}[spec.family]
    attention, ffn = spec.layers[0].attention, spec.layers[0].feed_forward.width
    settings = getattr(transformers, f"{name}Config")(
        hidden_size=spec.width, intermediate_size=ffn, num_hidden_layers=len(spec.layers),
        num_attention_heads=attention.heads, num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim, vocab_size=spec.vocab, max_position_embeddings=512,
        rms_norm_eps=spec.output_norm.eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope.base},
    )  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(settings)
    state = {}
    for key in model.state_dict():
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            array = file.array("token_embd.weight")
        elif key == "model.norm.weight":
            array = file.array("output_norm.weight")
        else:
            _, _, layer, *parts, kind = key.split(".")
            part = NAMES[".".join(parts)]
            array = file.array(f"blk.{layer}.{part}.{kind}")
            if spec.family == "llama" and part in ("attn_q", "attn_k"):
                array = halves(array, attention.heads if part == "attn_q" else attention.kv_heads)
        state[key] = torch.from_numpy(np.array(array))
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    model.load_state_dict(state)
    return model


def halves(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's permutation: pairs of neighbours become the rotated halves of each head."""
    rows = len(weight)
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.timeout(600)
def test_logits_agree_with_transformers(shape: str, tmp_path: Path) -> None:
    """Two prompts in one step, then 16 tokens of each, one by one."""
    torch = pytest.importorskip("torch")
    architecture, options = SHAPES[shape]
    options = dict(options)
    padding = options.pop("vocab") - len(byte_vocabulary().tokens)
    path = write_model(
        tmp_path / "model.gguf", architecture, kind=GGMLQuantizationType.F16, padding_rows=padding, **options
    )
    file = GgufFile.open(path)
    spec = read_spec(file)
    texts = np.random.default_rng(3).integers(0, spec.vocab, (2, TOKENS + DECODED)).tolist()
    with torch.no_grad():
        expected = transformers_model(file, spec)(torch.tensor(texts)).logits.numpy()

    pages = Pages(2, 512 // BLOCK)
    cuda = Cuda(
        file, spec, slots=2, kv_pages=2 * 512 // BLOCK, max_tokens=512, max_draws=512, context=512,
        tune=False,
    )  # fmt: skip
    with closing(cuda.runner):
        prompts = [Chunk(slot, texts[slot], 0, TOKENS, TOKENS) for slot in range(2)]
        whole = logits_of(cuda, pages, prompts, admit=True).reshape(2, TOKENS, -1)
        one_by_one = [
            logits_of(
                cuda, pages, [Chunk(slot, texts[slot], TOKENS + i, 1) for slot in range(2)], admit=False
            )
            for i in range(DECODED)
        ]
    for name, ours, theirs in (
        ("prefill", whole, expected[:, :TOKENS]),
        ("decode", np.stack(one_by_one, 1), expected[:, TOKENS:]),
    ):
        ours, theirs = ours.reshape(-1, spec.vocab), theirs.reshape(-1, spec.vocab)
        agreement = compare_logits(ours, theirs)
        print(f"{shape} {name}: {agreement}")  # noqa: T201
        agreement.check()
        with pytest.raises(AssertionError):
            compare_logits(ours * 1.01, theirs).check()
