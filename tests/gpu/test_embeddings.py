"""Embeddings by the CUDA runner: those of the reference, with the same bits in any company and in pieces."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Pooling
from nightmill.worker.runners.base import Runner
from nightmill.worker.runners.gpu.precision import Precision, WeightsFormat
from nightmill.worker.runners.ranking import Ranker
from nightmill.worker.runners.reference import ReferenceRunner, Rounding
from tests.gpu.conftest import Make
from tests.support.constraints import EveryNth
from tests.support.cuda_runners import cuda_runner, need_fp8
from tests.support.encoder_cases import ENCODER_FILES
from tests.support.encoder_models import rank_tensors
from tests.support.engines import NoText, complete
from tests.support.family_cases import file_of
from tests.support.ggufs import half_tensors
from tests.support.hybrid_cases import GPU_HYBRID_FILES
from tests.support.one_by_one import OneByOne

CONTEXT = 256


@pytest.fixture(scope="module")
def file() -> GgufFile:
    return GgufFile.open(demo_model())


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return {"slots": 8, "kv_pages": 8 * 16, "max_tokens": 512, "tune": False, "context": CONTEXT}


def texts(vocab: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(9)
    common = rng.integers(0, vocab, 70).tolist()
    return [(*common, *rng.integers(0, vocab, count).tolist()) for count in (1, 5, 60, 130, 186)]


def embeddings(vocab: int) -> list[Request]:
    return [
        Request(f"{number} {pooling}", 1, text, GenerationParams(embed=True), 0, embeds=places)
        for number, text in enumerate(texts(vocab))
        for pooling in (Pooling.LAST, Pooling.MEAN)  # the first token of all texts is the same
        for places in [pooling.places(len(text))]
    ]


def drawing(vocab: int) -> list[Request]:
    """Texts with answers, free and under masks, and prompts whose tokens are told."""
    return [
        Request(
            f"text {number}", 1, text[:190],
            GenerationParams(max_tokens=20, temperature=0.0, ignore_eos=True), number,
            constraint=EveryNth(vocab, 5) if number % 2 else None,
            prompt_logprobs_from=3 if number == 2 else None,
        )
        for number, text in enumerate(texts(vocab))
    ]  # fmt: skip


def computed(
    runner: Runner, requests: list[Request], budget: int = 512, *, sharing: bool = True, **sizes: Any
) -> dict[str, bytes]:
    asked = {"context_length": CONTEXT, "max_sequences": runner.slots, "token_budget": budget}
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(**asked | sizes),
        prefix_sharing=sharing,
        constraints=OneByOne(),
    )
    done = complete(engine, requests)
    assert {one.error for one in done.values()} == {None}
    return {name: one.embedding for name, one in done.items() if one.embedding is not None}


def numbers(found: dict[str, bytes]) -> npt.NDArray[np.float64]:
    return np.array([np.frombuffer(found[name], dtype="<f4") for name in sorted(found)], dtype=np.float64)


def check(runner: Runner, reference: Runner, vocab: int) -> None:
    alone = {}
    for request in embeddings(vocab):
        alone |= computed(runner, [request], sharing=False)
    assert len(set(alone.values())) == len(alone) == 2 * len(texts(vocab))
    for budget in (512, 8 + 64, 150):
        assert computed(runner, [*drawing(vocab), *embeddings(vocab)], budget) == alone
        assert computed(runner, embeddings(vocab)[::-1], budget) == alone
    wanted = numbers(computed(reference, embeddings(vocab)))
    cosines = (numbers(alone) * wanted).sum(axis=1)
    print(f"least cosine: {cosines.min():.7f}")  # noqa: T201
    assert cosines.min() > 0.9999
    assert (wanted @ wanted.T)[~np.eye(len(wanted), dtype=bool)].max() < 0.9999  # they differ by more


def test_they_are_the_references_and_the_same_in_any_company(
    file: GgufFile, spec: ModelSpec, make: Make
) -> None:
    with closing(ReferenceRunner(file, spec, kv_pages=8 * 16, slots=8)) as reference:
        check(make(), reference, spec.vocab)


def test_those_of_a_model_with_states(tmp_path: Path) -> None:
    keys, like = GPU_HYBRID_FILES["lfm2"]
    file = file_of(tmp_path, keys, like, **half_tensors(like))
    spec = read_spec(file)
    sizes = {"slots": 8, "kv_pages": 8 * 16}
    with (
        closing(cuda_runner(file, spec, max_tokens=512, tune=False, context=CONTEXT, **sizes)) as runner,
        closing(ReferenceRunner(file, spec, **sizes)) as reference,
    ):
        check(runner, reference, spec.vocab)


@pytest.mark.parametrize("weights", WeightsFormat)
@pytest.mark.parametrize("name", ENCODER_FILES)
def test_those_of_encoders(name: str, weights: WeightsFormat, tmp_path: Path) -> None:
    """Texts are computed whole, with others and alone.

    In FP8 nearer to the reference that rounds as this does than that is to one that does not.
    """
    keys, like = ENCODER_FILES[name]
    file = file_of(tmp_path, keys, like, **half_tensors(like))
    spec, rng = read_spec(file), np.random.default_rng(4)
    context, sizes = spec.context_length, {"slots": 8, "kv_pages": 8 * 16}
    if weights is WeightsFormat.FP8:
        need_fp8()
    requests = [
        Request(f"{number} {pooling}", 1, text, GenerationParams(embed=True), 0, embeds=places)
        for number, count in enumerate((1, 7, 64, 100, context, 33, 65))
        for text in [tuple(rng.integers(0, spec.vocab, count).tolist())]
        for pooling in (Pooling.CLS, Pooling.MEAN)
        for places in [pooling.places(len(text))]
    ]
    whole = {"context_length": context, "encodes": True}
    with (
        closing(
            cuda_runner(
                file, spec, max_tokens=512, tune=False, context=context,
                precision=Precision(weights=weights), **sizes,
            )
        ) as runner,
        closing(ReferenceRunner(file, spec, **sizes)) as reference,
        closing(ReferenceRunner(file, spec, rounding=Rounding(fp8=True), **sizes)) as rounding,
    ):  # fmt: skip
        alone = {}
        for request in requests:
            alone |= computed(runner, [request], sharing=False, **whole)
        for budget in (512, context):
            assert computed(runner, requests, budget, **whole) == alone
            assert computed(runner, requests[::-1], budget, **whole) == alone
        exact, rounded = (numbers(computed(one, requests, **whole)) for one in (reference, rounding))
    ours = numbers(alone)
    far, near = (1 - (ours * other).sum(axis=1) for other in (exact, rounded))
    print(f"{name}, {weights}: {far.max():.2g} off, {near.max():.2g} where rounded")  # noqa: T201
    if weights is WeightsFormat.FP8:
        assert near.mean() < 0.5 * (1 - (rounded * exact).sum(axis=1)).mean()
    else:
        assert far.max() < 1e-4


@pytest.mark.parametrize("name", ["bert", "modern-bert"])
def test_relevance_by_cross_encoders(name: str, tmp_path: Path) -> None:
    """Pairs among texts that are embedded: the reference's logits, the same bits alone and in any batch."""
    keys, like = ENCODER_FILES[name]
    tensors = half_tensors(like) | rank_tensors(like.width)
    if name == "modern-bert":
        del tensors["cls.bias"]
    file = file_of(tmp_path, keys | {"pooling_type": 4}, like, **tensors)
    spec, rng = read_spec(file), np.random.default_rng(4)
    assert spec.ranking is not None and spec.ranking.second_type == (name == "bert")
    context, sizes = spec.context_length, {"slots": 8, "kv_pages": 8 * 16}
    requests = []
    for number, count in enumerate((3, 7, 64, 100, context, 33, 65)):
        pair = tuple(rng.integers(0, spec.vocab, count).tolist())
        places = range(count if spec.ranking.mean else 1)
        params = GenerationParams(rerank="a query")
        requests.append(Request(str(number), 1, pair, params, 0, embeds=places, second=count // 3))
    alike = [replace(request, second=len(request.prompt_ids)) for request in requests]
    text = Request("text", 1, (1, 2, 3), GenerationParams(embed=True), 0, embeds=range(3))
    whole = {"context_length": context, "encodes": True, "rank": Ranker(file, spec.ranking, spec.width)}
    with (
        closing(cuda_runner(file, spec, max_tokens=512, tune=False, context=context, **sizes)) as runner,
        closing(ReferenceRunner(file, spec, **sizes)) as reference,
    ):
        alone = {}
        for request in (*requests, text):
            alone |= computed(runner, [request], sharing=False, **whole)
        for budget in (512, context):
            assert computed(runner, [*requests, text], budget, **whole) == alone
            assert computed(runner, [text, *requests[::-1]], budget, **whole) == alone
        others = computed(runner, alike, **whole)
        wanted = computed(reference, [*requests, text], **whole)
    del alone["text"], wanted["text"]
    ours, theirs, off = (numbers(one)[:, 0] for one in (alone, wanted, others))
    print(f"{name}: {np.abs(ours - theirs).max():.2g} off of {np.ptp(theirs):.2g}")  # noqa: T201
    assert np.abs(ours - theirs).max() < 0.02 * np.ptp(theirs)
    assert name != "bert" or np.abs(ours - off).max() > 0.02 * np.ptp(theirs)
