"""Earlier answers over HTTP: by a header, told in one, and only to who asked for them first."""

from typing import Any

import openai
import pytest

from tests.unit.server.conftest import ALICE, BOB, Server
from tests.unit.server.openai_batches import PLAIN, ended, file_of, row

CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "Hello"}],
    "seed": 3,
    "max_tokens": 20,
}


def test_a_pipeline_that_runs_again_finds_its_finished_calls(server: Server) -> None:
    asked = {"extra_headers": {"X-Nightmill-Reuse": "exact"}}

    def answer(key: str, **more: Any) -> tuple[str, str | None, str | None]:
        raw = server.openai(key).chat.completions.with_raw_response.create(**CHAT | asked | more)
        said = raw.parse().choices[0].message.content
        return raw.headers["x-request-id"], said, raw.headers.get("x-nightmill-reused-from")

    first, text, origin = answer(ALICE)
    assert origin is None
    again = answer(ALICE, metadata={"run": "2"}, store=False)
    assert again[1:] == (text, first)
    assert answer(BOB)[1:] == (text, None)  # nobody is told of what others have asked
    assert answer(ALICE, seed=4)[2] is None
    assert answer(ALICE, extra_headers={})[2] is None
    with server.http() as http:
        body = {"messages": CHAT["messages"], "seed": 3, "max_tokens": 20, "reuse": "exact"}
        told = http.post("/v1/generate", json=body)
        assert (told.json()["reused_from"], told.headers["x-nightmill-reused-from"]) == (first, first)
        plain = {"prompt": "Hello", "seed": 3, "max_tokens": 20}
        for _ in range(2):
            sent = http.post("/v1/jobs", json=plain, headers={"X-Nightmill-Reuse": "exact"})
            assert sent.status_code == 202
    with pytest.raises(openai.BadRequestError, match="X-Nightmill-Reuse: must be exact or any"):
        server.openai().chat.completions.create(**CHAT, extra_headers={"X-Nightmill-Reuse": "always"})


def test_batches_find_the_answers_of_their_keys_batches(server: Server) -> None:
    origins: dict[str, list[str | None]] = {}
    for name, key in (("first", ALICE), ("again", ALICE), ("others", BOB)):
        client = server.openai(key)
        file = client.files.create(file=file_of(row("a", seed=1), row("b", seed=2)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint=PLAIN,
            completion_window="24h",
            extra_headers={"X-Nightmill-Reuse": "exact"},
        )
        done = ended(client, batch)
        assert done.request_counts.completed == 2
        jobs = server.client.list_jobs(batch=f"{done.id}")[::-1]
        origins[name] = [job.reused_from for job in jobs]
        if name == "first":
            ids = [job.id for job in jobs]
    assert origins == {"first": [None, None], "again": ids, "others": [None, None]}
