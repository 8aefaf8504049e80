"""Encoders whole, by the CUDA runner's kernels on the host, against the reference runner."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.runners.gpu.device.element import Element
from tests.support.comparing import compare_logits
from tests.support.driving import BLOCK, Chunk, Pages, Reference
from tests.support.encoder_cases import ENCODER_FILES
from tests.support.encoder_models import RANKING, rank_tensors
from tests.support.family_cases import file_of
from tests.support.ggufs import half_tensors
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.whole_models import HostModel, launch_models_on_host

pytestmark = pytest.mark.heavy

KERNELS = {
    "bert": {"add_embeddings", "gelu_erf"}, "nomic-bert": {"add_embeddings"},
    "modern-bert": {"geglu_erf"},
}  # fmt: skip
PAIRS = "bert, pairs of texts"


@pytest.mark.parametrize("name", [*ENCODER_FILES, PAIRS])
def test_states_agree_with_the_reference_runner(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of all tokens of two texts in one step, seen through the embedding as a head.

    Of the pairs one is alone: the tokens of its second text take the second row of the kinds of texts.
    """
    launched = launch_models_on_host(monkeypatch, tmp_path)
    pairs, name = name == PAIRS, name.partition(",")[0]
    keys, like = ENCODER_FILES[name]
    tensors = half_tensors(like)
    if pairs:
        keys, like = keys | {"pooling_type": 4}, replace(like, pooling=None, ranking=RANKING)
        tensors |= rank_tensors(like.width)
    file = file_of(tmp_path, keys, like, **tensors)
    spec = read_spec(file)
    assert spec == like
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, spec.vocab, count).tolist() for count in (51, 6)]
    chunks = [Chunk(slot, text, 0, len(text), len(text)) for slot, text in enumerate(texts)]
    model = HostModel(HostDevice(Element.F16), file, spec, slots=2, pages=16, context=96, tokens=60)
    reference = Reference(file, spec, slots=2, kv_pages=16, page_size=BLOCK)
    types = np.repeat([0, 1, 0], [20, 31, 6]).astype(np.int32) if pairs else None
    asked = Pages(2, 8).batch(chunks, admit=True, kinds=model.page_kinds)
    ours = model.logits(replace(asked, text_types=types))
    batch = Pages(2, 8).batch(chunks, admit=True, kinds=reference.runner.page_kinds)
    reference.runner.launch(replace(batch, text_types=types))
    assert reference.runner.collect() is not None
    theirs = reference.show(len(batch.draws))
    compare_logits(ours, theirs).check(same_top=1.0)
    if pairs:  # which it does not agree with if all are of the first kind
        reference.runner.launch(batch)
        assert reference.runner.collect() is not None
        assert compare_logits(ours, reference.show(len(batch.draws))).mean_kl > 0.01
    assert launched >= {"embed", "residual_1", "prefill_attention_any"} | KERNELS[name]
