"""What a plan finds in a file: exactly the bad rows, and what the good ones ask for."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import Prompt, Rendering
from nightmill.jobs.errors import ChatTemplateError
from nightmill.jobs.formats import FileFormat, InputFile
from nightmill.jobs.request.spec import JobSpec
from nightmill.worker.commands.planning.survey import Survey, survey
from nightmill.worker.engine.limits import RequestLimits
from tests.unit.formats.files import chat, completion, write_lines
from tests.unit.planning.night import ByteReader

LIMITS = RequestLimits(vocab=256, context=40, page_size=4)


def encode(prompt: Prompt, rendering: Rendering | None = None) -> tuple[int, ...]:
    """A token for each byte; a template that wants the user to speak first."""
    if isinstance(prompt, str):
        return tuple(prompt.encode())
    if isinstance(prompt[0], int):
        return tuple(prompt)
    if prompt[0]["role"] == "assistant":
        raise ChatTemplateError("the model's chat template refuses these messages: the user speaks first")
    return tuple(b"".join(message["content"].encode() for message in prompt))


def look(path: Path, **options: Any) -> Survey:
    return survey(InputFile(path, FileFormat.OPENAI), ByteReader(encode), LIMITS, **options)


BAD: list[tuple[str, Any]] = [
    ("invalid_json", b"{"),
    ("invalid_json", b'{"custom_id": "a", "custom_id": "b"}'),
    ("invalid_encoding", b'{"custom_id": "\xff"}'),
    ("missing_field", {"custom_id": "m", "method": "POST", "url": "/v1/completions"}),
    ("missing_field", chat("bad-1", messages=None)),
    ("unsupported_field", chat("bad-2", best_of=2)),
    ("unsupported_field", chat("bad-3", tools=[{}])),
    (
        "unsupported_field",
        chat("bad-4", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    ),
    ("invalid_value", chat("bad-5", temperature="hot")),
    ("invalid_value", completion("bad-6", prompt="a\0b")),
    ("invalid_value", completion("bad-9", prompt=[1, 256])),
    ("invalid_value", completion("bad-10", prompt="a", stop_token_ids=[256])),
    ("duplicate_custom_id", chat("good-0")),
    ("over_context", completion("bad-7", prompt="x" * 40)),
    ("chat_template", chat("bad-8", messages=[{"role": "assistant", "content": "x"}])),
]


def test_of_many_mixed_rows_exactly_the_bad_ones_are_listed(tmp_path: Path) -> None:
    draw = random.Random(1)
    rows: list[Any] = [chat(f"good-{number}") for number in range(600)]
    wanted: dict[int, str] = {}
    for _, row in sorted(BAD, key=lambda _: draw.random()):
        line = draw.randrange(10, len(rows))
        rows.insert(line, row)
    kinds = {json.dumps(row) if isinstance(row, dict) else row: code for code, row in BAD}
    first = json.dumps(chat("good-0"))
    for number, row in enumerate(rows, 1):
        key = json.dumps(row) if isinstance(row, dict) else row
        if key in kinds and (key != first or number > 1):
            wanted[number] = kinds[key]
    found = look(write_lines(tmp_path / "in.jsonl", rows))
    assert {row.line: row.code for row in found.bad} == wanted
    assert len(wanted) == len(BAD)
    assert (found.rows, found.good) == (600 + len(BAD), 600)
    assert all(row.message.isprintable() for row in found.bad)


def test_a_row_over_the_context_is_refused_in_the_engines_words(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion("a", prompt="x" * 40, max_tokens=9)])
    (bad,) = look(path).bad
    assert (bad.line, bad.custom_id, bad.field) == (1, "a", "prompt")
    assert bad.message == (
        "the prompt has 40 tokens, which exceeds the available context size: this worker's context "
        "holds 40, of which at least one must be left for the answer: shorten it or start the worker "
        "with --context 49, if the model allows it"
    )


def test_a_prompt_that_leaves_one_token_is_good_and_its_answer_may_be_cut(tmp_path: Path) -> None:
    rows = [completion("a", prompt="x" * 39, max_tokens=9), completion("b", prompt="x" * 31, max_tokens=9)]
    found = look(write_lines(tmp_path / "in.jsonl", rows))
    assert list(found.limits) == [1, 9]
    assert found.cut == 1


def test_a_smaller_kv_cache_limits_rows_too(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion("a", prompt="x" * 20)])
    small = RequestLimits(vocab=256, context=40, page_size=4, pages=5)
    (bad,) = survey(InputFile(path), ByteReader(encode), small).bad
    assert "KV cache holds 20 (5 pages of 4)" in bad.message


def test_a_row_to_score_may_fill_the_context_and_is_checked_whole(tmp_path: Path) -> None:
    rows = [
        completion("fills", prompt="x" * 36, score=["yes", "four"]),
        completion("prompt alone", prompt="x" * 40, max_tokens=0, echo=True),
        completion("beyond", prompt="x" * 36, score=["no", "fiver", "yes"]),
        completion("prompt beyond", prompt="x" * 41, score="y"),
        completion("draws", prompt="x" * 40),
    ]
    found = look(write_lines(tmp_path / "in.jsonl", rows))
    assert [(row.custom_id, row.field) for row in found.bad] == [
        ("beyond", "score"), ("prompt beyond", "prompt"), ("draws", "prompt"),
    ]  # fmt: skip
    assert found.bad[0].message.startswith("the prompt, with what is scored behind it, has 41 tokens, which ")
    assert "left for the answer" not in found.bad[0].message
    assert "left for the answer" in found.bad[2].message


def test_special_tokens_in_plain_prompts_are_counted(tmp_path: Path) -> None:
    rows = [
        completion("a", prompt="<|im|>hello<|end|>"), completion("b", prompt="<|end|>"),
        completion("c", prompt="hello"), chat("d", messages=[{"role": "user", "content": "<|end|>"}]),
    ]  # fmt: skip
    found = look(write_lines(tmp_path / "in.jsonl", rows))
    assert (found.marked, found.marks) == (2, Counter({"<|end|>": 2, "<|im|>": 1}))


def test_what_the_good_rows_ask_for_is_counted(tmp_path: Path) -> None:
    rows = [
        completion("a", prompt="abc", max_tokens=5, model="one"),
        chat("b", best_of=2),
        completion("c", prompt="abcd", ignore_eos=True, model="two"),
        completion("d", prompt="a", ignore_eos=True, stop="x", model="one", n=3),
    ]
    found = look(
        write_lines(tmp_path / "in.jsonl", rows),
        defaults=JobSpec.defaults({"max_tokens": 7, "temperature": 0.0}),
    )
    assert list(found.prompt_tokens) == [3, 4, 1]
    assert list(found.limits) == [5, 7, 7]
    assert list(found.endless) == [0, 1, 0]
    assert (list(found.answers), found.tokens_at_most) == ([1, 1, 3], 5 + 7 + 3 * 7)
    assert found.models == {"one": 2, "two": 1}


def test_the_sample_is_of_good_rows_with_their_parameters(tmp_path: Path) -> None:
    rows = [completion(str(n), prompt="ab", seed=n, max_tokens=n) for n in range(1, 9)] + [
        chat("x", best_of=2)
    ]
    found = look(write_lines(tmp_path / "in.jsonl", rows), sample=20, defaults=JobSpec.defaults({"top_k": 3}))
    assert sorted(int(request.job_id) for request in found.sample) == list(range(1, 9))
    for request in found.sample:
        assert request.seed == request.params.max_tokens == int(request.job_id)
        assert (request.prompt_ids, request.params.top_k) == (tuple(b"ab"), 3)


def test_every_row_is_as_likely_as_another_to_be_in_the_sample(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion(str(n), prompt="ab") for n in range(8000)])
    found = look(path, sample=2000)
    assert len({request.job_id for request in found.sample}) == 2000
    quarters = Counter((int(request.job_id) - 1) // 2000 for request in found.sample)
    # 500 from each quarter of the file, with a standard deviation of 17.
    assert all(430 < quarters[quarter] < 570 for quarter in range(4))


def test_the_same_file_has_the_same_sample(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [completion(str(n), prompt="ab") for n in range(300)])
    first, second = look(path, sample=50).sample, look(path, sample=50).sample
    assert first == second
    assert [int(request.job_id) for request in first] != sorted(int(request.job_id) for request in first)


@pytest.mark.parametrize("rows", [1, 64])
def test_progress_hears_of_every_row(tmp_path: Path, rows: int) -> None:
    heard: list[None] = []
    path = write_lines(tmp_path / "in.jsonl", [completion(str(n)) for n in range(rows)])
    look(path, on_row=lambda: heard.append(None))
    assert len(heard) == rows


def test_rows_that_say_what_their_answer_must_be_are_counted_by_kind(tmp_path: Path) -> None:
    rows = [
        completion("a", regex="x"),
        completion("b", response_format={"type": "json_object"}),
        completion("c", guided_json={"type": "integer"}),
        completion("d", structured_outputs={"choice": ["x"]}),
        completion("e", response_format={"type": "text"}),
        completion("f", guided_regex="("),
    ]
    found = look(write_lines(tmp_path / "night.jsonl", rows))
    assert found.constrained == {"json_schema": 2, "regex": 2, "choice": 1}
