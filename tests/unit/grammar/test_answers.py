"""Whatever a model draws, a finished answer is what its row asks for."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from nightmill.jobs.base.contract import StopReason
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.engine.request import Completion
from nightmill.worker.grammar.matcher import Matcher
from nightmill.worker.grammar.tokens import SLICES
from nightmill.worker.runners.base import mask_words
from tests.support.constrained import Constrained
from tests.support.ggufs import byte_vocabulary, sentencepiece_vocabulary, write_model
from tests.support.schemas import FAMILIES, schemas

pytestmark = pytest.mark.heavy

SCHEMAS = int(os.environ.get("NIGHTMILL_TEST_SCHEMAS", "162"))
"""How many are tried; the whole sample has 1,000."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FORMATS = FormatChecker()


def validate(schema: Any, text: str) -> None:
    Draft202012Validator(schema, format_checker=_FORMATS).validate(json.loads(text))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Constrained]:
    with Constrained(write_model(tmp_path_factory.mktemp("model") / "bytes.gguf")) as made:
        yield made


def errors(done: dict[str, Completion]) -> list[str | None]:
    return [one.error for one in done.values()]


def test_every_finished_answer_obeys_its_schema(model: Constrained) -> None:
    made = schemas(seed=19, count=SCHEMAS)
    requests = [
        model.request(str(place), place, {"json_schema": schema}, max_tokens=300, temperature=1.0)
        for place, (_, schema) in enumerate(made)
    ]
    done = model.run(requests, slots=64)
    assert errors(done) == [None] * len(made)
    finished = set()
    for place, (family, schema) in enumerate(made):
        one = done[str(place)]
        assert one.stop_reason in (StopReason.EOS, StopReason.LENGTH)
        if one.stop_reason is StopReason.EOS:
            finished.add(family)
            validate(schema, one.text)
    assert finished == set(FAMILIES) and len(FAMILIES) >= 20


def test_the_bundled_model_answers_in_json(model: Constrained) -> None:
    asked: list[dict[str, Any]] = [{"json_schema": PERSON}, {"response_format": {"type": "json_object"}}]
    with Constrained(demo_model()) as demo:
        requests = [
            demo.request(f"{kind} {seed}", seed, one, max_tokens=120)
            for kind, one in enumerate(asked)
            for seed in range(4)
        ]
        done = demo.run(requests, slots=8, context=256)
    assert errors(done) == [None] * 8
    for name, one in done.items():
        if one.stop_reason is StopReason.EOS:
            validate(PERSON if name.startswith("0") else {"type": "object"}, one.text)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[a-f]{2,5}-\d+/é\\"}, r"[a-f]{2,5}-[0-9]+/é\\"),
        ({"choice": ["yes", "no", 'say "no"\n', "是"]}, 'yes|no|say "no"\n|是'),
        ({"choice": "only"}, "only"),
        ({"grammar": 'start: "<" NAME ("," NAME)* ">"\nNAME: /[a-c]{1,3}/'}, r"<[a-c]{1,3}(,[a-c]{1,3})*>"),
        ({"grammar": 'root ::= "(" item{1,3} ")"\nitem ::= [0-9] | "x"'}, r"\([0-9x]{1,3}\)"),
    ],
)
def test_every_finished_answer_matches(
    kind: str, asked: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    vocabulary = byte_vocabulary() if kind == "byte-level" else sentencepiece_vocabulary()
    with Constrained(write_model(tmp_path / "model.gguf", vocabulary=vocabulary)) as model:
        requests = [model.request(str(seed), seed, asked, max_tokens=200) for seed in range(12)]
        done = model.run(requests, slots=12)
    assert errors(done) == [None] * 12
    ended = [one.text for one in done.values() if one.stop_reason is StopReason.EOS]
    assert ended
    assert [text for text in ended if not re.fullmatch(pattern, text)] == []


def test_an_answer_that_is_cut_keeps_its_stop_reason(model: Constrained) -> None:
    done = model.run([model.request("j", 1, {"json_schema": PERSON}, max_tokens=3)])
    assert (done["j"].stop_reason, done["j"].completion_tokens) == (StopReason.LENGTH, 3)
    assert done["j"].text.lstrip().startswith("{")


def test_a_stop_string_ends_an_answer_as_it_ends_others(model: Constrained) -> None:
    done = model.run([model.request("j", 1, {"regex": "[0-9]{3}END"}, stop=["ND"], max_tokens=50)])
    assert done["j"].stop_reason is StopReason.STOP_SEQUENCE
    assert re.fullmatch("[0-9]{3}E", done["j"].text)


def test_blanks_are_bounded(model: Constrained) -> None:
    """A model that would draw blanks for ever comes to the end all the same."""
    matching = begin(model, {"json_schema": PERSON})
    blanks = [token for token in range(model.spec.vocab) if model.vocabulary.bytes_of(token) in (b" ", b"\n")]
    for token in [model.vocabulary.tokens.index("{"), *(20 * [blanks[1], blanks[0]])]:
        if not allowed(matching, model)[token]:
            break
        matching.matcher.consume_token(token)
    assert not allowed(matching, model)[blanks].any()


def test_no_answer_is_spelt_with_tokens_that_structure_prompts(model: Constrained) -> None:
    special = {
        token for token, text in enumerate(model.vocabulary.tokens) if text in model.vocabulary.markers()
    }
    special -= model.vocabulary.eos_ids
    assert special
    for asked in ({"regex": "(?s:.*)"}, {"grammar": "start: (<[0-250]> | /./)*"}, {"regex": "<tool_call>"}):
        matching = begin(model, asked)
        assert not allowed(matching, model)[list(special)].any()


def test_the_end_token_is_allowed_where_the_answer_may_end_and_only_there(model: Constrained) -> None:
    ends = sorted(model.vocabulary.eos_ids)
    matching = begin(model, {"grammar": 'start: "a" ("b" | <[97-98]>)?'})
    seen = []
    for text in "ab":
        seen.append(allowed(matching, model)[ends].tolist())
        matching.matcher.consume_token(model.vocabulary.tokens.index(text))
    everything = allowed(matching, model)
    assert seen == [[False] * len(ends), [True] * len(ends)]
    assert np.flatnonzero(everything).tolist() == ends


def test_tokens_go_over_byte_for_byte(model: Constrained) -> None:
    """Under `any text`, a token is allowed exactly if its bytes can begin, or go on, a text in UTF-8."""
    first = allowed(begin(model, {"regex": "(?s:.*)"}), model)
    markers = model.vocabulary.markers()
    for token, text in enumerate(model.vocabulary.tokens):
        spelt = model.vocabulary.bytes_of(token)
        begins = bool(spelt) and text not in markers and valid_beginning(spelt)
        assert first[token] == (begins or token in model.vocabulary.eos_ids), (token, text)


def test_sets_of_tokens_that_are_tried_together_change_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*({"json_schema": schema} for _, schema in schemas(seed=3, count=26)), {"regex": r"[^\n]{5}.*"}]
    walks = []
    for sets in ([], SLICES):
        monkeypatch.setattr("nightmill.worker.grammar.tokens.SLICES", sets)
        rng = np.random.default_rng(8)
        with Constrained(demo_model()) as demo:
            walk = []
            for one in asked:
                matching = begin(demo, one)
                while len(walk) % 40 != 39 and not matching.matcher.is_stopped():
                    walk.append(np.flatnonzero(allowed(matching, demo)).tolist())
                    matching.matcher.consume_token(int(rng.choice(walk[-1])))
                walk.append([])
            walks.append(walk)
    assert walks[0] == walks[1]


def valid_beginning(data: bytes) -> bool:
    for more in (
        b"",
        b"\x80",
        b"\x80\x80",
        b"\x80\x80\x80",
        b"\xa0\x80",
        b"\x90\x80\x80",
        b"\x90\x80",
        b"\xa0",
        b"\x90",
    ):
        try:
            (data + more).decode()
            return True
        except UnicodeDecodeError:
            continue
    return False


def test_unconstrained_texts_are_the_same_beside_constrained_ones(model: Constrained) -> None:
    free = [
        replace(model.request(f"free {seed}", seed, {"regex": "x"}, max_tokens=40), constrained=None)
        for seed in range(6)
    ]
    held = [model.request(f"held {seed}", seed, {"json_schema": PERSON}, max_tokens=60) for seed in range(6)]
    for depth in (1, 3):
        alone = model.run(free, slots=16, depth=depth)
        mixed = model.run([*held, *free], slots=16, depth=depth)
        assert {name: mixed[name].token_ids for name in alone} == {
            name: one.token_ids for name, one in alone.items()
        }


def begin(model: Constrained, asked: dict[str, Any]) -> Matcher:
    constrained = model.request("j", 1, asked).constrained
    assert constrained is not None
    made: Matcher = model.grammars.compile(constrained).result()()
    return made


def allowed(matching: Matcher, model: Constrained) -> Any:
    """Which tokens (V,) may be next."""
    masks = np.empty((1, mask_words(model.spec.vocab)), dtype=np.int32)
    assert model.grammars.masks({0: matching}, masks) == {}
    return np.unpackbits(masks[0].view(np.uint8), bitorder="little")[: model.spec.vocab].astype(bool)
