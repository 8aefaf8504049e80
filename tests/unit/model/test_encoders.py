"""Encoders: what their files say, WordPiece's tokens, and embeddings to the bit in any company."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import ChatTemplateError, ModelFileError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.assembly.model import load_model
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import Pooling
from nightmill.worker.model.tokenizer import Tokenizer
from nightmill.worker.runners.gpu.catalogue import check_spec
from nightmill.worker.runners.reference import ReferenceRunner
from tests.support.encoder_models import CLS, CONTEXT, PIECES, SEP, UNKNOWN, WIDTH, write_bert
from tests.support.engines import NoText, complete
from tests.support.needs import Need, missing
from tests.unit.model.conftest import DOWNLOADED


def spec_of(path: Path) -> Any:
    with GgufFile.open(path) as file:
        return read_spec(file)


def test_a_file_of_an_encoder_is_read(tmp_path: Path) -> None:
    spec = spec_of(write_bert(tmp_path / "m.gguf"))
    assert (spec.pooling, spec.tied_head, spec.output_norm_name) == (
        Pooling.CLS,
        True,
        "blk.1.layer_output_norm",
    )
    assert (spec.encoder.positions, spec.encoder.token_types) == (CONTEXT, 2)
    assert [layer.mixer.causal for layer in spec.layers] == [False, False]
    check_spec(spec)  # the CUDA kernels take it


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"keys": {"context_length": 200}},
            "bert.context_length: is 200, but position_embd.weight has only 96",
        ),
        ({"without": "token_embd_norm.bias"}, "tensor token_embd_norm.bias: is missing"),
        ({"without": "position_embd.weight"}, "tensor position_embd.weight: is missing"),
        ({"without": "blk.1.layer_output_norm.weight"}, "blk.1.layer_output_norm.weight: is missing"),
        ({"keys": {"attention.layer_norm_epsilon": 0.0}}, "layer_norm_epsilon: is 0, expected more than 0"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        spec_of(write_bert(tmp_path / "m.gguf", **changed))


def test_chats_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with closing(load_model(Settings(model=write_bert(tmp_path / "m.gguf")))) as model:
        (refused,) = model.encode_all([[{"role": "user", "content": "the night"}]])
        assert isinstance(refused, ChatTemplateError)
        assert "an encoder, which embeds texts and answers no chats" in str(refused)
        assert "such as bge-reranker-v2-m3, or a model that answers chats" in str(refused)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The Night", ["▁the", "▁night"]),
        ("milling rivers.", ["▁mill", "ing", "▁river", "s", "▁."]),
        ("níght, GRAIN", ["▁night", "▁,", "▁grain"]),
        ("whee lute", ["▁w", "hee", "[UNK]"]),
        ("[CLS] ▁night", ["[UNK]", "[UNK]", "[UNK]", "▁night"]),  # no text forms a control token
        ("", []),
    ],
)
def test_words_are_cut_into_the_longest_tokens(text: str, pieces: list[str], tmp_path: Path) -> None:
    with GgufFile.open(write_bert(tmp_path / "m.gguf")) as file:
        tokenizer = Tokenizer.from_gguf(file)
    assert [PIECES[token] for token in tokenizer.encode(text, add_bos=False)] == pieces
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.end_id) == (CLS, True, SEP)


def test_a_vocabulary_without_its_special_tokens_is_refused(tmp_path: Path) -> None:
    for key in ("unknown", "seperator"):
        path = write_bert(tmp_path / f"{key}.gguf", keys={f"tokenizer.ggml.{key}_token_id": 999})
        with GgufFile.open(path) as file, pytest.raises(ModelFileError, match=f"{key}_token_id: is 999"):
            Tokenizer.from_gguf(file)


def test_a_real_vocabulary_gives_llama_cpps_tokens() -> None:
    path = DOWNLOADED / "ggml-vocab-bert-bge.gguf"
    if not path.exists():
        missing(Need.VOCABULARIES)
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    texts = path.with_name(f"{path.name}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    expected = path.with_name(f"{path.name}.out").read_text("utf-8").splitlines()
    assert len(expected) > 40
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_bos=False) == [int(token) for token in ids.split()], text
    assert (tokenizer.bos_id, tokenizer.end_id) == (101, 102)


def computed(path: Path, texts: list[tuple[int, ...]], slots: int, **sizes: Any) -> list[Completion]:
    with GgufFile.open(path) as file:
        engine = Engine(
            ReferenceRunner(file, read_spec(file), kv_pages=64, slots=slots, depth=3),
            Detokenizer(text_stream=NoText, eos_ids=frozenset()),
            EngineSizes(
                **{"context_length": CONTEXT, "max_sequences": slots, "token_budget": CONTEXT + 20} | sizes,
                encodes=True,
            ),
        )
        requests = [
            Request(
                str(number), 1, text, GenerationParams(embed=True), 0,
                embeds=(Pooling.MEAN if number % 2 else Pooling.CLS).places(len(text)),
                interactive=number % 3 == 0,
            )
            for number, text in enumerate(texts)
        ]  # fmt: skip
        done = complete(engine, [*requests, Request("text", 1, (1, 2), GenerationParams(), 0)])
        assert "an encoder, which embeds texts or ranks them, and" in (done.pop("text").error or "")
        assert engine.stats.prompt_tokens == sum(map(len, texts))  # each once, although steps run ahead
        return [done[str(number)] for number in range(len(texts))]


def test_an_embedding_has_its_bits_in_any_company(tmp_path: Path) -> None:
    """Also where another text begins alike, which shares nothing: what is behind counts, too."""
    path = write_bert(tmp_path / "m.gguf")
    rng = np.random.default_rng(3)
    texts = [
        tuple(rng.integers(0, len(PIECES), int(size)).tolist()) for size in (1, 40, 96, 17, 60, 33, 96, 2)
    ]
    texts += [(*texts[2][:-1], 5), (*texts[1], UNKNOWN), texts[1]]
    together = computed(path, texts, 6)
    alone = [
        computed(path, [(5,), text] if number % 2 else [text], 1)[-1] for number, text in enumerate(texts)
    ]
    found = [one.embedding for one in together]
    assert found == [one.embedding for one in alone] and None not in found
    assert len({(one, number % 2) for number, one in enumerate(found)}) == len(texts)
    assert {len(one or b"") for one in found} == {4 * WIDTH}


def test_a_step_without_room_for_a_whole_text_is_no_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="50 tokens a step have no room for a text of 96"):
        computed(write_bert(tmp_path / "m.gguf"), [(1,)], 1, token_budget=50)
