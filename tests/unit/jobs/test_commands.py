"""The table of commands, which `nightmill --help` shows without importing them."""

import json
import re
import subprocess
import sys

import click
import pytest

from nightmill.jobs.commands.main import main
from nightmill.jobs.commands.options import first_sentence
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
