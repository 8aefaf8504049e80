"""Every block of code in README and docs is run as it stands, or says on its page why it is not.

One folder, one database, one Redis and one worker for all pages, in the order in which a newcomer reads them:
so no page is in the way of the next.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from nightmill import jobs
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.commands.process import running_worker
from tests.support.needs import Need, missing
from tests.support.pages import ALL, PAGES, ROOT, TYPED_IN
from tests.support.servers import http_server, start_redis, worker_env

RUN = {"sh", "python", "sql", "javascript"}
SHOWN = {"text", "jsonl", "ini", "nginx"}
"""What is there to be looked at. Blocks with further words (rows, errors) are held against the code by
tests/unit/formats/test_docs.py, the lines for cron by tests/integration/jobs/test_docs.py."""
NOT_RUN = [
    "make demo                      # installs into .venv, then answers questions through the whole path",
    "pip install -e '.[worker,embedded,hub,server,cuda]'   # takes minutes",
    "nightmill worker --model qwen2.5-0.5b-instruct-q8_0.gguf    "
    "# or celery -A nightmill.worker.app worker --pool=threads --model FILE",
    "git clone REPOSITORY nightmill && cd nightmill",
    "make dist",
    "nightmill worker --model qwen2.5-0.5b-instruct-q8_0.gguf            # on the machine with the GPU",
    "nightmill batch watch tonight                     # follows it; exits like `nightmill run`",
    'job_id = jobs.enqueue(chat, tools=[weather], tool_choice="required")',
    "pip install -e '.[server]'                        # in a clone; a wheel: docs/installing.md",
    "export NIGHTMILL_API_KEYS=alice=$ALICES_KEY,grafana:read=$GRAFANAS_KEY,ops:admin=sha256:$DIGEST",
    "nightmill serve --cors-origin https://app.example.org --cors-origin http://localhost:3000",
    "celery -A nightly beat & celery -A nightly worker",
    "nightmill worker --model qwen.gguf --hours 22:00-06:00/Europe/Berlin --idle-seconds 600",
    "nightmill worker --models small.gguf,big=hf:Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M --stay 10m "
    "--hours 22:00-06:00",
    "nightmill worker --models small.gguf,big=hf:Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M --together "
    "--gpu-memory 0.9",
    'pg_dump --format=custom --file=nightmill.dump "$DATABASE_URL"',
    "CREATE ROLE nightmill LOGIN PASSWORD 'SECRET';",
    "CREATE ROLE miller LOGIN PASSWORD 'SECRET';",
    "export NIGHTMILL_BROKER_URL=redis://redis.example:6379/0",
    "nightmill pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0",
    "nightmill embed papers.parquet --column abstract -o embedded.parquet "
    "--model qwen3-embedding-0.6b-q8_0.gguf",
    'first, second = jobs.embed_many(["a mill", "a river"], dimensions=256)',
    'client = OpenAI(base_url="http://localhost:8000/v1", api_key="...")',
    'relevance = jobs.rerank("What grinds grain?", ["a mill", "a river"])  # one for each, in their order',
    "curl http://localhost:8000/v1/rerank -H 'Content-Type: application/json' -d '{",
    "nightmill benchmark                 # the bundled model: whether the card computes right",
    "python -m benchmarks.cards q05.gguf --rows 1 8 64 --card rtx3090 --card rtx4090",
]
ROWS = (
    '{"custom_id": "q-1", "prompt": "1", "max_tokens": 4}\n{"prompt": 2}\n{"prompt": "3", "max_tokens": 4}\n'
)


def test_what_is_not_run_is_listed_here_and_says_why_on_its_page() -> None:
    left_out = [block for block in ALL if block.reason is not None]
    assert [block.text.splitlines()[0] for block in left_out] == NOT_RUN
    assert all(block.kind in RUN and len(block.reason or "") > 20 for block in left_out)


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {path.name for path in (ROOT / "docs").glob("*.md")} | {"README.md"} == {
        path.name for path in PAGES
    }
    for block in ALL:
        kind, *words = block.kind.split()
        assert kind in RUN or kind in SHOWN or words or kind == "crontab", str(block)
    for path in PAGES:
        page = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert not re.search(r"\n\n(    |\t)\S", page), (
            f"{path}: an indented block, which nothing checks: fence it"
        )
        assert page.count("```") == 0, path


_FINE = (0, 3)  # 3: some rows have failed, and one of the rows is bad


class Reader:
    """A newcomer who types in what the pages say."""

    def __init__(self, folder: Path, settings: Settings, client: Client) -> None:
        self.folder = folder
        self.client = client
        self.needs_node = False
        """Whether a block of JavaScript was left out."""
        self.names: dict[str, Any] = {"__name__": "typed_in"}
        self.environment = worker_env(settings)
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def sh(self, source: str) -> None:
        """In a shell that stops at the first error; `nightmill` alone in this process, which is quicker."""
        lines = source.replace("\\\n", " ").splitlines()
        commands = [shlex.split(line, comments=True) for line in lines]
        if all(command[:1] == ["nightmill"] and "&&" not in command for command in commands):
            for _, *arguments in commands:
                result = CliRunner().invoke(main, arguments)
                assert result.exit_code in _FINE, (arguments, result.output, result.exception)
            return
        self._run("bash", "-euc", source)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in _FINE, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr

    def python(self, source: str) -> None:
        """In an interpreter that stays open from block to block of a page."""
        exec(source, self.names)

    def javascript(self, source: str) -> None:
        """In Node.js, which need not be there on every developer's machine."""
        node = shutil.which("node")
        if node is None:
            self.needs_node = True
            return
        self._run(node, "--input-type=module", "--eval", source)

    def sql(self, source: str) -> None:
        """On the database of all the others."""
        with self.client.database.read() as connection:
            connection.execute(text(source)).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of prompts, and a model by the name that the pages use."""
    path = tmp_path_factory.mktemp("newcomer")
    shutil.copy(demo_model(), path / "qwen2.5-0.5b-instruct-q8_0.gguf")
    (path / "prompts.jsonl").write_text(ROWS)
    return path


@pytest.fixture(scope="module")
def served(folder: Path, session_directory: Path, sqlite_template: Path) -> Iterator[tuple[Settings, Client]]:
    """A database, a Redis and a worker for all pages."""
    database = folder / "nightmill.db"
    shutil.copy(sqlite_template, database)
    with start_redis(session_directory / "pages-redis") as server:
        settings = Settings(
            data_dir=folder / "data",
            database_url=f"sqlite:///{database}",
            broker_url=server.url,
            model=folder / "qwen2.5-0.5b-instruct-q8_0.gguf",
            reference=True,
        )
        with Client(settings) as client, running_worker(client, folder / "worker.log"):
            yield settings.model_copy(update={"model": None}), client


@pytest.fixture(scope="module")
def server(folder: Path, served: tuple[Settings, Client]) -> Iterator[str]:
    """The address of a `nightmill serve`."""
    with http_server(served[0], folder / "server.log") as url:
        yield url.removeprefix("http://")


# What a newcomer types in first is always tried; the other pages take a worker half a minute.
_PAGES = [pytest.param(path, marks=() if path.name == "README.md" else pytest.mark.slow) for path in TYPED_IN]


@pytest.mark.parametrize("path", _PAGES, ids=lambda path: path.name)
def test_a_page_does_what_it_says(
    path: Path,
    folder: Path,
    served: tuple[Settings, Client],
    server: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = Reader(folder, *served)
    monkeypatch.chdir(folder)
    for name, value in reader.environment.items():
        monkeypatch.setenv(name, value)
    jobs.default_client.cache_clear()
    chosen = [
        block for block in ALL if block.page == path.name and block.kind in RUN and block.reason is None
    ]
    assert chosen
    for block in chosen:
        getattr(reader, block.kind)(block.text.replace("127.0.0.1:8080", server))
    if reader.needs_node:
        missing(Need.NODE)
