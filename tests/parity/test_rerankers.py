"""Cross-encoders against transformers: same weights, the score of pairs, at random sizes.

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
from nightmill.worker.runners.ranking import Ranker
from nightmill.worker.runners.reference import ReferenceRunner
from tests.parity.encoders import (
    CONTEXT,
    MODERN_IDS,
    VOCAB,
    name_in_file,
    random_sizes,
    shaken,
    write_encoder,
)
from tests.support.engines import NoText, complete

pytestmark = pytest.mark.parity

HEADS = {
    "Bert": {"bert.pooler.dense": "cls", "classifier": "cls.output"},
    "XLMRoberta": {"classifier.dense": "cls", "classifier.out_proj": "cls.output"},
    "ModernBert": {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"},
}
FAMILIES = {"Bert": "bert", "XLMRoberta": "bert", "ModernBert": "modern-bert"}
BODIES = {"Bert": "bert.", "XLMRoberta": "roberta.", "ModernBert": "model."}
OFFSET = 2  # of XLM-RoBERTa's positions, behind that of padding; llama.cpp's converter leaves these rows out


def model_of(kind: str, rng: np.random.Generator) -> Any:
    """A random classifier of one label of transformers, all of whose weights count."""
    transformers = pytest.importorskip("transformers")
    sizes = random_sizes(rng) | {"num_labels": 1}
    if kind == "XLMRoberta":
        sizes["max_position_embeddings"] += OFFSET
        sizes |= {"type_vocab_size": 1, "pad_token_id": 1}
    if kind == "ModernBert":
        sizes |= {**MODERN_IDS, "local_attention": 16, "classifier_pooling": "mean"}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return shaken(lambda: getattr(transformers, f"{kind}ForSequenceClassification")(config), rng)


def written(path: Path, kind: str, model: Any) -> Path:
    """The model as a GGUF file, with llama.cpp's names."""
    family, tensors = FAMILIES[kind], {}
    for name, tensor in model.state_dict().items():
        stem, _, part = name.rpartition(".")
        array = tensor.float().numpy()
        found = HEADS[kind].get(stem) or name_in_file(family, stem.removeprefix(BODIES[kind]))
        if kind == "XLMRoberta" and found == "position_embd":
            array = array[OFFSET:]
        tensors[f"{found}.{part}"] = array
    return write_encoder(path, family, model.config, tensors, 4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", list(HEADS))
def test_scores_agree(kind: str, seed: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    model = model_of(kind, rng)
    file = GgufFile.open(written(tmp_path / "model.gguf", kind, model))
    spec = read_spec(file)
    assert spec.ranking is not None and spec.ranking.second_type == (kind == "Bert")
    pairs = [
        (tuple(rng.integers(3, VOCAB, int(count)).tolist()), int(count * rng.uniform(0.2, 0.8)))
        for count in (3, 17, 40, 90, CONTEXT)
    ]
    engine = Engine(
        ReferenceRunner(file, spec, kv_pages=64, slots=3),
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(
            context_length=CONTEXT, max_sequences=3, token_budget=CONTEXT + 30, encodes=True,
            rank=Ranker(file, spec.ranking, spec.width),
        ),
    )  # fmt: skip
    places = [range(len(pair)) if spec.ranking.mean else range(1) for pair, _ in pairs]
    params = GenerationParams(rerank="a query")
    done = complete(
        engine,
        [
            Request(str(number), 1, pair, params, 0, embeds=places[number], second=second)
            for number, (pair, second) in enumerate(pairs)
        ],
    )
    found, wanted, alike = [], [], []
    for number, (pair, second) in enumerate(pairs):
        types = (torch.arange(len(pair)) >= second).long()[None]
        with torch.no_grad():
            ids = torch.tensor([pair])
            for of, said in ((wanted, types), (alike, torch.zeros_like(types))):
                more = {"token_type_ids": said} if kind == "Bert" else {}
                of.append(float(model.double()(ids, **more).logits[0, 0]))
        embedding = done[str(number)].embedding
        assert embedding is not None, done[str(number)].error
        found.append(float(np.frombuffer(embedding, "<f4")[0]))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.ptp(wanted) > 0.01
    assert kind != "Bert" or np.abs(np.subtract(wanted, alike)).max() > 1e-3  # the kind of text counts
    print(f"{kind}: {np.abs(np.subtract(found, wanted)).max():.1e} off")  # noqa: T201
