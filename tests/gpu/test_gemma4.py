"""Gemma 4: heads of two sizes, keys of other layers, inputs of layers, and experts beside a dense network."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.kv_cache import kinds_layout
from nightmill.worker.runners.gpu.precision import HALF, Precision, WeightsFormat
from nightmill.worker.runners.kv_format import KvFormat
from tests.gpu.test_experts_runner import clear_text
from tests.support.comparing import compare_logits
from tests.support.cuda_runners import cuda_runner, need_fp8
from tests.support.driving import BLOCK, Chunk, Cuda, Pages, Reference, generate, logits_of
from tests.support.family_cases import file_of
from tests.support.gemma4_cases import GEMMA4_FILES, LARGE_EXPERTS, LARGE_HEADS
from tests.support.parts import file_of_halves
from tests.tiny import GEMMAS, expected, unpacked

CONTEXT = 480


@pytest.mark.parametrize("name", GEMMAS)
def test_a_tiny_models_answers_are_those_of_two_engines(name: str, tmp_path: Path) -> None:
    file = GgufFile.open(unpacked(name, tmp_path))
    answers, blocks = expected(name)["prompts"], 512 // BLOCK
    cuda = Cuda(file, read_spec(file), slots=1, kv_pages=blocks, max_tokens=512, context=512, tune=False)
    with closing(cuda.runner):
        found = [
            logits_of(cuda, Pages(1, blocks), [Chunk(0, one["prompt"], 0, len(one["prompt"]))], admit=True)
            for one in answers
        ]
    theirs = np.array([one["logits_all"] for one in answers], dtype=np.float32)
    compare_logits(np.concatenate(found), theirs).check(same_top=1.0)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", GEMMAS)
def test_a_tiny_models_texts_are_those_of_two_engines(name: str, graphs: bool, tmp_path: Path) -> None:
    file, answers = GgufFile.open(unpacked(name, tmp_path)), expected(name)["prompts"]
    options: dict[str, Any] = {"slots": 6, "context": 512, "kv_pages": 800, "max_tokens": 512}
    params = GenerationParams.parse({"temperature": 0.0, "max_tokens": 16, "ignore_eos": True})
    asked = [Request(f"j{n}", 1, tuple(one["prompt"]), params, 0) for n, one in enumerate(answers)]
    with closing(cuda_runner(file, read_spec(file), tune=False, graphs=graphs, **options)) as runner:
        done = generate(runner, asked, context=512, token_budget=300)
    assert [list(done[f"j{n}"]) for n in range(len(answers))] == [one["greedy"] for one in answers]


@pytest.mark.parametrize("pieces", [[200], [130, 70], [64, 64, 72]], ids=str)
def test_layers_with_heads_of_256_and_of_512_agree_with_the_reference_runner(
    pieces: list[int], tmp_path: Path
) -> None:
    """A prompt in pieces, then drawn tokens: keys that are values, and layers that read them."""
    text = np.random.default_rng(5).integers(0, LARGE_HEADS.vocab, 212).tolist()
    agree_with_the_reference(file_of_halves(tmp_path, LARGE_HEADS), LARGE_HEADS, text, pieces)


@pytest.mark.parametrize("pieces", [[70], [64, 6]], ids=str)
def test_experts_beside_heads_of_256_and_of_512_agree_with_the_reference_runner(
    pieces: list[int], tmp_path: Path
) -> None:
    """A text of which no token might as well go to other experts, longer than the window."""
    file = file_of_halves(tmp_path, LARGE_EXPERTS)
    text = clear_text(file, LARGE_EXPERTS, 78)
    agree_with_the_reference(file, LARGE_EXPERTS, text, pieces)


def agree_with_the_reference(file: GgufFile, spec: ModelSpec, text: list[int], pieces: list[int]) -> None:
    """Hold both runners' logits of pieces of a text, and of what is behind them as drawn tokens."""
    *starts, end = np.cumsum([0, *pieces]).tolist()
    chunks = [Chunk(0, text, start, size, min(size, 20)) for start, size in zip(starts, pieces, strict=True)]
    chunks += [Chunk(0, text, place, 1, drawn=True) for place in range(end, len(text))]
    blocks = 256 // BLOCK
    options: dict[str, Any] = {"slots": 1, "kv_pages": blocks}
    cuda = Cuda(file, spec, max_tokens=256, max_draws=64, context=256, tune=False, **options)
    with closing(cuda.runner):
        reference = Reference(file, spec, page_size=BLOCK, **options)
        ours, theirs = (
            np.concatenate(
                [logits_of(subject, pages, [chunk], admit=index == 0) for index, chunk in enumerate(chunks)]
            )
            for subject, pages in ((cuda, Pages(1, blocks)), (reference, Pages(1, blocks)))
        )
    compare_logits(ours, theirs).check()


def requests(vocab: int) -> list[Request]:
    """Some begin alike, by more than a segment of any kind of pages; most are longer than the window."""
    rng = np.random.default_rng(3)
    system = rng.integers(0, vocab, 150).tolist()
    made = []
    for number in range(10):
        own = rng.integers(0, vocab, 1 + 19 * number).tolist()
        params = GenerationParams(max_tokens=40 + 7 * number, temperature=0.7 * (number % 2), ignore_eos=True)
        made.append(Request(f"j{number}", 1, (*system[: 150 * (number % 3 > 0)], *own), params, seed=number))
    return made


PRECISIONS = {
    "16 bits": HALF,
    "FP8": Precision(weights=WeightsFormat.FP8),
    "FP8 keys": Precision(kv=KvFormat.FP8),
}


LARGE = {"large heads": LARGE_HEADS, "large heads beside experts": LARGE_EXPERTS}
CASES = [("tiny", precision) for precision in PRECISIONS]
CASES += [(name, "16 bits") for name in (*GEMMA4_FILES, *LARGE)]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_text_has_the_bits_that_it_has_alone(name: str, precision: str, tmp_path: Path) -> None:
    """In company, in pieces, with shared beginnings, and where sequences give way for want of pages."""
    if PRECISIONS[precision].weights is WeightsFormat.FP8:
        need_fp8()
    if name == "tiny":
        file = GgufFile.open(unpacked(GEMMAS[0], tmp_path))
    elif name in LARGE:
        file = file_of_halves(tmp_path, LARGE[name])
    else:
        keys, like = GEMMA4_FILES[name]
        file = file_of(tmp_path, keys | {"attention.sliding_window": 20}, like)
    spec, numbers = LARGE[name] if name in LARGE else read_spec(file), PRECISIONS[precision]
    layout = kinds_layout(spec, numbers.kv)
    assert (layout is not None) == (numbers.kv is KvFormat.ELEMENT)
    whole = CONTEXT // BLOCK if layout is None else layout.pages_for(CONTEXT)
    options: dict[str, Any] = {"context": CONTEXT, "max_tokens": 512, "tune": False, "precision": numbers}
    asked = requests(spec.vocab)
    alone: dict[str, tuple[int, ...]] = {}
    with closing(cuda_runner(file, spec, slots=1, kv_pages=2 * whole, **options)) as runner:
        for one in asked:
            alone |= generate(runner, [one], context=CONTEXT, token_budget=512)
    assert len(set(alone.values())) == len(asked)
    for slots, pages, budget in ((10, 10 * whole, 512), (10, whole + 20, 130)):
        with closing(cuda_runner(file, spec, slots=slots, kv_pages=pages, **options)) as runner:
            assert generate(runner, asked, context=CONTEXT, token_budget=budget) == alone
