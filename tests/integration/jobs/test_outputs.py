"""Commands and programs that write files: the input, a foreign file and a device stay what they are."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nightmill.jobs.base.settings import Settings
from nightmill.jobs.batches.batch import Batch
from nightmill.jobs.batches.result_files import destinations, vet
from nightmill.jobs.batches.streaming import ResultStream
from nightmill.jobs.client.client import Client
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import BatchFileError
from nightmill.jobs.formats import Destination, FileFormat, InputFile
from nightmill.jobs.formats.places import OnThisDisk
from nightmill.jobs.sql.claims import Claims
from nightmill.worker.assembly.model import demo_model
from tests.integration.jobs.batches.rows import finish
from tests.support.servers import worker_env

Run = Callable[..., Result]
FOREIGN = b"the only copy of a thesis\n"
_OPENAI = '{{"custom_id": "{}", "method": "POST", "url": "/v1/completions", "body": {{"prompt": {}}}}}\n'
INPUTS = {
    "in.jsonl": '{"prompt": "one"}\n{"prompt": 2}\n{"prompt": "three"}\n',
    "in.csv": "prompt,max_tokens\none,3\ntwo,none\nthree,3\n",
    "openai.jsonl": "".join(_OPENAI.format(*row) for row in (("a", '"one"'), ("b", 2), ("c", '"three"'))),
    "in.parquet": "",
}


@pytest.fixture
def client(sqlite_settings: Settings) -> Iterator[Client]:
    """A client beside the commands."""
    with Client(sqlite_settings) as made:
        yield made


@pytest.fixture
def run(sqlite_settings: Settings) -> Run:
    """Runs `nightmill ARGUMENTS` in this process."""
    env = worker_env(sqlite_settings.model_copy(update={"model": demo_model(), "reference": True}))

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], env=env)

    return invoke


@pytest.fixture(params=sorted(INPUTS))
def input(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three rows in each format, the second bad."""
    path = tmp_path / str(request.param)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        columns = {"prompt": ["one", "two", "three"], "max_tokens": [3, 0, 3]}
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
    else:
        path.write_text(INPUTS[str(request.param)])
    return path


@pytest.fixture
def batch(client: Client, input: Path) -> Batch:
    """The batch `night`, done: two results and an error."""
    made = client.submit_batch(input, name="night")
    worker = Claims(client.database, "a" * 32)
    worker.register("host", 1, "model", None)
    finish(worker, client.list_jobs(batch="night", state="queued"))
    return made


def refused(result: Result, path: Path, why: str) -> None:
    """One line on stderr that names the file, nothing on stdout."""
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {path}: ") and why in line, line


def test_run_replaces_neither_its_input_nor_a_foreign_file(
    run: Run, client: Client, input: Path, tmp_path: Path
) -> None:
    before = input.read_bytes()
    out = tmp_path / f"out{input.suffix}"
    foreign, hard, link = (tmp_path / f"{stem}{input.suffix}" for stem in ("foreign", "hard", "link"))
    foreign.write_bytes(FOREIGN)
    os.link(input, hard)
    link.symlink_to(input)
    for flags in ([], ["--overwrite"]):
        for name in (input, hard, link):
            refused(run("run", input, "-o", name, *flags), name, f"is also the input ({input})")
            refused(run("run", input, "-o", out, "--errors", name, *flags), name, "is also the input")
        refused(run("run", input, "-o", out, "--errors", out, *flags), out, "is also the file of results")
    refused(run("run", input, "-o", foreign), foreign, "is there already, and is not of batch")
    refused(run("run", input, "-o", out, "--errors", foreign), foreign, "is there already, and is not of")
    assert (input.read_bytes(), foreign.read_bytes(), out.exists()) == (before, FOREIGN, False)
    assert client.list_batches() == []  # nothing was queued


def test_run_does_not_take_its_input_for_the_file_of_errors(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "d.errors.jsonl"
    path.write_text(INPUTS["in.jsonl"])
    refused(run("run", path, "-o", tmp_path / "d.jsonl"), path, "is also the input")
    assert path.read_text() == INPUTS["in.jsonl"]


def test_run_refuses_a_name_of_another_format_and_what_is_no_file(
    run: Run, client: Client, input: Path, tmp_path: Path
) -> None:
    for name, said in (
        ("x.csv", "ends in .csv, but the results of OpenAI's rows are"),
        ("x.arrow", "Arrow is for tables with a template"),
    ):
        if (name == "x.csv") == (input.name == "openai.jsonl"):
            refused(run("run", input, "-o", tmp_path / name), tmp_path / name, said)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    refused(run("run", input, "-o", fifo), fifo, "is a FIFO, not a regular file")
    device = Path(os.devnull)
    refused(run("run", input, "-o", tmp_path / "x", "--errors", device), device, "is a device, not a regular")
    assert device.is_char_device()
    assert client.list_batches() == []


def test_the_same_run_at_once_is_refused_in_one_line(
    run: Run, client: Client, input: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"out{input.suffix}"
    format = client.submit_batch(input).format
    for options in ((), ("--errors", tmp_path / "e"), ("--overwrite",)):
        with Destination(out, format):
            refused(run("run", input, "-o", out, *options), out, "another process is writing it: wait")
    with Destination(tmp_path / f"out.errors{input.suffix}", format, errors=True) as errors:
        refused(run("run", input, "-o", out), errors.path, "another process is writing it")


def test_batch_results_and_errors_replace_only_what_is_of_the_batch(
    run: Run, batch: Batch, input: Path, tmp_path: Path
) -> None:
    prompts = input.read_bytes()
    for kind, rows in (("results", "2 rows"), ("errors", "1 row")):
        path, foreign, link, device = (
            tmp_path / f"{kind}-{stem}{input.suffix}" for stem in ("out", "foreign", "link", "device")
        )
        for _ in range(2):  # the second time it replaces its own
            assert run("batch", kind, "night", "-o", path).stdout == f"{path}: {rows}\n"
        foreign.write_bytes(FOREIGN)
        link.symlink_to(foreign)
        device.symlink_to(os.devnull)
        refused(run("batch", kind, "night", "-o", foreign), foreign, "is not of batch 'night'")
        refused(
            run("batch", kind, "night", "-o", link, "--overwrite"), link, f"is a link to {foreign}, which is"
        )
        refused(run("batch", kind, "night", "-o", device, "--overwrite"), device, "is a device")
        refused(run("batch", kind, "night", "-o", input, "--overwrite"), input, "is also the input")
        copy = tmp_path / f"{kind}-copy{input.suffix}"
        copy.write_bytes(prompts)
        refused(
            run("batch", kind, "night", "-o", copy, "--overwrite"), copy, "holds the prompts of batch 'night'"
        )
        with Destination(path, batch.format):
            refused(run("batch", kind, "night", "-o", path), path, "another process is writing it")
        assert (foreign.read_bytes(), input.read_bytes()) == (FOREIGN, prompts)
        assert run("batch", kind, "night", "-o", foreign, "--overwrite").exit_code == 0
        assert foreign.read_bytes() == path.read_bytes()
        assert run("batch", kind, "night", "-o", link).exit_code == 0 and link.is_symlink()
    # one kind does not take the place of the other
    swapped = tmp_path / f"errors-out{input.suffix}"
    refused(run("batch", "results", "night", "-o", swapped), swapped, "is not of batch 'night'")


def test_programs_write_files_by_the_same_rules(batch: Batch, input: Path, tmp_path: Path) -> None:
    path = tmp_path / f"out{input.suffix}"
    said: list[int] = []
    assert [batch.write_results(path, on_rows=said.append), batch.write_errors(tmp_path / "errors")] == [2, 1]
    path.write_bytes(FOREIGN)
    with pytest.raises(BatchFileError, match=r"is not of batch 'night': .* \(overwrite=True\)"):
        batch.write_results(path)
    with pytest.raises(BatchFileError, match="is also the input"):
        batch.write_errors(input, overwrite=True)
    assert batch.write_results(path, overwrite=True) == 2
    other = "out.csv" if batch.format is FileFormat.OPENAI else "out.arrow"
    with pytest.raises(BatchFileError, match="name a file that ends in"):
        batch.write_results(tmp_path / other)


def test_a_batch_of_jobs_that_were_enqueued_one_by_one_has_files_too(client: Client, tmp_path: Path) -> None:
    client.enqueue("one", batch="open")
    assert client.get_batch("open").write_results(tmp_path / "out.jsonl") == 0


def test_a_run_that_was_killed_goes_on_with_its_files_and_ends_in_order(
    client: Client, input: Path, tmp_path: Path
) -> None:
    out, failed = (tmp_path / f"{stem}{input.suffix}" for stem in ("out", "failed"))
    batch = client.submit_batch(input, name="night")
    worker = Claims(client.database, "a" * 32)
    worker.register("host", 1, "model", None)
    first, second = client.list_jobs(batch="night", state="queued")[::-1]
    sizes = []
    for done in ([second], [first], []):
        finish(worker, done)
        with (
            destinations(InputFile(input), OnThisDisk(out), OnThisDisk(failed), overwrite=False) as files,
            ResultStream(batch, *(vetted(file, batch) for file in files)) as stream,
        ):
            assert stream.update() == (0 if batch.format is FileFormat.PARQUET else 1 + len(done))
            sizes.append(out.stat().st_size if out.exists() else 0)
            if not done:
                assert stream.finish() == (2, 1)
    again = tmp_path / f"again{input.suffix}"
    batch.write_results(again)
    assert out.read_bytes() == again.read_bytes()
    assert sorted(sizes) == sizes and sizes[-1] == (0 if batch.format is FileFormat.PARQUET else sizes[1])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def vetted(destination: Destination, batch: Batch) -> Destination:
    """As `nightmill run` does before the first row is entered."""
    vet(destination, batch.store, batch.name, batch.record.fingerprint)
    return destination
