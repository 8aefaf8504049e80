"""Embeddings by the reference runner: the right ones, to the bit in any company and in any pieces."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.errors import ModelFileError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec, Pooling
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.engines import NoText, complete
from tests.support.ggufs import write_model, write_spec
from tests.support.specs import HYBRIDS

Array = npt.NDArray[np.float32]
RNG = np.random.default_rng(7)
BEGINNING = tuple(RNG.integers(0, 256, 40).tolist())
TEXTS = [(*BEGINNING, *RNG.integers(0, 256, count).tolist()) for count in (1, 7, 23, 50, 90)]


@pytest.fixture(scope="module", params=["attention", "with states"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GgufFile, ModelSpec]:
    path = tmp_path_factory.mktemp("embeddings") / "model.gguf"
    if request.param == "attention":
        file = GgufFile.open(write_model(path, "qwen3", heads=4, kv_heads=2, head_dim=24))
        return file, read_spec(file)
    spec = next(iter(HYBRIDS.values()))
    return GgufFile.open(write_spec(path, spec)), spec


def embedding(number: int, pooling: Pooling, dimensions: int | None = None) -> Request:
    params = GenerationParams(embed=True, dimensions=dimensions)
    text = TEXTS[number]
    return Request(f"{number} {pooling}", 1, text, params, 0, embeds=pooling.places(len(text)))


def computed(
    model: tuple[GgufFile, ModelSpec], requests: list[Request], *, budget: int = 512, slots: int = 6,
    pages: int = 64, sharing: bool = True,
) -> dict[str, Completion]:  # fmt: skip
    runner = ReferenceRunner(*model, kv_pages=pages, slots=slots)
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=160, max_sequences=slots, token_budget=budget),
        prefix_sharing=sharing,
    )
    done = complete(engine, requests)
    assert {completion.error for completion in done.values()} <= {None}
    return done


def test_an_embedding_has_the_same_bits_in_any_company_and_in_any_pieces(
    model: tuple[GgufFile, ModelSpec],
) -> None:
    grid = 64 if model[1].state_bytes else 1
    requests = [embedding(number, pooling) for pooling in Pooling for number in range(len(TEXTS))]
    texts = [
        Request(f"text {number}", 1, text, GenerationParams(max_tokens=9, temperature=0.0), number)
        for number, text in enumerate(TEXTS)
    ]
    alone = {
        request.job_id: computed(model, [request], sharing=False)[request.job_id].embedding
        for request in requests
    }
    firsts = {text[0] for text in TEXTS}  # all that a causal model has seen at the first token
    assert len(set(alone.values())) == len(TEXTS) * 2 + len(firsts)
    for options in (
        {"budget": 7 + grid, "slots": 3},
        {"budget": 33 + grid, "slots": 6},
        {"budget": 512, "slots": 6},
        {"budget": 100, "slots": 6, "pages": 14},  # of which some lose theirs
    ):
        together = computed(model, [*requests, *texts][:: -1 if options["slots"] == 3 else 1], **options)
        assert {name: together[name].embedding for name in alone} == alone
        for request in requests:
            done = together[request.job_id]
            assert (done.stop_reason, done.text, done.completion_tokens) == (StopReason.EOS, "", 0)


def test_beginnings_are_shared_where_the_states_behind_them_do_not_count(
    model: tuple[GgufFile, ModelSpec],
) -> None:
    last = computed(model, [embedding(number, Pooling.LAST) for number in (4, 3)], slots=1)
    mean = computed(model, [embedding(number, Pooling.MEAN) for number in (4, 3)], slots=1)
    assert all(done.cached_tokens == 0 for done in mean.values())
    if not model[1].state_bytes:
        assert last["3 last"].cached_tokens == 32  # two pages of the beginning


def test_an_embedding_is_the_pooled_state_behind_the_last_norm(model: tuple[GgufFile, ModelSpec]) -> None:
    states: list[Array] = []

    def keep(stage: str, values: npt.NDArray[np.float32]) -> None:
        if stage == "norm":
            states.append(values.astype(np.float64))

    runner = ReferenceRunner(*model, kv_pages=64, slots=1, trace=keep)
    for pooling, number, dimensions in ((Pooling.MEAN, 2, None), (Pooling.LAST, 4, 12)):
        states.clear()
        engine = Engine(
            runner,
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(context_length=160, max_sequences=1, token_budget=65),
        )
        (done,) = complete(engine, [embedding(number, pooling, dimensions)]).values()
        rows = np.concatenate(states)
        wanted = (rows.mean(axis=0) if pooling is Pooling.MEAN else rows[-1])[:dimensions]
        assert done.embedding is not None
        found = np.frombuffer(done.embedding, dtype="<f4")
        assert len(found) == (dimensions or model[1].width)
        np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), rtol=0, atol=2e-7)


def test_a_text_may_fill_the_context_and_no_more(model: tuple[GgufFile, ModelSpec]) -> None:
    runner = ReferenceRunner(*model, kv_pages=64, slots=1)
    fitting = len(TEXTS[0])
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=fitting, max_sequences=1, token_budget=65),
    )
    done = complete(engine, [embedding(number, Pooling.LAST) for number in (0, 1)])
    assert done["0 last"].embedding is not None
    assert done["1 last"].error is not None and "the text to embed has 47 tokens" in done["1 last"].error


def test_a_runner_that_computes_none_refuses_them_by_name(model: tuple[GgufFile, ModelSpec]) -> None:
    runner = ReferenceRunner(*model, kv_pages=64, slots=1)
    runner.embeds = False
    engine = Engine(
        runner,
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(context_length=160, max_sequences=1, token_budget=65),
    )
    (done,) = complete(engine, [embedding(0, Pooling.LAST)]).values()
    assert done.stop_reason is StopReason.ERROR
    assert done.error is not None and "--reference" in done.error


@pytest.mark.parametrize(
    ("number", "pooling"), [(None, None), (0, None), (1, "mean"), (2, None), (3, "last"), (4, None)]
)
def test_the_file_says_how_states_are_pooled(tmp_path: Path, number: int | None, pooling: str | None) -> None:
    metadata = {} if number is None else {"qwen3.pooling_type": number}
    tensors = {"cls.output.weight": np.ones((2, 64), dtype=np.float32)} if number == 4 else {}
    file = GgufFile.open(write_model(tmp_path / "model.gguf", "qwen3", metadata=metadata, tensors=tensors))
    assert read_spec(file).pooling == pooling


def test_an_unknown_pooling_is_a_fault_of_the_file(tmp_path: Path) -> None:
    file = GgufFile.open(write_model(tmp_path / "model.gguf", "qwen3", metadata={"qwen3.pooling_type": 9}))
    with pytest.raises(ModelFileError, match=r"qwen3\.pooling_type: is 9"):
        read_spec(file)
