"""Rows of result and error files: OpenAI's own types parse them, nothing is lost, every row ends once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from nightmill.jobs.base.contract import CallFormat, JobState, Markup, Rendering, StopReason, Tools
from nightmill.jobs.formats import FileFormat, InputFile, ResultFile, RowError, error_row, result_row
from nightmill.jobs.formats.ours import job_ids
from nightmill.jobs.formats.results import completion_body
from nightmill.jobs.formats.rows import OF_PROMPTS
from nightmill.jobs.reply.job import Answer, Job
from nightmill.jobs.request.parameters import GenerationParams
from tests.unit.formats.files import FINISHED, chat, completion, job, write_lines

FAILED = {
    StopReason.DEADLINE: JobState.FAILED,
    StopReason.CANCELLED: JobState.CANCELLED,
    StopReason.ERROR: JobState.FAILED,
}
SUCCEEDED = [reason for reason in StopReason if reason.state is JobState.SUCCEEDED]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
MESSAGES = [{"role": "user", "content": "Say a word"}]


@st.composite
def finished_jobs(draw: st.DrawFn, reasons: Any = tuple(StopReason)) -> Job:
    reason = draw(st.sampled_from(list(reasons)))
    is_chat = draw(st.booleans())
    return job(
        id=f"{draw(st.integers(0, 2**128 - 1)):032x}",
        custom_id=draw(TEXTS.filter(bool)),
        prompt=None if is_chat else draw(TEXTS),
        messages=MESSAGES if is_chat else None,
        params=GenerationParams(seed=draw(st.integers(0, 2**63 - 1))),
        model=draw(st.none() | st.just("demo")),
        row=draw(st.none() | st.integers(1, 10**6)),
        state=reason.state,
        stop_reason=reason,
        text=draw(TEXTS),
        error=draw(TEXTS.filter(bool)) if reason is StopReason.ERROR else None,
        prompt_tokens=draw(st.integers(0, 10**6)),
        completion_tokens=draw(st.integers(0, 10**6)),
    )


@given(finished_jobs(SUCCEEDED))
def test_openais_own_types_parse_a_result(done: Job) -> None:
    row = json.loads(json.dumps(result_row(done, FileFormat.OPENAI, model="served")))
    assert (row["custom_id"], row["error"], row["response"]["status_code"]) == (done.custom_id, None, 200)
    body = row["response"]["body"]
    if done.messages is None:
        parsed: Any = Completion.model_validate(body, strict=True)
        assert parsed.choices[0].text == done.text
    else:
        parsed = ChatCompletion.model_validate(body, strict=True)
        assert parsed.choices[0].message.content == done.text
        assert parsed.choices[0].message.role == "assistant"
    assert parsed.model == (done.model or "served")
    assert parsed.created == int(FINISHED.timestamp())
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == (done.prompt_tokens or 0) + (done.completion_tokens or 0)
    assert parsed.choices[0].finish_reason == (
        "stop" if done.stop_reason in (StopReason.EOS, StopReason.STOP_SEQUENCE) else "length"
    )
    assert (body["stop_reason"], body["seed"]) == (done.stop_reason, done.seed)


@given(finished_jobs(FAILED))
def test_openais_own_types_parse_what_a_failed_job_had(failed: Job) -> None:
    row = json.loads(json.dumps(error_row(failed, FileFormat.OPENAI)))
    assert row["custom_id"] == failed.custom_id
    assert row["error"]["code"] == failed.stop_reason
    assert row["error"].get("line") == failed.row
    if not failed.text:
        assert row["response"] is None
        return
    kind = Completion if failed.messages is None else ChatCompletion
    parsed = kind.model_validate(row["response"]["body"], strict=True)
    assert parsed.choices[0].finish_reason == "length"
    assert row["response"]["status_code"] in (408, 499, 500)


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [
        (StopReason.DEADLINE, None, "the deadline passed before the answer was complete"),
        (StopReason.CANCELLED, None, "the job was cancelled before the answer was complete"),
        (StopReason.ERROR, "the GPU fell off", "the GPU fell off"),
    ],
)  # fmt: skip
def test_an_error_says_what_happened(reason: StopReason, error: str | None, message: str) -> None:
    row = error_row(job(state=reason.state, stop_reason=reason, error=error, text=None), FileFormat.JSONL)
    assert row["error"].pop("message").partition(";")[0] == message
    assert row == {"custom_id": "a", "id": "0" * 31 + "1", "line": 3, "error": {"code": str(reason)}}


def bad(error: RowError, **values: Any) -> Job:
    """The job of a row that could not be run."""
    entry = {"code": error.code, "field": error.field, "line": 9, "error": error.message}
    return job(
        state=JobState.FAILED, stop_reason=StopReason.ERROR, prompt=None, text=None, row=9,
        error=error.message, errors=[entry], **values,
    )  # fmt: skip


def test_the_error_of_a_bad_row_has_its_code_its_field_and_its_line() -> None:
    refused = bad(RowError("unsupported_field", "body.n: 2 is not supported", "body.n"))
    assert error_row(refused, FileFormat.OPENAI) == {
        "id": refused.id,
        "custom_id": "a",
        "response": None,
        "error": {
            "code": "unsupported_field",
            "message": "body.n: 2 is not supported",
            "field": "body.n",
            "line": 9,
        },
    }


def test_the_error_of_an_attempt_that_died_is_not_taken_for_a_bad_row() -> None:
    died = [{"attempt": 1, "at": "2026-03-01T00:00:00+00:00", "error": "the worker died"}]
    expired = job(state=JobState.FAILED, stop_reason=StopReason.DEADLINE, errors=died)
    assert error_row(expired, FileFormat.OPENAI)["error"]["code"] == "deadline"
    failed = job(state=JobState.FAILED, stop_reason=StopReason.ERROR, errors=died, error="the worker died")
    assert error_row(failed, FileFormat.OPENAI)["error"]["code"] == "error"


@pytest.mark.parametrize("format", OF_PROMPTS)
def test_a_duplicate_leaves_its_custom_id_to_the_first_row(format: FileFormat) -> None:
    duplicate = bad(RowError("duplicate_custom_id", "custom_id: 'a' is also that of row 1", "custom_id"))
    assert error_row(duplicate, format)["custom_id"] is None


SEVERAL = (Answer("one", StopReason.EOS, 2, 7), Answer("two", StopReason.LENGTH, 3, 8))
SHOWN = [
    {"text": "one", "stop_reason": "eos", "completion_tokens": 2, "seed": 7},
    {"text": "two", "stop_reason": "length", "completion_tokens": 3, "seed": 8},
]


def test_several_answers_are_in_one_row_of_each_format(tmp_path: Path) -> None:
    made = job(text="one", completion_tokens=5, several=SEVERAL)
    late = replace(made, state=JobState.FAILED, stop_reason=StopReason.DEADLINE)
    body = result_row(made, FileFormat.OPENAI)["response"]["body"]
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "one", "stop"),
        (1, "two", "length"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert len(error_row(late, FileFormat.OPENAI)["response"]["body"]["choices"]) == 2
    for format, read in (
        (FileFormat.JSONL, list),
        (FileFormat.CSV, json.loads),
        (FileFormat.PARQUET, json.loads),
    ):
        assert read(result_row(made, format)["answers"]) == SHOWN
        assert read(error_row(late, format)["answers"]) == SHOWN
        for row, errors in ((result_row(made, format), False), (error_row(late, format), True)):
            path = tmp_path / f"{errors}.{format}"
            with ResultFile(path, format, errors=errors) as file:
                file.write(row)
            assert list(job_ids(path, format, errors=errors)) == [made.id]


def test_one_failed_answer_of_twenty_leaves_the_others_in_the_error() -> None:
    """The first is the text of the row; that it has none hides none of the others."""
    ends = [Answer("", StopReason.ERROR, 0, 7), *(Answer(f"a{n}", StopReason.EOS, 2, n) for n in range(19))]
    for text, several in (("", ends), ("a0", [*ends[1:], ends[0]])):
        failed = job(text=text, several=tuple(several), messages=MESSAGES, error="answer 7: no way on")
        failed = replace(failed, state=JobState.FAILED, stop_reason=StopReason.ERROR)
        row = error_row(failed, FileFormat.OPENAI)
        assert row["error"]["message"] == "answer 7: no way on"
        choices = row["response"]["body"]["choices"]
        assert [one["message"]["content"] for one in choices] == [one.text for one in several]
        assert [one["stop_reason"] for one in choices] == [str(one.stop_reason) for one in several]
        for format, read in ((FileFormat.JSONL, list), (FileFormat.CSV, json.loads)):
            assert [one["text"] for one in read(error_row(failed, format)["answers"])] == [
                one.text for one in several
            ]
    none = replace(failed, text="", several=tuple(replace(one, text="") for one in ends))
    assert error_row(none, FileFormat.OPENAI)["response"] is None


@pytest.mark.parametrize("format", [FileFormat.CSV, FileFormat.PARQUET])
def test_in_tables_every_row_has_the_same_columns(format: FileFormat) -> None:
    assert list(result_row(job(), format)) == [
        "custom_id", "id", "text", "stop_reason", "prompt_tokens", "completion_tokens", "seed",
        "answers", "content", "reasoning", "tool_calls", "embedding", "cached_tokens", "reasoning_tokens",
        "gpu_seconds", "energy_joules", "relevance",
    ]  # fmt: skip
    refused = bad(RowError("invalid_json", "is not JSON"), custom_id=None)
    assert error_row(refused, format) == {
        "custom_id": None,
        "id": refused.id,
        "line": 9,
        "code": "invalid_json",
        "field": None,
        "message": "is not JSON",
        "text": None,
        "answers": None,
        "content": None,
        "reasoning": None,
        "tool_calls": None,
    }


CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Bonn"}}</tool_call>'
TOLD: dict[str, Any] = {
    "prompt": None,
    "messages": [{"role": "user", "content": "Rain?"}],
    "rendering": Rendering(tools=Tools([{"type": "function", "function": {"name": "weather"}}])),
    "markup": Markup(CallFormat.HERMES, ("<think>", "</think>")),
}


def test_a_text_that_was_cut_in_its_thoughts_says_so() -> None:
    cut = job(**TOLD, text="<think>hm", stop_reason=StopReason.LENGTH)
    ended = job(**TOLD, text="<think>hm</think>Yes", stop_reason=StopReason.LENGTH)
    assert cut.reasoning_unfinished and not ended.reasoning_unfinished
    for made, expected in ((cut, True), (ended, None)):
        assert result_row(made, FileFormat.JSONL).get("reasoning_unfinished") is expected
        (choice,) = result_row(made, FileFormat.OPENAI)["response"]["body"]["choices"]
        assert (choice.get("reasoning_unfinished"), choice["finish_reason"]) == (expected, "length")
        assert choice["message"]["reasoning_content"] == "hm"


def test_thoughts_and_calls_are_told_apart_in_each_format(tmp_path: Path) -> None:
    made = job(**TOLD, text=f"<think>hm</think>Let me see. {CALL}")
    (call,) = made.tool_calls
    assert (made.reasoning, made.content, call.parsed) == ("hm", "Let me see.", {"place": "Bonn"})
    shown = [{"id": call.id, "name": "weather", "arguments": '{"place": "Bonn"}'}]
    plain = result_row(made, FileFormat.JSONL)
    assert (plain["content"], plain["reasoning"], plain["tool_calls"]) == ("Let me see.", "hm", shown)
    assert plain["text"] == made.text
    for format in OF_PROMPTS:
        cut = job(**TOLD, text=made.text, state=JobState.FAILED, stop_reason=StopReason.DEADLINE)
        for row, errors in ((result_row(made, format), False), (error_row(cut, format), True)):
            path = tmp_path / f"{errors}.{format}"
            with ResultFile(path, format, errors=errors) as file:
                file.write(row)
            assert list(job_ids(path, format, errors=errors)) == [made.id]
            if format in (FileFormat.CSV, FileFormat.PARQUET):
                assert json.loads(row["tool_calls"]) == shown and row["reasoning"] == "hm"
    body = result_row(made, FileFormat.OPENAI)["response"]["body"]
    choice = ChatCompletion.model_validate(body, strict=True).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    assert body["choices"][0]["message"]["reasoning_content"] == "hm"
    late = job(**TOLD, text=made.text, stop_reason=StopReason.LENGTH)
    assert completion_body(late, "m")["choices"][0]["finish_reason"] == "length"
    both = (Answer(CALL, StopReason.EOS, 3, 1), Answer("no", StopReason.EOS, 1, 2))
    several = job(**TOLD, several=both, text=CALL)
    answers = result_row(several, FileFormat.JSONL)["answers"]
    assert answers[0]["tool_calls"][0]["name"] == "weather" and "tool_calls" not in answers[1]
    messages = [choice["message"] for choice in completion_body(several, "m")["choices"]]
    assert messages[0]["content"] is None and messages[1]["content"] == "no"


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_every_input_row_ends_in_exactly_one_output(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Rows of all kinds go in; the good ones end somehow; each line is answered once, each custom_id once."""
    directory = tmp_path_factory.mktemp("night")
    ids = st.sampled_from(["a", "b", "c"]) | TEXTS.filter(bool)
    row = st.builds(chat, ids) | st.builds(completion, ids) | st.builds(chat, ids, best_of=st.just(2))
    broken = st.sampled_from([b"{", b"[]", b'{"a":1,"a":2}', b"\xff", b'{"custom_id": 5}', b"null"])
    rows = data.draw(st.lists(row | broken, min_size=1, max_size=30))
    file = InputFile(write_lines(directory / "in.jsonl", rows), FileFormat.OPENAI)
    with (
        ResultFile(directory / "out.jsonl", FileFormat.OPENAI) as results,
        ResultFile(directory / "errors.jsonl", FileFormat.OPENAI, errors=True) as errors,
    ):
        for read in file.rows():
            if read.error is not None:
                refused = replace(bad(read.error, id=str(read.number)), custom_id=read.custom_id)
                errors.write(error_row(replace(refused, row=read.number), FileFormat.OPENAI))
                continue
            ended = replace(data.draw(finished_jobs()), custom_id=read.custom_id, row=read.number)
            if ended.state is JobState.SUCCEEDED:
                results.write(result_row(replace(ended, id=str(read.number)), FileFormat.OPENAI))
            else:
                errors.write(error_row(replace(ended, id=str(read.number)), FileFormat.OPENAI))
    good, poor = (
        [json.loads(line) for line in (directory / name).read_text().split("\n")[:-1]]
        for name in ("out.jsonl", "errors.jsonl")
    )
    assert sorted(int(row["id"]) for row in good + poor) == list(range(1, len(rows) + 1))
    named = [row["custom_id"] for row in good + poor if row["custom_id"] is not None]
    given_ids = {row["custom_id"] for row in rows if isinstance(row, dict)}
    assert sorted(named) == sorted(given_ids)
    assert all(row["error"] is None for row in good)
    assert all(row["error"]["message"] for row in poor)
