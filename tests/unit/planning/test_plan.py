"""The plan as a whole: its verdict, its JSON, its words."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from nightmill.jobs.base.contract import Prompt, Rendering
from nightmill.jobs.base.hours import Hours
from nightmill.jobs.formats import InputFile
from nightmill.worker.commands.planning.plan import Measuring, Plan, PlannedModel, Schedule, make_plan
from nightmill.worker.commands.planning.report import describe_plan
from tests.unit.formats.files import chat, completion, write_lines
from tests.unit.planning.night import LIMITS, SLOTS, ByteReader, timed_engine

pytestmark = pytest.mark.heavy

NOW = datetime(2026, 3, 1, 20, 0, tzinfo=UTC)


def encode(prompt: Prompt, rendering: Rendering | None = None) -> tuple[int, ...]:
    assert isinstance(prompt, str)
    return tuple(byte % 12 for byte in prompt.encode())


READER = ByteReader(encode, 12)


def planned(path: Path, *, measured: bool = True, **options: Any) -> Plan:
    runner, engine = timed_engine()
    measuring = Measuring(engine, 60.0, runner.clock) if measured else None
    return make_plan(
        InputFile(path),
        PlannedModel(name="demo", reader=READER, limits=LIMITS, slots=SLOTS),
        Schedule(now=lambda: NOW, **options),
        measuring=measuring,
    )


@pytest.fixture
def night(tmp_path: Path) -> Path:
    """300 rows, 25 of them bad."""
    rows = [
        completion(
            str(n), prompt=f"prompt {n} " * 2, max_tokens=40, seed=n, model="other" if n % 3 else "demo"
        )
        for n in range(300)
    ]
    rows[100:125] = [completion(f"bad {n}", prompt="x", best_of=2) for n in range(25)]
    return write_lines(tmp_path / "night.jsonl", rows)


def test_a_plan_goes_on_in_the_next_hours_of_its_worker(night: Path) -> None:
    hours = Hours.parse("20:00-20:01/UTC")
    whole = planned(night).estimate
    assert whole is not None
    length, day = whole.done_at - whole.starts_at, timedelta(days=1)
    assert timedelta(seconds=5) < length < timedelta(seconds=60)
    late = planned(night, hours=hours, starts_at=NOW + timedelta(seconds=55)).estimate
    assert late is not None and late.done_at == NOW + day + length - timedelta(seconds=5)
    closed = planned(night, hours=hours, starts_at=NOW + timedelta(seconds=61), deadline_at=NOW + day)
    assert closed.estimate is not None and closed.estimate.fits is False
    assert (closed.estimate.starts_at, closed.estimate.done_at) == (NOW + day, NOW + day + length)
    assert "in the hours 20:00-20:01/UTC" in "\n".join(describe_plan(closed))


def test_the_json_of_a_plan_has_everything(night: Path) -> None:
    deadline = NOW + timedelta(hours=10)
    told = json.loads(json.dumps(planned(night, deadline_at=deadline, workers=2).as_json()))
    assert {name: told[name] for name in ("format", "model", "rows", "good", "bad_by_code")} == {
        "format": "openai",
        "model": "demo",
        "rows": 300,
        "good": 275,
        "bad_by_code": {"unsupported_field": 25},
    }
    assert told["bad"][0] == {
        "line": 101,
        "custom_id": "bad 0",
        "code": "unsupported_field",
        "field": "body.best_of",
        "message": "body.best_of: 2 is more than n, which is 1: answers are not chosen here; give n: 2 "
        "with logprobs, and choose among them",
    }
    assert [row["line"] for row in told["bad"]] == list(range(101, 126))
    assert told["rows_for_other_models"] == {
        "other": sum(bool(n % 3) for n in range(300) if not 100 <= n < 125)
    }
    assert told["prompt_tokens"] == sum(len(f"prompt {n} ") * 2 for n in range(300) if not 100 <= n < 125)
    assert told["longest_prompt"] == 22
    assert told["output_tokens_at_most"] == 275 * 40
    assert 0 < told["output_tokens"] < told["output_tokens_at_most"]
    assert told["context"] == 200
    pages = told["kv_pages"]
    assert 0 < pages["running"] <= pages["running_at_most"] < pages["whole"]
    assert (pages["tokens_per_page"], pages["available"]) == (4, 400)
    estimate = told["estimate"]
    assert (estimate["workers"], estimate["rows_at_once"], estimate["fits"]) == (2, 2 * SLOTS, True)
    assert estimate["measured_rows"] == 256
    assert estimate["starts_at"] == NOW.isoformat()
    assert estimate["deadline_at"] == deadline.isoformat()
    seconds = datetime.fromisoformat(estimate["done_at"]) - NOW
    assert seconds.total_seconds() == pytest.approx(estimate["seconds"], abs=0.001)
    assert 0 < estimate["tail_seconds"] < estimate["seconds"]


def test_the_deadline_is_met_from_the_time_of_the_estimate_on(night: Path) -> None:
    plan = planned(night)
    assert plan.estimate is not None and plan.estimate.fits is None
    needed = timedelta(seconds=plan.estimate.played.seconds)
    starts_at = NOW + timedelta(hours=3)
    for spare, fits in ((timedelta(seconds=-1), False), (timedelta(0), True), (timedelta(seconds=1), True)):
        again = planned(night, starts_at=starts_at, deadline_at=starts_at + needed + spare)
        assert again.estimate is not None
        assert again.estimate.fits is fits


def test_without_measuring_there_is_no_estimate_and_answers_count_as_their_longest(night: Path) -> None:
    told = planned(night, measured=False).as_json()
    assert (told["estimate"], told["output_tokens"]) == (None, None)
    assert told["output_tokens_at_most"] == 275 * 40
    prompts = [len(f"prompt {n} ") * 2 for n in range(300) if not 100 <= n < 125]
    assert told["kv_pages"]["whole"] == sum(-(-(prompt + 40) // 4) for prompt in prompts)


def test_rows_that_the_kv_cache_has_no_pages_for_do_not_run_at_once(tmp_path: Path) -> None:
    rows = [completion(str(n), prompt="x" * 150, max_tokens=50, ignore_eos=True) for n in range(60)]
    path = write_lines(tmp_path / "in.jsonl", rows)
    runner, engine = timed_engine()
    tight = replace(LIMITS, pages=150)
    plan = make_plan(
        InputFile(path),
        PlannedModel(name="demo", reader=READER, limits=tight, slots=SLOTS),
        Schedule(now=lambda: NOW),
        measuring=Measuring(engine, 60.0, runner.clock),
    )
    assert plan.estimate is not None
    assert plan.estimate.played.slots == 3  # of 50 pages each


def test_on_a_terminal_the_first_bad_rows_are_shown_and_all_are_counted(night: Path) -> None:
    lines = list(describe_plan(planned(night, deadline_at=NOW + timedelta(seconds=1))))
    assert lines[0] == f"{night}: 300 rows (openai), 275 good, 25 bad"
    assert lines[1].startswith("  line 101 'bad 0': body.best_of: 2 is more than n, ")
    assert lines[20].startswith("  line 120 'bad 19': ")
    assert lines[21] == "  ... and 5 more: --json lists all"
    assert lines[22].split() == ["25", "unsupported_field"]
    text = "\n".join(lines[23:])
    assert "rows ask for model 'other': nightmill run answers them with 'demo' all the same, " in text
    assert "nightmill batch submit with --model demo; without, they wait for 'other'" in text
    assert "prompt tokens  5," in text
    assert "(at most 11,000)" in text
    assert "DOES NOT FIT, by " in text


def test_a_file_of_bad_rows_only_has_a_plan(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [chat("a", best_of=2), chat("b", best_of=3)])
    plan = planned(path)
    assert plan.estimate is None
    assert plan.as_json()["kv_pages"]["whole"] == 0
    assert next(describe_plan(plan)).endswith("2 rows (openai), 0 good, 2 bad")


def test_a_plan_says_what_rows_ask_for_besides_a_text(tmp_path: Path) -> None:
    rows = [completion(str(n), max_tokens=40, **({"choice": ["a"]} if n % 3 else {})) for n in range(9)]
    rows += [completion("told", max_tokens=40, logprobs=0), completion("scored", score=["yes", "no"])]
    plan = planned(write_lines(tmp_path / "night.jsonl", rows), measured=False)
    assert plan.as_json()["rows_with_structured_output"] == {"choice": 6}
    assert plan.as_json()["rows_with_log_probabilities"] == 2
    assert plan.survey.tokens_at_most == 10 * 40 + 2
    text = "\n".join(describe_plan(plan))
    assert "note: 6 rows say what their answer must be (6 by choice)" in text
    assert "note: 2 rows ask for log-probabilities, or for scores of texts" in text


def test_a_plan_says_which_prompts_hold_special_tokens(tmp_path: Path) -> None:
    rows = [completion(str(n), prompt="<|im|>hello" if n else "hello") for n in range(4)]
    plan = planned(write_lines(tmp_path / "night.jsonl", rows), measured=False)
    assert plan.as_json()["rows_with_special_tokens"] == 3
    assert plan.as_json()["special_tokens_in_prompts"] == {"<|im|>": 3}
    assert "note: the chat template writes <|x|>" in list(describe_plan(plan))
    assert plan.as_json()["chat_template_fault"] == "the chat template writes <|x|>"
    (line,) = [line for line in describe_plan(plan) if "special tokens" in line]
    assert line.startswith("note: 3 plain prompts with special tokens of the model spelt out (<|im|>): ")


def test_every_key_of_the_json_is_described(night: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "file-formats.md").read_text(encoding="utf-8")
    table = page[page.index("## What `nightmill plan --json` prints") :]
    told = planned(night).as_json()
    names = [*told, *(f"estimate.{name}" for name in told["estimate"]), *told["kv_pages"], *told["bad"][0]]
    assert [name for name in names if f"`{name}`" not in table] == []
