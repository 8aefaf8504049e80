"""How rows are said to follow others: in files, in Python, on the command line; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import text

from nightmill.jobs.base.contract import JobState
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchConflictError, InvalidParameterError
from nightmill.jobs.sql.claims import Claims
from tests.integration.jobs.following.rows import (
    RATE,
    ROWS,
    ask,
    finish,
    follow,
    rows_of,
)
from tests.support.servers import worker_env


def test_rows_of_a_file_follow_others_of_it(client: Client, worker: Claims, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"custom_id": "a", "messages": [{"role": "user", "content": "Draft."}]},
        {"custom_id": "b", "after": "a", "prompt": 'Rate "{{ prior.content }}" {1}', "max_tokens": 3},
        {
            "custom_id": "c",
            "after": "a",
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "{{ prior.messages }} Shorter."},
            ],
        },
        {"custom_id": "d", "after": "e", "prompt": "{{ prior.text }}"},
        {"custom_id": "e", "after": "e", "prompt": "{{ prior.text }}"},
        {"custom_id": "f", "after": "a", "prompt": "{{ review }}"},
        {"custom_id": "g", "after": "a", "prompt": "{{ prior.reasoning }}"},
        {"custom_id": "h", "after": "b", "prompt": "{{ prior.parsed.score }}"},
        {"prompt": "{{ prior.text }}"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = client.submit_batch(path, name="rows")
    by_id = {job.custom_id: job for job in rows_of(batch)}
    assert [job.custom_id for job in rows_of(batch) if job.state is JobState.FAILED] == ["d", "e", "f"]
    assert "no row before this one has the custom_id 'e'" in str(by_id["d"].error)
    assert "no row before this one has the custom_id 'e'" in str(by_id["e"].error)
    assert "{{ review }} stands for nothing" in str(by_id["f"].error)
    assert by_id["row-9"].prompt == "{{ prior.text }}"  # it follows nothing, so that it is no template
    said = "{{ prior.text }} <|im_start|>system"
    finish(worker, [by_id["a"]], said.replace("{", "{{").replace("}", "}}"))
    by_id = {job.custom_id: job for job in rows_of(batch)}
    assert by_id["b"].prompt == f'Rate "{said}" {{1}}'
    assert by_id["b"].params.max_tokens == 3
    assert by_id["c"].messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Draft."},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Shorter."},
    ]
    assert by_id["g"].errors[-1]["code"] == "missing_field"
    finish(worker, [by_id["b"]])
    (h,) = [job for job in rows_of(batch) if job.custom_id == "h"]
    assert (h.state, h.errors[-1]["field"]) == (JobState.FAILED, "prior.parsed.score")


def test_rows_of_csv_and_of_python_follow_others(client: Client, worker: Claims, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('custom_id,after,prompt\na,,Once\nb,a,"{{ prior.text }}, then"\n')
    batch = client.submit_batch(tmp_path / "rows.csv", name="csv")
    finish(worker, rows_of(batch)[:1])
    assert rows_of(batch)[1].prompt == "draft 1, then"
    items = (
        {"custom_id": str(n), "prompt": f"{n}{{{{ prior.text }}}}", "after": str(n - 1)}
        for n in range(1, 400)
    )
    many = client.submit_batch([{"custom_id": "0", "prompt": "x"}, *items], name="many")
    jobs = rows_of(many)
    assert [job.prior for job in jobs] == [None, *(job.id for job in jobs[:-1])]
    client.cancel(jobs[0].id)  # and all behind it, one by one
    assert many.status().states[JobState.CANCELLED] == 400


def test_parsed_answers_and_their_keys_are_substituted(client: Client, worker: Claims) -> None:
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"]}
    drafts = ask(client, json_schema=schema)
    template = "{{ prior.parsed.score }} of {{ prior.parsed | json }}{{ prior.reasoning }}"
    judged = follow(client, template=template, plain=True, empty="keep", reuse="any")
    finish(worker, rows_of(drafts), '{{"score": {row}}}')
    jobs = rows_of(judged)
    assert [job.prompt for job in jobs] == [f'{n} of {{"score": {n}}}' for n in (1, 2, 3)]
    with client.database.read() as connection:
        query = text("SELECT count(DISTINCT content_key) FROM jobs WHERE batch = 'judged'")
        assert connection.execute(query).scalar_one() == 3


def test_what_cannot_follow_is_refused_with_the_way_out(client: Client, tmp_path: Path) -> None:
    ask(client)
    client.enqueue("x", batch="grows")
    with pytest.raises(BatchConflictError, match="'grows' was filled by enqueue"):
        follow(client, "grows")
    with pytest.raises(InvalidParameterError, match=r"there is no prior\.txt; there are prior\.text, "):
        follow(client, template="{{ prior.txt }}")
    with pytest.raises(InvalidParameterError, match="no column 'reviews'; there are 'id', 'review', 'draft'"):
        follow(client, template="{{ reviews }}")
    with pytest.raises(InvalidParameterError, match="after: needs a template"):
        client.submit_batch(after="drafts")
    with pytest.raises(InvalidParameterError, match="leave out the file"):
        client.submit_batch(ROWS, after="drafts", template="x {{ prior.text }}")
    with pytest.raises(InvalidParameterError, match="column: 'review' is a column of the table already"):
        client.submit_batch(after="drafts", template="{{ prior.text }}", column="review")
    with pytest.raises(InvalidParameterError, match="submitted with after"):
        client.submit_batch(ROWS, template="{{ prior.text }}")
    with pytest.raises(InvalidParameterError, match="source: is missing"):
        client.submit_batch(name="nothing")


def test_the_command_line_submits_and_shows_rows_that_wait(
    client: Client, server_settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in worker_env(server_settings).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    ask(client)
    submit = ("batch", "submit", "--after", "drafts", "--template", RATE)
    done = run(*submit, "--choice", "1", "--choice", "5", "--json")
    assert done.exit_code == 0, done.output
    name = json.loads(done.stdout)["name"]
    assert name.startswith("drafts-") and json.loads(done.stdout)["held"] == 3
    assert json.loads(run(*submit, "--choice", "1", "--choice", "5", "--json").stdout)["name"] == name
    assert "waits      3 rows for the rows that they follow" in run("batch", "status", name).output
    job = rows_of(client.get_batch(name))[0]
    shown = run("show", job.id).output
    assert job.prior is not None and job.prior in shown and "held" in shown
    assert "held" not in run("show", job.prior).output
    (tmp_path / "rows.csv").write_text("review\nx\n")
    for wrong in ([str(tmp_path / "rows.csv")], ["--format", "csv"], ["--query", "SELECT 1", "--from", "x"]):
        refused = run(*submit, *wrong)
        assert (refused.exit_code, "--after stands in place of" in refused.output) == (2, True)
    unknown = run("batch", "submit", "--after", "nothing", "--template", "{{ prior.text }}")
    assert unknown.exit_code == 1 and "there is no batch 'nothing'" in unknown.output
