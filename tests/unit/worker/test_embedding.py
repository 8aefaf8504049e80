"""Jobs that embed their text, in a service on an engine whose runner does as the test says."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from nightmill.jobs.base.contract import JobState, StopReason
from nightmill.jobs.batches.verifying import Verdict, compare
from nightmill.jobs.commands.printing import job_values, print_all_of
from nightmill.jobs.commands.terminal import to_json
from nightmill.jobs.errors import EmbeddingError, InvalidParameterError, InvalidPromptError
from nightmill.jobs.reply.embeddings import encoded, numbers, written
from nightmill.jobs.request.spec import JobSpec
from tests.unit.engine.by_definition import expected_embedding
from tests.unit.engine.scripted import ScriptedRunner, make_request
from tests.unit.worker.bench import PROMPT, Bench

EMBED: dict[str, Any] = {"embed": True, "pooling": "last"}


def wanted(pooling: str = "last", **params: Any) -> bytes:
    places = range(0 if pooling == "mean" else len(PROMPT) - 1, len(PROMPT))
    return expected_embedding(make_request("j", PROMPT, embeds=places, embed=True, **params))


def test_a_job_ends_with_the_embedding_of_its_text(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    client = bench.client
    of_rows = [
        {"embed": "text", "pooling": "last"},
        {"prompt": "text", "embed": True, "pooling": "mean", "custom_id": "mean"},
        {"embed": [1, 2], "pooling": "mean", "dimensions": 2},
        {"prompt": "text", "max_tokens": 2},
    ]
    ids = client.enqueue_many(of_rows)
    bench.service.run_shard(ids)
    last, mean, cut, text = (client.get(job_id) for job_id in ids)
    found = [job.packed_embedding for job in (last, mean, cut, text)]
    assert found == [wanted(), wanted("mean"), wanted("mean", dimensions=2), None]
    for job in (last, mean, cut):
        assert (job.state, job.stop_reason, job.text) == (JobState.SUCCEEDED, StopReason.EOS, "")
        assert (job.prompt_tokens, job.completion_tokens) == (len(PROMPT), 0)
        assert job.embedding is not None and abs(sum(x * x for x in job.embedding) - 1) < 1e-6
    assert (last.prompt, cut.prompt_ids, text.embedding) == ("text", [1, 2], None)
    assert bench.service.in_flight.idle
    assert [job.packed_embedding for job in client.results(ids)] == found


def test_it_is_shown_short_and_whole(build: Callable[..., Bench], capsys: pytest.CaptureFixture[str]) -> None:
    bench = build(ScriptedRunner())
    job_id, text = bench.client.enqueue_many([{"embed": "a", "pooling": "last"}, "b"], max_tokens=2)
    bench.service.run_shard([job_id, text])
    job = bench.client.get(job_id)
    print_all_of(job)
    assert re.search(r"^embedding +3 numbers: -?0\.\d{4}, .*, \.\.\.$", capsys.readouterr().out, re.M)
    values = json.loads(to_json(job_values(job)))
    assert np.array(values["embedding"], dtype="<f4").tobytes() == job.packed_embedding
    told = bench.client.enqueue("b", prompt_logprobs=1, max_tokens=2)
    bench.service.run_shard([told])
    for shown in (job, bench.client.get(text), bench.client.get(told)):
        assert not [name for name in job_values(shown) if name.startswith("packed")]


def test_a_model_that_was_made_for_no_embeddings_says_so(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    job_id = bench.client.enqueue("text", embed=True)
    bench.service.run_shard([job_id])
    job = bench.client.get(job_id)
    assert (job.state, job.error) == (JobState.FAILED, "pooling: no file says any")


def test_many_texts_become_embeddings_in_their_order(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    found: list[Any] = []
    asking = threading.Thread(
        target=lambda: found.extend(bench.client.embed_many(["a", "b", "c"], pooling="mean", timeout=240))
    )
    asking.start()
    while len(ids := [job.id for job in bench.client.list_jobs()]) < 3:
        asking.join(0.01)
    bench.service.run_shard(ids)
    asking.join()
    assert found == [numbers(wanted("mean"))] * 3


def test_one_that_fails_is_an_error_of_many(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    failure: list[Exception] = []

    def ask() -> None:
        with pytest.raises(EmbeddingError, match=r"without an embedding, failed .*: pooling") as caught:
            bench.client.embed_many(["a"], timeout=240)
        failure.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    while not (ids := [job.id for job in bench.client.list_jobs()]):
        asking.join(0.01)
    bench.service.run_shard(ids)
    asking.join()
    assert failure


def test_verifying_compares_embeddings_to_the_bit(build: Callable[..., Bench]) -> None:
    bench = build(ScriptedRunner())
    job_id = bench.client.enqueue("text", **EMBED)
    bench.service.run_shard([job_id])
    job = bench.client.get(job_id)
    assert compare(job_id, job, job).verdict is Verdict.EQUAL
    assert job.packed_embedding is not None
    bits = np.frombuffer(job.packed_embedding, dtype=np.int32).copy()
    bits[1] ^= 1
    found = compare(job_id, job, replace(job, packed_embedding=bits.tobytes()))
    assert found.verdict is Verdict.DEFECT and found.parting is not None
    assert found.parting.then != found.parting.now


def test_nine_digits_keep_all_bits() -> None:
    data = np.random.default_rng(1).standard_normal(2000).astype("<f4").tobytes()
    assert np.array(written(data)).astype("<f4").tobytes() == data
    assert np.array(numbers(data), dtype="<f4").tobytes() == data
    assert encoded(b"\x00\x00\x80?") == "AACAPw=="


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"embed": "a", "prompt": "b"}, "embed: is the text itself"),
        ({"embed": ""}, "prompt: is empty"),
        ({"embed": True}, "prompt: is missing"),
        ({"embed": True, "messages": [{"role": "user", "content": "x"}]}, "embed: is for plain texts"),
        ({"embed": "a", "n": 2}, "embed: does not go with n"),
        ({"embed": "a", "logprobs": 0}, "embed: does not go with logprobs"),
        ({"embed": "a", "score": ["b"]}, "embed: does not go with score"),
        ({"embed": "a", "choice": ["b", "c"]}, "embed: an embedding has no answer"),
        ({"embed": "a", "dimensions": 0}, "dimensions: must be at least 1"),
        ({"embed": "a", "pooling": "cls"}, "pooling: must be last or mean"),
        ({"prompt": "a", "dimensions": 5}, "dimensions: is for embeddings"),
        ({"prompt": "a", "pooling": "last"}, "pooling: is for embeddings"),
    ],
)
def test_what_contradicts_an_embedding_is_refused_by_name(row: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidParameterError, InvalidPromptError), match=said):
        JobSpec.parse(row)


def test_equal_texts_are_embedded_once(build: Callable[..., Bench]) -> None:
    """In a worker's hands, and later; another pooling is another embedding, and a text none at all."""
    runner = ScriptedRunner()
    bench = build(runner)
    asked = {"embed": "a", "pooling": "mean", "reuse": "exact"}
    text = {"prompt": "a", "reuse": "any", "max_tokens": 2}
    ids = bench.client.enqueue_many(
        [asked, asked, asked | {"pooling": "last"}, asked | {"dimensions": 2}, text]
    )
    bench.service.run_shard(ids)
    later = bench.client.enqueue_many([asked, asked | {"reuse": "any"}, asked | {"dimensions": 1}])
    bench.service.run_shard(later)
    found = [bench.client.get(job_id) for job_id in (*ids, *later)]
    embeddings = [wanted("mean"), wanted("mean"), wanted(), wanted("mean", dimensions=2), None]
    embeddings += [wanted("mean"), wanted("mean"), wanted("mean", dimensions=1)]
    assert [job.packed_embedding for job in found] == embeddings
    origins = [None, ids[0], None, None, None, ids[0], ids[0], None]
    assert [job.reused_from for job in found] == origins
    pooled = [int(batch.pools["rows"].sum()) for batch in runner.batches]
    assert sum(pooled) == 3 + 1 + 3 + 3


def test_an_earlier_embedding_is_looked_for_whatever_the_seed() -> None:
    keys = [
        JobSpec.parse({"embed": "a", "reuse": mode} | more).row("j", datetime.now(UTC), 3)["content_key"]
        for mode in ("exact", "any")
        for more in ({}, {"seed": 5})
    ]
    assert None not in keys and len(set(keys)) == 1
