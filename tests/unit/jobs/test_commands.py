"""The table of commands, which `nightmill --help` shows without importing them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nightmill.jobs.commands.main import main
from nightmill.jobs.commands.options import first_sentence
from nightmill.jobs.commands.terminal import confirm
from nightmill.jobs.request.spec import JobSpec
from tests.support.servers import clean_environment

HEAVY = {"sqlalchemy", "celery", "redis", "pydantic", "rich", "alembic", "numpy", "tokenizers"}


def test_each_command_is_where_the_table_says_and_does_what_it_says() -> None:
    context = click.Context(main)
    listed = main.sentences(context)
    assert {"enqueue", "batch", "run", "worker", "demo"} <= {name for name, _ in listed}
    for name, says in listed:
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert first_sentence(command) == says


def test_what_help_shows_as_json_is_json_that_the_option_takes() -> None:
    enqueue = main.get_command(click.Context(main), "enqueue")
    assert enqueue is not None
    shown = {
        option.opts[0]: json.loads(example)
        for option in enqueue.params
        if isinstance(option, click.Option)
        for example in re.findall(r"'({.*})'", option.help or "")
    }
    assert shown.keys() == {"--response-format", "--chat-template-kwargs", "--logit-bias"}
    for name, example in shown.items():
        JobSpec.defaults({name.strip("-").replace("-", "_"): example})


def test_json_and_grammars_may_be_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    enqueue = main.get_command(click.Context(main), "enqueue")
    assert enqueue is not None
    Path("schema.json").write_text('\ufeff{"type":\n "object"}\n')
    Path("rules.gbnf").write_text('root ::= "a"\n')
    Path("latin.json").write_bytes(b'{"a": "\xe4"}')
    arguments = ["--json-schema", "@schema.json", "--grammar", "@rules.gbnf", "--metadata", '{"a": 1}', "p"]
    found = enqueue.make_context("enqueue", list(arguments)).params
    assert found["json_schema"] == {"type": "object"}
    assert (found["grammar"], found["metadata"]) == ('root ::= "a"', {"a": 1})
    for value, said in (
        ("schema.json", "'schema.json' is a file; write @schema.json"),
        ("@none.json", "none.json: No such file or directory"),
        ("@rules.gbnf", "is not JSON: Expecting value at character 1"),
        ("@latin.json", "latin.json is not UTF-8; save it as that"),
        ("@.", ".: Is a directory"),
    ):
        with pytest.raises(click.BadParameter) as caught:
            enqueue.make_context("enqueue", ["--json-schema", value, "p"])
        assert caught.value.message == said


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [("y\n", 0, ""), ("n\n", 1, "Aborted!"), ("", 2, "answer: give --yes")],
)
def test_a_question_that_nobody_answers_names_the_option(answer: str, code: int, said: str) -> None:
    @click.command()
    def delete() -> None:
        confirm("Delete 60 rows?")
        click.echo("{}")

    result = CliRunner().invoke(delete, input=answer)
    assert (result.exit_code, result.stdout) == (code, "{}\n" if code == 0 else "")
    assert "Delete 60 rows? [y/N]" in result.stderr and said in result.stderr


def test_an_unknown_command_is_none() -> None:
    assert main.get_command(click.Context(main), "enqeue") is None


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys, nightmill.jobs.commands.main\n"
        f"try: nightmill.jobs.commands.main.main({arguments})\n"
        "except SystemExit: print('loaded:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, check=True
    )
    shown, _, loaded = done.stdout.rpartition("loaded:")
    assert "version" in shown or "Commands:" in shown
    assert set(loaded.split()) & HEAVY == set()


def test_results_over_http_are_not_deleted_by_a_zero() -> None:
    """Who writes it may well mean that they are kept for ever."""
    result = CliRunner().invoke(main, ["serve", "--keep-files", "0d"])
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: --keep-files 0: results would be deleted at once; without it they are kept\n"
    )
