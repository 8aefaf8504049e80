"""The fewest tokens of an answer, beside answers that must be something and in them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from nightmill.jobs.base.contract import StopReason
from tests.support.constrained import Constrained
from tests.support.ggufs import write_model

FEWEST = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Constrained]:
    with Constrained(write_model(tmp_path_factory.mktemp("model") / "bytes.gguf")) as made:
        yield made


@pytest.mark.parametrize("depth", [1, 3])
def test_a_free_answer_needs_no_grammar_to_be_long_enough(model: Constrained, depth: int) -> None:
    ends = {"stop_token_ids": list(range(40, 180)), "max_tokens": 20, "temperature": 3.0}
    free = [model.request(str(n), n, {}, **ends) for n in range(8)]
    longer = [model.request(str(n), n, {}, min_tokens=FEWEST, **ends) for n in range(8)]
    assert min(len(one.token_ids) for one in model.run(free, depth=depth).values()) < FEWEST
    answers = model.run(longer, depth=depth)
    assert {one.error for one in answers.values()} == {None}
    assert min(len(one.token_ids) for one in answers.values()) > FEWEST
    alone = {one.job_id: model.run([one], depth=depth)[one.job_id].token_ids for one in longer}
    assert {name: one.token_ids for name, one in answers.items()} == alone


def test_both_kinds_of_masks_in_one_step_change_nothing_of_each_other(model: Constrained) -> None:
    asked = [{"regex": "[a-z]{1,300}"}, {}, {"choice": ["yes", "no"]}, {}] * 3
    requests = [
        model.request(str(n), n, one, min_tokens=FEWEST, max_tokens=20, temperature=3.0)
        for n, one in enumerate(asked)
    ]
    together = model.run(requests)
    for request, one in zip(requests, asked, strict=True):
        answer = together[request.job_id]
        alone = model.run([request])[request.job_id]
        assert (answer.token_ids, answer.text, answer.error) == (alone.token_ids, alone.text, None)
        if "choice" in one:  # which nothing can follow: it ends, however short it is
            assert answer.text in ("yes", "no") and answer.stop_reason is StopReason.EOS
        else:
            assert len(answer.token_ids) > FEWEST


def test_an_answer_that_its_own_row_rules_out_is_called_that(model: Constrained) -> None:
    """And not the work of a damaged file, as of an output that is not a number."""
    a = model.vocabulary.ordinary()["a"]
    asked = model.request("j", 1, {"choice": ["a"]}, bad_words=["a"])
    (answer,) = model.run([replace(asked, banned=((a,),))]).values()
    assert answer.error is not None and "damaged" not in answer.error
    assert "bad_words of the row rule out all that its answer may have here (choice, " in answer.error
