"""Encoders against transformers: same weights, pooled hidden states, at random sizes.

Needs torch and transformers; run with `make parity`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Pooling
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.engines import NoText, complete
from tests.support.ggufs import byte_vocabulary, write_file

pytestmark = pytest.mark.parity

VOCAB = len(byte_vocabulary().tokens) + 5
CONTEXT = 160
NUMBERS = {Pooling.MEAN: 1, Pooling.CLS: 2}
NAMES = {
    "bert": {
        "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
        "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
        "encoder.layer.N.attention.self.query": "attn_q", "encoder.layer.N.attention.self.key": "attn_k",
        "encoder.layer.N.attention.self.value": "attn_v",
        "encoder.layer.N.attention.output.dense": "attn_output",
        "encoder.layer.N.attention.output.LayerNorm": "attn_output_norm",
        "encoder.layer.N.intermediate.dense": "ffn_up", "encoder.layer.N.output.dense": "ffn_down",
        "encoder.layer.N.output.LayerNorm": "layer_output_norm",
    },
    "nomic-bert": {
        "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
        "embeddings.LayerNorm": "token_embd_norm", "layers.N.self_attn.q_proj": "attn_q",
        "layers.N.self_attn.k_proj": "attn_k", "layers.N.self_attn.v_proj": "attn_v",
        "layers.N.self_attn.o_proj": "attn_output", "layers.N.post_attention_layernorm": "attn_output_norm",
        "layers.N.mlp.gate_proj": "ffn_gate", "layers.N.mlp.up_proj": "ffn_up",
        "layers.N.mlp.down_proj": "ffn_down", "layers.N.post_mlp_layernorm": "layer_output_norm",
    },
    "modern-bert": {
        "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm",
        "layers.N.attn.Wqkv": "attn_qkv", "layers.N.attn.Wo": "attn_output",
        "layers.N.attn_norm": "attn_norm", "layers.N.mlp_norm": "ffn_norm", "layers.N.mlp.Wi": "ffn_up",
        "layers.N.mlp.Wo": "ffn_down", "final_norm": "output_norm",
    },
}  # fmt: skip
"""What llama.cpp's converter calls the tensors of transformers' models."""
KEYS = {
    "bert": {},
    "nomic-bert": {"rope.freq_base": 1000.0},
    "modern-bert": {"rope.freq_base": 160_000.0, "attention.sliding_window": 16},
}


def model_of(family: str, rng: np.random.Generator) -> Any:
    """A random model of transformers, all of whose weights count."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    heads = int(rng.integers(1, 5))
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 8 * heads * int(rng.integers(2, 5)), "num_attention_heads": heads,
        "num_hidden_layers": int(rng.integers(2, 6)), "intermediate_size": 16 * int(rng.integers(3, 9)),
        "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    torch.manual_seed(int(rng.integers(1 << 30)))
    if family == "modern-bert":
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        config = transformers.ModernBertConfig(**sizes, **ids, local_attention=16)
        model = transformers.ModernBertModel(config)
    else:
        name = {"bert": "Bert", "nomic-bert": "NomicBert"}[family]
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}Model")(config, add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + torch.randn_like(parameter) * 0.2)
    return model.eval()


def written(path: Path, family: str, model: Any, pooling: Pooling) -> Path:
    """The model as a GGUF file."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".")
        number = next((part for part in parts if part.isdecimal()), "")
        found = NAMES[family]["N".join(stem.split(number)) if number else stem]
        tensors[f"blk.{number}.{found}.{kind}" if number else f"{found}.{kind}"] = tensor.float().numpy()
    config = model.config
    keys = {
        "block_count": config.num_hidden_layers, "context_length": CONTEXT,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.causal": False,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", None) or config.norm_eps,
        "pooling_type": NUMBERS[pooling],
    }  # fmt: skip
    return write_file(path, family, keys | KEYS[family], tensors)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pooling", [Pooling.CLS, Pooling.MEAN])
@pytest.mark.parametrize("family", list(NAMES))
def test_embeddings_agree(family: str, pooling: Pooling, seed: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    model = model_of(family, rng)
    file = GgufFile.open(written(tmp_path / "model.gguf", family, model, pooling))
    spec = read_spec(file)
    assert spec.pooling is pooling and spec.encoder is not None
    texts = [tuple(rng.integers(0, VOCAB, int(count)).tolist()) for count in (1, 2, 17, 90, CONTEXT)]
    engine = Engine(
        ReferenceRunner(file, spec, kv_pages=64, slots=3),
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=CONTEXT, max_sequences=3, token_budget=CONTEXT + 30, encodes=True),
    )
    requests = [
        Request(str(number), 1, text, GenerationParams(embed=True), 0, embeds=pooling.places(len(text)))
        for number, text in enumerate(texts)
    ]
    done = complete(engine, requests)
    found, wanted = [], []
    for number, text in enumerate(texts):
        with torch.no_grad():
            states = model(torch.tensor([text])).last_hidden_state[0].double().numpy()
        pooled = states[0] if pooling is Pooling.CLS else states.mean(axis=0)
        wanted.append(pooled / np.linalg.norm(pooled))
        embedding = done[str(number)].embedding
        assert embedding is not None, done[str(number)].error
        found.append(np.frombuffer(embedding, dtype="<f4").astype(np.float64))
    cosines = np.array(found) @ np.array(wanted).T
    assert np.diag(cosines).min() > 0.99999
    others = cosines[~np.eye(len(texts), dtype=bool)]
    assert others.max() < 0.999  # the measure tells texts apart
