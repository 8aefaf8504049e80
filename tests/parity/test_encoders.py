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
from tests.parity.encoders import (
    CONTEXT,
    MODERN_IDS,
    NAMES,
    VOCAB,
    name_in_file,
    random_sizes,
    shaken,
    write_encoder,
)
from tests.support.engines import NoText, complete

pytestmark = pytest.mark.parity

NUMBERS = {Pooling.MEAN: 1, Pooling.CLS: 2}


def model_of(family: str, rng: np.random.Generator) -> Any:
    """A random model of transformers, all of whose weights count."""
    transformers = pytest.importorskip("transformers")
    sizes = random_sizes(rng)
    if family == "modern-bert":
        config = transformers.ModernBertConfig(**sizes, **MODERN_IDS, local_attention=16)
        return shaken(lambda: transformers.ModernBertModel(config), rng)
    name = {"bert": "Bert", "nomic-bert": "NomicBert"}[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return shaken(lambda: getattr(transformers, f"{name}Model")(config, add_pooling_layer=False), rng)


def written(path: Path, family: str, model: Any, pooling: Pooling) -> Path:
    """The model as a GGUF file."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        tensors[f"{name_in_file(family, stem)}.{kind}"] = tensor.float().numpy()
    return write_encoder(path, family, model.config, tensors, NUMBERS[pooling])


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
