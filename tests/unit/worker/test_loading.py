"""What a claimed job holds becomes token ids, or an error of that job alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.errors import ChatTemplateError, InvalidParameterError, InvalidPromptError
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.sql.claims import Claim
from nightmill.worker.assembly.model import LoadedModel, load_model
from tests.support.ggufs import CHATML, write_model


def loaded(path: Path, template: str | None) -> LoadedModel:
    return load_model(Settings(model=write_model(path / "model.gguf", layers=1, chat_template=template)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    model = loaded(tmp_path_factory.mktemp("model"), CHATML)
    yield model
    model.close()


def claim(prompt: str | None = None, messages: Any = None) -> Claim:
    return Claim("id", 1, prompt, messages, GenerationParams(seed=1), priority=5, deadline_at=None)


DEPTHS = (10, *range(200, 1100, 50), 100_000)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_token_ids_stay_as_they_are(model: LoadedModel) -> None:
    ids = Claim("id", 1, None, None, GenerationParams(seed=1), 5, None, prompt_ids=[7, 7, 2, 10**9])
    assert model.tokenize_all([claim("hello"), ids, claim("hello")]) == [
        model.encode("hello"), (7, 7, 2, 10**9), model.encode("hello"),
    ]  # fmt: skip


def test_of_a_long_prompt_the_end_is_taken_if_no_more_is_wanted(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", layers=1, metadata={"tokenizer.ggml.add_bos_token": True})
    model = load_model(Settings(model=path))
    text, chat = "hello mill by the river", [{"role": "user", "content": "hello"}]
    bos, whole, rendered = model.tokenizer.bos_id, model.encode(text), model.encode(chat)
    assert whole[0] == rendered[0] == bos and len(whole) > 5
    try:
        for most in (1, 2, 5, len(whole) - 1, len(whole), 10_000):
            params = GenerationParams(seed=1, truncate_prompt_tokens=most)
            claims = [
                replace(claim(text), params=params), replace(claim(messages=chat), params=params),
                replace(claim(), prompt_ids=list(whole), params=params),
            ]  # fmt: skip
            of_text, of_chat, of_ids = model.tokenize_all(claims)
            for found, ids in ((of_text, whole), (of_chat, rendered)):
                begun = () if most == 1 or most >= len(ids) else (bos,)
                assert isinstance(found, tuple) and len(found) == min(most, len(ids))
                assert found == (*begun, *ids[len(begun) - most :])
            assert of_ids == whole[-most:]
    finally:
        model.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_text_to_embed_ends_as_the_file_says(tmp_path: Path, ends: bool) -> None:
    metadata = {"tokenizer.ggml.add_eos_token": ends}
    model = load_model(Settings(model=write_model(tmp_path / "m.gguf", layers=1, metadata=metadata)))
    try:
        text, eos = "hello mill", model.vocabulary.eos_id
        whole = model.encode(text)
        embeds, cuts = GenerationParams(embed=True), GenerationParams(embed=True, truncate_prompt_tokens=2)
        claims = [
            claim(text), replace(claim(text), params=embeds), replace(claim(text), params=cuts),
            replace(claim(), prompt_ids=[1, 2], params=embeds),
        ]  # fmt: skip
        ended = (*whole, eos) if ends else whole
        assert model.tokenize_all(claims) == [whole, ended, ended[-2:], (1, 2)]
    finally:
        model.close()


def test_an_embedding_is_pooled_as_the_file_says_or_the_job(tmp_path: Path) -> None:
    plain = GenerationParams(embed=True)
    mean = GenerationParams(embed=True, pooling="mean")
    for number, wanted in ((None, None), (1, range(5)), (3, range(4, 5)), (4, None)):
        metadata = {} if number is None else {"qwen3.pooling_type": number}
        path = write_model(tmp_path / f"{number}.gguf", "qwen3", layers=1, metadata=metadata)
        model = load_model(Settings(model=path))
        assert model.embedded(mean, 5) == range(5)
        if wanted is None:
            refused = (
                r"^pooling: this model was not made" if number is None else r"^embed: .* is a cross-encoder"
            )
            with pytest.raises(InvalidParameterError, match=refused):
                model.embedded(plain, 5)
        else:
            assert model.embedded(plain, 5) == wanted
        width = model.spec.width
        fitting = GenerationParams(embed=True, pooling="last", dimensions=width)
        assert model.embedded(fitting, 5) == range(4, 5)
        with pytest.raises(InvalidParameterError, match=r"^dimensions: is 65, but embeddings of this model"):
            model.embedded(fitting.model_copy(update={"dimensions": width + 1}), 5)
        model.close()


def test_a_word_is_spelt_as_it_stands_in_a_text(model: LoadedModel) -> None:
    runs = model.tokenize_banned(["mill", " mill", "mill"])
    encode = model.tokenizer.encode
    assert runs == (tuple(encode("mill", add_bos=False)), tuple(encode(" mill", add_bos=False)))
    assert all(model.tokenizer.decode(run).strip() == "mill" for run in runs)
    with pytest.raises(InvalidParameterError, match=r"^bad_words: have 5,\d{3} tokens in all spellings"):
        model.tokenize_banned([f"{number:09}" * 3 for number in range(100)])


def test_claims_are_answered_in_order_and_each_for_itself(model: LoadedModel) -> None:
    chat = [{"role": "user", "content": "hello"}]
    claims = [
        claim("hello world"),
        claim(messages=chat),
        claim("\udc80"),
        claim(messages=[{"content": "no role"}]),
        claim(),
        claim(messages="no list"),
        claim(messages=["no object"]),
        claim(messages=7),
        claim("<|im_end|>"),
        claim(messages=chat),
        *(claim(messages=[{"role": "user", "content": "hello", "more": nested(depth)}]) for depth in DEPTHS),
        claim(messages=chat),
    ]
    answers = model.tokenize_all(claims)
    assert answers[0] == model.encode("hello world") == tuple(model.tokenizer.encode("hello world"))
    assert answers[1] == answers[9] == model.encode(chat)
    assert answers[-1] == answers[1]
    deep = answers[10:-1]
    assert deep[0] == answers[1]
    assert all(answer == answers[1] or isinstance(answer, ChatTemplateError) for answer in deep)
    assert isinstance(deep[-1], ChatTemplateError)
    assert answers[4] == ()
    assert answers[8] == model.encode("<|im_end|>")
    assert isinstance(answers[2], InvalidPromptError)
    assert [isinstance(answers[index], ChatTemplateError) for index in (3, 5, 6, 7)] == [True] * 4
    assert model.tokenize_all(claims[:1]) == answers[:1]
    assert model.tokenize_all([]) == []


@pytest.mark.parametrize("template", [None, "{% for %}", "{{ 'x' * 10**12 }}"])
def test_plain_prompts_need_no_template_that_works(template: str | None, tmp_path: Path) -> None:
    model = loaded(tmp_path, template)
    chat, plain = model.tokenize_all([claim(messages=[{"role": "user", "content": "hello"}]), claim("hello")])
    assert isinstance(chat, ChatTemplateError)
    assert "tokenizer.chat_template: " in str(chat)
    assert plain == tuple(model.tokenizer.encode("hello"))
    with pytest.raises(ChatTemplateError, match="chat_template"):
        model.encode([{"role": "user", "content": "hello"}])


def test_a_closed_model_has_no_process_left(tmp_path: Path) -> None:
    model = loaded(tmp_path, CHATML)
    assert not isinstance(model.chat, str)
    assert model.chat.pid is not None
    model.close()
    assert model.chat.pid is None
