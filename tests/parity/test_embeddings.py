"""Embeddings against transformers: same weights, pooled hidden states, at random sizes.

Needs torch and transformers; run with `make parity`.
"""

from dataclasses import replace
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
from tests.parity.cases import CASES, Case
from tests.parity.test_transformers import architecture_of, converted_keys, converted_tensors, make_model
from tests.support.engines import NoText, complete
from tests.support.ggufs import write_file

pytestmark = pytest.mark.parity

NUMBERS = {Pooling.MEAN: 1, Pooling.LAST: 3}


def sized(case: Case, seed: int) -> Case:
    """The case with other sizes."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.integers(1, 4))
    options = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * int(rng.integers(1, 4)),
        "head_dim": 8 * int(rng.integers(2, 5)),
        "hidden_size": 8 * int(rng.integers(6, 20)),
        "intermediate_size": 16 * int(rng.integers(6, 20)),
        "num_hidden_layers": int(rng.integers(1, 4)),
    }
    return replace(case, options=case.options | options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_embeddings_agree(pooling: Pooling, seed: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    case = sized(next(case for case in CASES.values() if case.family == "qwen3"), seed)
    model: Any = make_model(case)
    keys = converted_keys(model.config, case) | {"pooling_type": NUMBERS[pooling]}
    tensors = converted_tensors(model, case)
    file = GgufFile.open(write_file(tmp_path / "model.gguf", architecture_of(case), keys, tensors))
    spec = read_spec(file)
    assert spec.pooling is pooling
    rng = np.random.default_rng(seed)
    texts = [tuple(rng.integers(0, spec.vocab, int(count)).tolist()) for count in rng.integers(1, 200, 5)]
    engine = Engine(
        ReferenceRunner(file, spec, kv_pages=64, slots=3),
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=spec.context_length, max_sequences=3, token_budget=48),
    )
    requests = [
        Request(str(number), 1, text, GenerationParams(embed=True), 0, embeds=pooling.places(len(text)))
        for number, text in enumerate(texts)
    ]
    done = complete(engine, requests)
    found, wanted = [], []
    for number, text in enumerate(texts):
        with torch.no_grad():
            states = model.model(torch.tensor([text])).last_hidden_state[0].double().numpy()
        pooled = states[-1] if pooling is Pooling.LAST else states.mean(axis=0)
        wanted.append(pooled / np.linalg.norm(pooled))
        embedding = done[str(number)].embedding
        assert embedding is not None
        found.append(np.frombuffer(embedding, dtype="<f4").astype(np.float64))
    cosines = np.array(found) @ np.array(wanted).T
    assert np.diag(cosines).min() > 0.9999
    others = cosines[~np.eye(len(texts), dtype=bool)]
    assert others.max() < 0.999  # the measure tells texts apart
