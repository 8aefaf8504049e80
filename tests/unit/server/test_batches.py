"""Batches over HTTP, with OpenAI's own client: from a file to files of results, whoever dies in between."""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from nightmill.jobs.server.job_service import ServerLimits
from nightmill.jobs.server.native import job_object
from nightmill.worker.service import answering
from tests.support.servers import wait_until
from tests.unit.server.conftest import BOB, EVE, Server, text_of
from tests.unit.server.openai_batches import (
    CHAT,
    PLAIN,
    ended,
    ended_at_last,
    file_of,
    lines,
    row,
    submit,
)
from tests.unit.worker.bench import ScriptedPrompting

pytestmark = pytest.mark.usefixtures("looks_often")


def test_a_batch_from_its_file_to_its_results(server: Server) -> None:
    client = server.openai()
    rows = [row(f"r{seed}", CHAT, seed=seed, n=2 if seed == 4 else 1) for seed in range(5)]
    bad = [row("r1", CHAT), b"{nonsense", row("x", PLAIN), row("y", CHAT, temperature=-1)]
    batch = submit(client, *rows, *bad, endpoint=CHAT, window="2d", metadata={"night": "one"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHAT, "2d")
    assert batch.expires_at == batch.created_at + 2 * 86_400 and batch.metadata == {"night": "one"}
    batch = ended(client, batch)
    assert batch.status == "completed", batch
    counts, usage = batch.request_counts, batch.usage
    assert (counts.total, counts.completed, counts.failed) == (9, 5, 4)
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in times and times == sorted(times)
    assert [(one.line, one.code, one.param) for one in batch.errors.data] == [
        (6, "duplicate_custom_id", "custom_id"),
        (7, "invalid_json", None),
        (8, "invalid_value", "url"),
        (9, "invalid_value", "body.temperature"),
    ]
    assert batch.errors.data[2].message == f"url: must be {CHAT}, as the batch says"
    done = lines(client, batch.output_file_id)
    assert [one["custom_id"] for one in done] == [f"r{seed}" for seed in range(5)]
    for seed, one in enumerate(done):
        body = one["response"]["body"]
        assert (one["response"]["status_code"], one["error"], body["object"]) == (
            200,
            None,
            "chat.completion",
        )
        assert body["choices"][0]["message"]["content"] == text_of(seed, max_tokens=9)
        assert [choice["index"] for choice in body["choices"]] == list(range(2 if seed == 4 else 1))
    assert usage.input_tokens == 15 and usage.total_tokens == 15 + usage.output_tokens
    assert usage.output_tokens == sum(one["response"]["body"]["usage"]["completion_tokens"] for one in done)
    failed = lines(client, batch.error_file_id)
    assert [(one["custom_id"], one["response"], one["error"]["line"]) for one in failed] == [
        (None, None, 6), (None, None, 7), ("x", None, 8), ("y", None, 9),
    ]  # fmt: skip
    files = {one.id: one for one in client.files.list(purpose="batch_output")}
    assert files.keys() == {batch.output_file_id, batch.error_file_id}
    assert files[batch.output_file_id].filename == f"{batch.id}_output.jsonl"
    assert len(client.files.content(batch.output_file_id).read()) == files[batch.output_file_id].bytes
    with pytest.raises(openai.ConflictError, match="is completed: there is nothing to cancel"):
        client.batches.cancel(batch.id)
    # The command line knows it by the same name.
    assert server.client.get_batch(batch.id).status().state == "completed_with_errors"


def test_lists_owners_and_the_asynchronous_client(start: Callable[..., Any]) -> None:
    async def program(server: Server) -> None:
        async with server.openai_async() as client:
            file = await client.files.create(file=file_of(row("a", seed=1)), purpose="batch")
            asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": PLAIN, "completion_window": "24h"}
            ids = [(await client.batches.create(**asked)).id for _ in range(5)]
            assert [one.id async for one in client.batches.list(limit=2)] == ids[::-1]
            page = await client.batches.list(limit=3, after=ids[3])
            assert [one.id for one in page.data] == ids[2::-1] and page.has_more is False
            raw = await client.batches.with_raw_response.retrieve(ids[0])
            assert raw.http_response.status_code == 200 and raw.parse().id == ids[0]
            key = {"extra_headers": {"Idempotency-Key": "k"}}
            first = await client.batches.create(**asked, **key)
            assert (await client.batches.create(**asked, **key)).id == first.id
            with pytest.raises(openai.ConflictError, match="which is of other content"):
                await client.batches.create(**asked | {"completion_window": "1h"}, **key)
            with pytest.raises(openai.NotFoundError, match="no file has the id"):
                await server.openai_async(BOB).batches.create(**asked, **key)
            for one in [*ids, first.id]:
                assert await asyncio.to_thread(ended, server.openai(), await client.batches.retrieve(one))
            with pytest.raises(openai.BadRequestError, match="names a file of results"):
                done = await client.batches.retrieve(ids[0])
                await client.batches.create(**asked | {"input_file_id": done.output_file_id})
            assert [one.id async for one in server.openai_async(BOB).batches.list()] == []
            assert len([one async for one in server.openai_async(EVE).batches.list()]) == 6
            for forged in (ids[0], "batch_" + "0" * 32, "batch_x", "x"):
                with pytest.raises(openai.NotFoundError, match="there is no batch"):
                    await server.openai_async(BOB).batches.retrieve(forged)
                with pytest.raises(openai.NotFoundError, match="there is no batch"):
                    await server.openai_async(BOB).batches.cancel(forged)
            for call in (client.with_options(api_key=EVE).batches.cancel(ids[0]),):
                with pytest.raises(openai.PermissionDeniedError, match="may only read"):
                    await call
            with pytest.raises(openai.PermissionDeniedError, match="may only read"):
                await server.openai_async(EVE).batches.create(**asked)

    with start() as server:
        asyncio.run(program(server))


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
    ({"endpoint": ["x"]}, 400, "endpoint"),
    ({"completion_window": None}, 400, "completion_window"),
    ({"completion_window": "soon"}, 400, "completion_window"),
    ({"completion_window": "0h"}, 400, "completion_window"),
    ({"completion_window": "9999w"}, 400, "completion_window"),
    ({"completion_window": 24}, 400, "completion_window"),
    ({"input_file_id": None}, 400, "input_file_id"),
    ({"input_file_id": 5}, 400, "input_file_id"),
    ({"input_file_id": "../../x"}, 404, None),  # type: ignore[list-item]
    ({"metadata": [1]}, 400, "metadata"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
    ({"metadata": {"a": "x\x00"}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at"}}, 400, "output_expires_after"),
    ({"model": "model"}, 400, "model"),
]


def test_what_is_refused_leaves_nothing_and_limits_are_said(start: Callable[..., Any]) -> None:
    with start(worker=False, limits=ServerLimits(batches=2)) as server, server.http() as http:
        file = server.openai().files.create(file=file_of(row("a")), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": PLAIN, "completion_window": "24h"}
        for more, status, param in BAD:
            answer = http.post("/v1/batches", json=asked | more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (
                more,
                answer.text,
            )
        for wrong in ("../../x", "x", "file-x"):  # the answer names what was asked for, as it was
            answer = http.post("/v1/batches", json=asked | {"input_file_id": wrong})
            assert answer.json()["error"]["message"].startswith(f"no file has the id '{wrong}'")
        assert http.get("/v1/batches").json()["data"] == []
        for status in (200, 200, 429):
            answer = http.post("/v1/batches", json=asked)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "too_many_batches" and answer.headers["retry-after"]


def test_files_that_cannot_be_run_fail_and_say_why(server: Server) -> None:
    client = server.openai()
    where = str(server.client.settings.data_dir)
    for content, code, line in (
        ([b"\xff" * 50], "invalid_encoding", 1),
        ([b" \n "], "invalid_file", None),
        ([b'{"prompt": "plain"}', b"[]"], "unsupported_field", 1),
        ([row("x", CHAT)], "invalid_value", 1),
    ):
        batch = ended(client, submit(client, *content))
        assert (batch.status, batch.failed_at is not None) == ("failed", True), batch
        first = batch.errors.data[0]
        assert (first.code, first.line) == (code, line)
        assert where not in batch.model_dump_json() and batch.output_file_id is None
        client.files.delete(batch.input_file_id)
    assert server.client.list_jobs(state="queued") == []


def test_a_cancelled_batch_keeps_what_was_done(server: Server) -> None:
    server.bench.runner.seconds = 0.02  # type: ignore[attr-defined]
    client = server.openai()
    rows = [
        row(f"r{seed}", seed=seed, max_tokens=100 if seed < 37 else 3, ignore_eos=True) for seed in range(40)
    ]
    batch = submit(client, *rows)
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3)
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    wait_until(lambda: not server.bench.service.poll_cancellations() and ended_at_last(client, batch))
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.cancelled_at >= batch.cancelling_at) == ("cancelled", True)
    counts = batch.request_counts
    done, rest = lines(client, batch.output_file_id), lines(client, batch.error_file_id)
    assert (len(done), len(rest)) == (counts.completed, counts.failed) and counts.total == 40
    assert {one["custom_id"] for one in done + rest} == {f"r{seed}" for seed in range(40)}
    assert {one["error"]["code"] for one in rest} == {"cancelled"}
    # What was not done is done after all, and the files are whole then.
    server.bench.runner.seconds = 0.0  # type: ignore[attr-defined]
    url = f"/v1/night/{batch.id}/retry"
    with server.http(BOB) as bob, server.http() as http:
        assert bob.post(url).status_code == 404
        again = http.post(url).json()
        assert (again["status"], again["output_file"], again["ended_at"]) == ("in_progress", None, None)
        # The worker of these tests begins an attempt at a job once only.
        server.bench.run([job.id for job in server.client.list_jobs(state="queued")])
        batch = ended(client, batch)
        assert (batch.status, batch.error_file_id, batch.cancelling_at) == ("completed", None, None)
        assert [one["custom_id"] for one in lines(client, batch.output_file_id)] == [
            f"r{seed}" for seed in range(40)
        ]
        assert http.post(url).json()["output_file"] == batch.output_file_id  # there was nothing to retry
        # Answers that are extended are written into new files, too.
        short = lines(client, batch.output_file_id)[37]["response"]["body"]["choices"][0]
        assert server.client.get_batch(batch.id).extend(20).rows == 3
        assert client.batches.retrieve(batch.id).status == "in_progress"
        server.bench.run([job.id for job in server.client.list_jobs(state="queued")])
        extended = ended(client, batch)
        assert (extended.status, extended.request_counts.completed) == ("completed", 40)
        longer = lines(client, extended.output_file_id)[37]["response"]["body"]["choices"][0]
        assert longer["text"].startswith(short["text"]) and len(longer["text"]) > len(short["text"])
        assert len(lines(client, batch.output_file_id)) == 40  # the former file stays
        failed = ended(client, submit(client, {"custom_id": "bad"}))
        assert http.post(f"/v1/night/{failed.id}/retry").status_code == 409
        server.client.get_batch(batch.id).delete()
        answer = http.post(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batch_not_found")


def test_rows_of_a_file_may_follow_others_of_it(server: Server) -> None:
    client = server.openai()
    plain = (
        b'{"custom_id": "a", "prompt": "Once", "seed": 1}\n'
        b'{"custom_id": "b", "after": "a", "prompt": "Rate: {{ prior.text }}", "seed": 2}\n'
        b'{"custom_id": "c", "after": "nobody", "prompt": "{{ prior.text }}"}\n'
    )
    file = client.files.create(file=("plain.jsonl", plain), purpose="batch")
    with server.http() as http:
        answer = http.post("/v1/night", json={"file": file.id, "max_tokens": 9})
        assert answer.status_code == 202
        url = f"/v1/night/{answer.json()['id']}"
        queued = lambda: server.client.list_jobs(state="queued")  # noqa: E731
        (waiting,) = wait_until(lambda: (jobs := queued()) and not jobs[0].held and jobs)
        assert waiting.prompt == f"Rate: {text_of(1, max_tokens=9)}"
        shown = job_object(waiting)
        assert (shown["prior"], shown["held"]) == (waiting.prior, False)
        server.bench.run([waiting.id])
        night = wait_until(lambda: (now := http.get(url).json())["ended_at"] and now)
        assert [bad["line"] for bad in night["bad_rows"]] == [3]
        assert [done["custom_id"] for done in lines(client, night["output_file"])] == ["a", "b"]
        # OpenAI's rows follow nothing.
        batch = ended(client, submit(client, row("x") | {"after": "y"}))
        assert batch.errors.data[0].param == "after"


def test_night_takes_any_format_and_tells_how_it_goes(server: Server) -> None:
    client = server.openai()
    plain = b'{"prompt": "Once", "seed": 1}\n{"prompt": "unspeakable"}\n{"prompt": 5}\n'
    file = client.files.create(file=("plain.jsonl", plain), purpose="batch")
    with server.http() as http:
        body = {"file": file.id, "name": "tonight", "max_tokens": 9, "priority": 2, "deadline": "8h"}
        for more, param in (
            ({"deadline": "1s", "scheduled_at": "1h"}, None),
            ({"scheduled_at": "2030-01-02T00:00+00:00", "deadline": "2030-01-01T00:00+00:00"}, "deadline"),
            ({"deadline": "2020-01-01T00:00+00:00"}, "deadline"),
            ({"priority": 11}, "priority"),
            ({"budget": "much"}, "budget"),
            ({"max_failures": 5}, "max_failures"),
            ({"temperature": -1}, "temperature"),
            ({"name": ""}, "name"),
            ({"custom_id": "x"}, "custom_id"),
            ({"file": 1}, "file"),
            ({"model": "modle"}, "model"),
        ):
            answer = http.post("/v1/night", json=body | more)
            if param is None:
                assert answer.status_code == 202
                assert http.delete(f"/v1/night/{answer.json()['id']}").json()["status"] in (
                    "cancelling",
                    "cancelled",
                )
            else:
                assert answer.status_code == (404 if param == "model" else 400), answer.text
                assert answer.json()["error"]["param"] == param
        answer = http.post("/v1/night", json=body | {"budget": "1M-tokens", "max_failures": "5%"})
        assert answer.status_code == 202
        url = f"/v1/night/{answer.json()['id']}"
        night = wait_until(lambda: (now := http.get(url).json())["ended_at"] and now)
        assert (night["name"], night["status"], night["state"], night["rows"]) == (
            "tonight", "completed", "completed_with_errors", 3,
        )  # fmt: skip
        assert (night["succeeded"], night["unsuccessful"], night["settings"]) == (
            1,
            2,
            {"max_tokens": 9, "priority": 2, "budget": "1M-tokens", "max_failures": "5%"},
        )
        assert (night["budget"], night["max_failures"], night["stopped_because"]) == (
            *({"tokens": 1_000_000}, 0.05, None),
        )
        assert night["spent"] == {"tokens": night["tokens_in"] + night["tokens_out"]}
        messages = sorted(group["message"] for group in night["errors"])
        assert messages[1] == "the template refuses" and messages[0].startswith("prompt: must be")
        assert [bad["line"] for bad in night["bad_rows"]] == [3]
        (done,) = lines(client, night["output_file"])
        assert (done["text"], done["custom_id"]) == (text_of(1, max_tokens=9), "row-1")
        assert len(http.get("/v1/night").json()["data"]) == 2
        assert client.batches.retrieve(night["id"]).status == "completed"
        assert server.client.get(done["id"]).priority == 2
    with server.http(BOB) as http:
        assert http.get(url).status_code == http.delete(url).status_code == 404


def test_usage_of_a_batch_says_what_was_cached_and_thought(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(number % 11 for number in range(22))  # five pages and a half
    monkeypatch.setattr(ScriptedPrompting, "tokenize_all", lambda self, claims: [prompt] * len(claims))
    monkeypatch.setattr(answering, "reasoning_tokens", lambda token_ids, markup, spell: len(token_ids) // 2)
    with start() as server:
        client = server.openai()
        rows = [row(f"r{number}", CHAT, seed=number, max_tokens=60) for number in range(3)]
        batch = ended(client, submit(client, *rows, endpoint=CHAT))
        bodies = [one["response"]["body"]["usage"] for one in lines(client, batch.output_file_id)]
        cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in bodies)
        thought = sum(one["completion_tokens_details"]["reasoning_tokens"] for one in bodies)
        (listed,) = client.batches.list()
        for shown in (batch, client.batches.retrieve(batch.id), listed):
            assert shown.usage.input_tokens_details.cached_tokens == cached == 40
            assert shown.usage.output_tokens_details.reasoning_tokens == thought > 0
