"""Encoders whole, by the CUDA runner's kernels on the host, against the reference runner."""

from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.runners.gpu.device.element import Element
from tests.support.comparing import compare_logits
from tests.support.driving import BLOCK, Chunk, Pages, Reference
from tests.support.encoder_cases import ENCODER_FILES
from tests.support.family_cases import file_of
from tests.support.ggufs import half_tensors
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.whole_models import HostModel, launch_models_on_host

pytestmark = pytest.mark.heavy

KERNELS = {
    "bert": {"add_embeddings", "gelu_erf"}, "nomic-bert": {"add_embeddings"},
    "modern-bert": {"geglu_erf"},
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODER_FILES)
def test_states_agree_with_the_reference_runner(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of all tokens of two texts in one step, seen through the embedding as a head."""
    launched = launch_models_on_host(monkeypatch, tmp_path)
    keys, like = ENCODER_FILES[name]
    file = file_of(tmp_path, keys, like, **half_tensors(like))
    spec = read_spec(file)
    assert spec == like
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, spec.vocab, count).tolist() for count in (51, 6)]
    chunks = [Chunk(slot, text, 0, len(text), len(text)) for slot, text in enumerate(texts)]
    model = HostModel(HostDevice(Element.F16), file, spec, slots=2, pages=16, context=96, tokens=60)
    reference = Reference(file, spec, slots=2, kv_pages=16, page_size=BLOCK)
    ours = model.logits(Pages(2, 8).batch(chunks, admit=True, kinds=model.page_kinds))
    batch = Pages(2, 8).batch(chunks, admit=True, kinds=reference.runner.page_kinds)
    reference.runner.launch(batch)
    assert reference.runner.collect() is not None
    theirs = reference.show(len(batch.draws))
    compare_logits(ours, theirs).check(same_top=1.0)
    assert launched >= {"embed", "residual_1", "prefill_attention_any"} | KERNELS[name]
