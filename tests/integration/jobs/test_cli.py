"""The `nightmill` command: what it prints for people and programs, and how it fails."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.base.contract import StopReason, WorkerState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.batches import batch
from nightmill.jobs.commands.main import main
from nightmill.jobs.reply.job import Answer
from nightmill.jobs.request.spec import JobSpec
from nightmill.jobs.sql.claims import Claims, Outcome
from nightmill.jobs.sql.tables import SCHEMA_REVISION
from tests.integration.jobs.conftest import Run
from tests.support.servers import wait_until, worker_env


def _finish(client: Client, job_id: str, text: str = "a text") -> None:
    claims = Claims(client.database, "a" * 32)
    (claim,) = claims.claim([job_id])
    claims.finish([Outcome(job_id, claim.attempt, StopReason.EOS, text, 2, 3)])


def _fail(client: Client, job_id: str) -> None:
    claims = Claims(client.database, "a" * 32)
    (claim,) = claims.claim([job_id])
    claims.finish([Outcome(job_id, claim.attempt, StopReason.ERROR, "", 2, 0, "it is too long")])


def test_enqueue_streams_a_text_to_its_end(run: Run, cli_client: Client) -> None:
    done: list[Result] = []
    command = threading.Thread(target=lambda: done.append(run("enqueue", "a prompt", "--stream")))
    command.start()
    (job,) = wait_until(cli_client.list_jobs)
    _finish(cli_client, job.id, "a\n\x1btext")
    command.join(240)
    (result,) = done
    assert (result.exit_code, result.stdout) == (0, "a\n\x1btext\n")
    waits = "No worker is running: start one, nightmill worker --model FILE\n"
    assert result.stderr == f"{waits}{job.id}  a prompt\nsucceeded, eos, 2 + 3 tokens\n"
    assert run("enqueue", "a prompt", "--stream", "--json").exit_code == 2


@pytest.mark.parametrize("how", ["--wait", "--stream"])
def test_enqueue_that_waits_for_a_job_that_fails_says_so_by_its_exit_code(
    how: str, run: Run, cli_client: Client
) -> None:
    done: list[Result] = []
    command = threading.Thread(target=lambda: done.append(run("enqueue", "good", "bad", how)))
    command.start()
    jobs = wait_until(lambda: len(found := cli_client.list_jobs()) == 2 and found)
    for job in jobs:
        (_finish if job.prompt == "good" else _fail)(cli_client, job.id)
    command.join(240)
    assert [result.exit_code for result in done] == [3]


def test_who_waits_is_told_that_no_worker_lives_and_what_goes_on_after_ctrl_c(
    run: Run, cli_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "results", interrupted)
    monkeypatch.setattr(Batch, "wait", interrupted)
    nobody = "No worker is running: start one, nightmill worker --model FILE\n"
    waited = run("enqueue", "a prompt", "--wait", "--batch", "mine")
    (job,) = cli_client.list_jobs()
    assert (waited.exit_code, waited.stderr) == (130, f"{nobody}Interrupted; 1 job handed in: {job.id}\n")
    cli_client.submit_batch(["a prompt"], name="tonight")
    watched = run("batch", "watch", "tonight")
    assert (watched.exit_code, watched.stderr) == (130, nobody)
    Claims(cli_client.database, "a" * 32).register("myhost", 4, "mymodel", None)
    assert "No worker" not in run("batch", "watch", "tonight").stderr


def test_workers_are_paused_and_resumed_by_a_part_of_their_id(
    run: Run, cli_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "wait", interrupted)
    cli_client.submit_batch(["a prompt"], name="tonight")
    claims = Claims(cli_client.database, "a" * 32)
    claims.register("my\x1bhost", 4, "mymodel", None)
    assert run("worker", "pause", "aaaa").stdout == "aaaaaaaa: paused, mymodel on my\\x1bhost\n"
    assert claims.paused()
    assert run("worker", "pause", "all").stdout == "no live worker is to be paused\n"
    claims.beat(WorkerState.SLEEPING, "paused, until it is resumed")
    assert "The worker sleeps, paused, until it is resumed" in run("batch", "watch", "tonight").stderr
    assert run("worker", "resume", "all").stdout.startswith("aaaaaaaa: resumed")
    unknown = run("worker", "resume", "b")
    said = "Error: 'b' is not the id of a live worker; alive are aaaaaaaa\n"
    assert (unknown.exit_code, unknown.stderr) == (1, said)


def test_enqueue_prints_ids_and_keeps_every_option(run: Run, cli_client: Client) -> None:
    result = run(
        *(
            "enqueue",
            "one",
            "two",
            "--batch",
            "b",
            "--max-tokens",
            "7",
            "--temperature",
            "0.5",
            "--top-k",
            "3",
        ),
        *(
            "--top-p",
            "0.9",
            "--min-p",
            "0.1",
            "--repetition-penalty",
            "1.1",
            "--seed",
            "4",
            "--priority",
            "8",
        ),
        *("--stop", "x", "--stop", "y"),
    )
    assert result.exit_code == 0, result.output
    ids = result.stdout.split()
    found = [cli_client.get(job_id) for job_id in ids]
    assert [job.prompt for job in found] == ["one", "two"]
    for job in found:
        assert (job.batch, job.priority) == ("b", 8)
        assert job.params.model_dump() == {
            "max_tokens": 7,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "seed": 4,
            "stop": ("x", "y"),
            "ignore_eos": False,
            "stop_token_ids": (),
            "min_tokens": 0,
            "n": 1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "bad_words": (),
            "logprobs": None,
            "echo": False,
            "score": (),
            "include_stop_str_in_output": False,
            "prompt_logprobs": None,
            "return_token_ids": False,
            "truncate_prompt_tokens": None,
            "max_reasoning_tokens": None,
            "embed": False,
            "dimensions": None,
            "pooling": None,
            "rerank": None,
            "instruction": None,
        }


def test_enqueue_reads_standard_input_and_makes_chats(run: Run, cli_client: Client) -> None:
    result = run("enqueue", "-", "--system", "be brief", "--json", stdin="from stdin\n")
    (job_id,) = json.loads(result.stdout)["ids"]
    assert cli_client.get(job_id).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "from stdin\n"},
    ]
    (chat,) = json.loads(run("enqueue", "hi", "--chat", "--json").stdout)["ids"]
    assert cli_client.get(chat).messages == [{"role": "user", "content": "hi"}]


def test_list_and_show_tell_people_and_programs(run: Run, cli_client: Client) -> None:
    first = cli_client.enqueue("the first\nprompt", batch="b", metadata={"k": 1})
    second = cli_client.enqueue([{"role": "user", "content": "a chat"}])
    _finish(cli_client, first)
    listed = run("list")
    assert first in listed.stdout
    assert "succeeded" in listed.stdout
    lines = [json.loads(line) for line in run("list", "--json").stdout.splitlines()]
    assert [line["id"] for line in lines] == [second, first]
    assert [
        json.loads(run("list", *chosen, "--json").stdout)["id"]
        for chosen in (["--state", "queued"], ["--batch", "b"], ["-n", "1"])
    ] == [second, first, second]
    assert run("list", "--batch", "b", "--state", "queued").exit_code == 0
    for command in ("list", "stats", "cancel"):
        unknown = run(command, "--batch", "bb")
        assert unknown.exit_code == 1 and "there is no batch 'bb'" in unknown.stderr
    shown = run("show", first)
    assert "state                succeeded" in shown.stdout
    assert shown.stdout.endswith("\na text\n")
    job = json.loads(run("show", first, "--json").stdout)
    assert (job["state"], job["stop_reason"], job["text"]) == ("succeeded", "eos", "a text")
    assert (job["prompt_tokens"], job["completion_tokens"], job["metadata"]) == (2, 3, {"k": 1})
    assert job["params"]["max_tokens"] == 256
    assert job["finished_at"].endswith("+00:00")


def test_enqueue_and_show_print_every_answer(run: Run, cli_client: Client) -> None:
    (job_id,) = json.loads(run("enqueue", "a prompt", "--n", "2", "--seed", "7", "--json").stdout)["ids"]
    answers = (Answer("one", StopReason.EOS, 2, 7), Answer("t\x1bwo", StopReason.LENGTH, 3, 8))
    claims = Claims(cli_client.database, "a" * 32)
    claims.claim([job_id])
    claims.finish([Outcome(job_id, 1, StopReason.EOS, "one", 4, 5, answers=answers)])
    shown = run("show", job_id).stdout
    assert shown.endswith(
        "\nanswer 0  eos, 2 tokens, seed 7\none\n\nanswer 1  length, 3 tokens, seed 8\nt\x1bwo\n"
    )
    job = json.loads(run("show", job_id, "--json").stdout)
    assert [answer["text"] for answer in job["answers"]] == ["one", "t\x1bwo"] and job["text"] == "one"


def test_cancel_and_retry(run: Run, cli_client: Client) -> None:
    running, queued = (cli_client.enqueue("prompt", batch="b") for _ in range(2))
    Claims(cli_client.database, "a" * 32).claim([running])
    assert (
        run("cancel", running, queued).stdout == f"{running}: running, asked to stop\n{queued}: cancelled\n"
    )
    assert run("retry", queued).stdout == f"{queued}: queued\n"
    assert json.loads(run("cancel", queued, "--json").stdout) == {queued: "cancelled"}
    assert json.loads(run("retry", queued, "--json").stdout) == {"ids": [queued]}
    assert json.loads(run("cancel", "--batch", "b", "--json").stdout) == {
        "batch b": "1 cancelled, 1 running and asked to stop"
    }
    nothing = run("cancel")
    assert nothing.exit_code == 2
    assert "name job ids, or a --batch" in nothing.stderr


def test_stats_count_jobs_messages_and_workers(run: Run, cli_client: Client) -> None:
    _finish(cli_client, cli_client.enqueue("prompt", batch="b"))
    cli_client.enqueue("prompt")
    registered = Claims(cli_client.database, "a" * 32)
    registered.register("myhost", 4, "mymodel", None)
    said = json.loads(run("stats", "--json").stdout)
    assert said["state"] == {"queued": 1, "succeeded": 1}
    assert said["stop_reason"] == {"eos": 1}
    assert (said["prompt_tokens"], said["completion_tokens"], said["queue_messages"]) == (2, 3, 2)
    assert [(worker["host"], worker["model"], worker["state"]) for worker in said["workers"]] == [
        ("myhost", "mymodel", "starting")
    ]
    assert json.loads(run("stats", "--batch", "b", "--json").stdout)["state"] == {"succeeded": 1}
    for_people = " ".join(run("stats").stdout.split())
    assert "stopped by eos 1" in for_people
    assert "worker aaaaaaaa starting, mymodel on myhost" in for_people
    registered.register_models(["mymodel", "other", "third"], swap_for_interactive=False)
    in_turn = " ".join(run("stats").stdout.split())
    assert "starting, mymodel, in turn with other, third on myhost" in in_turn


def test_migrate_says_what_it_did(run: Run, directory: Path) -> None:
    url = f"sqlite:///{directory}/fresh.db"
    lacking = run("list", NIGHTMILL_DATABASE_URL=url)
    assert (lacking.exit_code, lacking.stdout) == (1, "")
    assert (
        lacking.stderr == f"Error: the database at {url} has no Nightmill tables: run `nightmill migrate`\n"
    )
    assert (
        run("migrate", NIGHTMILL_DATABASE_URL=url).stdout == f"{url}: schema {SCHEMA_REVISION} (was empty)\n"
    )
    assert (
        run("migrate", NIGHTMILL_DATABASE_URL=url).stdout
        == f"{url}: schema {SCHEMA_REVISION} (was up to date)\n"
    )
    assert run("list", NIGHTMILL_DATABASE_URL=url).exit_code == 0


def test_stop_ends_the_embedded_redis_and_no_other(run: Run, directory: Path) -> None:
    own = {"NIGHTMILL_BROKER_URL": "", "NIGHTMILL_DATA_DIR": str(directory / "own")}
    assert run("stop", **own).stdout == "no embedded Redis was running\n"
    assert run("enqueue", "prompt", **own).exit_code == 0
    assert run("stop", **own).stdout == "embedded Redis stopped\n"
    configured = run("stop")
    assert configured.exit_code == 1
    assert "which Nightmill did not start" in configured.stderr


def test_every_command_explains_itself() -> None:
    context = click.Context(main)
    names = main.list_commands(context)
    assert {"enqueue", "list", "show", "cancel", "retry", "stats", "migrate", "stop"} <= set(names)
    for name in names:
        command = main.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(200), name
    for group in (main, batch):
        said = group.get_help(click.Context(group, info_name="x", max_content_width=80))
        assert "..." not in said.partition("\nCommands:\n")[2]
    for arguments in (["--help"], ["-h"], ["enqueue", "--help"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0
        assert "Usage:" in result.stdout
    assert "NIGHTMILL_DATABASE_URL" in CliRunner().invoke(main, ["--help"]).stdout
    assert CliRunner().invoke(main, ["--version"], prog_name="nightmill").stdout.startswith("nightmill, ")


def _nightmill(settings: Settings, *arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("nightmill")), *arguments],
        env=worker_env(settings, **more),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_installed_command_works_and_fails_without_a_traceback(sqlite_settings: Settings) -> None:
    done = _nightmill(sqlite_settings, "enqueue", "grüße", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (job_id,) = json.loads(done.stdout)["ids"]
    with Client(sqlite_settings) as client:
        assert client.get(job_id).prompt == "grüße"
        _finish(client, job_id, "ünï")
    waited = _nightmill(sqlite_settings, "show", job_id, "--json")
    assert json.loads(waited.stdout)["text"] == "ünï"
    failed = _nightmill(sqlite_settings, "show", "nothing")
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", "Error: there is no job 'nothing'\n")


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_a_job_is_known_by_the_id_of_its_answer(prefix: str, run: Run, cli_client: Client) -> None:
    job_id = cli_client.enqueue("a prompt")
    assert json.loads(run("show", f"{prefix}{job_id}", "--json").stdout)["id"] == job_id
    assert run("cancel", f"{prefix}{job_id}").stdout == f"{job_id}: cancelled\n"
    assert run("retry", f"{prefix}{job_id}").stdout == f"{job_id}: queued\n"
    missing = run("show", f"{prefix}{'0' * 32}")
    assert missing.exit_code == 1 and "there is no job" in missing.stderr


def test_a_request_with_several_prompts_is_known_by_its_id(run: Run, cli_client: Client) -> None:
    request, ids = cli_client.enqueueing.enqueue_request(
        [JobSpec.parse("one"), JobSpec.parse("two")], owner="a"
    )
    assert request not in ids
    shown = [json.loads(line)["id"] for line in run("show", f"cmpl-{request}", "--json").stdout.splitlines()]
    assert shown == ids
    assert json.loads(run("cancel", f"cmpl-{request}", "--json").stdout) == dict.fromkeys(ids, "cancelled")
