"""What a campaign is made of: plans that a seed repeats, texts that workers draw, mutants, messages."""

import random
from pathlib import Path

import numpy as np
import pytest

from nightmill.jobs.request.parameters import GenerationParams
from nightmill.worker.engine.engine import Engine
from nightmill.worker.engine.options import Detokenizer, EngineSizes
from nightmill.worker.engine.request import Completion, Request
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer import Tokenizer
from tests.campaign import forged, gguf_document, model, mutants, strange_templates, texts
from tests.campaign.plan import ONLY, kinds, make_plan
from tests.campaign.worker import ScriptedRunner
from tests.support.ggufs import write_model


@pytest.mark.parametrize("part", ONLY)
def test_a_seed_plans_the_same_twice_and_another_seed_otherwise(part: str) -> None:
    plan = make_plan(7, part, 120.0, 3)
    assert plan == make_plan(7, part, 120.0, 3)
    assert plan != make_plan(8, part, 120.0, 3)
    assert {action.name for action in plan} >= kinds(part), "a round has every kind of fault"


def test_the_worker_writes_the_texts_that_the_oracle_expects(tmp_path: Path) -> None:
    file = GgufFile.open(model.write(tmp_path / "bytes.gguf"))
    tokenizer = Tokenizer.from_gguf(file)
    engine = Engine(
        ScriptedRunner(len(tokenizer.vocabulary.tokens), 8),
        Detokenizer(text_stream=lambda: tokenizer.stream(continues=True), eos_ids=tokenizer.eos_ids),
        EngineSizes(context_length=texts.CONTEXT, max_sequences=8, token_budget=64),
    )
    draw = random.Random(1)
    expected: dict[str, texts.Answer] = {}
    for number in range(200):
        prompt = "".join(draw.choices("abc xyz", k=draw.randrange(1, 60)))
        params = {
            "max_tokens": draw.choice((1, 5, 60, 900)),
            "temperature": draw.choice((0.0, 0.5)),
            "stop": draw.sample(("a", "Q", "xy", "e ", "\ufffd"), draw.randrange(3)),
            "ignore_eos": draw.random() < 0.5,
        }
        expected[str(number)] = texts.answer(prompt, number, params)
        ids = tuple(tokenizer.encode(prompt))
        assert list(ids) == texts.prompt_ids(prompt)
        engine.submit(Request(str(number), 1, ids, GenerationParams.parse(params), number))
    done: list[Completion] = []
    while engine.has_work:
        done += engine.step()
    found = {
        one.job_id: texts.Answer(one.text.replace("\0", "\ufffd"), one.stop_reason, one.completion_tokens)
        for one in done
    }
    assert found == expected
    assert {one.stop_reason for one in done} == {"eos", "length", "stop_sequence", "context_full"}


def test_a_text_depends_on_prompt_seed_and_parameters() -> None:
    whole = texts.answer("prompt", 1, {"max_tokens": 50}).text
    assert whole != texts.answer("prompt", 2, {"max_tokens": 50}).text
    assert whole != texts.answer("Prompt", 1, {"max_tokens": 50}).text
    assert whole != texts.answer("prompt", 1, {"max_tokens": 50, "top_k": 3}).text
    assert texts.begins(whole, texts.answer("prompt", 1, {"max_tokens": 20}).text)


def test_a_document_is_written_as_it_was_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", layers=1, width=32, ffn=32, heads=2, kv_heads=1)
    document = gguf_document.read(path)
    assert document.encode() == path.read_bytes()
    made = [mutants.mutant(document, random.Random(number)) for number in range(200)]
    assert made == [mutants.mutant(document, random.Random(number)) for number in range(200)]
    assert len(set(made)) > 150, "mutants differ"
    assert document.encode() == path.read_bytes(), "making mutants leaves the document as it was"
    for mutate in mutants.STRUCTURAL:
        mutants.mutant(document, random.Random(mutate.__name__))


def test_templates_and_messages_come_from_the_seed_alone() -> None:
    templates = [strange_templates.generated(random.Random(number)) for number in range(50)]
    assert templates == [strange_templates.generated(random.Random(number)) for number in range(50)]
    messages = forged.messages(random.Random(3), ["a" * 32])
    assert messages == forged.messages(random.Random(3), ["a" * 32])
    assert np.unique([len(message) for message in messages]).size > 10
