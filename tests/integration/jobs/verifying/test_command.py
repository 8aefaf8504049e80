"""`nightmill verify`: what it prints, and its exit codes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.base.contract import StopReason
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.reply.job import Job
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.verifying.worked import (
    H100,
    H200,
    outcome,
    tamper,
    working,
)
from tests.support.servers import worker_env


@pytest.fixture
def run(client: Client) -> Callable[..., Result]:
    """Runs `nightmill verify ARGUMENTS` in this process."""

    def invoke(*arguments: object) -> Result:
        words = ["verify", *map(str, arguments)]
        return CliRunner().invoke(main, words, env=worker_env(client.settings))

    return invoke


def test_the_command_says_what_is_equal_and_exits_0(
    client: Client, claims: Claims, night: str, run: Callable[..., Result]
) -> None:
    with working(client, claims):
        done = run(night, "--sample", 5, "--seed-of-sample", 7)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "night: 5 of 5 rows equal to the bit",
        f"Computed now by {H200}",
        "The same rows again: --sample 5 --seed-of-sample 7",
    ]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"text": "the \x1b[31mtext"}, 1, "by the same arithmetic, which is a defect: please report it"),
        (
            {"text": "the\u202e text", "arithmetic": str(H100)},
            3,
            "by another arithmetic (device: NVIDIA H100, now NVIDIA H200)",
        ),
        ({"text": "the", "arithmetic": None}, 3, "by an arithmetic that was not recorded, then or now"),
    ],
)
def test_the_command_says_what_differs_and_why(
    client: Client, claims: Claims, night: str, run: Callable[..., Result], changes: Any, code: int, said: str
) -> None:
    job_id = tamper(client, 2, **changes)
    with working(client, claims):
        done = run(night)
        as_json = run(night, "--json")
    equal, _, row, then, now = done.stdout.splitlines()[:5]
    assert equal == "night: 8 of 9 rows equal to the bit"
    assert row.startswith(f"row 2, q-2, job {job_id}: another text after ") and row.endswith(said)
    shown = changes["text"].replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert (then, now) == (f"  then  “{shown}”", "  now   “the text of p2 with seed 2”")
    values = json.loads(as_json.stdout)
    assert (values["batch"], values["equal"], values["counts"]["equal"]) == (night, False, 8)
    (different,) = [one for one in values["rows"] if one["verdict"] != "equal"]
    assert (different["job_id"], different["parting"]["then"]) == (job_id, changes["text"])
    assert done.exit_code == as_json.exit_code == code


def test_the_command_exits_4_where_rows_cannot_be_computed(
    client: Client, claims: Claims, night: str, run: Callable[..., Result]
) -> None:
    with working(client, claims, lambda claim: outcome(claim, stop_reason=StopReason.ERROR, error="a\nb")):
        done = run(night, "--sample", 1)
    assert done.exit_code == 4
    assert "not computed again: a\\nb\n" in done.stdout


def test_the_command_that_nobody_serves_says_so_in_one_line(
    claims: Claims, night: str, run: Callable[..., Result]
) -> None:
    claims.sign_off()
    done = run(night)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: no live worker serves 'model'") and done.stderr.count("\n") == 1


def test_an_interrupted_command_exits_130_and_leaves_nothing(
    client: Client, claims: Claims, night: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[Job] = client.list_jobs()

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nightmill.jobs.batches.verifying.time.sleep", interrupted)
    done = run(night)
    assert done.exit_code == 130
    assert client.list_jobs() == before
    assert [batch.name for batch in client.list_batches()] == [night]
