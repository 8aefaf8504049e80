"""Whole models in bfloat16: as the reference runner computes them, and where half does not reach."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import ModelFileError
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.device.element import Element
from nightmill.worker.runners.gpu.element_choice import choose_element
from nightmill.worker.runners.gpu.precision import Precision
from nightmill.worker.runners.reference import ReferenceRunner
from tests.gpu.conftest import Make
from tests.support.beyond_half import VOCAB, write_beyond_half
from tests.support.comparing import compare_logits
from tests.support.driving import BLOCK, GREEDY, Chunk, Cuda, Pages, Reference, generate, logits_of
from tests.support.elements import PRECISION, rounded
from tests.support.engines import NoText, complete
from tests.support.family_cases import GPU_FILES, file_of
from tests.support.ggufs import spec_tensors, write_model

COARSER = PRECISION[Element.BF16] / PRECISION[Element.F16]
CONTEXT = 256
MODELS: dict[str, dict[str, Any]] = {
    "heads of 64": {"architecture": "qwen2", "width": 448, "heads": 7, "kv_heads": 1, "head_dim": 64},
    "heads of 128": {"architecture": "llama", "width": 256, "heads": 4, "kv_heads": 2, "head_dim": 128},
    "norms of heads": {"architecture": "qwen3", "width": 256, "heads": 4, "kv_heads": 2, "head_dim": 128},
    "heads of 16": {"architecture": "llama", "width": 64, "heads": 4, "kv_heads": 2},
}


def agree(file: GgufFile) -> None:
    """The runners, on prompts in two chunks, then tokens of five sequences at once, and of one alone.

    Errors of logits are larger than in half as bfloat16 is coarser, the divergence by the square of that.
    """
    spec = read_spec(file)
    element = choose_element(file, spec).element
    assert element is Element.BF16
    slots, blocks = 5, 128 // BLOCK
    texts = np.random.default_rng(5).integers(0, spec.vocab, (slots, 110)).tolist()
    steps = [[Chunk(s, texts[s], 0, 60, 60) for s in range(slots)]]
    steps += [[Chunk(s, texts[s], 60, 40, 40) for s in range(slots)]]
    steps += [[Chunk(s, texts[s], place, 1, drawn=True) for s in range(slots)] for place in range(100, 105)]
    steps += [[Chunk(0, texts[0], place, 1, drawn=True)] for place in range(105, 110)]
    cuda = Cuda(
        file, spec, slots=slots, kv_pages=slots * blocks, max_tokens=512, max_draws=512, context=128,
        tune=False, precision=Precision(element),
    )  # fmt: skip
    with closing(cuda.runner):
        reference = Reference(file, spec, kv_pages=slots * blocks, page_size=BLOCK, slots=slots)
        ours, theirs = (
            np.concatenate(
                [logits_of(one, pages, chunks, admit=index == 0) for index, chunks in enumerate(steps)]
            )
            for one, pages in ((cuda, Pages(slots, blocks)), (reference, Pages(slots, blocks)))
        )
    compare_logits(ours, theirs, clear=0.05 * COARSER).check(mean_kl=1e-4 * COARSER**2)


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_the_reference_runner(name: str, tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.gguf", kind=GGMLQuantizationType.BF16, ffn=384, layers=4, **MODELS[name]
    )
    agree(GgufFile.open(path))


@pytest.mark.parametrize("name", [name for name, (_, spec) in GPU_FILES.items() if spec.overflows_half])
def test_families_that_overflow_half_agree_with_the_reference_runner(name: str, tmp_path: Path) -> None:
    keys, like = GPU_FILES[name]
    weights = {name: rounded(array, Element.BF16) for name, array in spec_tensors(like).items()}
    agree(file_of(tmp_path, keys, like, **weights))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile.open(write_beyond_half(tmp_path_factory.mktemp("model") / "model.gguf"))


def requests() -> list[Request]:
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(0, VOCAB, length).tolist()) for length in (1, 2, 17, 40, 100, 5)]
    return [Request(str(number), 1, prompt, GREEDY, seed=0) for number, prompt in enumerate(prompts)]


def test_numbers_beyond_half_give_the_texts_of_the_reference_runner(
    file: GgufFile, spec: ModelSpec, make: Make
) -> None:
    """All at once, alone, and with prompts in small pieces; by fused kernels and by those of large steps."""
    options = {"context": CONTEXT, "token_budget": 256}
    pages = 6 * CONTEXT // BLOCK
    reference = ReferenceRunner(file, spec, kv_pages=pages, page_size=BLOCK, slots=6)
    expected = generate(reference, requests(), **options)
    assert all(len(tokens) >= 100 for tokens in expected.values())
    runner = make(slots=6, kv_pages=pages, context=CONTEXT, precision=Precision(Element.BF16))
    assert generate(runner, requests(), **options) == expected
    assert generate(runner, requests(), context=CONTEXT, token_budget=7) == expected
    for one in requests():
        assert generate(runner, [one], **options) == {one.job_id: expected[one.job_id]}


def test_in_half_the_same_texts_end_with_what_to_do(make: Make) -> None:
    runner = make(slots=6, kv_pages=6 * CONTEXT // BLOCK, context=CONTEXT)
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=CONTEXT, max_sequences=6, token_budget=256),
    )
    done = complete(engine, requests()).values()
    assert [one.stop_reason for one in done] == [StopReason.ERROR] * 6
    assert all("is not a number" in (one.error or "") and "--dtype bf16" in (one.error or "") for one in done)


def test_a_weight_beyond_half_is_refused_in_half_alone(tmp_path: Path) -> None:
    huge = np.full((64, 64), 70_000, dtype=np.float32)
    path = write_model(tmp_path / "model.gguf", tensors={"blk.0.attn_output.weight": huge})
    with GgufFile.open(path) as file:
        spec, options = read_spec(file), {"slots": 1, "kv_pages": 4, "context": 32, "max_tokens": 64}
        with pytest.raises(ModelFileError, match=r"a weight is beyond 65504, .* F16.*--dtype bf16"):
            Cuda(file, spec, **options)
        with closing(Cuda(file, spec, precision=Precision(Element.BF16), **options).runner):
            pass
