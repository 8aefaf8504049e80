"""Cross-encoders: tokens of pairs, relevance against the formula in float64, and its bits in any company."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError, ModelFileError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import LoadedModel, load_model
from nightmill.worker.commands.sentence import write_sentence
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Pooling
from nightmill.worker.runners.ranking import Ranker
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.encoder_cases import ENCODER_FILES
from tests.support.encoder_models import (
    CLS,
    CONTEXT,
    LAYERS,
    PIECES,
    SEP,
    WIDTH,
    rank_tensors,
    tensors_of_bert,
    write_bert,
    write_reranker,
)
from tests.support.engines import NoText, complete
from tests.support.family_cases import file_of
from tests.unit.model.test_unigram import keys_of

Doubles = npt.NDArray[np.float64]
QUERY = "the river wheel"
DOCUMENTS = [
    "a mill by the river", "grain, stone. stone", "", "night", "milling the night " * 7,
    "grain, stone. stone", "[SEP] the wheel [CLS]", "▁mill",
]  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A claimed job, as far as tokens depend on it."""

    prompt: str
    params: GenerationParams
    prompt_ids: None = None
    messages: None = None
    rendering: None = None
    requested_at: None = None


def asked(document: str, query: str = QUERY, **params: Any) -> Any:
    return Asked(document, GenerationParams(rerank=query, **params))


def layer_norm(x: Doubles, tensors: dict[str, Doubles], name: str) -> Doubles:
    centred = x - x.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
    made: Doubles = normed * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
    return made


def by_the_formula(tokens: Sequence[int], second: int, tensors: dict[str, Doubles]) -> float:
    """BERT with a pooler and a classifier of one label (Devlin et al. 2018), in float64."""

    def linear(x: Doubles, name: str) -> Doubles:
        made: Doubles = x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
        return made

    types = (np.arange(len(tokens)) >= second).astype(int)
    x = tensors["token_embd.weight"][list(tokens)] + tensors["token_types.weight"][types]
    x = layer_norm(x + tensors["position_embd.weight"][: len(tokens)], tensors, "token_embd_norm")
    for index in range(LAYERS):
        block = f"blk.{index}."
        q, k, v = (
            linear(x, block + name).reshape(len(x), 4, -1).swapaxes(0, 1)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        scores = np.exp(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ v
        mixed = linear(mixed.swapaxes(0, 1).reshape(len(x), -1), block + "attn_output")
        x = layer_norm(x + mixed, tensors, block + "attn_output_norm")
        up = linear(x, block + "ffn_up")
        up = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
        x = layer_norm(x + linear(up, block + "ffn_down"), tensors, block + "layer_output_norm")
    return float(linear(np.tanh(linear(x[0], "cls")), "cls.output")[0])


def ranked(model: LoadedModel, pairs: Sequence[tuple[int, ...]], slots: int = 4) -> list[bytes | None]:
    """The relevance of pairs, together with texts that are embedded."""
    spec = model.spec
    assert spec.ranking is not None
    engine = Engine(
        ReferenceRunner(model.file, spec, kv_pages=64, slots=slots),
        Detokenizer(text_stream=NoText, eos_ids=frozenset()),
        EngineSizes(
            context_length=CONTEXT, max_sequences=slots, token_budget=CONTEXT + 30, encodes=True,
            rank=Ranker(model.file, spec.ranking, spec.width),
        ),
    )  # fmt: skip
    requests = []
    for number, pair in enumerate(pairs):
        found = model.paired(pair)
        assert found is not None
        places, second = found
        params = GenerationParams(rerank="the query")
        requests.append(Request(str(number), 1, pair, params, 0, embeds=places, second=second))
    text = Request("text", 1, pairs[0], GenerationParams(embed=True), 0, embeds=Pooling.CLS.places(9))
    done = complete(engine, [*requests[:2], text, *requests[2:]])
    assert {one.error for one in done.values()} == {None}
    assert len(done["text"].embedding or b"") == 4 * WIDTH
    return [done[str(number)].embedding for number in range(len(pairs))]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    with closing(load_model(Settings(model=write_reranker(tmp_path / "m.gguf")))) as loaded:
        yield loaded


def test_relevance_is_that_of_the_formula(model: LoadedModel) -> None:
    pairs = model.tokenize_all([asked(document) for document in DOCUMENTS])
    tensors = {name: one.astype(np.float64) for name, one in (tensors_of_bert() | rank_tensors()).items()}
    found = ranked(model, pairs)  # type: ignore[arg-type]
    logits = np.array([np.frombuffer(one or b"", "<f4")[0] for one in found], dtype=np.float64)
    wanted, alike = (
        [by_the_formula(pair, second, tensors) for pair, second in zip(pairs, seconds, strict=True)]  # type: ignore[arg-type]
        for seconds in ([model.paired(pair)[1] for pair in pairs], [CONTEXT] * len(pairs))  # type: ignore[arg-type, index]
    )
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    assert np.abs(np.subtract(wanted, alike)).min() > 1e-3  # the kind of text counts
    assert np.ptp(logits) > 0.1


def test_a_pair_is_ranked_with_the_same_bits_in_any_company(model: LoadedModel) -> None:
    pairs: list[Any] = model.tokenize_all([asked(document) for document in DOCUMENTS])
    together = ranked(model, pairs)
    assert together == ranked(model, pairs[::-1], slots=2)[::-1]
    assert together == [ranked(model, [pair], slots=1)[0] for pair in pairs]
    assert together[1] == together[5] and len(set(together)) == len(DOCUMENTS) - 1


def test_a_pair_has_the_tokens_of_berts_tokenizer(model: LoadedModel) -> None:
    river, wheel, the, mill = (PIECES.index(f"▁{word}") for word in ("river", "wheel", "the", "mill"))
    first: Any = model.tokenize_all([asked("the mill"), asked(""), asked("the mill", "[SEP] mill")])
    assert first[0] == (CLS, the, river, wheel, SEP, the, mill, SEP)
    assert first[1] == (CLS, the, river, wheel, SEP, SEP)
    assert first[2].index(SEP) == len(first[2]) - 4 > 1  # no text has one: what follows is the document
    assert [model.paired(pair) for pair in first[:2]] == [(range(1), 5), (range(1), 5)]


def test_a_pair_has_the_tokens_of_xlm_robertas_tokenizer(tmp_path: Path) -> None:
    """Two separators between them; one kind of text, so the table of kinds has one row."""
    rng, pieces = np.random.default_rng(2), keys_of()
    shapes = {"token_embd": (len(pieces["tokenizer.ggml.tokens"]), WIDTH), "token_types": (1, WIDTH)}
    tables = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    path = write_bert(tmp_path / "m.gguf", keys=pieces | {"pooling_type": 4}, tensors=rank_tensors() | tables)
    with closing(load_model(Settings(model=path))) as model:
        alone = [model.tokenizer.encode(text, add_bos=False) for text in ("the mill", "at night")]
        (pair,) = model.tokenize_all([asked("at night", "the mill")])
        assert pair == (0, *alone[0], 2, 2, *alone[1], 2)
        assert model.paired(pair) == (range(1), len(alone[0]) + 3)
        assert model.spec.paired_positions == 0


def test_a_document_is_cut_where_the_row_says(model: LoadedModel) -> None:
    long = "the mill " * 90
    whole, cut, none, little = model.tokenize_all(
        [
            asked(long), asked(long, truncate_prompt_tokens=20), asked(long, truncate_prompt_tokens=6),
            asked(long, truncate_prompt_tokens=5),
        ]
    )  # fmt: skip
    assert isinstance(whole, tuple) and len(whole) == 186
    assert cut == (*whole[:19], SEP) and none == (*whole[:5], SEP)
    assert isinstance(little, InvalidParameterError)
    assert "is 5, but the query has 3 tokens, and there are 3 beside it" in str(little)


def test_each_bad_pair_fails_alone(model: LoadedModel) -> None:
    good, bad, query = model.tokenize_all([asked("mill"), asked("\ud800"), asked("mill", "a")])
    assert isinstance(good, tuple) and isinstance(query, tuple)
    assert isinstance(bad, InvalidPromptError) and "lone surrogate" in str(bad)


def test_what_a_cross_encoder_cannot_do_is_said(model: LoadedModel) -> None:
    with pytest.raises(InvalidParameterError, match=r"ranks pairs of texts .*: give rows with rerank"):
        model.embedded(GenerationParams(embed=True), 3)
    (refused,) = model.encode_all([[{"role": "user", "content": "the night"}]])
    assert "a cross-encoder, which ranks documents and answers no chats" in str(refused)


def test_an_encoder_without_a_head_says_so(tmp_path: Path) -> None:
    with closing(load_model(Settings(model=write_bert(tmp_path / "m.gguf")))) as model:
        text: Any = replace(asked("mill"), params=GenerationParams(embed=True))
        ids, refused = model.tokenize_all([text, asked("mill")])
        assert isinstance(ids, tuple) and "without a head that ranks pairs" in str(refused)


def test_a_classifier_of_several_labels_ranks_nothing(tmp_path: Path) -> None:
    tensors = rank_tensors() | {
        "cls.output.weight": np.ones((3, WIDTH), np.float32), "cls.output.bias": np.ones(3, np.float32),
    }  # fmt: skip
    path = write_bert(tmp_path / "m.gguf", keys={"pooling_type": 4}, tensors=tensors)
    with closing(load_model(Settings(model=path))) as model:
        with pytest.raises(InvalidParameterError, match=r"gives 3 numbers for a pair \(cls.output.weight\)"):
            model.paired((CLS, 5, SEP, 6, SEP))
        assert not model.pairs or not model.pairs.relevant


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"without": "cls.output.weight"}, "tensor cls.output.weight: is missing, but bert.pooling_type"),
        ({"without": "cls.weight"}, "tensor cls.weight: is missing, but there is cls.bias"),
        ({"tensors": {"cls.bias": np.ones(WIDTH + 1, np.float32)}}, "tensor cls.bias: has shape"),
        ({"tensors": {"cls.extra": np.ones(2, np.float32)}}, "tensor cls.extra: is not part of"),
    ],
)
def test_a_head_that_contradicts_itself_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = rank_tensors() | changed.pop("tensors", {})
    path = write_bert(tmp_path / "m.gguf", keys={"pooling_type": 4}, tensors=tensors, **changed)
    with GgufFile.open(path) as file, pytest.raises(ModelFileError, match=message):
        read_spec(file)


def test_a_head_that_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    tensors = rank_tensors() | {"cls.output.bias": np.array([np.nan], np.float32)}
    path = write_bert(tmp_path / "m.gguf", keys={"pooling_type": 4}, tensors=tensors)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        assert spec.ranking is not None
        with pytest.raises(ModelFileError, match=r"tensor cls\.output\.bias: holds what is not a number"):
            Ranker(file, spec.ranking, spec.width)


def test_modern_berts_head_takes_the_mean(tmp_path: Path) -> None:
    """A dense layer without a bias, GELU, a norm, one row: as transformers' classifier has it."""
    keys, like = ENCODER_FILES["modern-bert"]
    width, rng = like.width, np.random.default_rng(8)
    dense, norm, row = (
        rng.standard_normal(shape, np.float32) for shape in ((width, width), width, (1, width))
    )
    tensors = {"cls.weight": dense, "cls.norm.weight": norm, "cls.output.weight": row}
    with file_of(tmp_path, keys | {"pooling_type": 4}, like, **tensors) as file:
        spec = read_spec(file)
        assert spec.ranking is not None and spec.ranking.mean and not spec.ranking.second_type
        total = rng.standard_normal(width)
        found = np.frombuffer(Ranker(file, spec.ranking, width)(total, 7), "<f4")
    x = dense.astype(np.float64) @ (total / 7)
    x = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    x = (x - x.mean()) / np.sqrt(x.var() + spec.output_norm.eps) * norm
    np.testing.assert_allclose(found, row @ x, atol=1e-4)


def test_check_ranks_a_pair(model: LoadedModel, tmp_path: Path) -> None:
    made = write_sentence(Settings(model=tmp_path / "m.gguf", reference=True), model)
    assert made.ok and made.found.startswith('finds "The sea is" 0.')
