"""Gemma 4 whole, by the CUDA runner's kernels on the host, against other engines and the reference runner."""

from pathlib import Path

import numpy as np
import pytest

from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Experts
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.kinds import has_tail
from tests.gpu.test_experts_runner import chosen_by_kernels, clear_text
from tests.support.comparing import compare_logits
from tests.support.driving import BLOCK, Chunk, Pages, Reference
from tests.support.family_cases import file_of
from tests.support.gemma4_cases import GEMMA4_FILES
from tests.support.ggufs import half_tensors
from tests.tiny import GEMMAS, expected, unpacked
from tests.unit.runners.host_kernels import HostDevice
from tests.unit.runners.whole_models import HostModel, launch_models_on_host

pytestmark = pytest.mark.heavy


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    return launch_models_on_host(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", GEMMA4_FILES)
def test_logits_agree_with_the_reference_runner(launched: set[str], name: str, tmp_path: Path) -> None:
    """A prompt in two pieces, the first of which draws nothing, beside another; then tokens one by one.

    Where the last layers keep nothing, also with the rows that draw alone in these.
    """
    keys, like = GEMMA4_FILES[name]
    file = file_of(tmp_path, keys | {"attention.sliding_window": 20}, like, **half_tensors(like))
    spec, drawn = read_spec(file), 3
    text = np.random.default_rng(5).integers(0, spec.vocab, 33 + drawn).tolist()
    if spec.experts:
        text = clear_text(file, spec, 33 + drawn)
    other = [7, 3, 9, 1, 4, 2, 8, 6]
    steps = [
        [Chunk(0, text, 0, 20, draws=0), Chunk(1, other, 0, 3)],
        [Chunk(0, text, 20, 13, draws=2)],
        [Chunk(0, text, 33, 1, drawn=True), Chunk(1, other, 3, 5)],
        *([Chunk(0, text, 33 + index, 1, drawn=True)] for index in range(1, drawn)),
    ]
    device = HostDevice(Element.F16)
    model = HostModel(device, file, spec, slots=2, pages=32, context=128, tokens=40)
    reference, pages = (
        Reference(file, spec, slots=2, kv_pages=32, page_size=BLOCK),
        (Pages(2, 8), Pages(2, 8)),
    )
    ours, theirs = [], []
    for step in steps:
        admit = step is steps[0]
        given = pages[0].batch(step, admit=admit, kinds=model.page_kinds)
        with chosen_by_kernels() as chosen:
            ours.append(model.logits(given))
        assert len(chosen) == sum(isinstance(one.feed_forward, Experts) for one in spec.layers)
        if has_tail(spec):
            again = model.logits(given, tail=True)
            np.testing.assert_allclose(again, ours[-1], rtol=0, atol=2e-2)
            ours[-1] = again
        batch = pages[1].batch(step, admit=admit, kinds=reference.runner.page_kinds)
        reference.runner.launch(batch)
        assert reference.runner.collect() is not None
        theirs.append(reference.show(len(batch.draws)))
    compare_logits(np.concatenate(ours), np.concatenate(theirs)).check(same_top=1.0)
    assert model.tails == (3 if has_tail(spec) else 0)
    own = {"residual_1", "layer_inputs", "gate_inputs"}
    if spec.experts:
        own = {"residual_1", "choose", "place_tokens", "combine_1"}
    assert launched >= {"qkv_rope_write", "decode_attention_any", *own}


def test_a_tiny_models_answers_are_those_of_two_engines(launched: set[str], tmp_path: Path) -> None:
    """By way of the reference runner: kernels against it at all positions, which are enough to average over
    what half precision rounds, and it against the engines' logits, which are those of the last."""
    file = GgufFile.open(unpacked(GEMMAS[0], tmp_path))
    spec, ours, theirs = read_spec(file), [], []
    model = HostModel(HostDevice(Element.F16), file, spec, slots=1, pages=16, context=256, tokens=80)
    reference = Reference(file, spec, slots=1, kv_pages=16, page_size=BLOCK)
    for one in expected(GEMMAS[0])["prompts"][:4]:
        prompt = one["prompt"]
        whole = Chunk(0, prompt, 0, len(prompt), draws=len(prompt))
        ours.append(model.logits(Pages(1, 16).batch([whole], admit=True, kinds=model.page_kinds)))
        batch = Pages(1, 16).batch([whole], admit=True, kinds=reference.runner.page_kinds)
        reference.runner.launch(batch)
        assert reference.runner.collect() is not None
        theirs.append(reference.show(len(prompt)))
        np.testing.assert_allclose(theirs[-1][-1], one["logits_all"], rtol=0, atol=2e-3)
        assert ours[-1][-1].argmax() == np.argmax(one["logits_all"])
    compare_logits(np.concatenate(ours), np.concatenate(theirs)).check(same_top=1.0)
