"""The model that goes beyond half does what its description says: the reference runner computes in float."""

from pathlib import Path

import numpy as np

from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.runners.reference import ReferenceRunner, ops
from tests.support.beyond_half import LARGEST, follows, write_beyond_half
from tests.support.driving import GREEDY
from tests.support.engines import NoText, complete


def test_its_feed_forward_network_reaches_a_million_and_decides_the_text(tmp_path: Path) -> None:
    file = GgufFile.open(write_beyond_half(tmp_path / "model.gguf"))
    embeddings, neurons = file.array("token_embd.weight"), file.array("blk.0.ffn_gate.weight")
    gate = embeddings @ neurons.T
    largest = ops.swiglu(np.concatenate([gate, gate], axis=1)).max(axis=1)
    np.testing.assert_allclose(largest, LARGEST, rtol=1e-3)
    runner = ReferenceRunner(file, read_spec(file), kv_pages=8, page_size=16, slots=1)
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=128, max_sequences=1, token_budget=128),
    )
    (done,) = complete(engine, [Request("one", 1, (3, 1, 4), GREEDY, seed=0)]).values()
    expected = [follows(4)]
    while len(expected) < len(done.token_ids):
        expected.append(follows(expected[-1]))
    assert len(set(expected)) == len(expected) > 100
    assert list(done.token_ids) == expected
