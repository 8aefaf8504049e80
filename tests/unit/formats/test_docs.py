"""The examples and tables of docs/file-formats.md are true."""

import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from nightmill.jobs.base.contract import CallFormat, JobState, Markup, Rendering, StopReason, Tools
from nightmill.jobs.errors import RowCode
from nightmill.jobs.formats import FileFormat, InputFile, error_row, refusals, result_row
from nightmill.jobs.formats.openai import GUIDED, IGNORED
from nightmill.jobs.formats.plain import ROW_KEYS
from nightmill.jobs.formats.results import ERROR_COLUMNS, RESULT_COLUMNS
from nightmill.jobs.reply.answers import answer_seed
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.reply.logprobs import pack
from nightmill.jobs.request.fields import FIELDS
from nightmill.jobs.request.parameters import GenerationParams
from nightmill.jobs.request.schemas import MAX_DEPTH, REFUSED
from nightmill.jobs.request.structured import CONSTRAINT_FIELDS, MAX_BYTES, MAX_CHOICES, MAX_REGEX
from nightmill.jobs.request.tools import TOOL_KEYS
from tests.unit.formats.files import job

PAGES = Path(__file__).parents[3] / "docs"
PAGE = (PAGES / "file-formats.md").read_text(encoding="utf-8")
RENDERING = ("reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_BLOCK = re.compile(r"```(\w+) (\w+)(?: (\w+))?\n(.*?)```", re.DOTALL)
EXAMPLES = [(kind, format, text) for _, kind, format, text in _BLOCK.findall(PAGE)]


def examples(kind: str) -> list[Any]:
    found = [pytest.param(format, text, id=format) for k, format, text in EXAMPLES if k == kind]
    assert found
    return found


def section(heading: str) -> str:
    """The page from a heading to the next of the same or a higher level."""
    level = heading.count("#")
    rest = PAGE[PAGE.index(f"{heading}\n") + len(heading) :]
    return re.split(rf"\n#{{1,{level}}} ", rest)[0]


def named_in_tables(text: str) -> set[str]:
    """What stands in backticks in the first columns of its tables."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def read(tmp_path: Path, format: str, text: str) -> list[Any]:
    path = tmp_path / ("in.csv" if format == "csv" else "in.jsonl")
    path.write_text(text, encoding="utf-8")
    file = InputFile(path)
    assert file.format == format
    return list(file.rows())


@pytest.mark.parametrize(("format", "text"), examples("input"))
def test_every_row_of_an_example_is_good(tmp_path: Path, format: str, text: str) -> None:
    rows = read(tmp_path, format, text)
    assert len(rows) >= 2
    assert [row.error for row in rows] == [None] * len(rows)


def test_the_bad_rows_have_the_errors_that_the_page_says(tmp_path: Path) -> None:
    ((_, format, text),) = [example for example in EXAMPLES if example[0] == "bad"]
    ((_, _, errors),) = [example for example in EXAMPLES if example[0] == "errors"]
    said = [f"line {row.number}: {row.error.message}" for row in read(tmp_path, format, text)]
    assert said == errors.strip().splitlines()


def shape(value: Any) -> Any:
    """A row with its values left out."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else None


@pytest.mark.parametrize(("format", "text"), examples("results"))
def test_result_rows_look_as_the_page_says(format: str, text: str) -> None:
    if format == "csv":
        assert text.splitlines()[0].split(",") == list(RESULT_COLUMNS)
        return
    messages = [{"role": "user", "content": "x"}] if format == "openai" else None
    made = result_row(job(messages=messages, prompt=None if messages else "x"), FileFormat(format))
    shown = json.loads(text)
    assert shape(shown) == shape(made)
    if format == "openai":
        ChatCompletion.model_validate(shown["response"]["body"], strict=True)


@pytest.mark.parametrize(("format", "text"), examples("several"))
def test_rows_with_several_answers_look_as_the_page_says(format: str, text: str) -> None:
    shown = json.loads(text)
    numbers = range(len(shown["answers"]))
    assert [answer["seed"] for answer in shown["answers"]] == [answer_seed(shown["seed"], n) for n in numbers]
    assert sum(answer["completion_tokens"] for answer in shown["answers"]) == shown["completion_tokens"]
    answers = tuple(Answer("x", StopReason.EOS, 1, n) for n in numbers)
    assert shape(shown) == shape(result_row(job(several=answers), FileFormat(format)))


@pytest.mark.parametrize(("format", "text"), examples("told"))
def test_rows_with_log_probabilities_look_as_the_page_says(format: str, text: str) -> None:
    shown = json.loads(text)
    (tokens,) = (answer["logprobs"] for answer in shown["answers"])
    data = pack(
        [one["id"] for one in tokens],
        b"".join(
            array("f", [one["logprob"]]).tobytes()
            + array("i", [other["id"] for other in one["top"]]).tobytes()
            + array("f", [other["logprob"] for other in one["top"]]).tobytes()
            for one in tokens
        ),
        len(tokens[0]["top"]),
        {one["id"]: (bytes(one["bytes"]), "") for first in tokens for one in first["top"]}.__getitem__,
    )
    made = result_row(job(packed_logprobs=data), FileFormat(format))
    assert shape(shown) == shape(made)
    assert shown["answers"][0]["logprobs"] == made["answers"][0]["logprobs"]


@pytest.mark.parametrize(("format", "text"), examples("calls"))
def test_rows_with_calls_look_as_the_page_says(format: str, text: str) -> None:
    shown = json.loads(text)
    tools = Tools([{"type": "function", "function": {"name": "weather"}}])
    told = job(text=shown["text"], rendering=Rendering(tools=tools), markup=Markup(CallFormat.HERMES))
    made = result_row(told, FileFormat(format))
    assert shape(shown) == shape(made)
    calls, read = shown["tool_calls"], made["tool_calls"]
    assert [call | {"id": ""} for call in calls] == [call | {"id": ""} for call in read]


@pytest.mark.parametrize(("format", "text"), examples("failures"))
def test_error_rows_look_as_the_page_says(format: str, text: str) -> None:
    if format == "csv":
        assert text.splitlines()[0].split(",") == list(ERROR_COLUMNS)
        return
    bad = {"errors": [{"code": "x", "field": "y", "error": "z"}], "text": None, "error": "z"}
    late = {"stop_reason": StopReason.DEADLINE}
    failed = job(
        **(
            {"state": JobState.FAILED, "stop_reason": StopReason.ERROR}
            | (bad if format == "openai" else late)
        )
    )
    made = error_row(failed, FileFormat(format))
    shown = json.loads(text)
    assert shape(shown) == shape(made)
    if format == "jsonl":
        assert shown["error"] == made["error"]


def test_every_key_of_a_plain_row_is_described() -> None:
    assert named_in_tables(section("## Plain JSONL")) == ROW_KEYS


def test_the_page_says_what_each_key_acts_on() -> None:
    rows = re.findall(r"^\| (`[^|]*) \| ([a-z ]+) \|", section("## Plain JSONL"), re.MULTILINE)
    said = {name: scope for cell, scope in rows for name in re.findall(r"`([^`]+)`", cell)}
    assert {said.pop(name) for name in ("prompt", "messages")} == {"prompt"}
    assert said.pop("after") == "job"
    assert said == {name: FIELDS[name].scope for name in ROW_KEYS - {"prompt", "messages", "after"}}


def test_the_page_of_http_says_what_each_parameter_acts_on() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
    table = page[page.index("| acts on | parameters |") :].split("\n\n")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (`.*)\|$", table, re.MULTILINE)
    said = {name: scope for scope, cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    asked = (
        GenerationParams.model_fields.keys() | CONSTRAINT_FIELDS.keys() | TOOL_KEYS.keys() | set(RENDERING)
    )
    assert said == {name: FIELDS[name].scope for name in asked}


def test_every_key_of_an_openai_body_is_described() -> None:
    described = named_in_tables(section("## OpenAI's batch format").split("### Results")[0])
    frame = {"custom_id", "method", "url", "body"}
    ours = {"top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids", "min_tokens", "best_of"}
    ours |= {"include_stop_str_in_output", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words"}
    ours |= {"logprobs", "top_logprobs", "echo", "score"}
    ours |= {"prompt_logprobs", "return_token_ids", "truncate_prompt_tokens", "max_reasoning_tokens"}
    ours |= {"tools", "tool_choice", "parallel_tool_calls"}
    ours |= {"reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
    ours |= CONSTRAINT_FIELDS.keys() | GUIDED.keys() | {"structured_outputs"}
    parameters = {"max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "model", "n"}
    assert described == frame | ours | parameters | {"messages", "prompt"} | refusals.OF_ROWS.keys() | IGNORED


def test_every_key_that_is_refused_stands_in_the_table_with_the_reason_that_is_given() -> None:
    page = (
        (PAGES / "http.md").read_text(encoding="utf-8").split("\n## What is refused\n")[1].split("\n## ")[0]
    )
    table = [line for line in page.splitlines() if line.startswith("| `")]
    assert table == [
        f"| `{name}` | {', '.join(f'`{json.dumps(value)}`' for value in refusal.neutral)} | {refusal.why} |"
        for name, refusal in refusals.REFUSED.items()
    ]


def test_what_can_be_said_of_an_answer_and_what_cannot_is_described() -> None:
    page = section("## Structured output")
    assert set(CONSTRAINT_FIELDS) - {"response_format"} <= named_in_tables(page)
    refused = page.split("names it, not passed over:")[1].split("Remove it")[0]
    assert set(re.findall(r"`([^`]+)`", refused)) == REFUSED
    for bound in (
        f"{MAX_BYTES >> 10} KiB",
        f"{MAX_DEPTH}\nlevels",
        f"{MAX_REGEX:,} characters",
        f"{MAX_CHOICES:,} choices",
    ):
        assert bound in page


def test_every_code_of_a_bad_row_is_described() -> None:
    assert named_in_tables(section("## A bad row is an error of that row")) == set(RowCode)
