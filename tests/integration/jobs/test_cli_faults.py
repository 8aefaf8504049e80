"""What the command line says where something is wrong: one line, and no traceback."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from tests.integration.jobs.conftest import Run
from tests.support.servers import free_port


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["show", "nothing"], {}, "there is no job 'nothing'"),
        (["cancel", "nothing"], {}, "there is no job 'nothing'"),
        (["enqueue", ""], {}, "prompt: is empty"),
        (
            ["enqueue", "x", "--max-tokens", "-1"],
            {},
            "max_tokens: must be at least 1",
        ),
        (["enqueue", "x", "--temperature", "nan"], {}, "temperature: must be a finite number"),
        (["list"], {"NIGHTMILL_BROKER": "x"}, "NIGHTMILL_BROKER is not a setting of Nightmill. Did you mean"),
        (["list"], {"NIGHTMILL_DATABASE_URL": "mysql://x"}, "NIGHTMILL_DATABASE_URL: names 'mysql'"),
        (
            ["list"],
            {"NIGHTMILL_DATABASE_URL": "postgresql://me:hunter2@127.0.0.1:1/x"},
            "the database at postgresql+psycopg://me:***@127.0.0.1:1/x does not answer",
        ),
        (
            ["stats"],
            {"NIGHTMILL_BROKER_URL": "redis://:hunter2@127.0.0.1:1/0"},
            "the broker at redis://:***@127.0.0.1:1/0 does not answer",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    run: Run, arguments: list[str], env: dict[str, str], message: str
) -> None:
    result = run(*arguments, **env)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1
    assert "hunter2" not in result.output
    assert ".." not in result.stderr and ". Check" not in result.stderr.replace(". Check that", "")


def test_a_broker_that_is_down_is_a_warning_and_the_id_is_printed(run: Run, cli_client: Client) -> None:
    result = run("enqueue", "prompt", NIGHTMILL_BROKER_URL=f"redis://127.0.0.1:{free_port()}/0")
    assert result.exit_code == 0
    assert result.stderr.startswith("Warning: 1 job is kept in the database, and a worker will fetch")
    assert cli_client.get(result.stdout.strip()).prompt == "prompt"


@pytest.mark.parametrize(
    "arguments", [["list"], ["enqueue", "x"], ["stats"], ["migrate"], ["check"], ["demo", "-n", "1"]]
)
@pytest.mark.parametrize("place", ["file/data", "file", "/proc/nightmill"])
def test_an_unusable_data_directory_is_one_line(arguments: list[str], place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    env = {"NIGHTMILL_DATA_DIR": str(tmp_path / place)}
    result = CliRunner().invoke(main, arguments, env=env)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "cannot be used: " in result.output
    assert "Set NIGHTMILL_DATA_DIR to one that you may write to" in result.output


def test_nobodys_home_directory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", classmethod(_no_home))
    result = CliRunner().invoke(main, ["list"])
    assert (result.exit_code, result.output) == (
        1,
        "Error: this user has no home directory: set NIGHTMILL_DATA_DIR\n",
    )


def _no_home(cls: type[Path]) -> Path:
    raise RuntimeError("Could not determine home directory.")
