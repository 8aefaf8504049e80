"""`nightmill batch` and `nightmill prune`: what they print for people and programs, and how they exit."""

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.base.contract import StopReason, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.formats import remote
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.sweep import Sweep
from tests.support.servers import worker_env

Run = Callable[..., Result]


@pytest.fixture
def run(sqlite_settings: Settings) -> Run:
    """Runs `nightmill ARGUMENTS` in this process, with the settings of the test."""

    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        env = worker_env(sqlite_settings)
        return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin, env=env)

    return invoke


@pytest.fixture
def cli_client(sqlite_settings: Settings) -> Iterator[Client]:
    """A client beside the command."""
    with Client(sqlite_settings) as client:
        yield client


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three rows, the second bad."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "seed": 1}\n{"prompt": 2}\n{"prompt": "three"}\n')
    return path


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine stands in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def finish(client: Client, batch: str, reason: StopReason = StopReason.EOS) -> None:
    """End every queued row of a batch."""
    claims = Claims(client.database, "a" * 32)
    queued = [job.id for job in client.list_jobs(state="queued", batch=batch)]
    for claim in claims.claim(queued):
        claims.finish([Outcome(claim.job_id, claim.attempt, reason, f"text of {claim.prompt}", 2, 3)])


def test_submit_keeps_every_option_and_says_what_it_understood(
    run: Run, cli_client: Client, file: Path
) -> None:
    options = ("--max-tokens", 9, "--temperature", 0.5, "--stop", "x", "--ignore-eos", "--seed", 4)
    result = run(
        *("batch", "submit", file, "--name", "night", "--model", "m", "--priority", 7),
        *("--at", "01:00", "--deadline", "06:00"),
        *options,
    )
    assert result.exit_code == 0, result.output
    said = re.findall(r"(begins|deadline) (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d CES?T)$", result.stderr, re.M)
    assert [(label, text[11:19]) for label, text in said] == [
        ("begins", "01:00:00"),
        ("deadline", "06:00:00"),
    ]
    assert result.stdout.startswith("night: scheduled\n")
    assert "3: 2 queued, 0 running, 0 succeeded, 1 failed, 0 cancelled" in result.stdout
    assert result.stdout.endswith("Next: nightmill batch status night\n")
    record = cli_client.get_batch("night").record
    assert record.scheduled_at is not None and record.deadline_at is not None
    assert record.deadline_at - record.scheduled_at in (timedelta(hours=5), timedelta(hours=4))
    assert datetime.now(UTC) < record.scheduled_at < datetime.now(UTC) + timedelta(hours=25)
    first, _, third = sorted(cli_client.list_jobs(batch="night"), key=lambda job: job.row or 0)
    assert (first.model, first.priority, first.seed, third.seed) == ("m", 7, 1, 4)
    assert (first.params.max_tokens, first.params.temperature) == (9, 0.5)
    assert (first.params.stop, first.params.ignore_eos) == (("x",), True)
    again = run("batch", "submit", file, "--name", "night", "--model", "m", "--priority", 7, *options)
    assert again.exit_code == 0 and cli_client.get_batch("night").record == record


def test_submitting_again_prints_the_times_that_hold(run: Run, cli_client: Client, file: Path) -> None:
    submit = ("batch", "submit", file, "--name", "night")
    first = run(*submit, "--at", "2h", "--deadline", "2031-01-01T06:00")
    assert first.stderr.splitlines()[1] == "deadline 2031-01-01 06:00:00 CET"
    again = run(*submit, "--at", "3h", "--deadline", "2031-01-01T06:00")
    begins = first.stderr.splitlines()[0]
    assert again.stderr.splitlines() == [
        f"{begins}, as it was submitted at first",
        "deadline 2031-01-01 06:00:00 CET",
    ]
    nobody = "No worker is running: start one, nightmill worker --model FILE\n"
    assert run("batch", "submit", file, "--name", "no times").stderr == nobody
    late = run("batch", "submit", file, "--name", "no times", "--deadline", "1h")
    assert late.stderr == f"deadline none, as it was submitted at first\n{nobody}"


def test_submit_exits_like_watch_where_nothing_is_left_to_run(
    run: Run, cli_client: Client, file: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 1}\n{"prompt": 2}\n')
    refused = run("batch", "submit", bad, "--name", "bad one")
    assert (refused.exit_code, refused.stdout.splitlines()[0]) == (4, "bad one: failed")
    assert refused.stdout.endswith("Next: nightmill batch errors 'bad one' -o FILE\n")
    assert run("batch", "submit", bad, "--name", "bad one", "--json").exit_code == 4
    assert run("batch", "submit", file, "--name", "night").exit_code == 0
    finish(cli_client, "night")
    assert run("batch", "submit", file, "--name", "night").exit_code == 3


def test_status_list_and_watch_tell_people_and_programs_the_same(
    run: Run, cli_client: Client, file: Path
) -> None:
    run("batch", "submit", file, "--name", "night")
    finish(cli_client, "night")
    status = run("batch", "status", "night")
    assert status.stdout.splitlines()[0] == "night: completed_with_errors"
    assert "eos 2, error 1" in status.stdout
    assert "4 read, 6 written" in status.stdout
    assert "error      1 x prompt: must be a text" in status.stdout
    told = json.loads(run("batch", "status", "night", "--json").stdout)
    assert (told["state"], told["done"], told["succeeded"], told["unsuccessful"]) == (
        "completed_with_errors",
        3,
        2,
        1,
    )
    assert told["states"] == {"queued": 0, "running": 0, "succeeded": 2, "failed": 1, "cancelled": 0}
    assert told["errors"][0]["rows"] == 1
    run("batch", "submit", file, "--name", "later", "--at", "2h")
    listed = [json.loads(line) for line in run("batch", "list", "--json").stdout.splitlines()]
    assert [(item["name"], item["state"]) for item in listed] == [
        ("later", "scheduled"),
        ("night", "completed_with_errors"),
    ]
    table = run("batch", "list").stdout.splitlines()
    assert table[2].split()[:5] == ["night", "completed_with_errors", "3", "3", "1"]
    watched = run("batch", "watch", "night")
    assert watched.exit_code == 3
    assert watched.stdout == status.stdout


def test_watch_exits_by_the_state_that_the_batch_ends_in(
    run: Run, cli_client: Client, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "one"}\n')
    bad.write_text('{"prompt": 1}\n')
    for name, source in (("done", good), ("cancelled", good), ("late", good), ("bad", bad)):
        run("batch", "submit", source, "--name", name)
    finish(cli_client, "done")
    finish(cli_client, "late", StopReason.DEADLINE)
    cli_client.get_batch("cancelled").cancel()
    codes = {name: run("batch", "watch", name).exit_code for name in ("done", "bad", "late", "cancelled")}
    assert codes == {"done": 0, "bad": 4, "late": 5, "cancelled": 6}


def test_results_and_errors_are_written_whole_in_the_order_of_the_file(
    run: Run, cli_client: Client, file: Path, tmp_path: Path
) -> None:
    run("batch", "submit", file, "--name", "night")
    output = tmp_path / "results.jsonl"
    early = run("batch", "results", "night", "-o", output)
    assert early.stdout == f"{output}: 0 rows; not done yet: 2 rows\n"
    finish(cli_client, "night")
    assert json.loads(run("batch", "results", "night", "-o", output, "--json").stdout) == {
        "path": str(output),
        "rows": 2,
        "unfinished": 0,
    }
    assert [json.loads(line)["text"] for line in output.open()] == ["text of one", "text of three"]
    piped = run("batch", "results", "night", "-o", "-")
    assert (piped.stdout, piped.stderr) == (output.read_text(), "standard output: 2 rows\n")
    errors = tmp_path / "errors.jsonl"
    assert run("batch", "errors", "night", "-o", errors).stdout == f"{errors}: 1 row\n"
    assert json.loads(errors.read_text())["line"] == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "errors.jsonl",
        "prompts.jsonl",
        "results.jsonl",
    ]


def test_cancel_and_retry_failed(run: Run, cli_client: Client, file: Path) -> None:
    run("batch", "submit", file, "--name", "night")
    assert run("batch", "cancel", "night").stdout == "night: 2 rows cancelled, 0 running and asked to stop\n"
    assert json.loads(run("batch", "cancel", "night", "--json").stdout) == {"cancelled": 0, "asked": 0}
    assert run("batch", "status", "night").stdout.startswith("night: cancelled\n")
    retried = run("batch", "retry-failed", "night", "--deadline", "8h", "--json")
    assert json.loads(retried.stdout) == {"queued": 2}
    assert retried.stderr.startswith("deadline ")
    deadline = cli_client.get_batch("night").record.deadline_at
    assert deadline is not None and deadline > datetime.now(UTC) + timedelta(hours=7)


def test_delete_asks_and_refuses_what_is_not_over(run: Run, cli_client: Client, file: Path) -> None:
    run("batch", "submit", file, "--name", "night")
    refused = run("batch", "delete", "night", "--yes")
    assert refused.exit_code == 1
    assert refused.stderr == (
        "Error: batch 'night' has 2 rows that are not finished: wait, or cancel it first "
        "(nightmill batch cancel night)\n"
    )
    run("batch", "cancel", "night")
    assert run("batch", "delete", "night", stdin="n\n").exit_code == 1
    assert len(cli_client.list_batches()) == 1
    assert run("batch", "delete", "night", "--yes").stdout == "night: 3 rows deleted\n"
    assert cli_client.list_batches() == []


def test_prune_deletes_only_what_is_old_enough(run: Run, cli_client: Client, file: Path) -> None:
    run("batch", "submit", file, "--name", "night")
    finish(cli_client, "night")
    time.sleep(0.01)
    kept = run("prune", "--older-than", "1h")
    assert kept.stdout == "0 jobs and 0 batches deleted\n"
    dry = run("prune", "--older-than", "0s", "--dry-run", "--json")
    assert json.loads(dry.stdout) == {"jobs": 3, "batches": 1, "dry_run": True}
    assert len(cli_client.list_batches()) == 1
    assert run("prune", "--older-than", "0s").stdout == "3 jobs and 1 batch deleted\n"
    assert cli_client.list_batches() == []
    bad = run("prune", "--older-than", "soon")
    assert bad.stderr.startswith("Error: --older-than: 'soon' is not a duration; write a number and s, m,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batch", "status", "nothing"], "there is no batch 'nothing': `nightmill batch list` shows those"),
        (["batch", "submit", "nothing.jsonl"], "nothing.jsonl: there is no such file"),
        (["batch", "submit", "FILE", "--at", "soon"], "--at: 'soon' is not a time; write 06:00"),
        (["batch", "submit", "FILE", "--max-tokens", "0"], "max_tokens: "),
        (
            ["batch", "submit", "FILE", "--at", "3h", "--deadline", "2000-01-01T00:00Z"],
            "deadline: 2000-01-01",
        ),
        (
            ["batch", "submit", "FILE", "--deadline", "2000-01-01T00:00Z"],
            "deadline: 2000-01-01T00:00:00+00:00 has passed (it is 2",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    run: Run, file: Path, arguments: list[str], message: str
) -> None:
    result = run(*(file if argument == "FILE" else argument for argument in arguments))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")


def test_every_command_of_a_batch_explains_itself(run: Run) -> None:
    for command in (
        "submit",
        "list",
        "status",
        "watch",
        "results",
        "errors",
        "cancel",
        "retry-failed",
        "delete",
    ):
        result = run("batch", command, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.stdout and "--json" in result.stdout


def test_expired_rows_show_in_the_status(
    run: Run, cli_client: Client, sqlite_settings: Settings, file: Path
) -> None:
    run("batch", "submit", file, "--name", "night", "--deadline", "1h")
    with Client(sqlite_settings, clock=lambda: datetime.now(UTC) + timedelta(hours=2)) as later:
        assert Sweep(later.database).expire() == 2
    assert run("batch", "status", "night").stdout.startswith("night: expired\n")


def test_no_end_is_foretold_where_no_worker_is_left(run: Run, cli_client: Client, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n' * 3)
    run("batch", "submit", path, "--name", "night", "--model", "m")
    claims = Claims(cli_client.database, "b" * 32)
    claims.register("host", 1, "m", None)
    claims.beat(WorkerState.READY)
    (claim,) = claims.claim([cli_client.list_jobs(batch="night")[-1].id])
    claims.finish([Outcome(claim.job_id, claim.attempt, StopReason.EOS, "text", 2, 3)])
    assert "ends       about" in run("batch", "status", "night").stdout
    claims.sign_off()
    said = run("batch", "status", "night").stdout
    assert "ends" not in said and "2 queued" in said


def test_rows_of_standard_input_are_the_same_batch_as_long_as_they_are_the_same(
    run: Run, cli_client: Client, file: Path
) -> None:
    submit = ("batch", "submit", "-", "--json")
    first, again = (json.loads(run(*submit, stdin=file.read_text()).stdout) for _ in range(2))
    assert first["name"] == again["name"] and first["name"].startswith("stdin-")
    assert (first["source"], first["rows"], first["states"]["failed"]) == ("standard input", 3, 1)
    other = json.loads(run(*submit, stdin=file.read_text() + '{"prompt": "4"}\n').stdout)
    assert (other["rows"], len(cli_client.list_batches())) == (4, 2)
    for options, said in (
        ((), "standard input: has no known format; say which it has (--format csv, or jsonl)"),
        (("--format", "parquet"), "standard input: cannot be read as Parquet"),
    ):
        refused = run("batch", "submit", "-", *options, stdin="prompt\none\n")
        assert refused.exit_code == 1 and said in refused.stderr and "/" not in refused.stderr
    wide = run("batch", "submit", "-", "--format", "csv", "--json", stdin="prompt\none\n")
    assert json.loads(wide.stdout)["rows"] == 1


def test_results_go_to_a_url_by_the_rules_of_files_and_no_copy_is_named(
    run: Run, cli_client: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "READABLE", ("memory",))
    monkeypatch.setattr(remote, "WRITABLE", ("memory",))
    store = fsspec.filesystem("memory")
    store.pipe("/b/prompts.jsonl", file.read_bytes())
    store.pipe("/b/others.jsonl", b'{"id": "somebody", "custom_id": "else"}\n')
    submitted = run("batch", "submit", "memory://b/prompts.jsonl", "--json")
    made = json.loads(submitted.stdout)
    assert made["source"] == "memory://b/prompts.jsonl" and made["name"].startswith("prompts-")
    finish(cli_client, made["name"])
    refused = run("batch", "results", made["name"], "-o", "memory://b/others.jsonl")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: memory://b/others.jsonl: is there already, and is not of batch")
    for _ in range(2):
        written = run("batch", "results", made["name"], "-o", "memory://b/results.jsonl")
        assert written.stdout == "memory://b/results.jsonl: 2 rows\n", written.output
    assert len(store.cat("/b/results.jsonl").splitlines()) == 2
    forced = run("batch", "errors", made["name"], "-o", "memory://b/others.jsonl", "--overwrite")
    assert forced.exit_code == 0 and json.loads(store.cat("/b/others.jsonl"))["line"] == 2
    store.store.clear()


@pytest.mark.parametrize(
    ("command", "seconds", "complaint", "code"),
    [
        ("sh -c 'cat > told'", 60, "", 0),
        ("sh -c 'exit 3'", 60, "--on-end: sh exited with 3", 3),
        ("no-such-program --now", 60, "--on-end: no-such-program cannot be run: No such file", None),
        ("sh -c 'sleep 60 & wait'", 0.1, "--on-end: sh took longer than 0.1 s, and was killed", None),
    ],
)
def test_a_command_at_the_end_changes_nothing_of_the_batch(
    run: Run, cli_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    command: str, seconds: float, complaint: str, code: int | None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 1}\n')  # has ended as soon as it is there
    done = run("batch", "submit", bad, "--on-end", command, "--on-end-seconds", seconds, "--json")
    status = json.loads(done.stdout)
    assert (done.exit_code, status["state"], status.pop("on_end")) == (4, "failed", {"exit_code": code})
    assert complaint in done.stderr and (complaint != "" or done.stderr == "")
    if code == 0:
        assert json.loads((tmp_path / "told").read_text()) == status
    refused = run("batch", "submit", bad, "--name", "never", "--on-end", "echo 'x")
    assert refused.exit_code == 1 and "--on-end: cannot be split into words" in refused.stderr
    assert [batch.name for batch in cli_client.list_batches()] == [status["name"]]
