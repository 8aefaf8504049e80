"""One door: a job through Python, JSONL, CSV, OpenAI rows or the command line is the same row of SQL.

Or it is refused in the same words.
"""

import csv
import io
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from sqlalchemy import select

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import InvalidRequestError
from nightmill.jobs.formats.rows import printable
from nightmill.jobs.request.fields import FIELDS, OF_A_BATCH, PARAMETERS, BatchSettings, JobSettings
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS
from nightmill.jobs.request.tools import TOOL_KEYS
from nightmill.jobs.sql.jobs import JOBS
from nightmill.jobs.sql.tables import JobRow
from tests.support.servers import worker_env

Found = tuple[str, Any]
"""("row", what SQL holds) or ("refused", why)."""

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 1_000_000),
    "temperature": st.floats(0, 100),
    "top_k": st.integers(-1, 2**31 - 1),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.integers(0, 2**63 - 1),
    "stop": st.lists(TEXTS, min_size=1, max_size=16),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    "min_tokens": st.just(0) | st.just(1),
    "n": st.integers(1, 128),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(
        st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), min_size=1, max_size=3
    ),
    "bad_words": st.lists(TEXTS.filter(str.strip), min_size=1, max_size=5),
    "logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(0, 20),
    "return_token_ids": st.booleans(),
    "truncate_prompt_tokens": st.integers(1, 2**31 - 1),
    "max_reasoning_tokens": st.just(0),
    "embed": st.booleans(),
    "dimensions": st.integers(1, 4096),
    "pooling": st.sampled_from(["last", "mean"]),
    "rerank": TEXTS.filter(str.strip),
    "instruction": TEXTS,
    "reasoning_effort": st.sampled_from(["low", "medium", "high"]),
    "score": st.lists(TEXTS, min_size=1, max_size=5),
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["enable_thinking", "reasoning_effort", "X1"]),
        st.booleans() | st.integers(-9, 9) | st.sampled_from(["high", "26 Jul 2024", ""]),
    ),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.just(False),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}, "strict": True}},
        ]
    ),
    "json_schema": st.sampled_from([{"type": "integer"}, {"enum": ["ü", 1]}]),
    "regex": st.sampled_from(["[a-z]+", r"\d{3}", "\u00fc|/"]),
    "choice": st.lists(TEXTS, min_size=1, max_size=5),
    "grammar": st.sampled_from(['start: "a"+', 'root ::= "a" | "b"']),
    "tools": st.lists(TEXTS, min_size=1, max_size=2).map(
        lambda texts: [
            {"type": "function", "function": {"name": f"f{n}", "description": text}}
            for n, text in enumerate(texts)
        ]
    ),
    "tool_choice": st.sampled_from(["auto", "none", "required", "f0"]),
    "parallel_tool_calls": st.booleans(),
    "model": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:+/@-]{0,20}\Z"),
    "custom_id": TEXTS,
    "priority": st.integers(0, 9),
    "max_attempts": st.integers(1, 100),
    "reuse": st.sampled_from(["exact", "any"]),
    "metadata": st.dictionaries(TEXTS, st.none() | st.booleans() | st.integers() | TEXTS, max_size=3),
}
BAD: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(max_value=-1) | st.integers(1_000_001),
    "temperature": st.floats(max_value=-0.01, allow_infinity=False) | st.floats(100.1, allow_infinity=False),
    "top_k": st.integers(max_value=-2) | st.integers(2**31),
    "top_p": st.floats(1.01, allow_infinity=False) | st.just(0.0),
    "min_p": st.floats(1.01, allow_infinity=False),
    "repetition_penalty": st.floats(0, 0.009),
    "seed": st.integers(max_value=-2) | st.integers(2**63),
    "stop": st.just([""]) | st.lists(TEXTS, min_size=17, max_size=18) | st.just(["a\0"]),
    "stop_token_ids": st.just([-1]) | st.just([1] * 257) | st.just([2**31]),
    "min_tokens": st.integers(1_000_001) | st.integers(max_value=-1),
    "n": st.integers(129) | st.integers(max_value=0),
    "presence_penalty": st.floats(2.001, 1e30),
    "frequency_penalty": st.floats(-1e30, -2.001),
    "logit_bias": st.sampled_from([{"5": 101}, {"-1": 1}, {"x": 1}, {str(2**31): 0}, {"5": "1"}]),
    "bad_words": st.just([" "]) | st.just(["a" * 257]) | st.just(["a\0"]),
    "logprobs": st.integers(21, 99) | st.just(-1),
    "score": st.just([""]) | st.just(["a\0"]),
    "chat_template_kwargs": st.sampled_from([{"messages": 1}, {"a": [1]}, {"a": "<|x|>"}, {"1": 1}]),
    "response_format": st.just({"type": "poem"}) | st.just({"type": "json_schema"}),
    "json_schema": st.just({"not": {}}) | st.just({"items": {"uniqueItems": True}}),
    "regex": st.just("a\0") | st.just("a" * 8_193),
    "choice": st.just(["a", ""]) | st.just(["a\0"]),
    "grammar": st.just("a\0"),
    "tools": st.sampled_from([[{"type": "web_search"}], [{"type": "function", "function": {"name": "a b"}}]]),
    "tool_choice": st.just("nobody"),
    "reuse": st.sampled_from(["some", "Exact"]),  # an empty cell of CSV would be an absent key
    "model": st.just("two words") | st.just("m" * 201),
    "custom_id": st.just("c" * 513) | st.just("a\0b"),
    "priority": st.integers(10, 99) | st.integers(-9, -1),
    "max_attempts": st.integers(101) | st.integers(max_value=0),
    "metadata": st.just({"a": "\0"}),
}
ROW_FIELDS = frozenset(GOOD)  # the others are said of a batch as a whole


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a job with a text or a chat; at most one of them is bad."""
    prompt = draw(TEXTS.filter(lambda text: text != "-"))
    chat: list[Any] = [{"role": "user", "content": prompt}]
    job: dict[str, Any] = draw(st.sampled_from([{"prompt": prompt}, {"messages": chat}]))
    names = draw(st.sets(st.sampled_from(sorted(GOOD))))
    job = dict(job) | {name: draw(GOOD[name]) for name in sorted(names)}
    if draw(st.booleans()):
        bad = draw(st.sampled_from(sorted(BAD)))
        job[bad] = draw(BAD[bad])
    return job


class Doors:
    """Each method hands a job in, and says what became of it."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client = client
        self.folder = folder

    def python(self, job: Mapping[str, Any]) -> Found:
        said = dict(job)
        prompt = said.pop("prompt", None) or said.pop("messages")
        try:
            return self._row(self.client.enqueue(prompt, **said))
        except InvalidRequestError as error:
            return "refused", printable(str(error))

    def python_rows(self, job: Mapping[str, Any]) -> Found:
        try:
            return self._row(self.client.enqueue_many([job])[0])
        except InvalidRequestError as error:
            return "refused", printable(str(error))

    def jsonl(self, job: Mapping[str, Any]) -> Found:
        return self._file(json.dumps(job), "jsonl")

    def csv(self, job: Mapping[str, Any]) -> Found:
        text = io.StringIO()
        writer = csv.writer(text)
        values = job.values()
        writer.writerow(job)
        writer.writerow(
            json.dumps(value) if isinstance(value, list | dict | bool) else str(value) for value in values
        )
        return self._file(text.getvalue(), "csv")

    def openai(self, job: Mapping[str, Any]) -> Found:
        body = {name: value for name, value in job.items() if name != "custom_id"}
        url = "/v1/completions" if "prompt" in job else "/v1/chat/completions"
        if "messages" in job and "logprobs" in job:  # OpenAI says it in two words there
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        row = {"custom_id": job.get("custom_id", "row-1"), "method": "POST", "url": url, "body": body}
        kind, what = self._file(json.dumps(row), "jsonl")
        return kind, what.removeprefix("body.") if kind == "refused" else what

    def command_line(self, job: Mapping[str, Any]) -> Found:
        arguments = ["enqueue", "--json"]
        for name, value in job.items():
            option = f"--{name.replace('_', '-')}"
            if name == "messages":
                arguments.append("--chat")
            elif name in ("stop", "choice", "stop_token_ids", "bad_words", "score"):
                arguments += [argument for one in value for argument in (option, str(one))]
            elif name in ("add_generation_prompt", "parallel_tool_calls"):
                arguments.append(option if value else f"--no-{option.removeprefix('--')}")
            elif isinstance(value, bool):
                arguments += [option] * value
            elif name != "prompt":
                arguments += [option, json.dumps(value) if isinstance(value, dict | list) else str(value)]
        prompt = job["prompt"] if "prompt" in job else job["messages"][0]["content"]
        done = CliRunner().invoke(main, [*arguments, "--", prompt], env=worker_env(self.client.settings))
        if done.exit_code:
            return "refused", printable(done.output.removeprefix("Error: ").removesuffix("\n"))
        return self._row(json.loads(done.stdout)["ids"][0])

    def _file(self, content: str, ending: str) -> Found:
        name = f"file-{uuid.uuid4()}"
        path = self.folder / f"{name}.{ending}"
        path.write_text(content + "\n", encoding="utf-8", newline="")
        batch = self.client.submit_batch(path, name=name)
        (job,) = [*batch.results(), *batch.errors()] or self.client.list_jobs(batch=name)
        return ("refused", job.error) if job.error else self._row(job.id)

    def _row(self, job_id: str) -> Found:
        with self.client.database.read() as connection:
            row = dict(connection.execute(select(JOBS).where(JobRow.id == job_id)).one()._mapping)
        for name in ("id", "batch", "row"):
            del row[name]
        return "row", row


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(job=jobs())
@example({"prompt": "x", "stop": [""]})
def test_a_job_is_the_same_row_or_the_same_refusal_through_every_door(
    sqlite_client: Client, tmp_path: Path, job: dict[str, Any]
) -> None:
    doors = Doors(sqlite_client, tmp_path)
    kind, expected = doors.python(job)
    found = {door.__name__: door(job) for door in (doors.python_rows, doors.jsonl, doors.csv)}
    found["command_line"] = doors.command_line(job)
    of_openai = (
        PARAMETERS - {"embed", "dimensions", "pooling", "rerank", "instruction"}
        | CONSTRAINT_FIELDS.keys()
        | {"prompt", "messages", "model", "custom_id"}
    )
    if job.keys() <= of_openai and ("prompt" in job or 0 <= job.get("logprobs", 0) <= 20):
        found["openai"] = doors.openai(job)
    for door, (how, what) in found.items():
        assert how == kind, (door, what)
        if kind == "refused":
            shown = expected.removeprefix("item 0: ")
            assert what == shown, door
            continue
        drawn = set() if "seed" in job else {"seed"}
        in_file = {"custom_id"} if "custom_id" not in job else set()
        times = {"created_at", "sent_at"}
        differ = {name for name in what if what[name] != expected[name]}
        assert differ <= drawn | in_file | times, door


def test_none_counts_as_not_given(sqlite_client: Client) -> None:
    nothing = dict.fromkeys(FIELDS)
    plain, none = sqlite_client.enqueue("x", seed=1), sqlite_client.enqueue("x", **(nothing | {"seed": 1}))
    (row,) = sqlite_client.enqueue_many([{"prompt": "x", "messages": None, "top_k": None}], top_k=3, seed=1)
    assert sqlite_client.get(none).params == sqlite_client.get(plain).params
    assert sqlite_client.get(row).params.top_k == 3


def test_the_table_of_fields_is_what_calls_and_commands_take() -> None:
    assert set(JobSettings.__annotations__) == FIELDS.keys()
    assert (
        set(BatchSettings.__annotations__)
        == OF_A_BATCH
        == PARAMETERS
        | CONSTRAINT_FIELDS.keys()
        | {*("priority", "max_attempts", "reuse", "model", "scheduled_at", "deadline")}
        | {"reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
        | TOOL_KEYS.keys()
    )
    assert FIELDS.keys() - {"batch", "scheduled_at", "deadline", "idempotency_key"} == ROW_FIELDS
    assert all(field.says.endswith(".") for field in FIELDS.values())
    enqueue = main.get_command(None, "enqueue")  # type: ignore[arg-type]
    assert enqueue is not None
    assert {option.name for option in enqueue.params} >= FIELDS.keys()


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[1]", "metadata: must be a mapping")])
def test_metadata_of_a_command_is_a_json_object(sqlite_settings: Settings, text: str, said: str) -> None:
    done = CliRunner().invoke(main, ["enqueue", "x", "--metadata", text], env=worker_env(sqlite_settings))
    assert done.exit_code != 0
    assert said in done.output and "line" not in done.output  # as in a file
