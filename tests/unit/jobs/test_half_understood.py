"""Texts that SQL cannot hold are made storable; rows of other versions are shown all the same."""

import json
import warnings
from datetime import UTC, datetime
from typing import Any

import pytest

from nightmill.jobs.base.contract import JobState, StopReason, storable, unstorable
from nightmill.jobs.commands.printing import job_values, prompt_line
from nightmill.jobs.commands.terminal import to_json
from nightmill.jobs.sql.snapshots import job_from_row

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("plain ünï 😀", "plain ünï 😀"),
        ("bad\x00", "bad\ufffd"),
        ("a lone \ud83d surrogate", "a lone \ufffd surrogate"),
        ("", ""),
    ],
)
def test_any_text_can_be_made_storable(given: str, stored: str) -> None:
    assert storable(given) == stored
    assert unstorable(stored) is None


def test_a_long_error_is_cut_and_says_so() -> None:
    assert storable("x" * 4_000, 4_000) == "x" * 4_000
    cut = storable("x" * 5_000_000, 4_000)
    assert len(cut) == 4_000 and cut.endswith("x ... (cut: 5,000,000 characters)")


def row(**changes: Any) -> Any:
    columns: dict[str, Any] = dict.fromkeys(
        [
            "batch", "row", "custom_id", "model", "messages", "stop_reason", "text", "prompt_tokens",
            "completion_tokens", "arithmetic", "markup", "error", "errors", "worker", "idempotency_key",
            "metadata", "owner", "request_id", "cancel_requested_at", "scheduled_at", "deadline_at",
            "started_at", "finished_at", "constrained", "prompt_ids", "rendering", "prompt_digest", "request",
            "history", "reuse", "reused_from", "prior", "held",
            "cached_tokens", "reasoning_tokens", "gpu_seconds", "energy_joules",
        ]
    )  # fmt: skip
    columns |= {"id": "0" * 32, "state": "queued", "prompt": "hello", "params": {"max_tokens": 3}, "seed": 5}
    return (
        columns | {"attempt": 0, "failures": 0, "max_attempts": 3, "priority": 5, "created_at": NOW} | changes
    )


def test_words_of_a_newer_version_are_shown_as_they_are() -> None:
    job = job_from_row(row(state="paused", stop_reason="bored"))
    assert (job.state, job.stop_reason) == ("paused", "bored")
    assert isinstance(job.state, JobState) and isinstance(job.stop_reason, StopReason)
    assert f"{job.state}, {job.stop_reason}" == "paused, bored"
    assert job_from_row(row(arithmetic="abacus")).arithmetic == "abacus"
    asked = job_from_row(row(constrained={"kind": "rhyme", "text": "ABAB"})).constrained
    assert asked is not None and (asked.kind, asked.text) == ("rhyme", "ABAB")
    for strange in ([1], {"kind": 5}, {"kind": "regex"}, "regex"):
        assert job_from_row(row(constrained=strange)).constrained is None
    assert not job.state.final and job.state not in set(JobState)
    assert json.loads(to_json(job_values(job)))["state"] == "paused"
    with pytest.raises(ValueError):
        JobState("paused")  # nothing was added to the words that are accepted


@pytest.mark.parametrize(
    ("changes", "field", "shown"),
    [
        ({"params": {"max_tokens": 3, "foo": 1}}, "params.max_tokens", 3),
        ({"params": {"max_tokens": 10**12}}, "params.max_tokens", 10**12),
        ({"params": {"temperature": "warm"}}, "params.temperature", "warm"),
        ({"params": ["?"]}, "params.max_tokens", 256),
        ({"params": "{broken"}, "params.seed", 5),
        ({"messages": {"role": "user"}}, "messages", None),
        ({"errors": {"a": 1}}, "errors", []),
        ({"errors": ["?", {"attempt": 1}]}, "errors", [{"attempt": 1}]),
        ({"metadata": "{broken"}, "metadata", {}),
    ],
)
def test_a_row_that_is_half_understood_is_shown(changes: dict[str, Any], field: str, shown: Any) -> None:
    job = job_from_row(row(**changes))
    value: Any = job
    for name in field.split("."):
        value = getattr(value, name)
    assert value == shown
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert json.loads(to_json(job_values(job)))["prompt"] == prompt_line(job) == "hello"


def test_token_ids_are_shown_by_their_first_ones() -> None:
    assert prompt_line(job_from_row(row(prompt=None, prompt_ids=[5, 7]))) == "token ids 5 7"
    assert len(prompt_line(job_from_row(row(prompt=None, prompt_ids=[5] * 10**6)))) < 400
    assert prompt_line(job_from_row(row(prompt=None, prompt_ids={"a": 1}))) == ""
