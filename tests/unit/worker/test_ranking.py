"""Jobs that rank a document, in a service on an engine of a model that chats: yes against no."""

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.batches.verifying import Verdict, compare
from nightmill.jobs.commands.printing import job_values, print_all_of
from nightmill.jobs.commands.terminal import to_json
from nightmill.jobs.errors import InvalidParameterError, InvalidPromptError
from nightmill.jobs.formats.inputs import FileFormat
from nightmill.jobs.formats.results import result_row
from nightmill.jobs.request.spec import JobSpec
from tests.unit.engine.scripted import EOS, ScriptedRunner, found_for
from tests.unit.worker.bench import PROMPT, Bench

ASKED: dict[str, Any] = {"rerank": "What grinds grain?", "prompt": "a mill"}


def logit() -> float:
    """By definition: the log-probability of `yes` behind the prompt less that of `no`."""
    sums = []
    for word in ("yes", "no"):
        tokens, total = list(PROMPT), 0.0
        for letter in word:
            total += float(found_for(tokens, ord(letter) % EOS)["logprob"])
            tokens.append(ord(letter) % EOS)
        sums.append(total)
    return sums[0] - sums[1]


def test_a_job_ends_with_the_relevance_of_its_document(
    build: Callable[..., Bench], capsys: pytest.CaptureFixture[str]
) -> None:
    """Computed once for equal rows; shown, written and verified as what it is."""
    bench = build(ScriptedRunner())
    client = bench.client
    exact = ASKED | {"reuse": "exact"}
    ids = client.enqueue_many([ASKED, exact, exact, exact | {"instruction": "Find stones"}])
    bench.service.run_shard(ids)
    jobs = [client.get(job_id) for job_id in ids]
    for job in jobs:
        assert (job.state, job.stop_reason, job.text) == (JobState.SUCCEEDED, StopReason.EOS, "")
        assert (job.embedding, job.scores, job.several) == (None, None, ())
        assert job.packed_embedding == struct.pack("<f", logit())
        assert job.relevance == pytest.approx(1 / (1 + math.exp(-logit())), abs=1e-6)
    assert [job.reused_from for job in jobs] == [None, None, ids[1], None]
    assert bench.service.in_flight.idle
    print_all_of(jobs[0])
    assert f"relevance{jobs[0].relevance:18.6f}"[-8:] in capsys.readouterr().out
    shown = json.loads(to_json(job_values(jobs[0])))
    assert shown["relevance"] == jobs[0].relevance and "embedding" not in shown
    rows = [result_row(jobs[0], format) for format in FileFormat]
    assert [row.get("relevance") for row in rows if "response" not in row] == [jobs[0].relevance] * 4
    (body,) = (row["response"]["body"] for row in rows if "response" in row)
    assert body["results"] == [{"index": 0, "relevance_score": jobs[0].relevance}]
    assert compare(ids[0], jobs[0], jobs[1]).verdict is Verdict.EQUAL


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"rerank": " "}, "rerank: must be a text, not an empty one"),
        ({"rerank": 5}, "rerank: must be a text"),
        ({"rerank": "a\x00"}, "rerank: a query "),
        ({"prompt": [1, 2]}, "rerank: is for documents that are plain texts"),
        ({"prompt": None, "messages": [{"role": "user", "content": "x"}]}, "rerank: is for documents"),
        ({"n": 2}, "rerank: does not go with n"),
        ({"embed": True}, "rerank: does not go with embed"),
        ({"choice": ["b", "c"]}, "rerank: a relevance is no answer"),
        ({"rerank": None, "instruction": "a"}, "instruction: is for reranking; give rerank too"),
        ({"dimensions": 5}, "dimensions: is for embeddings"),
    ],
)
def test_what_contradicts_ranking_is_refused_by_name(row: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidParameterError, InvalidPromptError), match=said):
        JobSpec.parse(ASKED | row)
